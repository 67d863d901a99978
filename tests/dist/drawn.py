"""Programs that nobody wrote down: drawn by the test, run by each rank beside one process."""

from __future__ import annotations

import contextlib
import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import moefuse
from tests.cpu.capture_case import Seen, capturing
from tests.dist.idioms import ANY_IDS, AROUND, BODIES, ROUTERS, Block, H

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
ROUTINGS = ("uniform", "one expert", "one rank", "nan", "any ids")


@dataclass(frozen=True)
class Drawn:
    """One case; ``tokens`` of each rank, ``how``: arguments of ``parallelize``."""

    body: str
    router: str
    around: str
    experts: int
    top_k: int
    tokens: tuple[int, ...]
    routing: str
    how: dict[str, Any]
    dtype: str
    mode: str
    seed: int


@st.composite
def cases(draw: Any, world: int) -> Drawn:
    """Legal cases on ``world`` ranks."""
    body = draw(st.sampled_from(sorted(BODIES)))
    router = draw(st.sampled_from([r for r in ROUTERS if r != "given" or body in ANY_IDS]))
    routing = draw(st.sampled_from([r for r in ROUTINGS if (r == "any ids") == (router == "given")]))
    top_k = draw(st.integers(1, 3))
    experts = draw(st.sampled_from([4, 6, 8])) if router == "nested" else draw(st.integers(max(world, top_k), 9))
    whose = draw(st.sampled_from(["distinct", "distinct", "replicated", "sequence"]))
    most = draw(st.sampled_from([None, "equal", 17, 20]))
    if whose == "replicated" or most == "equal":
        tokens: tuple[int, ...] = (draw(st.integers(0, 17)),) * world
    else:
        tokens = tuple(draw(st.lists(st.integers(0, 17), min_size=world, max_size=world)))
    table = st.lists(st.integers(0, world - 1), min_size=experts, max_size=experts)
    how: dict[str, Any] = {"tokens": whose, "placement": draw(st.one_of(st.sampled_from(["linear", "round_robin"]), table))}
    if most is not None:
        how["max_tokens"] = most
    how["transport"] = draw(st.sampled_from(["auto", "auto", "all_to_all", "gather"]))
    mode = draw(st.sampled_from(["eval", "train", "train", "checkpointed", "autocast"]))
    dtype = "float32" if mode == "autocast" else draw(st.sampled_from(sorted(DTYPES)))
    return Drawn(body, router, draw(st.sampled_from(AROUND)), experts, top_k, tokens, routing, how, dtype, mode, draw(st.integers(0, 99)))


@dataclass(frozen=True)
class Outcome:
    """What is wrong on a rank, and how many layers were fused."""

    wrong: list[str]
    fused: int
    skipped: list[str]


