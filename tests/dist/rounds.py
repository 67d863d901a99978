"""Experts as one op whose tokens travel in rounds, beside the same at once and on one process."""

from __future__ import annotations

import contextlib
import copy
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import moefuse
from moefuse.ops import rounds
from moefuse.ops.meaning.call import ExpertsCall
from moefuse.parallel.meshes import register
from moefuse.runtime import collectives
from moefuse.runtime.groups import Terms
from moefuse.runtime.transports import allgather
from tests.cpu.capture_case import Seen, capturing
from tests.dist import equal, faults, layers, scenes

E, H, I, K = 8, 96, 40, 2  # noqa: E741
COUNTS = (500, 200, 256, 0)
ops = torch.ops.moefuse


@dataclass(frozen=True)
class Found:
    """``rounds``: of a call with the smallest ones; ``worst``: against one process; bytes: (of the peak, as said before) of both calls."""

    rounds: int
    same: bool
    worst: float
    small: tuple[int, int]
    whole: tuple[int, int]


class Peak(TorchDispatchMode):
    """The most bytes of tensors that came into being in the block and were alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.known: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for made in torch.utils._pytree.tree_leaves(out):
            if isinstance(made, Tensor) and made.untyped_storage()._cdata not in given:
                self.add(made.untyped_storage())
        return out

    def add(self, storage: Any) -> None:
        size = storage.nbytes()
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self.free, size)

    def free(self, size: int) -> None:
        self.now -= size


def in_rounds(rank: int) -> Found:
    world = dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    w_in, w_out = (torch.randn(E, *shape, generator=generator) * 0.3 for shape in ((2 * I, H), (H, I)))
    every = [torch.randn(n, H, generator=generator) for n in COUNTS]
    ids = [torch.randint(0, E, (n, K), generator=generator) for n in COUNTS]
    weights = [torch.rand(n, K, generator=generator) for n in COUNTS]
    terms = Terms(register(faults.mesh(60))).text
    slots = E // world
    here = slice(rank * slots, (rank + 1) * slots)
    mine = (every[rank], ids[rank], weights[rank], [w_in[here]], [], [w_out[here]], [], [], [])
    how: dict[str, Any] = {"place": torch.arange(E, dtype=torch.int32), "slots": slots, "terms": terms, "layer": "first"}
    packed = (*ExpertsCall.of(*mine).pack(), *how.values())
    small, seen, peak = _measured(lambda: rounds._infer(*packed, 1))
    whole, once, all_at_once = _measured(lambda: rounds._infer(*packed, None))
    assert once == 1
    x, local_weights, local, *handle = _dispatched(mine, how)
    three = ops.ep_combine.default(ops.experts.default(x, local, local_weights, *mine[3:]), handle, len(every[rank]), terms, "first")
    alone = ops.experts.default(every[rank], ids[rank], weights[rank], [w_in], [], [w_out], [], [], [])
    a_token = rounds.bytes_of_a_token(ExpertsCall.of(*mine), world)
    worst = ((whole - alone).abs().max() / alone.abs().max()).item() if len(alone) else 0.0
    return Found(
        seen,
        torch.equal(small, whole) and torch.equal(small, three) and torch.equal(small, ops.ep_experts.default(*mine, **how, limit=1)),
        worst,
        (peak - _bytes(small), rounds.LEAST * a_token),
        (all_at_once - _bytes(whole), max(COUNTS) * a_token),
    )


def _dispatched(mine: tuple[Any, ...], how: dict[str, Any]) -> tuple[Tensor, ...]:
    x, ids, weights, *_ = mine
    x, weights, ids, *handle = ops.ep_dispatch.default([x, weights], ids, *how.values())
    return x, weights, ids, *handle


def _measured(call: Callable[[], Tensor]) -> tuple[Tensor, int, int]:
    """(result, rounds, bytes of the peak)."""
    known = allgather._AllGather.dispatch
    with contextlib.ExitStack() as stack:
        counted = stack.enter_context(mock.patch.object(allgather._AllGather, "dispatch", autospec=True, side_effect=known))
        stack.enter_context(mock.patch.object(allgather, "all_gathers", _gathers))
        stack.enter_context(mock.patch.object(allgather, "all_to_all", _all_to_all))
        stack.enter_context(torch.no_grad())
        peak = stack.enter_context(Peak())
        out = call()
    return out, counted.call_count, peak.most


# Threads of gloo hold tensors a little longer than their collective takes; these are of no program.


def _gathers(pairs: list[tuple[Tensor, Tensor]], group: Any) -> None:
    with _disable_current_modes():
        for every, mine in pairs:
            there = torch.empty_like(every)
            collectives.all_gather(there, mine.clone(), group)
            every.copy_(there)


def _all_to_all(every: Tensor, parts: Tensor, group: Any) -> None:
    with _disable_current_modes():
        there = torch.empty_like(every)
        collectives.all_to_all(there, parts.clone(), group)
        every.copy_(there)


def _bytes(t: Tensor) -> int:
    return t.untyped_storage().nbytes()


def limited(rank: int, case: equal.Case) -> equal.Found:
    """With MOEFUSE_WORKSPACE_MIB."""
    os.environ["MOEFUSE_WORKSPACE_MIB"] = "1"
    try:
        return equal.run(rank, case)
    finally:
        del os.environ["MOEFUSE_WORKSPACE_MIB"]


class Taught(nn.Module):
    """A layer beside one without gradients, and itself without them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.teacher = layers.Stacked(4), layers.Stacked(4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = self.teacher(x)
        found = self.layer(x)
        with torch.no_grad():
            again = self.layer(x)
        return found * wanted + again  # type: ignore[no-any-return]


def without_gradients_inside(rank: int) -> tuple[float, str]:
    """(The largest relative difference of a result and of its tokens' gradients from one process, report)."""
    single = Taught()
    model = copy.deepcopy(single)
    moefuse.parallelize(model, scenes.mesh())
    seen = Seen()
    run = torch.compile(model, backend=capturing(seen, behind="aot_eager"))
    x, y = (torch.randn(5 + 2 * rank, layers.H, generator=torch.Generator().manual_seed(rank)).requires_grad_() for _ in range(2))
    out, wanted = run(x), single(y)
    out.square().sum().backward()
    wanted.square().sum().backward()
    pairs = ((out, wanted), (x.grad, y.grad))
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs), str(seen.report)  # type: ignore[operator,union-attr]
