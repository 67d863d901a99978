"""Programs that nobody wrote down: drawn by the test, run by each rank beside one process."""

from __future__ import annotations

import copy
import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import moefuse
from tests.cpu.capture_case import Seen, capturing
from tests.dist.idioms import ANY_IDS, AROUND, BODIES, ROUTERS, Block, H

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
ROUTINGS = ("uniform", "one expert", "one rank", "nan", "any ids")
MODES = ("eval", "train", "train", "micro-batches", "checkpointed", "reentrant", "selective", "autocast", "mixed")
"""``"mixed"``: experts in bfloat16 and the rest in float32, under autocast."""


AGAIN = ("checkpointed", "reentrant", "selective")
"""What is computed twice is counted twice."""


@dataclass(frozen=True)
class Drawn:
    """One case; ``tokens`` of each rank that has its own, ``how``: arguments of ``parallelize``, ``shape`` of the mesh."""

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
    shape: tuple[int, ...]

    @property
    def roles(self) -> tuple[str, ...]:
        """What each dimension of the mesh is for."""
        roles = self.how.get("experts", "ep")
        return roles if isinstance(roles, tuple) else (roles,)

    @property
    def share(self) -> int:
        """How many ranks, one behind the other, have the same tokens."""
        return math.prod(self.shape) // len(self.tokens)

    @property
    def scale(self) -> float:
        """What the sum of all tokens' gradients is multiplied by for experts."""
        if self.how.get("grads") == "sum":
            return 1.0
        if "distinct" in (self.how["tokens"], self.how["tokens"][0]):
            return 1 / len(self.tokens)
        return 1 / self.shape[0] if self.roles[0] == "dp" else 1.0


LAYOUTS: dict[int, list[tuple[tuple[str, ...], tuple[int, ...]]]] = {
    2: [(("ep",), (2,))] * 3 + [(("tp",), (2,)), (("dp", "ep"), (2, 1)), (("dp", "tp"), (2, 1))],
    4: [(("ep",), (4,))] * 2 + [(("dp", "ep"), (2, 2))] * 2 + [(("ep", "tp"), (2, 2)), (("tp",), (4,))],
}
"""Roles of the dimensions of a mesh, and their sizes."""


@st.composite
def cases(draw: Any, world: int, most_experts: int = 9) -> Drawn:
    """Legal cases on ``world`` ranks."""
    body = draw(st.sampled_from(sorted(BODIES)))
    router = draw(st.sampled_from([r for r in ROUTERS if r != "given" or body in ANY_IDS]))
    routing = draw(st.sampled_from([r for r in ROUTINGS if (r == "any ids") == (router == "given")]))
    top_k = draw(st.integers(1, 3))
    pairs = [n for n in (4, 6, 8) if n <= most_experts]
    experts = draw(st.sampled_from(pairs) if router == "nested" else st.integers(max(world, top_k), most_experts))
    roles, shape = draw(st.sampled_from(LAYOUTS[world]))
    whose = draw(st.sampled_from(["distinct", "distinct", "replicated", "sequence"]))
    most = draw(st.sampled_from([None, "equal", 17, 20]))
    sliced = roles == ("ep", "tp") and whose != "replicated" and draw(st.booleans())  # ranks with slices of the same have the same tokens
    differ = {"dp", *(roles[:1] if sliced else roles if whose != "replicated" else ())}
    own = [n for n, role in zip(shape, roles, strict=True) if role in differ]
    owners = math.prod(own)
    number = st.integers(0, 17)
    counts = st.lists(number, min_size=owners, max_size=owners)
    tokens = (draw(number),) * owners if most == "equal" else tuple(draw(counts))
    spread = shape[roles.index("ep")] if "ep" in roles else 1
    table = st.lists(st.integers(0, spread - 1), min_size=experts, max_size=experts)
    how: dict[str, Any] = {
        "tokens": (whose, "replicated") if sliced else whose,
        "placement": draw(st.one_of(st.sampled_from(["linear", "round_robin"]), table)),
    }
    if most is not None:
        how["max_tokens"] = most
    if roles != ("ep",):
        how["experts"] = roles
    how["grads"] = draw(st.sampled_from(["mean", "mean", "sum"]))
    how["transport"] = draw(st.sampled_from(["auto", "auto", "all_to_all", "gather"]))
    mode = draw(st.sampled_from(MODES))
    dtype = "float32" if mode in ("autocast", "mixed") else draw(st.sampled_from(sorted(DTYPES)))
    around, seed = draw(st.sampled_from(AROUND)), draw(st.integers(0, 99))
    return Drawn(body, router, around, experts, top_k, tokens, routing, how, dtype, mode, seed, shape)


