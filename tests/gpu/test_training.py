"""Differentiated calls of ``experts`` on the device, alone and in compiled models."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import Tensor

from moefuse.runtime import providers
from tests.cpu.ops_case import Case, leaves, oracle_grads, reference, run, to
from tests.gpu.gpu_case import on_gpu

pytestmark = pytest.mark.gpu

SOME = {"tokens": 70, "hidden": 96, "inter": 64, "hidden_out": 96, "experts": 9, "top_k": 4}
MANY = {"tokens": 1500, "hidden": 136, "inter": 200, "hidden_out": 264, "experts": 6, "top_k": 2}
WIDE = {"tokens": 3000, "hidden": 512, "inter": 384, "hidden_out": 512, "experts": 8, "top_k": 4}
ODD = {"tokens": 70, "hidden": 51, "inter": 37, "hidden_out": 45, "experts": 5, "top_k": 3}
STORAGES: list[dict[str, bool]] = [{}, {"transposed": True}, {"separate": True}]


def pull(out: Tensor) -> Tensor:
    return torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(out)


def shaken(t: Tensor, jitter: int | None, dtype: torch.dtype) -> Tensor:
    """``t``, every value multiplied by 1 + r or 1 - r at random if there is a seed; r is the usual rounding of ``dtype``."""
    if jitter is None:
        return t
    # 16 bit: every value is rounded once, by a quarter of eps on average; else sums are rounded at every step.
    rounding = torch.finfo(dtype).eps * (0.25 if dtype.itemsize == 2 else 1.0)
    sign = torch.randint(0, 2, t.shape, generator=torch.Generator().manual_seed(jitter)).to(t) * 2 - 1
    return t.mul_(1 + rounding * sign)


def results(function: Any, case: Case, dtype: torch.dtype, jitter: int | None = None) -> list[Tensor]:
    """The output and the gradient of every input of the same values in ``dtype``.

    With a seed ``jitter`` every input, the incoming gradient too (a bias's gradient depends on nothing else), is one rounding off.
    """
    args = to(on_gpu(case.args()), dtype)
    for t in leaves(args):
        shaken(t, jitter, case.dtype).requires_grad_()
    out = function(args, **(case.options if dtype == case.dtype else {**case.options, "out_dtype": None}))
    incoming = pull(out.detach().to(case.dtype)).to(out.dtype)
    return [out.detach(), *oracle_grads(out, leaves(args), shaken(incoming, jitter, case.dtype))]


def near(got: Tensor, own: Tensor, exact: Tensor, moved: float, name: object = "") -> None:
    """Within 1.5 times the error of autograd's own in the same dtype, or what inputs off by some roundings would give, as norms.

    Autograd's own error alone is luck where a result hangs on one sum that cancels; ``moved`` is how far the exact result moves with
    inputs that are one rounding off.
    """
    assert (got.shape, got.dtype) == (own.shape, own.dtype)
    assert got.isfinite().all()
    if got.numel():
        error, allowed = (float((t.double() - exact).norm()) for t in (got, own))
        roundings = 8 if got.dtype in (torch.float32, torch.float64) else 1
        limit = 1.5 * max(allowed, moved) + roundings * torch.finfo(got.dtype).eps * float(exact.norm())
        assert error <= limit, f"{name}: {error:.3g}, limit {limit:.3g}: own {allowed:.3g}, moved {moved:.3g}"


def check(case: Case) -> None:
    exact = results(reference, case, torch.float64)
    jittered = [results(reference, case, torch.float64, jitter) for jitter in range(3)]
    moved = [max(float((it[i] - t).norm()) for it in jittered) for i, t in enumerate(exact)]
    every = zip(results(run, case, case.dtype), results(reference, case, case.dtype), exact, moved, strict=True)
    for i, values in enumerate(every):
        near(*values, i)


def test_triton_runs_the_ops() -> None:
    x = torch.empty(3, 3, device="cuda")
    for op in ("experts_forward", "experts_backward_rows", "experts_backward_in", "experts_backward_out"):
        assert providers.select(op, x).name == "triton"


@pytest.mark.parametrize("storage", STORAGES, ids=["stacked", "in-out", "separate"])
def test_never_waits_and_repeats(storage: dict[str, bool]) -> None:
    """Bitwise equal from run to run, whatever the memory held, without a wait for the host."""
    case = Case(**WIDE, **storage, dtype=torch.bfloat16)
    args = on_gpu(case.args())
    for t in leaves(args):
        t.requires_grad_()
    grad = pull(run(args).detach())

    def once() -> list[Tensor]:
        return list(torch.autograd.grad(run(args), leaves(args), grad))

    want = once()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = once()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    for value in (0.0, float("nan"), 1e30):
        junk = torch.full((64 << 20,), value, device="cuda")
        del junk
        assert all(torch.equal(a, b) for a, b in zip(once(), want, strict=True))


def test_a_graph_of_forward_and_backward_replays_with_other_routing() -> None:
    case = Case(**WIDE, dtype=torch.bfloat16)
    args = on_gpu(case.args())
    for t in leaves(args):
        t.requires_grad_()
    grad = pull(run(args).detach())

    def once() -> list[Tensor]:
        out = run(args)
        return [out, *torch.autograd.grad(out, leaves(args), grad)]

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            once()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = once()
    ids = args[1].clone()
    for other in (torch.zeros_like(ids), torch.full_like(ids, -1), ids.roll(1, 0)):
        args[1].copy_(other)
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(captured, once(), strict=True))


@pytest.mark.parametrize("on_input", [False, True], ids=["weight-on-output", "weight-on-input"])
def test_memory(on_input: bool) -> None:
    """Saved: pre-activation and routing. At the peak of backward also the gradient of either, and one set of rows; no copy of weights."""
    case = Case(**WIDE, bias=False, weight_on_input=on_input, low_id=0, high_id=8, dtype=torch.bfloat16)
    args = on_gpu(case.args())
    for t in leaves(args):
        t.requires_grad_()
    run(args, **case.options).sum().backward()
    for t in leaves(args):
        t.grad = None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    out = run(args, **case.options)
    slots, i, h = case.tokens * case.top_k, case.inter, case.hidden
    saved = torch.cuda.memory_allocated() - before
    # The allocator leaves a large block whole when less than a MiB of it would remain.
    assert saved <= 2 * (slots * 2 * i + case.tokens * h) + 8 * slots + (2 << 20)
    torch.cuda.reset_peak_memory_stats()
    out.sum().backward()
    peak = torch.cuda.max_memory_allocated() - before
    grads = sum(t.numel() * 2 for t in leaves(args))
    assert peak <= saved + grads + 2 * slots * (2 * i + max(2 * i, h)) + 4 * case.tokens * h + 32 * slots + (1 << 20)


FAMILIES = ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "llama4"]


def one_step(model: Any, ids: Tensor) -> tuple[float, dict[str, Tensor]]:
    """The loss and the gradients of one step."""
    model.zero_grad()
    logits = model(ids, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1))
    loss.backward()
    return float(loss.detach()), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("name", FAMILIES)
def test_a_compiled_model_trains_as_in_eager(name: str) -> None:
    """Loss and every gradient of one step against double precision, within a budget of eager's own error; every layer fused."""
    pytest.importorskip("transformers.integrations.moe")
    import moefuse
    from tests.zoo import tiny
    from tests.zoo.budget import cast

    model = cast(tiny.build(name), torch.float32).cuda().train()
    exact = cast(copy.deepcopy(model), torch.float64)
    if tiny.FAMILIES[name].registry:
        exact.set_experts_implementation("eager")  # grouped_mm takes no float64
    ids = tiny.tokens(2, 12).cuda()
    want, own = one_step(model, ids)
    truth, exact_grads = one_step(exact, ids)
    got, grads = one_step(torch.compile(model, backend="moefuse"), ids)
    report = moefuse.last_report()
    assert report is not None
    assert [(s.code, s.message) for s in report.skipped] == []
    assert len(report.fused) == tiny.FAMILIES[name].layers
    assert abs(got - truth) <= 2 * abs(want - truth) + 1e-5
    names = {n.removeprefix("_orig_mod."): g for n, g in grads.items()}
    assert set(names) == set(own)
    for n, g in names.items():
        error, allowed = float((g.double() - exact_grads[n]).norm()), float((own[n].double() - exact_grads[n]).norm())
        assert error <= 2 * allowed + 1e-4 * float(exact_grads[n].norm()) + 1e-7, f"{n}: {error:.3g}, eager's {allowed:.3g}"


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("frozen", [False, True], ids=["", "experts-frozen"])
@pytest.mark.parametrize(("hidden", "inter", "experts", "top_k"), [(512, 384, 32, 4), (2048, 768, 128, 8), (1024, 3584, 8, 2)])
def test_training_takes_no_more_memory_than_the_default(hidden: int, inter: int, experts: int, top_k: int, frozen: bool) -> None:
    """A block of transformers, forward and backward: peak memory of backend moefuse against that of backend inductor.

    Where rows weigh more than weights, as much as them (Qwen3's sizes), and where few experts are large (Mixtral's proportions).
    """
    transformers = pytest.importorskip("transformers")
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    sizes = {"hidden_size": hidden, "moe_intermediate_size": inter, "num_experts": experts, "num_experts_per_tok": top_k}
    config = transformers.Qwen3MoeConfig(**sizes)
    config._experts_implementation = "grouped_mm"
    torch.manual_seed(0)
    block = Qwen3MoeSparseMoeBlock(config).to("cuda", torch.bfloat16)
    for p in block.parameters():
        torch.nn.init.normal_(p, std=p.shape[-1] ** -0.5)
    block.experts.requires_grad_(not frozen)
    x = torch.randn(1, 4096, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    peaks = {}
    for backend in ("inductor", "moefuse"):
        torch._dynamo.reset()
        compiled = torch.compile(block, backend=backend)
        for _ in range(3):
            block.zero_grad()
            x.grad = None
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            out = compiled(x)
            (out[0] if isinstance(out, tuple) else out).float().square().mean().backward()
            peaks[backend] = torch.cuda.max_memory_allocated() - before
    assert peaks["moefuse"] <= 1.02 * peaks["inductor"], peaks


@pytest.mark.parametrize("sizes", [SOME, MANY, ODD], ids=["some", "many", "odd"])
@pytest.mark.parametrize("gating", ["merged", "separate", "plain"])
def test_hidden_activations_once_more(gating: str, sizes: dict[str, int]) -> None:
    """``moefuse::recomputed_experts`` has the bits of ``moefuse::experts``, and keeps less."""
    case = Case(**sizes, gating=gating, dtype=torch.bfloat16)  # type: ignore[arg-type]
    found = []
    for op in (torch.ops.moefuse.experts, torch.ops.moefuse.recomputed_experts):
        args = on_gpu(case.args(requires_grad=True))
        op(*args, **case.options)  # a first call may let go of what earlier calls of other sizes kept
        gc.collect()  # what other tests have left would be let go in between
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        out = op(*args, **case.options)
        kept = torch.cuda.memory_allocated() - before
        found.append((out.detach(), oracle_grads(out, leaves(args), pull(out)), kept))
        del out
    (out, grads, kept), (again, regrads, less) = found
    assert torch.equal(out, again)
    assert all(torch.equal(a, b) for a, b in zip(grads, regrads, strict=True))
    assert less < kept
