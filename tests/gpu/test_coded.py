"""``moefuse::experts_extended`` on the device: every encoding against the definition; graphs, live storage, no waiting."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moefuse.ops.meaning.coded_weights import Codes
from tests.cpu.coded_case import ENCODINGS, coded, hold
from tests.cpu.ops_case import Case, assert_as_exact, reference, to

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
LARGE = Case(tokens=600, hidden=256, inter=192, hidden_out=256, experts=9, top_k=3, dtype=BF16, low_id=-1)


def on_gpu(args: list[Any]) -> list[Any]:
    return [[t.cuda() for t in a] if isinstance(a, list) else a.cuda() for a in args]


def run(args: list[Any], options: dict[str, Any]) -> Tensor:
    out: Tensor = torch.ops.moefuse.experts_extended(*args, **options)
    return out


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("separate", [False, True], ids=["stacked", "separate"])
@pytest.mark.parametrize("name", ENCODINGS)
def test_weights_have_the_bits_of_the_definition(name: str, separate: bool, dtype: torch.dtype) -> None:
    """Rows of a unit matrix give the weights themselves: also with steps in bfloat16, which the interpreter does not round."""
    from moefuse.kernels.triton.host import coded as host, sorted_rows
    from moefuse.kernels.triton.host.sorted_rows import Sorted

    held = hold(ENCODINGS[name], 3, 96, 128, torch.Generator().manual_seed(0))
    dense = held.dense(dtype).cuda()
    storage, more = held.lists(separate)
    count = len(storage)
    as_bytes = [(t.view(torch.uint8) if t.dtype not in host.ELEMENTS else t).cuda() for t in storage]
    more = [t.cuda() for t in more]
    codes = Codes(held.encoding, more[:count], more[count:])
    for back, width, columns in ((False, 128, 96), (True, 96, 128)):
        x = torch.eye(width, dtype=dtype, device="cuda").repeat(3, 1)
        ends = torch.arange(4, device="cuda") * width
        it = Sorted(torch.arange(3 * width, device="cuda"), ends, 3 * width, 3, 1)
        out = torch.full((3 * width, columns), float("nan"), dtype=dtype, device="cuda")
        host.product(out, x, host.held(as_bytes, codes), sorted_rows.tiled(it, dtype), back=back)
        found = out.view(3, width, columns)
        assert torch.equal(found if back else found.transpose(1, 2), dense), (name, back)


@pytest.mark.parametrize("tokens", [0, 1, 2, 8, 64, 513, 4096])
@pytest.mark.parametrize("name", ["fp8 blocks", "nibbles, zeros", "mxfp4", "int8 channels", "words of features", "nf4"])
def test_values_and_gradients(name: str, tokens: int) -> None:
    """Against float64 with the weights that the encoding means; biases, ids of nobody, and the same bits in every run."""
    case = LARGE.with_(tokens=tokens)
    encoding = ENCODINGS[name]
    args, dense, options = coded(case, encoding, None, encoding)
    args, dense = on_gpu(args), on_gpu(dense)
    out = run(args, options)
    assert_as_exact(out, reference(dense, **case.options), reference(to(dense, torch.float64), **case.options))
    for _ in range(3):
        assert torch.equal(run(args, options), out)
    grads = []
    for given, wide, op in ((args, BF16, run), (dense, torch.float64, lambda a, o: reference(a, **case.options))):
        x, weights = (given[i].detach().to(wide).requires_grad_() for i in (0, 2))
        rest = given if wide == BF16 else to(given, wide)
        result = op([x, rest[1], weights, *rest[3:]], options)
        grads.append(torch.autograd.grad(result.double().square().sum(), (x, weights)) if tokens else ())
    for ours, theirs in zip(*grads, strict=True):
        assert float((ours.double() - theirs).abs().max()) <= 0.05 * float(theirs.abs().max())


def test_a_graph_reads_live_storage_and_waits_for_nothing() -> None:
    """Storage, scales and ids that change between replays are read as they are."""
    encoding = ENCODINGS["nibbles"]
    args, _, options = coded(LARGE, encoding, None, encoding)
    args = on_gpu(args)
    for _ in range(3):
        run(args, options)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(args, options)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(args, options)
    args[3][0].add_(17)
    args[-1][0].mul_(0.5)
    args[1].copy_(args[1].roll(1, 0))
    graph.replay()
    assert torch.equal(out, run(args, options))


def test_no_weight_sized_temporary() -> None:
    """Forward and backward of many experts take less memory than the unpacked weights of a few."""
    case = Case(tokens=64, hidden=1024, inter=1024, hidden_out=1024, experts=32, top_k=2, dtype=BF16, bias=False, low_id=0, high_id=32)
    args, _, options = coded(case, ENCODINGS["fp8 blocks"], None, ENCODINGS["fp8 blocks"])
    args = on_gpu(args)
    args[0].requires_grad_()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run(args, options).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 4 * 3 * 1024 * 1024 * 2


@pytest.mark.parametrize("gating", ["merged", "separate"])
@pytest.mark.parametrize("name", ["fp8 blocks", "nibbles, zeros", "words of features", "halves"])
def test_many_rows(name: str, gating: str) -> None:
    """Some experts are unpacked at a time, by the kernels with specialised warps where there are any: values and gradients."""
    from moefuse.kernels.triton.provide import coded_products

    (least,) = (k.rows[0] for k in coded_products.KERNELS if k.name == "some experts at a time, unpacked")
    case = LARGE.with_(tokens=900, experts=4, gating=gating, separate=gating == "separate", hidden_out=256)
    assert case.tokens * case.top_k >= least * case.experts
    encoding = ENCODINGS[name]
    args, dense, options = coded(case, encoding, encoding if gating == "separate" else None, encoding)
    args, dense = on_gpu(args), on_gpu(dense)
    out = run(args, options)
    assert_as_exact(out, reference(dense, **case.options), reference(to(dense, torch.float64), **case.options))
    assert torch.equal(run(args, options), out)
    grads = []
    for given, wide, op in ((args, BF16, run), (dense, torch.float64, lambda a, o: reference(a, **case.options))):
        x, weights = (given[i].detach().to(wide).requires_grad_() for i in (0, 2))
        rest = given if wide == BF16 else to(given, wide)
        result = op([x, rest[1], weights, *rest[3:]], options)
        grads.append(torch.autograd.grad(result.double().square().sum(), (x, weights)))
    for ours, theirs in zip(*grads, strict=True):
        assert float((ours.double() - theirs).abs().max()) <= 0.05 * float(theirs.abs().max())
