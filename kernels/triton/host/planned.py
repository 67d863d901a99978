"""What follows from the kind of a call of ``moefuse::experts``, as all that builds the launches of a plan reads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from moefuse.kernels.triton.device.structs import Rows, Stored
from moefuse.kernels.triton.host.layout import Device, Workspace, device_of, first_features, kernel_gating
from moefuse.kernels.triton.host.operands import Operand, describe, is_apart
from moefuse.kernels.triton.launch.descriptors import Described
from moefuse.kernels.triton.launch.launch import INTERPRETED, Launch
from moefuse.ops.meaning.call import ExpertsCall
from moefuse.tuning.problem import Config, Problem, Tiles, Vectors


class Planned:
    """Sizes, strides and dtypes of all calls of a kind, and the launches so far.

    Attributes:
        by_token: launches with a row of programs for each token, which may be made for some tokens at a time (``arriving.py``): "spread"
            copies their rows into sorted order, "sum" adds up what their slots have.
    """

    config: Config
    specialised: bool

    def __init__(self, call: ExpertsCall, device: Device | None) -> None:
        x, ids, weights, body = call.x, call.ids, call.weights, call.body
        self.device, self.index = device or device_of(x.device), x.device.index
        self.stacked = tuple(len(tensors) > 1 and not describe(tensors, tensors[0].dim()).uniform for tensors in call.lists)
        w_in, w_up, w_out, b_in, b_up, b_out = self.uniform(call).lists
        self.dtype, self.body, self.out_dtype = x.dtype, body, call.out_dtype
        self.tokens, self.hidden = x.shape
        self.top_k = ids.shape[1]
        self.slots = self.tokens * self.top_k
        self.experts = call.w_in.experts
        self.out, self.inter = w_out[0].shape[-2:]
        mixed = body.split and (len(w_in) > 1) != (len(w_up) > 1)
        mixed_bias = bool(b_in and b_up) and (len(b_in) > 1) != (len(b_up) > 1)
        self.w_in, self.w_out = describe(w_in, 2, mixed), describe(w_out, 2)
        self.w_up = describe(w_up, 2, mixed) if w_up else self.w_in
        self.b_in = describe(b_in, 1, mixed_bias) if b_in else None
        self.b_up = describe(b_up, 1, mixed_bias) if b_up else None if body.split else self.b_in
        self.b_out = describe(b_out, 1) if b_out else None
        self.empty = not (self.slots and self.out and self.experts)
        self.strides_x, self.strides_ids, self.strides_weights = Rows(*x.stride()), Rows(*ids.stride()), Rows(*weights.stride())
        self.workspace = Workspace()
        self.steps: list[Launch] = []
        self.by_token: dict[str, Launch] = {}
        self.apart: set[str] = set()

    def uniform(self, call: ExpertsCall) -> ExpertsCall:
        """The call as it is; a list whose tensors differ in their strides is stacked: there is no single form to read it."""
        if not any(self.stacked):
            return call
        return call.with_lists([torch.stack(list(t))] if stack else t for t, stack in zip(call.lists, self.stacked, strict=True))

    @property
    def problem(self) -> Problem:
        """What a choice of a configuration is about."""
        return Problem(
            self.tokens,
            self.top_k,
            self.experts,
            self.hidden,
            self.inter,
            self.out,
            self.body.gating,
            str(self.dtype).removeprefix("torch."),
            self.w_in.strides[2] != 1 and self.w_in.strides[1] == 1,
            self.w_out.strides[2] != 1 and self.w_out.strides[1] == 1,
            self.w_in.table,
        )

    @property
    def gating(self) -> str:
        """The kernels' form of the gating: halves of one tensor and two tensors are one form."""
        return kernel_gating(self.body)

    @property
    def firsts(self) -> tuple[int, int]:
        """First feature of gate and of up."""
        return first_features(self.body, self.inter)

    def steps_of(self, form: str, name: str) -> str:
        """The name of the table that a kernel with descriptors of this form takes; without such a form something that is not read."""
        if is_apart(form):
            self.apart.add(name)
        return f"steps_{name}" if is_apart(form) else name

    def up_stored(self, form: str = "") -> Stored:
        """How the first projection is stored; ``form`` of its descriptors."""
        a, b = self.b_in, self.b_up
        aligned, tables = self.w_in.aligned and self.w_up.aligned, (a is not None and a.table) or (b is not None and b.table)
        return Stored(self.w_in.table, aligned, self.wide(self.w_in, self.w_up), a is not None, b is not None, tables, form)

    def down_stored(self, form: str = "") -> Stored:
        """How the second projection is stored; ``form`` of its descriptor."""
        w, b = self.w_out, self.b_out
        return Stored(w.table, w.aligned, self.wide(w), b is not None, BIAS_TABLE=b is not None and b.table, DESC=form)

    def wide(self, *operands: Operand) -> bool:
        """64-bit offsets within an expert or a token's row."""
        return any(w.wide for w in operands) or abs(self.strides_x[1]) * self.hidden >= 1 << 31

    @property
    def pdl(self) -> bool:
        """Programmatic dependent launch."""
        return self.config.pdl and not INTERPRETED

    def launch(
        self, kernel: Any, grid: Sequence[int], part: Tiles | Vectors | int, arrays: Mapping[str, str | Described], **numbers: Any
    ) -> Launch:
        """Add a launch. ``part`` says how many warps and stages; ``arrays``: by parameter, the name of an input or a section."""
        made = self.made(kernel, grid, part, arrays, **numbers)
        self.steps.append(made)
        return made

    def made(
        self, kernel: Any, grid: Sequence[int], part: Tiles | Vectors | int, arrays: Mapping[str, str | Described], **numbers: Any
    ) -> Launch:
        """A launch that is no step yet."""
        options = {"num_warps": part} if isinstance(part, int) else {"num_warps": part.warps, "num_stages": max(part.stages, 1)}
        if self.pdl:
            options["launch_pdl"] = True
        return Launch(kernel, grid, arrays, numbers, **options)
