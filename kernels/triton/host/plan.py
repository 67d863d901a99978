"""One call of ``moefuse::experts`` as a few launches: sizes, strides and configuration are worked out once per kind of call.

A :class:`Plan` holds everything that follows from shapes, strides, dtypes and options; running it allocates one workspace and the output,
and launches. Buffer sizes depend on T, K, E and the sizes of an expert, never on the routing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moefuse._torch_private import empty_cuda, raw_stream as _raw_stream
from moefuse.kernels.triton.config import choose
from moefuse.kernels.triton.host import plan_specialised, plan_tiles, plan_vectors
from moefuse.kernels.triton.host.layout import INPUTS, Device, Lists
from moefuse.kernels.triton.host.operands import Operand, address_table, steps_table
from moefuse.kernels.triton.host.planned import Planned
from moefuse.kernels.triton.launch import dispatcher
from moefuse.kernels.triton.launch.driver_launch import Direct
from moefuse.kernels.triton.launch.launch import stream_of
from moefuse.ops.meaning.call import ExpertsCall, cut
from moefuse.tuning.problem import Config

MAX_KNOWN = 4096
"""Sets of separate Parameters that a plan remembers; beyond, it forgets them."""


@dataclass
class Separate:
    """The addresses behind the names of weights and biases for one set of separate Parameters, and the tables among them.

    ``told``: C++ was asked to launch calls with them.
    """

    places: dict[str, int]
    tables: list[Tensor]
    told: bool = False


class Plan(Planned):
    """All calls with the same shapes, strides, dtypes, alignments and options."""

    def __init__(self, call: ExpertsCall, config: Config | None = None, device: Device | None = None) -> None:
        super().__init__(call, device)
        refusal = plan_specialised.refusal(self)
        self.specialised = refusal is None
        self.config = config or self._choose()
        if self.config.specialised and (refusal or not self.config.possible):
            raise ValueError(refusal or "warp-specialised kernels have no such tiles")
        self.ready = False
        self.direct: Direct | None = None
        self.known: dict[tuple[int, ...], Separate] = {}
        self.told = any(self.stacked)
        self.inputs: tuple[int, ...] = ()
        self.sections: list[int] = []
        if not self.empty:
            self._build()

    def _choose(self) -> Config:
        device = self.device
        return choose(self.problem, device.name, device.hopper, device.shared, self.dtype.itemsize, self.specialised)

    def _build(self) -> None:
        ws, s = self.workspace, self.slots
        ws.add("h", (s, self.inter), self.dtype)
        if self.config.bm:
            plan_tiles.build_tiles(self)
        else:
            plan_vectors.build_vectors(self)

    def run(self, call: ExpertsCall, out: Tensor | None = None, addresses: Sequence[int] = ()) -> Tensor:
        """The output [T, N] of a call that this plan was made for; written to ``out`` if there are slots, experts and features.

        ``addresses``: of all weights and biases in the order of the call's lists, by whoever knows them.
        """
        if self.empty:
            return call.x.new_zeros((self.tokens, self.out), dtype=self.out_dtype)
        call = self.uniform(call)
        if out is None:
            out = torch.empty((self.tokens, self.out), dtype=self.out_dtype, device=call.device)
        if self.ready:
            return self._again(call, out, addresses)
        space = torch.empty(self.workspace.size, dtype=torch.uint8, device=call.device)
        self._first(call, self._operands(call.lists), space, out)
        return out

    def _again(self, call: ExpertsCall, out: Tensor, addresses: Sequence[int]) -> Tensor:
        """:meth:`run` once it is ``ready``."""
        places = self._places(call, addresses)
        space = torch.empty(self.workspace.size, dtype=torch.uint8, device=call.device)
        base = space.data_ptr()
        at = {name: base + part[0] for name, part in self.workspace.parts.items()} | places
        at["x"], at["ids"], at["weights"], at["out"] = call.x.data_ptr(), call.ids.data_ptr(), call.weights.data_ptr(), out.data_ptr()
        stream = stream_of(call.device)
        for step in self.steps:
            step.again(stream, [at[name] for name in step.names])
        return out

    def _places(self, call: ExpertsCall, known: Sequence[int]) -> dict[str, int]:
        """The address behind each weight and bias name; for experts in several tensors kept, with the tables that these need."""
        addresses = () if any(self.stacked) else _addresses(call, known)
        found = self.known.get(addresses)
        if found is not None:
            return found.places
        operands = self._operands(call.lists)
        places = {name: t.data_ptr() for name, t in operands.items()}
        # A table that is written while a graph is recorded holds nothing yet.
        if addresses and not (call.x.is_cuda and torch.cuda.is_current_stream_capturing()):
            if len(self.known) >= MAX_KNOWN:
                self.known.clear()
            self.known[addresses] = Separate(places, [t for t in operands.values() if t.dtype == torch.int64])
        return places

    def hand_over(self, packed: Sequence[Any], every: Sequence[int]) -> None:
        """Let C++ launch what this plan launches, for calls like this packed one; once for the same Parameters, where they are separate.

        ``every``: the addresses of all tensors.
        """
        tensors, counts = packed[0], packed[1]
        separate = max(counts) > 1
        it = self.known.get(tuple(every[3:])) if separate else self
        if it is None or it.told or not self.ready:
            return  # None: the first call with these Parameters, or one that is recorded
        tables = self.tables(tuple(cut(tensors, counts, 3))) if separate else None
        possible = (tables if separate else self.direct) is not None
        it.told = possible and dispatcher.remember(dispatcher.key_of(*packed), self, self.positions(counts), tables)
        self.told |= not it.told  # what it takes is the same for all calls of the plan

    def _operands(self, lists: Lists) -> dict[str, Tensor]:
        """The tensor behind each weight and bias name; a name without one gets some other tensor, which is not read."""
        w_in, w_up, w_out, b_in, b_up, b_out = lists
        found: dict[str, Tensor] = {}
        for name, tensors, w in (("w_in", w_in, self.w_in), ("w_up", w_up or w_in, self.w_up), ("w_out", w_out, self.w_out)):
            if name in self.apart:
                found[name], found[f"steps_{name}"] = steps_table(tensors)
            else:
                found[name] = address_table(tensors) if w.table else tensors[0]
        for name, tensors, operand in (("b_in", b_in, self.b_in), ("b_up", b_up, self.b_up), ("b_out", b_out, self.b_out)):
            if tensors and operand:
                found[name] = address_table(tensors) if operand.table else tensors[0]
            else:
                found[name] = found["b_in"] if name == "b_up" else found["w_out"]
        return found

    def _first(self, call: ExpertsCall, operands: dict[str, Tensor], space: Tensor, out: Tensor) -> None:
        own = {"x": call.x, "ids": call.ids, "weights": call.weights, "out": out}
        tensors = {**self.workspace.views(space), **operands, **own}
        for step in self.steps:
            step.first([tensors[name] for name in step.names])
        self.ready = all(step.compiled is not None for step in self.steps)
        if self.ready and not any(self.stacked) and not any(operand is not None and operand.table for operand in self._described()):
            try:
                self.direct = Direct(self.steps, self.names, self.index)
                self.sections = [start for start, _, _ in self.workspace.parts.values()]
            except NotImplementedError:
                return

    def _described(self) -> tuple[Operand | None, ...]:
        return self.w_in, self.w_up, self.w_out, self.b_in, self.b_up, self.b_out

    def tables(self, lists: Lists) -> dict[int, Tensor] | None:
        """The tables of addresses that this call launches with, by the index of their name in :data:`INPUTS`.

        None if one of them does not follow from the addresses of a list of several tensors, or a descriptor takes its place.
        """
        described = zip(lists, self._described(), strict=True)
        if self.apart or any(len(tensors) == 1 and operand.table for tensors, operand in described if operand):
            return None
        return {INPUTS.index(name): t for name, t in self._operands(lists).items() if t.dtype == torch.int64}

    @property
    def names(self) -> tuple[str, ...]:
        """What a direct launch gets the addresses of, in order."""
        return ("out", *INPUTS, *self.workspace.parts)

    def positions(self, counts: Sequence[int]) -> tuple[int, ...]:
        """Where each name of :data:`INPUTS` is among all tensors of a call in schema order; lists of one tensor, given their lengths.

        A name without a tensor gets some other one, which is not read.
        """
        at, start = [0, 1, 2], 3
        for n in counts:
            at.append(start if n else -1)
            start += n
        w_in, w_up, w_out, b_in, b_up, b_out = at[3:]
        b_in = b_in if b_in >= 0 else w_in
        more = (w_in, w_up if w_up >= 0 else w_in, w_out, b_in, b_up if b_up >= 0 else b_in, b_out if b_out >= 0 else w_out)
        return (0, 1, 2, *more)

    def run_flat(self, every: Sequence[int], counts: Sequence[int]) -> Tensor:
        """:meth:`run` of a packed call with lists of one tensor, given all addresses."""
        assert self.direct is not None
        out = empty_cuda((self.tokens, self.out), (self.out, 1), self.out_dtype)
        space = empty_cuda((self.workspace.size,), (1,), torch.uint8)
        base = space.data_ptr()
        self.inputs = self.inputs or self.positions(counts)
        addresses = [out.data_ptr(), *[every[i] for i in self.inputs], *[base + at for at in self.sections]]
        self.direct.run(_raw_stream(self.index), addresses)
        return out


def _addresses(call: ExpertsCall, known: Sequence[int]) -> tuple[int, ...]:
    """The addresses of all Parameters where a list has several; else nothing."""
    lists = call.lists
    if max(map(len, lists)) <= 1:
        return ()
    return tuple(known or [t.data_ptr() for tensors in lists for t in tensors])
