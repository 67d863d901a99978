"""``experts_extended`` with terms on the device, alone and in compiled models."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import moefuse
from moefuse.ops.meaning.call import ExpertsCall
from moefuse.runtime import providers
from tests.cpu.lora_case import SCALES, Sizes, arguments, check, merged, moved, ours, results, tensors
from tests.gpu.stacked_lora import Stacked

pytestmark = pytest.mark.gpu

SIZES = {
    "few": Sizes(3, 9, 2, 96, 64),
    "some": Sizes(70, 9, 4, 96, 64),
    "many": Sizes(1500, 6, 2, 136, 200),
    "wide": Sizes(3000, 8, 4, 512, 384),
    "odd": Sizes(70, 5, 3, 51, 37),
}
ERRORS = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 2e-5, torch.float64: 1e-11}


def on_gpu(*args: Any, **options: Any) -> list[Any]:
    return moved(arguments(*args, **options), device="cuda")


def test_triton_runs_the_ops() -> None:
    call = ExpertsCall.of_extended(*on_gpu("merged", torch.bfloat16, torch.bfloat16), scales=SCALES)
    for op in ("experts_extended", "experts_extended_forward", "experts_extended_hidden", "experts_extended_backward"):
        assert providers.select(op, call).name == "triton"


@pytest.mark.parametrize("rank", [3, 16, 40, 128])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("dtype", ERRORS, ids=str)
def test_every_dtype(dtype: torch.dtype, sizes: Sizes, rank: int) -> None:
    """Factors in float32, as PEFT has them beside 16 bits."""
    of = torch.float64 if dtype == torch.float64 else torch.float32
    check(on_gpu("merged", dtype, of, rank=rank, sizes=sizes), ERRORS[dtype])


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_inference(sizes: Sizes) -> None:
    """The same bits from call to call, and those that it has where gradients are wanted; few rows are for kernels of their own there."""
    args = on_gpu("merged", torch.bfloat16, torch.float32, rank=16, sizes=sizes)
    with torch.no_grad():
        expected = ours(args)
        assert all(torch.equal(ours(args), expected) for _ in range(4))
        exact = merged(moved(args, torch.float64, "cuda"))
    if sizes != SIZES["few"]:
        assert torch.equal(ours(args).detach(), expected)
    assert float((expected.double() - exact).norm()) <= ERRORS[torch.bfloat16] * float(exact.norm())


@pytest.mark.parametrize("sizes", [SIZES["some"], SIZES["many"], SIZES["odd"]], ids=["some", "many", "odd"])
@pytest.mark.parametrize("gating", ["merged", "separate", "plain"])
def test_hidden_activations_once_more(gating: str, sizes: Sizes) -> None:
    """With ``recompute`` the op has the same bits, recorded calls too, and keeps less."""
    args = on_gpu(gating, torch.bfloat16, torch.float32, rank=4, sizes=sizes)
    expected, kept = results(args, ours, gating=gating), []
    for recompute in (False, True):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        out = torch.ops.moefuse.experts_extended(*args, scales=SCALES, gating=gating, recompute=recompute)
        kept.append(torch.cuda.memory_allocated() - before)
        del out
    assert kept[1] < kept[0]

    def again(args: list[Any], **options: Any) -> Tensor:
        found: Tensor = torch.ops.moefuse.experts_extended(*args, scales=SCALES, recompute=True, **options)
        return found

    for _ in range(4):
        assert all(torch.equal(a, b) for a, b in zip(results(args, again, gating=gating), expected, strict=True))


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_the_same_bits_from_run_to_run(sizes: Sizes) -> None:
    """Recorded calls too: the third of a kind is the first that is played."""
    args = on_gpu("merged", torch.bfloat16, torch.float32, rank=16, sizes=sizes)
    first = results(args, ours)
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(results(args, ours), first, strict=True))


def test_the_host_never_waits() -> None:
    args = on_gpu("merged", torch.bfloat16, torch.float32, rank=16, sizes=SIZES["many"])
    results(args, ours)
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = ours(args)
        torch.autograd.grad(out, [t for t in tensors(args) if t.requires_grad], out)
    finally:
        torch.cuda.set_sync_debug_mode(before)


def test_memory() -> None:
    """No weight with its term, no gradient of it: a step of frozen experts takes rows, and gradients of the factors."""
    sizes = Sizes(64, 64, 2, 1024, 512)
    args = on_gpu("merged", torch.bfloat16, torch.float32, rank=16, sizes=sizes, bias=False)
    for part in args[3:9]:
        for t in part:
            t.requires_grad_(False)
    wanted = [t for part in args[9:] for t in part]
    results(args, ours)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()
    torch.autograd.grad(ours(args).sum(), wanted)
    torch.cuda.synchronize()
    used = torch.cuda.max_memory_allocated() - start
    factors = sum(t.numel() for t in wanted)
    rows = sizes.tokens * sizes.top_k * (2 * sizes.hidden + 4 * 2 * sizes.inner) * 2
    assert used <= 3 * 2 * factors + 4 * factors + 2 * rows + (1 << 21)
    assert used < args[3][0].numel()


@pytest.mark.parametrize("tokens", [5, 700])
def test_a_compiled_model(tokens: int) -> None:
    """The weights with their terms are never made, whatever the number of rows."""
    torch.manual_seed(0)
    model = Stacked().cuda()
    for name in ("router.weight", "gate_up", "down"):
        parameter = model.get_parameter(name)
        parameter.data = parameter.data.bfloat16()
    exact = copy.deepcopy(model).double()
    x = torch.randn(tokens, 256, device="cuda").bfloat16()
    compiled = torch.compile(model, backend="moefuse", options={"expect": 1})
    for _ in range(3):
        model.zero_grad()
        out = compiled(x)
        out.float().square().sum().backward()
    true = exact_forward(exact, x.double(), model)
    true.square().sum().backward()
    assert "LoRA r=8" in str(moefuse.last_report())
    assert float((out.detach().double() - true.detach()).norm()) <= 2e-2 * float(true.detach().norm())
    for name in ("gate_up_a", "gate_up_b", "down_a", "down_b"):
        mine, theirs = model.get_parameter(name).grad, exact.get_parameter(name).grad
        assert mine is not None
        assert theirs is not None
        assert float((mine.double() - theirs).norm()) <= 4e-2 * float(theirs.norm()), name


def exact_forward(exact: Any, x: Tensor, model: Any) -> Tensor:
    """In float64, expert by expert, with the choices of the model."""
    with torch.no_grad():
        scores = model.router(x.bfloat16()).softmax(-1, dtype=torch.float32)
    weights, ids = scores.topk(model.top_k)
    out = torch.zeros_like(x)
    gate_up, down = exact.weight("gate_up"), exact.weight("down")
    for e in range(model.experts):
        token, slot = torch.where(ids == e)
        gate, up = (x[token] @ gate_up[e].t()).chunk(2, -1)
        out = out.index_add(0, token, (F.silu(gate) * up) @ down[e].t() * weights[token, slot, None].double())
    return out
