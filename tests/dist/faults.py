"""What ranks do to each other when one of them fails: a layer as its ops, so that a fault can be put between any two of them."""

from __future__ import annotations

import contextlib
import copy
import datetime
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import moefuse
from moefuse.runtime import groups
from moefuse.runtime.transports import all_to_all, allgather
from tests.cpu.capture_case import Seen, capturing
from tests.dist import layers
from tests.dist.layers import H, K

E = 6
TIMEOUT = 10
"""Seconds of the group of one case: more than a loaded machine takes to start."""
LATE = 2
"""Seconds that a rank is waited for which will not come."""
ops = torch.ops.moefuse


@dataclass(frozen=True)
class Layer:
    """The experts of a model of two layers, each of which gives the sum of a token's slots back: K times the token."""

    model: nn.Module
    mesh: DeviceMesh
    terms: str
    slots: int

    def dispatch(self, x: Tensor, layer: str = "first", ids: Tensor | None = None) -> list[Tensor]:
        ids = torch.arange(len(x) * K).view(-1, K) % E if ids is None else ids
        place = self.model.get_submodule(layer)._moefuse_place
        found: list[Tensor] = ops.ep_dispatch.default([x], ids, place, self.slots, self.terms, layer)
        return found

    def combine(self, arrived: list[Tensor], tokens: int, layer: str = "first") -> Tensor:
        rows, local, *handle = arrived
        found: Tensor = ops.ep_combine.default(rows * (local >= 0).sum(1, keepdim=True), handle, tokens, self.terms, layer)
        return found

    def __call__(self, x: Tensor, layer: str = "first") -> Tensor:
        return self.combine(self.dispatch(x, layer), len(x), layer)


def mesh(timeout: float = TIMEOUT) -> DeviceMesh:
    """All ranks, with a process group of their own: what one case breaks, others do not use."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=timeout))
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=("ep",))


def layer(seed: int = 0, **how: Any) -> Layer:
    torch.manual_seed(seed)
    model = layers.Model(layers.Stacked, E)
    around = mesh()
    plan = moefuse.parallelize(model, around, **how)
    return Layer(model, around, plan.layers[0].terms[0].text, plan.layers[0].placement.slots)


def impatient(mesh: DeviceMesh) -> None:
    """From here on, when all ranks have started, those of a mesh over which experts are spread wait for each other for :data:`LATE`."""
    known = groups.earlier(mesh.get_group())
    assert known is not None
    for group in (known.process_group, known.host):
        dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=LATE), group)


def tried(call: Callable[[], object]) -> tuple[str, float]:
    """(what it raised, seconds)."""
    start = time.monotonic()
    try:
        call()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - start
    return "nothing", time.monotonic() - start


def right(at: Layer, rank: int) -> bool:
    """Whether a call gives what it should; False if it is wrong. What raises, raises."""
    x = torch.randn(3 + rank, H)
    return torch.allclose(at(x), K * x)


Fault = tuple[str, float, str, bool | str]
"""What was raised, seconds, and what a later call of all ranks raises or gives."""


def fault(rank: int, name: str, **how: Any) -> Fault:
    """One fault of rank 1, and what comes of it on this rank."""
    at = layer(**how)
    assert right(at, rank)
    if name in SILENT:
        impatient(at.mesh)
    text, seconds = tried(lambda: FAULTS[name](at, rank))
    later: bool | str = "nothing"
    again, _ = tried(lambda: later_call(at, rank))
    with contextlib.suppress(RuntimeError, ValueError):
        later = right(at, rank)
    return text, seconds, again, later


def later_call(at: Layer, rank: int) -> None:
    assert right(at, rank), "a wrong number"


def _wrong_shape(at: Layer, rank: int) -> None:
    x = torch.randn(3, H)
    at.dispatch(x, ids=torch.zeros(3 + rank, K, dtype=torch.int64))


def _no_memory(at: Layer, rank: int) -> None:
    with _raising(all_to_all, "destinations", rank):
        at(torch.randn(3, H))


def _other_layers(at: Layer, rank: int) -> None:
    at(torch.randn(3, H), ("first", "second")[rank])


def _other_dtypes(at: Layer, rank: int) -> None:
    at(torch.randn(3, H, dtype=(torch.float32, torch.float64)[rank]))


def _eager_and_compiled(at: Layer, rank: int) -> None:
    if rank:
        at.model.first(torch.randn(3, H))  # type: ignore[operator]
    else:
        at(torch.randn(3, H))


def _gathers_of_other_layers(at: Layer, rank: int) -> None:
    """One rank's code raised in the middle of an expert, and it goes on with the next batch."""
    at.model.get_submodule(("second", "first")[rank])(torch.randn(3, H))


