"""The kernels of the grouped tier and of training compile for every target without a GPU there, without spills, within shared memory.

The ops run on meta tensors; their launches are compiled instead of made.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import torch

from moefuse.ops.meaning.call import Body, ExpertsCall, Stack, Term
from tests.strategies import THOROUGH
from tests.triton.test_compiled import SHARED, compile_launch, spills


@dataclasses.dataclass(frozen=True)
class Sizes:
    """One layer: T tokens, K of E experts, H hidden, I inner; ``oai``: biases and storage in-out."""

    tokens: int = 4096
    top_k: int = 8
    experts: int = 128
    hidden: int = 2048
    inter: int = 768
    dtype: torch.dtype = torch.bfloat16
    oai: bool = False
    separate: bool = False
    held: torch.dtype | None = None
    """Of weights and biases, where it is another."""

    def draw(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self.dtype, device="meta")

    def hold(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self.held or self.dtype, device="meta")

    def weight(self, out: int, inp: int) -> list[torch.Tensor]:
        if self.separate:
            return [self.hold(out, inp) for _ in range(self.experts)]
        return [self.hold(self.experts, inp, out).transpose(1, 2) if self.oai else self.hold(self.experts, out, inp)]

    def bias(self, out: int) -> list[torch.Tensor]:
        return [self.hold(self.experts, out)] if self.oai else []


SIZES = {
    "many rows": Sizes(),
    "few rows": Sizes(tokens=64),
    "in-out": Sizes(top_k=4, experts=32, hidden=2880, inter=2880, oai=True),
    "separate": Sizes(tokens=512, experts=16, separate=True),
    "odd": Sizes(tokens=300, hidden=99, inter=77),
    "odd, many rows": Sizes(experts=8, hidden=99, inter=77),
    "float32": Sizes(tokens=64, dtype=torch.float32),
    "float32, many rows": Sizes(dtype=torch.float32),
    "float32, odd": Sizes(tokens=300, experts=8, hidden=99, inter=77, dtype=torch.float32),
    "held, many rows": Sizes(held=torch.float32),
    "held, few rows": Sizes(tokens=64, held=torch.float32),
    "held, in-out": Sizes(top_k=4, experts=32, hidden=2880, inter=2880, oai=True, held=torch.float32),
    "held, separate": Sizes(tokens=2048, experts=16, separate=True, held=torch.float32),
    "held, odd": Sizes(tokens=300, hidden=99, inter=77, held=torch.float32),
    "float64": Sizes(tokens=64, dtype=torch.float64),
}
ON_AMD = ["many rows", "few rows", "held, many rows", "float64"]


def cases(everywhere: str, targets: Collection[int | str] = tuple(SHARED)) -> list[Any]:
    """Every size for sm_90, few of them for AMD, and ``everywhere`` for ``targets``; all of the product under HYPOTHESIS_PROFILE=deep."""
    return [
        pytest.param(name, arch, id=f"{name}-{arch}")
        for name in SIZES
        for arch in SHARED
        if arch == 90 or (name == everywhere and arch in targets) or (arch == "gfx942" and name in ON_AMD) or THOROUGH
    ]


SMALLEST = (89, "gfx942")
"""The targets of each maker with the least shared memory: the others have what they have, and the grouped tier is compiled for all."""


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What would be launched, in the form of a step of a plan with its tensors."""
    from moefuse.kernels.triton.host import linear
    from moefuse.kernels.triton.launch import calls

    made: list[Any] = []

    def run(it: Any, tensors: Any, *_: Any) -> None:
        assert all(isinstance(n, int) and n > 0 for n in it.grid), (it.kernel.__name__, it.grid)
        made.append((it, dict(zip(it.names, tensors, strict=True))))

    monkeypatch.setattr(calls, "as_launch", run)
    monkeypatch.setattr(linear, "address_table", lambda t: torch.empty(len(t), dtype=torch.int64, device="meta"))
    monkeypatch.setattr(linear, "steps_table", lambda t: (t[0], torch.empty(len(t), dtype=torch.int64, device="meta")))
    return made


SPILLED = {("float32, many rows", 90): 16}
"""Bytes: a step with these tiles takes 0.8 of the time of the largest that keep everything in registers (gpu-kernels.md, "float32")."""


def compile_all(
    made: list[Any], arch: int | str, folder: Path, monkeypatch: pytest.MonkeyPatch, run: Callable[[], Any], spilled: int = 0
) -> None:
    """Run, and compile every different launch."""
    from moefuse.kernels.triton.host import factors, layout, linear, sorted_rows, wgrad

    device = layout.Device("", 132, SHARED[arch], arch == 90, not isinstance(arch, str))
    for module in (factors, linear, sorted_rows, wgrad):
        monkeypatch.setattr(module, "device_of", lambda d: device)
    run()
    seen = set()
    for it, tensors in made:
        key = (it.kernel.__name__, str(it.args), tuple(t.dtype for t in tensors.values()))
        if key in seen:
            continue
        seen.add(key)
        compiled = compile_launch(it, tensors, arch)
        name = f"{it.kernel.__name__} for {arch} {it.args}"
        assert compiled.metadata.shared <= SHARED[arch], f"{name}: {compiled.metadata.shared} bytes of shared memory"
        assert spills(compiled, arch, folder) <= spilled, f"{name} spills"