@dataclass(frozen=True)
class Outcome:
    """What is wrong on a rank, and how many layers were fused."""

    wrong: list[str]
    fused: int
    skipped: list[str]


def inputs(case: Drawn) -> list[tuple[Tensor, Tensor]]:
    """(x, nudge) of each rank, in float64. Scores stand apart, so that no rounding changes the routing; near 1 a sigmoid's would not."""
    generator = torch.Generator().manual_seed(case.seed)
    found = []
    for count in case.tokens:
        x = torch.randn(count, H, generator=generator, dtype=torch.float64)
        nudge = torch.rand(count, case.experts, generator=generator).argsort(-1).double() * 4 - 4 * case.experts
        if case.routing == "one expert":
            nudge[:, case.experts // 2] = 4
        if case.routing == "one rank":
            nudge[:] = torch.arange(0, -4 * case.experts, -4)
        if case.routing == "nan":
            nudge[1::3, 0] = float("nan")
        if case.routing == "any ids":
            nudge = torch.randint(-2, case.experts + 2, nudge.shape, generator=generator).double()
        found.append((x.bfloat16().double(), nudge))
    return found


def run(rank: int, case: Drawn, behind: str | None = "aot_eager") -> Outcome:
    """Compare one case on one rank. A layer that has no slices by which it can be spread is a case of nothing."""
    torch.manual_seed(case.seed)
    dtype = DTYPES[case.dtype]
    single = Block(case.body, case.router, case.around, case.experts, case.top_k).to(dtype)
    if case.mode == "mixed":
        single.mlp.experts.bfloat16()
    exact = copy.deepcopy(single).double()
    model = copy.deepcopy(single)
    mesh = init_device_mesh("cpu", case.shape, mesh_dim_names=case.roles)
    try:
        moefuse.parallelize(model, mesh, **case.how)
    except moefuse.ParallelError as error:
        return Outcome([], -1, [str(error)])
    seen = Seen()
    compiled: Any = model if behind is None else torch.compile(model, backend=capturing(seen, behind=behind))
    every, here = inputs(case), rank // case.share
    mine = _called(compiled, every[here : here + 1], case, dtype, case.mode)
    theirs = _called(single, every, case, dtype, case.mode if case.mode in ("autocast", "mixed") else "")
    truth = _called(exact, every, case, torch.float64, "")
    wrong = _wrong("out", mine.outs[0], theirs.outs[here], truth.outs[here], case)
    if case.around == "counts" and case.mode not in AGAIN:
        counted, wanted = (dict(m.named_buffers())["mlp.load"] for m in (model, single))
        dist.all_reduce(counted)
        wrong += [] if torch.equal(counted / case.share, wanted) else ["counts are other ones"]
    if case.mode != "eval":
        wrong += _wrong("x", mine.grads[0], theirs.grads[here], truth.grads[here], case)
        _add_up(model, case)
        wanted, true = ({name: _grad(p) for name, p in m.named_parameters()} for m in (single, exact))
        # One weight divided by itself is a constant: what comes back to the router is rounding.
        nothing = case.top_k == 1 and case.router != "given"
        # Buffers have none; of a list of experts a rank's state has its own.
        for name, grad in ((name, grad) for name, grad in _by_name(model).items() if name in wanted):
            beside = max(v.abs().max().item() for v in true.values()) if nothing and "router" in name else 0.0
            wrong += _wrong(name, grad, wanted[name], true[name], case, beside)
    return Outcome(wrong, len(seen.report.fused), [skipped.code for skipped in seen.report.skipped])


@dataclass(frozen=True)
class _Called:
    outs: list[Tensor]
    grads: list[Tensor]


def _called(model: Any, every: list[tuple[Tensor, Tensor]], case: Drawn, dtype: torch.dtype, mode: str) -> _Called:
    """Outputs of a call for each one's tokens, and gradients of the tokens; those of Parameters are added up."""
    train = case.mode != "eval"
    outs, grads = [], []
    for x, nudge in every:
        mine, nudge = x.to(dtype).requires_grad_(train), nudge.to(dtype)
        cut = [slice(None, len(x) // 3), slice(len(x) // 3, None)] if case.mode == "micro-batches" else [slice(None)]
        parts = []
        for part in cut:
            with torch.set_grad_enabled(train), torch.autocast("cpu", torch.bfloat16, enabled=mode in ("autocast", "mixed")):
                out = _again(model, mine[part], nudge[part], mode)
            if train:
                (out * torch.linspace(-1, 1, out.numel(), dtype=torch.float64).to(out.dtype).view(out.shape)).sum().backward()
            parts.append(out.detach())
        outs.append(torch.cat(parts))
        grads.append(_grad(mine))
    return _Called(outs, grads)


def _again(model: Any, x: Tensor, nudge: Tensor, mode: str) -> Tensor:
    """The result of a call, all of which, or products apart, is computed again for gradients."""
    if mode not in AGAIN:
        return model(x, nudge)  # type: ignore[no-any-return]
    more: dict[str, Any] = {"use_reentrant": mode == "reentrant"}
    if mode == "selective":
        more["context_fn"] = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    return checkpoint(model, x, nudge, **more)  # type: ignore[no-any-return]


def _grad(of: Tensor) -> Tensor:
    return torch.zeros_like(of) if of.grad is None else of.grad


def _add_up(model: nn.Module, case: Drawn) -> None:
    """All gradients as the sum over all tokens: those of the rest as data parallelism adds them, those of experts without their factor."""
    for parameter in model.parameters():
        parameter.grad = _grad(parameter)
        if isinstance(parameter, DTensor):
            parameter.grad /= case.scale
        else:
            dist.all_reduce(parameter.grad)
            parameter.grad /= case.share


def _by_name(model: nn.Module) -> dict[str, Tensor]:
    """Gradients by the names of one process's Parameters: the state of a model whose weights they are."""
    with torch.no_grad():
        for parameter in model.parameters():
            local: Any = parameter
            (local.to_local() if isinstance(local, DTensor) else local).copy_(
                parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
            )
    return {name: v.full_tensor() if isinstance(v, DTensor) else v for name, v in model.state_dict().items()}


def _wrong(name: str, mine: Tensor, theirs: Tensor, truth: Tensor, case: Drawn, least: float = 1e-30) -> list[str]:
    """What is said about values that are not those of one process; where that has NaN, anything goes.

    Relative to the largest value, or to ``least``.
    """
    known = theirs.isfinite() & truth.isfinite()
    mine, theirs, truth = (v.detach().double()[known] for v in (mine, theirs, truth))
    if not mine.numel():
        return []
    if not mine.isfinite().all():
        return [f"{name} is not finite"]
    largest = max(truth.abs().max().item(), least, 1e-30)
    if case.dtype == "bfloat16" or case.mode in ("autocast", "mixed"):
        off, allowed = (mine - truth).abs().max().item(), (theirs - truth).abs().max().item() * 1.1
        # A rounding of each rank's partial sum; of gradients another one where data parallelism adds them up in bfloat16.
        allowed += (1 if name == "out" else 2) * math.prod(case.shape) * 2.0**-8 * largest
    else:
        off, allowed = (mine - theirs).abs().max().item(), (1e-12 if case.dtype == "float64" else 2e-6) * largest
    return [f"{name} is off by {off / largest:.1e}, {allowed / largest:.1e} allowed"] if off > allowed else []