def _in_the_middle(at: Layer, rank: int) -> None:
    """Behind the collective of combine: the other rank has its result, and comes to the next call."""
    summed = allgather._sum

    def raising(*args: Any) -> None:
        summed(*args)
        raise torch.OutOfMemoryError("rank 1 has no memory")

    with mock.patch.object(allgather, "_sum", raising if rank else summed):
        at(torch.randn(3, H))


def _idle(at: Layer, rank: int) -> None:
    if rank:
        time.sleep(LATE + 1)
    else:
        at(torch.randn(3, H))


def _between(at: Layer, rank: int) -> None:
    arrived = at.dispatch(torch.randn(3, H))
    if rank:
        raise ValueError("rank 1 has a bad batch")
    at.combine(arrived, 3)


def _backward(at: Layer, rank: int) -> None:
    x = torch.randn(3, H, requires_grad=True)
    arrived = at.dispatch(x)
    if rank:
        arrived[0].register_hook(_bad_gradient)
    at.combine(arrived, 3).sum().backward()


def _bad_gradient(grad: Tensor) -> None:
    raise ValueError("rank 1 has a bad gradient")


def _too_many(at: Layer, rank: int) -> None:
    at(torch.randn(6 + 3 * rank, H))


FAULTS = {
    "wrong shape": _wrong_shape,
    "no memory": _no_memory,
    "other layers": _other_layers,
    "other dtypes": _other_dtypes,
    "eager and compiled": _eager_and_compiled,
    "gathers of other layers": _gathers_of_other_layers,
    "in the middle": _in_the_middle,
    "idle": _idle,
    "between": _between,
    "backward": _backward,
    "too many": _too_many,
}
SILENT = ("idle", "between", "backward", "too many")
"""Those behind which rank 1 does not come, without a word; where tokens are counted, "too many" is said."""


@contextlib.contextmanager
def _raising(module: Any, name: str, rank: int) -> Iterator[None]:
    error = torch.OutOfMemoryError("rank 1 has no memory")
    with mock.patch.object(module, name, side_effect=error) if rank else contextlib.nullcontext():
        yield


def slow(rank: int) -> bool:
    """Rank 1 takes a second before a layer, inside of it, and in backward: less than the timeout each, and nothing happens."""
    at = layer()
    x = torch.randn(3 + rank, H, requires_grad=True)
    time.sleep(rank)
    arrived = at.dispatch(x)
    time.sleep(rank)
    if rank:
        arrived[0].register_hook(lambda grad: time.sleep(1))
    out = at.combine(arrived, len(x))
    out.sum().backward()
    assert x.grad is not None
    return torch.allclose(out, K * x) and torch.allclose(x.grad, torch.full_like(x, K))


def killed(rank: int, where: str) -> str:
    """Rank 1 is gone in the middle of forward or backward."""
    at = layer()
    x = torch.randn(3, H, requires_grad=True)
    arrived = at.dispatch(x)
    if rank and where == "forward":
        os._exit(1)
    if rank:
        arrived[0].register_hook(lambda grad: os._exit(1))
    text, seconds = tried(lambda: at.combine(arrived, 3).sum().backward())
    assert seconds < TIMEOUT, seconds
    again, seconds = tried(lambda: at(x))
    assert again.startswith("PeerError: first: this rank and the others of the mesh"), again
    assert seconds < TIMEOUT, seconds
    return text


