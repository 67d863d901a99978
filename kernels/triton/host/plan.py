"""One call of ``moefuse::experts`` as a few launches: sizes, strides and configuration are worked out once per kind of call.

A :class:`Plan` holds everything that follows from shapes, strides, dtypes and options; running it allocates one workspace and the output,
and launches. Buffer sizes depend on T, K, E and the sizes of an expert, never on the routing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from moefuse.kernels.triton.config import choose
from moefuse.kernels.triton.host import plan_specialised, plan_tiles, plan_vectors
from moefuse.kernels.triton.host.layout import Device, Lists
from moefuse.kernels.triton.host.operands import address_table, steps_table
from moefuse.kernels.triton.host.planned import Planned
from moefuse.kernels.triton.launch.launch import Launch
from moefuse.kernels.triton.launch.record import as_launch, as_value
from moefuse.ops.meaning.call import ExpertsCall
from moefuse.tuning.problem import Config


def launch_all(steps: Sequence[Launch], tensors: Mapping[str, Tensor]) -> None:
    """Steps in order, with the tensor behind each name."""
    for step in steps:
        as_launch(step, [tensors[name] for name in step.names])


class Plan(Planned):
    """All calls with the same shapes, strides, dtypes, alignments and options."""

    def __init__(self, call: ExpertsCall, config: Config | None = None, device: Device | None = None) -> None:
        super().__init__(call, device)
        refusal = plan_specialised.refusal(self)
        self.specialised = refusal is None
        self.config = config or self._choose()
        if self.config.specialised and (refusal or not self.config.possible):
            raise ValueError(refusal or "warp-specialised kernels have no such tiles")
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

    def run(self, call: ExpertsCall, out: Tensor | None = None) -> Tensor:
        """The output [T, N] of a call that this plan was made for; written to ``out`` if there are slots, experts and features."""
        if self.empty:
            return call.x.new_zeros((self.tokens, self.out), dtype=self.out_dtype)
        call = self.uniform(call)
        if out is None:
            out = torch.empty((self.tokens, self.out), dtype=self.out_dtype, device=call.device)
        self.start(call, self.steps, {"out": out})
        return out

    def start(self, call: ExpertsCall, steps: Sequence[Launch], more: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Launch some steps with what :meth:`tensors` gives."""
        tensors = self.tensors(call, more)
        launch_all(steps, tensors)
        return tensors

    def tensors(self, call: ExpertsCall, more: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensor behind each name: sections of a new workspace, operands, and ``more``."""
        space = torch.empty(self.workspace.size, dtype=torch.uint8, device=call.device)
        own = {"x": call.x, "ids": call.ids, "weights": call.weights}
        return {**self.workspace.views(space), **self._operands(call.lists), **own, **more}

    def _operands(self, lists: Lists) -> dict[str, Tensor]:
        """The tensor behind each weight and bias name; a name without one gets some other tensor, which is not read."""
        w_in, w_up, w_out, b_in, b_up, b_out = lists
        found: dict[str, Tensor] = {}
        for name, tensors, w in (("w_in", w_in, self.w_in), ("w_up", w_up or w_in, self.w_up), ("w_out", w_out, self.w_out)):
            if name in self.apart:
                found[name], found[f"steps_{name}"] = as_value(steps_table, tensors)
            else:
                found[name] = as_value(address_table, tensors) if w.table else tensors[0]
        for name, tensors, operand in (("b_in", b_in, self.b_in), ("b_up", b_up, self.b_up), ("b_out", b_out, self.b_out)):
            if tensors and operand:
                found[name] = as_value(address_table, tensors) if operand.table else tensors[0]
            else:
                found[name] = found["b_in"] if name == "b_up" else found["w_out"]
        return found
