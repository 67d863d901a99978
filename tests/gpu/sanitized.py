"""Every kernel once, on small problems, for NVIDIA's compute-sanitizer (which wants to see a process from its start):

    compute-sanitizer --tool memcheck --error-exitcode 1 python tests/gpu/sanitized.py
    compute-sanitizer --tool racecheck --error-exitcode 1 python tests/gpu/sanitized.py
    compute-sanitizer --tool memcheck --error-exitcode 1 python tests/gpu/sanitized.py apart    (what has this in its name)

torch's allocator is asked to give every tensor an allocation of its own, so that a read past a tensor's end is seen.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
os.environ["MOEFUSE_DIRECT_LAUNCH"] = "0"
sys.path[:0] = [str(Path(__file__).parent.parent.parent)]

import torch  # noqa: E402

from moefuse.kernels.triton.host import plan as plans  # noqa: E402
from moefuse.kernels.triton.provide.activate import activate  # noqa: E402
from moefuse.ops.meaning.call import Body  # noqa: E402
from moefuse.ops.meaning.recipe import Recipe  # noqa: E402
from moefuse.tuning.problem import Config, Tiles, Vectors  # noqa: E402
from tests.cpu.ops_case import Case  # noqa: E402
from tests.gpu import test_grouped as tier  # noqa: E402
from tests.gpu.gpu_case import assert_right, on_gpu  # noqa: E402

HIGH = Tiles(64, 64, 4, 3, 4)
CONFIGS = {
    "vectors": Config(0, Vectors(4, 64), Vectors(4, 32, at=2)),
    "parts": Config(0, Vectors(4, 64), Vectors(32, 16, at=1, parts=3)),
    "swap": Config(16, Tiles(64, 64, 4, 3, swap=True), Tiles(64, 64, 4, 3, swap=True)),
    "pointers": Config(64, HIGH, HIGH),
    "descriptors": Config(64, replace(HIGH, desc=True, join=True), replace(HIGH, desc=True, rows_desc=True)),
    "walk": Config(64, replace(HIGH, desc=True, persistent=True, flatten=True), replace(HIGH, desc=True, persistent=True, flatten=True)),
    "stored": Config(128, Tiles(64, 64, 8, 3, 4, desc=True, join=True, persistent=True, flatten=True, store=2),
                     Tiles(128, 64, 8, 3, 4, desc=True, rows_desc=True, persistent=True, flatten=True, store=2)),
    "sorted rows": Config(128, Tiles(64, 64, 8, 3, 4, desc=True, rows_desc=True, join=True, store=1), Tiles(64, 64, 8, 3, 4, tail=True)),
}  # fmt: skip

WARPS = {form: Config(bm, Tiles(64, 64, 4, 3, 4, rows_desc=True, store=1, specialised=form),
                      Tiles(128, 64, 4, 3, 4, rows_desc=True, store=2, specialised=form))
         for form, bm in (("shared", 128), ("pingpong", 128))}  # fmt: skip


def cases() -> Iterator[tuple[str, Case, Config]]:
    odd = Case(tokens=37, hidden=72, inter=40, hidden_out=56, experts=5, top_k=3, dtype=torch.bfloat16, bias=False, low_id=-1, high_id=6)
    for name, config in CONFIGS.items():
        yield name, odd, config
        yield name, odd.with_(bias=True, gating="interleaved", activation="swiglu_oai"), config
    for form, config in WARPS.items():
        for tokens in (37, 700):
            yield form, odd.with_(tokens=tokens), config
            yield form, odd.with_(tokens=tokens, bias=True, gating="interleaved", activation="swiglu_oai", separate=True), config
    yield "many slots", odd.with_(tokens=3000), CONFIGS["stored"]
    yield "separate", odd.with_(separate=True), CONFIGS["pointers"]
    for gating in ("merged", "interleaved", "separate"):
        yield f"apart {gating}", odd.with_(tokens=3000, separate=True, gating=gating), CONFIGS["stored"]


def main() -> None:
    only = sys.argv[1] if len(sys.argv) > 1 else ""
    for name, case, config in cases():
        if only not in name:
            continue
        args = on_gpu(case.args())
        call = case.call(args)
        assert_right(plans.Plan(call, config).run(call), args, case.options)
        sys.stdout.write(f"{name}: right\n")
    case = Case(tokens=37, hidden=72, inter=40, hidden_out=56, experts=5, top_k=3, dtype=torch.bfloat16)
    torch.ops.moefuse.experts(*on_gpu(case.args()), **case.options)
    torch.cuda.synchronize()
    sys.stdout.write("op called\n")
    trainings: dict[str, dict[str, Any]] = {
        "few": {},
        "many": {"tokens": 3000},
        "many apart": {"tokens": 3000, "separate": True, "gating": "separate", "hidden_out": 72, "inter": 64},
        "separate": {"separate": True},
        "in-out": {"transposed": True},
        "weight on input": {"weight_on_input": True, "gating": "separate"},
    }
    for name, changes in trainings.items():
        if only in name:
            trained(case.with_(**changes))
            sys.stdout.write(f"op trained: {name}\n")
    if only:
        return
    router()
    for size in ("few", "many", "odd"):
        for form in tier.FORMS:
            call = tier.inputs(size, form, torch.bfloat16)
            for t in tier.leaves(call):
                t.requires_grad_()
            tier.body(**call).float().sum().backward()
            torch.cuda.synchronize()
            sys.stdout.write(f"grouped tier {size} {form}\n")


def router() -> None:
    """Logits, choice, all of a router, and the activation of a shared expert, at sizes that are no multiple of a block."""
    x, w, bias = (torch.randn(*shape, device="cuda", dtype=torch.bfloat16) for shape in ((5, 1001), (37, 1001), (37,)))
    logits = torch.ops.moefuse.router_logits(x, w, bias, torch.float32)
    for scores in (logits, logits.bfloat16()):
        torch.ops.moefuse.topk(scores, 3)
    groups = Recipe(3, "sigmoid", 4, 2, 2, by_choice=False, renormalise=True)
    torch.ops.moefuse.route(logits[:, :36].contiguous(), bias[:36].float(), *groups.arguments, torch.bfloat16)
    activate(x[:, ::2], x[:, 1::2].contiguous().repeat(1, 2)[:, :501], Body())
    torch.cuda.synchronize()
    sys.stdout.write("router called\n")


def trained(case: Case) -> None:
    """Forward and backward of the op."""
    args = [[t.requires_grad_() for t in a] if isinstance(a, list) else a for a in on_gpu(case.args())]
    args[0].requires_grad_()
    args[2].requires_grad_()
    torch.ops.moefuse.experts(*args, **case.options).float().sum().backward()
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