def programs(rank: int, how: str, behind: str) -> list[float | str]:
    """Ranks whose programs differ: errors of outputs, or what was raised."""
    single = layers.Model(layers.Stacked, 3)
    torch.manual_seed(0)
    model = layers.Model(layers.Stacked, 3)
    if how == "a break inside" and rank:
        model.second.__class__ = _Broken
    moefuse.parallelize(model, mesh(30))
    dynamic = None if how != "shapes" else bool(rank)
    run: Any = torch.compile(model, backend=capturing(Seen(), behind=behind), dynamic=dynamic)
    found: list[float | str] = []
    for step, counts in enumerate(((4, 9), (7, 2), (7, 3))):
        if how == "shapes" and rank == step == 0:
            time.sleep(1)  # it compiles later than the other one
        x = torch.randn(counts[rank], H, generator=torch.Generator().manual_seed(step * 2 + rank))
        with torch.no_grad():
            text, _ = tried(lambda x=x: found.append((run(x) - single(x)).abs().max().item()))  # type: ignore[misc]
        if text != "nothing":
            return [*found, text]
    return found


class _Numbered(layers.Stacked):
    """Experts that read what Python has beside them."""

    number: Any = 2
    function: Any = staticmethod(F.silu)

    def expert(self, e: int, rows: Tensor, weight: Tensor) -> Tensor:
        gate, up = F.linear(rows, self.gate_up[e]).chunk(2, -1)
        return F.linear(self.function(gate) * self.number * up, self.down[e]) * weight


OWN = {
    "an int": ("number", 3, (4, 5)),
    "a float": ("number", None, (0.5, 0.25)),  # of the first call: one that changes is an input, and the layer gathers
    "a function": ("function", F.gelu, (F.relu, F.silu)),
}
"""What both ranks set after a call, and what each of them sets then, or before the first one."""


def numbers(rank: int, what: str, transport: Any, grad: bool, behind: str) -> tuple[list[float], str]:
    """Experts whose numbers change on both ranks, alike and then not: errors of outputs, and what was raised."""
    torch.manual_seed(0)
    model = layers.Model(_Numbered, 3)
    single = copy.deepcopy(model)
    moefuse.parallelize(model, mesh(30), transport=transport)
    run: Any = torch.compile(model, backend=capturing(Seen(), behind=behind))
    name, both, own = OWN[what]
    found: list[float] = []
    for step, value in enumerate((own[rank],) if both is None else (None, both, own[rank])):
        for at in (model.second, single.second) if value is not None else ():
            setattr(at, name, value)
        x = torch.randn(5 + rank, H, generator=torch.Generator().manual_seed(step * 2 + rank))
        with torch.set_grad_enabled(grad):
            text, _ = tried(lambda x=x: found.append((run(x) - single(x)).abs().max().item()))  # type: ignore[misc]
    return found, text


class _Broken(layers.Stacked):
    """The graph breaks in front of the third expert: what is left are no experts any more."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        for e in range(len(self.gate_up)):
            if e == 2:
                torch._dynamo.graph_break()
            token, slot = torch.where(ids == e)
            gate, up = F.linear(x[token], self.gate_up[e]).chunk(2, -1)
            out.index_add_(0, token, F.linear(F.silu(gate) * up, self.down[e]) * weights[token, slot, None])
        return out


def break_beside(module: Any) -> None:
    """The graph breaks between the router and the experts."""
    route = module.route

    def broken(x: Tensor) -> Any:
        out = route(x)
        torch._dynamo.graph_break()
        return out

    module.route = broken


def weights(rank: int, name: str) -> str:
    """With ``debug=True``, ranks of which one has other values of a tensor, or one that the other does not have."""
    at = layer(debug=True)
    tensors = dict(at.model.named_parameters()) | dict(at.model.named_buffers())
    with torch.no_grad():
        tensors["first._moefuse_place"] = at.model.first._moefuse_place
        if name in tensors:
            tensors[name].view(-1)[-1] += rank
        elif rank:
            at.model.register_buffer(name, torch.zeros(1))
    return tried(lambda: at(torch.randn(3, H)))[0]


def promised(rank: int, counts: tuple[int, int], how: dict[str, Any]) -> tuple[str, str]:
    """With ``debug=True``: ranks with so many tokens, which differ in their last number only; and a later call as it should be."""
    at = layer(debug=True, **how)
    x = torch.ones(counts[rank], H)
    x[-1, -1] += rank
    text, _ = tried(lambda: at(x))
    again, _ = tried(lambda: at(torch.ones(3, H)))
    return text, again
