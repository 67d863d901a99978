"""How the op runs on the device: graphs, repeatability, no waiting, memory, streams, torch.compile."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from moefuse.runtime import providers
from tests.cpu.ops_case import Case
from tests.gpu.gpu_case import assert_right, on_gpu, run

pytestmark = pytest.mark.gpu

FEW = {"tokens": 2, "hidden": 256, "inter": 128, "hidden_out": 256, "experts": 16, "top_k": 2}
SOME = {"tokens": 64, "hidden": 256, "inter": 128, "hidden_out": 256, "experts": 16, "top_k": 4}
MANY = {"tokens": 6000, "hidden": 256, "inter": 128, "hidden_out": 256, "experts": 16, "top_k": 4}
REGIMES = pytest.mark.parametrize("sizes", [FEW, SOME, MANY], ids=["few", "some", "many"])
STORAGES = pytest.mark.parametrize("storage", [{}, {"transposed": True}, {"separate": True}], ids=["stacked", "in-out", "separate"])


def skewed(ids: Tensor, how: int) -> Tensor:
    """Another routing: all slots to one expert, none valid, or shuffled."""
    return (torch.zeros_like(ids), torch.full_like(ids, -1), ids.roll(1, 0))[how]


@REGIMES
@STORAGES
def test_a_graph_replays_with_other_routing(sizes: dict[str, Any], storage: dict[str, Any]) -> None:
    case = Case(**sizes, **storage, dtype=torch.bfloat16)
    args = on_gpu(case.args())
    run(args, **case.options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(args, **case.options)
    ids = args[1].clone()
    for how in range(3):
        args[1].copy_(skewed(ids, how))
        args[0].normal_()
        graph.replay()
        assert torch.equal(out, run(args, **case.options))
        assert_right(out, args, case.options)


@REGIMES
def test_bitwise_equal_from_run_to_run(sizes: dict[str, Any]) -> None:
    """Whatever the buffers held before, and whoever used the device in between."""
    case = Case(**sizes, dtype=torch.bfloat16)
    args = on_gpu(case.args())
    want = run(args, **case.options)
    for value in (0.0, float("nan"), 1e30):
        junk = torch.full((32 << 20,), value, device="cuda")
        del junk
        assert torch.equal(run(args, **case.options), want)


@REGIMES
@STORAGES
def test_the_host_never_waits(sizes: dict[str, Any], storage: dict[str, Any]) -> None:
    case = Case(**sizes, **storage, dtype=torch.bfloat16)
    args = on_gpu(case.args())
    run(args, **case.options)
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = run(args, **case.options)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_right(out, args, case.options)


@REGIMES
def test_memory(sizes: dict[str, Any]) -> None:
    """At most the activations and outputs of every slot, the sorted order, and the result: no copy of x, of weights or of E/K slots."""
    case = Case(**sizes, bias=False, dtype=torch.bfloat16)
    args = on_gpu(case.args())
    run(args, **case.options)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run(args, **case.options)
    peak = torch.cuda.max_memory_allocated() - before
    slots = case.tokens * case.top_k
    need = 2 * (slots * (case.inter + case.hidden_out) + case.tokens * case.hidden_out) + 16 * slots
    assert peak <= need + (64 << 10) + 2 * slots


@REGIMES
def test_streams(sizes: dict[str, Any]) -> None:
    """Calls on two streams do not share buffers."""
    case = Case(**sizes, dtype=torch.bfloat16)
    args = on_gpu(case.args())
    want = run(args, **case.options)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]
    outs: list[Tensor] = []
    for _ in range(10):
        for stream in streams:
            with torch.cuda.stream(stream):
                outs.append(run(args, **case.options))
    torch.cuda.synchronize()
    assert all(torch.equal(out, want) for out in outs)


def test_threads() -> None:
    """A plan is shared by the threads that make the same call."""
    from concurrent.futures import ThreadPoolExecutor

    case = Case(**SOME, dtype=torch.bfloat16)
    calls = [on_gpu(case.with_(seed=seed).args()) for seed in range(4)]
    wants = [run(args, **case.options) for args in calls]
    torch.cuda.synchronize()

    def work(i: int) -> bool:
        with torch.cuda.stream(torch.cuda.Stream()):
            outs = [run(calls[i], **case.options) for _ in range(50)]
            torch.cuda.current_stream().synchronize()
        return all(torch.equal(out, wants[i]) for out in outs)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))


def test_weights_are_read_live() -> None:
    """A write to a weight, and a weight that moves, show in the next call."""
    for storage in ({}, {"separate": True}):
        case = Case(**SOME, **storage, dtype=torch.bfloat16)
        args = on_gpu(case.args())
        run(args, **case.options)
        for w in args[3]:
            w.neg_()
        assert_right(run(args, **case.options), args, case.options)
        args[5] = [w.clone() for w in args[5]]
        assert_right(run(args, **case.options), args, case.options)
        for w in args[3]:
            w.set_(w.clone())
        assert_right(run(args, **case.options), args, case.options)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiled_block(mode: str) -> None:
    """transformers' own block through the backend, fused, equal to itself within the dtype."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    import moefuse
    from moefuse.backend import backend

    config = transformers.Qwen3MoeConfig(hidden_size=128, moe_intermediate_size=64, num_experts=16, num_experts_per_tok=4)
    config._experts_implementation = "grouped_mm"
    torch.manual_seed(0)
    block = Qwen3MoeSparseMoeBlock(config).to("cuda", torch.bfloat16).eval()
    for p in block.parameters():
        torch.nn.init.normal_(p, std=p.shape[-1] ** -0.5)
    torch._dynamo.reset()
    compiled = torch.compile(block, backend=backend, mode=mode)
    with torch.inference_mode():
        for tokens in (1, 5, 300):
            x = torch.randn(1, tokens, 128, device="cuda", dtype=torch.bfloat16)
            for _ in range(3):
                got = compiled(x)
            want = block(x)
            got, want = (t[0] if isinstance(t, tuple) else t for t in (got, want))
            torch.testing.assert_close(got, want, rtol=3e-2, atol=3e-2)
    report = moefuse.last_report()
    assert report is not None
    assert len(report.fused) == 1
    torch._dynamo.reset()