def inputs(case: Drawn) -> list[tuple[Tensor, Tensor]]:
    """(x, nudge) of each rank, in float64. Scores stand apart, so that no rounding changes the routing."""
    generator = torch.Generator().manual_seed(case.seed)
    found = []
    for count in case.tokens:
        x = torch.randn(count, H, generator=generator, dtype=torch.float64)
        nudge = torch.rand(count, case.experts, generator=generator).argsort(-1).double() * 4
        if case.routing == "one expert":
            nudge[:, case.experts // 2] += 64
        if case.routing == "one rank":
            nudge += torch.arange(case.experts, 0, -1).double() * 64
        if case.routing == "nan":
            nudge[1::3, 0] = float("nan")
        if case.routing == "any ids":
            nudge = torch.randint(-2, case.experts + 2, nudge.shape, generator=generator).double()
        found.append((x.bfloat16().double(), nudge))
    return found[:1] * len(found) if case.how["tokens"] == "replicated" else found


def run(rank: int, case: Drawn, behind: str | None = "aot_eager") -> Outcome:
    """Compare one case on one rank."""
    torch._dynamo.reset()
    torch.manual_seed(case.seed)
    dtype = DTYPES[case.dtype]
    single = Block(case.body, case.router, case.around, case.experts, case.top_k).to(dtype)
    exact = copy.deepcopy(single).double()
    model = copy.deepcopy(single)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    moefuse.parallelize(model, mesh, **case.how)
    seen = Seen()
    compiled: Any = model if behind is None else torch.compile(model, backend=capturing(seen, behind=behind))
    every = inputs(case)
    mine = _called(compiled, [every[rank]], case, dtype, case.mode == "autocast", case.mode == "checkpointed")
    same = case.how["tokens"] == "replicated"
    whose, here = (every[:1], 0) if same else (every, rank)
    theirs = _called(single, whose, case, dtype, case.mode == "autocast")
    truth = _called(exact, whose, case, torch.float64)
    wrong = _wrong("out", mine.outs[0], theirs.outs[here], truth.outs[here], case)
    if case.mode != "eval":
        scale = 1.0 if same or case.how["tokens"] == "sequence" else 1 / len(every)
        wrong += _wrong("x", mine.grads[0] * scale, theirs.grads[here] * scale, truth.grads[here] * scale, case)
        _average(model, same, scale)
        wanted, true = ({name: _grad(p) * scale for name, p in m.named_parameters()} for m in (single, exact))
        for name, grad in _by_name(model).items():
            wrong += _wrong(name, grad, wanted[name], true[name], case)
    return Outcome(wrong, len(seen.report.fused), [skipped.code for skipped in seen.report.skipped])


@dataclass(frozen=True)
class _Called:
    outs: list[Tensor]
    grads: list[Tensor]


def _called(
    model: Any, every: list[tuple[Tensor, Tensor]], case: Drawn, dtype: torch.dtype, autocast: bool = False, again: bool = False
) -> _Called:
    """Outputs of a call for each rank's tokens, and gradients of the tokens; those of Parameters are added up."""
    train = case.mode != "eval"
    outs, grads = [], []
    for x, nudge in every:
        mine, nudge = x.to(dtype).requires_grad_(train), nudge.to(dtype)
        around: Any = torch.autocast("cpu", dtype=torch.bfloat16) if autocast else contextlib.nullcontext()
        with torch.set_grad_enabled(train), around:
            out = checkpoint(model, mine, nudge, use_reentrant=False) if again else model(mine, nudge)
        if train:
            (out * torch.linspace(-1, 1, out.numel(), dtype=torch.float64).to(out.dtype).view(out.shape)).sum().backward()
        outs.append(out.detach())
        grads.append(_grad(mine))
    return _Called(outs, grads)


def _grad(of: Tensor) -> Tensor:
    return torch.zeros_like(of) if of.grad is None else of.grad


def _average(model: nn.Module, same: bool, scale: float) -> None:
    """As data parallelism does it for what is not spread."""
    for parameter in model.parameters():
        parameter.grad = _grad(parameter)
        if not isinstance(parameter, DTensor) and not same:
            dist.all_reduce(parameter.grad)
            parameter.grad *= scale


def _by_name(model: nn.Module) -> dict[str, Tensor]:
    """Gradients by the names of one process's Parameters: the state of a model whose weights they are."""
    with torch.no_grad():
        for parameter in model.parameters():
            local: Any = parameter
            (local.to_local() if isinstance(local, DTensor) else local).copy_(
                parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
            )
    return {name: v.full_tensor() if isinstance(v, DTensor) else v for name, v in model.state_dict().items()}


def _wrong(name: str, mine: Tensor, theirs: Tensor, truth: Tensor, case: Drawn) -> list[str]:
    """What is said about values that are not those of one process; where that has NaN, anything goes."""
    known = theirs.isfinite() & truth.isfinite()
    mine, theirs, truth = (v.detach().double()[known] for v in (mine, theirs, truth))
    if not mine.numel():
        return []
    if not mine.isfinite().all():
        return [f"{name} is not finite"]
    largest = truth.abs().max().clamp(min=1e-30).item()
    if case.dtype == "bfloat16" or case.mode == "autocast":
        off, allowed = (mine - truth).abs().max().item(), (theirs - truth).abs().max().item() * 1.1
        # A rounding of each rank's partial sum; of gradients another one where data parallelism adds them up in bfloat16.
        allowed += (1 if name == "out" else 2) * len(case.tokens) * 2.0**-8 * largest
    else:
        off, allowed = (mine - theirs).abs().max().item(), (1e-12 if case.dtype == "float64" else 2e-6) * largest
    return [f"{name} is off by {off / largest:.1e}, {allowed / largest:.1e} allowed"] if off > allowed else []