@pytest.mark.parametrize(("name", "arch"), cases(everywhere="many rows"))
def test_the_grouped_tier(name: str, arch: int | str, launches: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from moefuse.kernels.triton.provide import grouped as tier

    s = SIZES[name]
    ids = torch.empty(s.tokens, s.top_k, dtype=torch.int64, device="meta")
    weights = s.draw(s.tokens, s.top_k)

    def run() -> None:
        xs, order, offsets = tier.permute(s.draw(s.tokens, s.hidden), ids, s.experts)
        w, b = s.weight(s.inter, s.hidden), s.bias(s.inter)
        h = tier.grouped_linear(xs, offsets, w, b)
        tier.grouped_linear_backward(h, xs, offsets, w, b, [True, True, bool(b)])
        v = [s.draw(s.inter) for _ in range(s.experts)] if s.separate else [s.draw(s.experts, s.inter)]
        rows = tier.expert_rows(v, offsets, xs.shape[0])
        tier.expert_rows_backward(rows, v, offsets)
        out = tier.combine(xs, weights, order, offsets, s.top_k, None)
        tier.combine_backward(out, xs, weights, order, offsets, s.top_k, [True, True])

    compile_all(launches, arch, tmp_path, monkeypatch, run, SPILLED.get((name, arch), 0))


@pytest.mark.parametrize("on_input", [False, True], ids=["weight-on-output", "weight-on-input"])
@pytest.mark.parametrize(("name", "arch"), cases(everywhere="few rows", targets=SMALLEST))
def test_training(name: str, arch: int | str, on_input: bool, launches: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from moefuse.kernels.triton.provide import training
    from moefuse.ops.meaning.grad_calls import InCall, Needs, OutCall, RowsCall

    if on_input and name not in ("in-out", "float32") and not THOROUGH:
        pytest.skip("HYPOTHESIS_PROFILE=deep compiles it for every size")
    s = SIZES[name]
    ids = torch.empty(s.tokens, s.top_k, dtype=torch.int64, device="meta")
    x, weights = s.draw(s.tokens, s.hidden), s.draw(s.tokens, s.top_k)
    w_in, w_up = Stack(s.weight(2 * s.inter, s.hidden), s.bias(2 * s.inter)), Stack([])
    w_out = Stack(s.weight(s.hidden, s.inter), s.bias(s.hidden))
    body = Body("swiglu_oai", (1.7, 7.0), "interleaved", on_input=on_input) if s.oai else Body(on_input=on_input)
    how = Needs.of([True, True, True, False, True, s.oai, False, s.oai], on_input), body

    def run() -> None:
        out, h, order, offsets = training.experts_forward(ExpertsCall(x, ids, weights, w_in, w_up, w_out, body, x.dtype))
        d_h, a, *_ = training.experts_backward_rows(RowsCall(out, weights, h, order, offsets, w_out, *how))
        training.experts_backward_in(InCall(x, weights, d_h, order, offsets, w_in, w_up, *how))
        training.experts_backward_out(OutCall(out, weights, order, offsets, a, w_out, *how))

    compile_all(launches, arch, tmp_path, monkeypatch, run, SPILLED.get((name, arch), 0))
    grads = "weight_grad_tiles" if arch == 90 and name.removeprefix("held, ") in ("many rows", "in-out", "separate") else "weight_grads"
    assert {"linear_tiles", grads, "activate", "activate_grads", "sum_rows"} <= {it.kernel.__name__ for it, _ in launches}


RANKS = {"many rows": 16, "in-out": 20, "separate": 128, "odd": 3, "held, many rows": 16}


@pytest.mark.parametrize(("name", "arch"), [c for c in cases(everywhere="many rows", targets=SMALLEST) if c.values[0] in RANKS])
def test_low_rank_terms(name: str, arch: int | str, launches: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Factors in float32 beside 16 bits: B of "in-out" with the expert as the fastest dimension, those of "separate" apart."""
    from moefuse.kernels.triton.provide import extended
    from moefuse.ops.meaning.grad_calls import GradCall, Needs

    call = low_rank_call(name)
    need = Needs.of([True, True, *[False] * 6, True, True, False, False, True, True], False)

    def run() -> None:
        out, h, order, offsets, u = extended.experts_extended_forward(call)
        extended.experts_extended_backward(GradCall(out, call.x, call.weights, h, order, offsets, *call.stacks, need, call.body, u))

    compile_all(launches, arch, tmp_path, monkeypatch, run)
    assert {"linear_tiles", "weight_grads", "copy_factors"} <= {it.kernel.__name__ for it, _ in launches}


@pytest.mark.parametrize(("name", "arch"), [c for c in cases(everywhere="many rows", targets=SMALLEST) if c.values[0] in RANKS])
def test_low_rank_terms_of_few_slots(
    name: str, arch: int | str, launches: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Factors in float32 are read where they are: no copies. Weights in float32 are rounded by tiles only."""
    from moefuse.kernels.triton.provide import extended

    call = low_rank_call(name, tokens=2)
    compile_all(launches, arch, tmp_path, monkeypatch, lambda: extended.experts_extended(call))
    names = {it.kernel.__name__ for it, _ in launches}
    assert "linear_tiles" in names if SIZES[name].held else names == {"shrink_vectors", "up_vectors", "down_vectors"}


def low_rank_call(name: str, tokens: int | None = None) -> ExpertsCall:
    s, rank = SIZES[name], RANKS[name]
    tokens = tokens or s.tokens
    ids = torch.empty(tokens, s.top_k, dtype=torch.int64, device="meta")
    x, weights = s.draw(tokens, s.hidden), s.draw(tokens, s.top_k)
    w_in, w_up = Stack(s.weight(2 * s.inter, s.hidden), s.bias(2 * s.inter)), Stack([])
    w_out = Stack(s.weight(s.hidden, s.inter), s.bias(s.hidden))
    body = Body("swiglu_oai", (1.7, 7.0), "interleaved") if s.oai else Body()

    def factor(*shape: int) -> list[torch.Tensor]:
        if s.separate:
            return [torch.empty(shape, device="meta") for _ in range(s.experts)]
        return [torch.empty(*shape, s.experts, device="meta").permute(2, 0, 1) if s.oai else torch.empty(s.experts, *shape, device="meta")]

    def term(out: int, inputs: int) -> Term:
        return Term(factor(rank, inputs), factor(out, rank), 0.5)

    w_in, w_out = w_in._replace(term=term(2 * s.inter, s.hidden)), w_out._replace(term=term(s.hidden, s.inter))
    return ExpertsCall(x, ids, weights, w_in, w_up, w_out, body, x.dtype)


SCORES = [(4096, 1024, 32), (300, 8, 2)]


@pytest.mark.parametrize("arch", list(SHARED))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_topk(dtype: torch.dtype, arch: int | str, launches: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of 32 and of 64 bits; the widest row is what has to fit the registers of one warp."""
    from moefuse.kernels.triton.provide import router as router_plan

    if dtype != torch.float32 and arch != 90 and not THOROUGH:
        pytest.skip("HYPOTHESIS_PROFILE=deep compiles it for every target")
    sizes = SCORES if arch == 90 or THOROUGH else SCORES[:1]

    def run() -> None:
        for tokens, experts, k in sizes:
            router_plan.topk(torch.empty(tokens, experts, dtype=dtype, device="meta"), k)

    compile_all(launches, arch, tmp_path, monkeypatch, run)
    assert len(launches) == len(sizes)


RECIPES = {
    "softmax": ((300, 128), {"k": 8, "score": "softmax", "renormalise": True}),
    "groups": (
        (4096, 256),
        {"k": 8, "score": "sigmoid", "groups": 8, "kept": 4, "best": 2, "by_choice": False, "renormalise": True, "eps": 1e-20},
    ),
    "widest": ((64, 1024), {"k": 32, "score": "softmax", "groups": 16, "kept": 4, "best": 2, "renormalise": True, "scale": 2.5}),
}


@pytest.mark.parametrize("arch", list(SHARED))
@pytest.mark.parametrize("name", list(RECIPES))
def test_route(name: str, arch: int | str, launches: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole router in the registers of one warp."""
    from moefuse.kernels.triton.provide import router as router_plan
    from moefuse.ops.meaning.recipe import Recipe

    if (name != "widest" or arch in (89, 100)) and not THOROUGH:
        pytest.skip("HYPOTHESIS_PROFILE=deep compiles every router for every target")
    sizes, fields = RECIPES[name]
    logits, bias = (torch.empty(size, dtype=torch.float32, device="meta") for size in (sizes, sizes[1:]))
    compile_all(launches, arch, tmp_path, monkeypatch, lambda: router_plan.route(logits, bias, Recipe(**fields), torch.bfloat16))
    assert len(launches) == 1


@pytest.mark.parametrize("arch", list(SHARED))
def test_router_logits(arch: int | str, launches: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sizes of a program, from 16 bits and from float32, with a weight that is a transposed view."""
    from moefuse.kernels.triton.provide import logits

    sizes = [(torch.bfloat16, 8, 7168), (torch.float32, 3, 20000)]

    def run() -> None:
        for dtype, tokens, hidden in sizes:
            x, w = (torch.empty(*shape, dtype=dtype, device="meta") for shape in ((tokens, hidden), (hidden, 256)))
            logits.router_logits(x, w.t(), torch.empty(256, device="meta"), torch.float32)

    compile_all(launches, arch, tmp_path, monkeypatch, run)
    assert len(launches) == len(sizes)