@pytest.mark.parametrize("tokens", [1, 64], ids=["few", "some"])
def test_what_is_kept_is_not_in_the_pool_of_a_graph(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Separate experts need tables of addresses, and a shared expert a number; torch checks that its pools hold nothing of ours."""
    from moefuse.kernels.triton.host import operands
    from moefuse.ops import shared
    from tests.gpu.test_shared import Block, before

    monkeypatch.setattr(operands, "_TABLES", {})
    monkeypatch.setattr(shared, "_EVERY", {})
    torch._dynamo.reset()
    model = Block(before).cuda().eval()
    compiled = torch.compile(model, backend="moefuse", mode="reduce-overhead")
    x = torch.randn(1, tokens, next(model.parameters()).shape[-1], device="cuda")
    with torch.no_grad():
        for _ in range(4):
            torch.testing.assert_close(compiled(x), model(x), rtol=2e-3, atol=2e-3)
    torch._dynamo.reset()


def known() -> Any:
    """What plays records, once the C++ is compiled."""
    from moefuse.kernels.triton.launch import player

    for thread in threading.enumerate():
        if thread.name.endswith("(_start)"):
            thread.join()
    it = player.active()
    assert it is not None, "the C++ did not compile"
    return it.library.moefuse_known


@pytest.mark.parametrize(
    ("tokens", "separate"), [(2, False), (2, True), (700, False), (700, True)], ids=["stacked", "separate", "tensor maps", "maps apart"]
)
def test_launched_without_python(tokens: int, separate: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once C++ knows a call it launches it: the same bits, live weights, other tokens; a graph records it."""
    from moefuse.kernels.triton.host.plan import Plan
    from moefuse.kernels.triton.provide import experts as provider

    sizes = {"tokens": tokens, "hidden": 256, "inter": 128, "hidden_out": 256, "experts": 8, "top_k": 2}
    case = Case(**sizes, bias=False, dtype=torch.bfloat16, separate=separate)
    args = on_gpu(case.args())
    run(args, **case.options)
    count = known()
    providers.forget_records()
    for _ in range(2):
        run(args, **case.options)
    assert count() == 1
    plan = provider.plan_of(case.call(args))
    assert tokens == 2 or any(step.descs for step in plan.steps)  # type: ignore[union-attr]

    def want() -> Tensor:
        return plan.run(case.call(args))

    with monkeypatch.context() as patch:
        patch.setattr(Plan, "__init__", None)
        assert torch.equal(run(args, **case.options), want())
        args[0] = args[0] * 2
        for w in args[3]:
            w.mul_(0.5)
        assert torch.equal(run(args, **case.options), want())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            recorded = run(args, **case.options)
    args[1].copy_(args[1].flip(0))
    graph.replay()
    assert torch.equal(recorded, want())
    assert_right(recorded, args, case.options)


def test_known_addresses() -> None:
    """Many rows of separate Parameters: each set of them has tables of its own. Weights are read live, and none is kept alive."""
    case = Case(tokens=700, hidden=136, inter=200, hidden_out=264, experts=6, top_k=2, gating="separate", bias=False, separate=True)
    case = case.with_(dtype=torch.bfloat16)
    args = on_gpu(case.args())
    want = run(args, **case.options)
    count = known()
    providers.forget_records()
    assert_right(want, args, case.options)
    others = (
        [*args[:3], args[3][::-1], *args[4:]],  # the same addresses in another order
        [*args[:5], [w[:128] for w in args[5]], *args[6:]],  # the same addresses and strides, other sizes
        [args[0][:600], args[1][:600], args[2][:600], *args[3:]],
    )
    for _ in range(4):
        assert torch.equal(run(args, **case.options), want)
        for other in others:
            assert_right(run(other, **case.options), other, case.options)
    assert count() == 3  # the first two are one kind, with two records
    args[5][1].mul_(2)
    changed = run(args, **case.options)
    assert_right(changed, args, case.options)
    refs = [weakref.ref(w) for part in args[3:6] for w in part]
    del args, other, others
    gc.collect()
    assert not any(ref() is not None for ref in refs)


def steps_of(case: Case, args: list[Any]) -> list[Tensor]:
    """A step of training."""
    x, weights = args[0].detach().requires_grad_(), args[2].detach().requires_grad_()
    held = [[w.detach().requires_grad_() for w in part] for part in args[3:]]
    out = run([x, args[1], weights, *held], **case.options)
    return [out, *torch.autograd.grad(out, [x, weights, *(w for part in held for w in part)], torch.ones_like(out).cumsum(1).sin())]


@STORAGES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_training_without_python(storage: dict[str, bool], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits from records as from Python, in memory that is full of something else."""
    from moefuse.kernels.triton.provide import training

    case = Case(**SOME, **storage, bias=False, dtype=dtype)
    args = on_gpu(case.args())
    want = steps_of(case, args)
    known()
    for _ in range(2):
        for found, right in zip(steps_of(case, args), want, strict=True):
            assert torch.equal(found, right)
    for name in ("products", "sorted_of", "_hidden"):
        monkeypatch.setattr(training, name, None)
    held = [torch.full((1 << 22,), float("nan"), device="cuda") for _ in range(8)]
    del held
    for found, right in zip(steps_of(case, args), want, strict=True):
        assert torch.equal(found, right)
