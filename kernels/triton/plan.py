"""One call of ``moefuse::experts`` as a few launches: sizes, strides and configuration are worked out once per kind of call.

A :class:`Plan` holds everything that follows from shapes, strides, dtypes and options; running it allocates one workspace and the output,
and launches. Buffer sizes depend on T, K, E and the sizes of an expert, never on the routing.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from moefuse._torch_private import empty_cuda
from moefuse._torch_private import raw_stream as _raw_stream
from moefuse.kernels.triton import combine, gemm, gemv, routing
from moefuse.kernels.triton.config import SHARED_BYTES, Config, Problem, Tiles, Vectors, choose, power_of_two
from moefuse.kernels.triton.direct import Direct
from moefuse.kernels.triton.launch import INTERPRETED, Address, Descriptor, Launch, stream_of
from moefuse.kernels.triton.operands import Operand, address_table, describe

Lists = tuple[Sequence[Tensor], ...]
"""w_in, w_up, w_out, b_in, b_up, b_out."""

INPUTS = ("x", "ids", "weights", "w_in", "w_up", "w_out", "b_in", "b_up", "b_out")
"""Names of the tensors that a call brings."""
SORT_AT_ONCE = 8192
"""Up to this many slots one kernel sorts; each of its programs reads all ids."""
CHUNK = 256
"""Slots of a chunk of the sort for more."""
UNROLLED = 16
"""Up to so many slots per token the combine has all their rows in flight at once."""


@dataclass(frozen=True)
class Body:
    """The options of a call."""

    activation: str
    args: tuple[float, float]
    gating: str
    up_first: bool
    on_input: bool
    out_dtype: torch.dtype


@dataclass(frozen=True)
class Device:
    """What a configuration depends on of the device."""

    name: str
    sms: int
    shared: int
    hopper: bool


@functools.cache
def device_of(device: torch.device) -> Device:
    """Properties of a device; of the interpreter's, those of a small Hopper."""
    if device.type != "cuda":
        return Device("interpreter", 2, SHARED_BYTES, False)
    p = torch.cuda.get_device_properties(device)
    shared = getattr(p, "shared_memory_per_block_optin", SHARED_BYTES)
    return Device(p.name, p.multi_processor_count, shared, torch.version.hip is None and p.major == 9)


class Workspace:
    """Sections of one allocation, each at a multiple of 256 bytes."""

    def __init__(self) -> None:
        self.size = 0
        self.parts: dict[str, tuple[int, tuple[int, ...], torch.dtype]] = {}

    def add(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.parts[name] = (self.size, shape, dtype)
        count = 1
        for n in shape:
            count *= n
        self.size += -(-count * dtype.itemsize // 256) * 256

    def views(self, base: Tensor) -> dict[str, Tensor]:
        """Every section as a tensor."""
        out = {}
        for name, (offset, shape, dtype) in self.parts.items():
            count = functools.reduce(lambda a, b: a * b, shape, 1) * dtype.itemsize
            out[name] = base[offset : offset + count].view(dtype).view(shape)
        return out


def rows_descriptor(rows: int, features: int, bm: int, bn: int) -> tuple[Any, ...]:
    """(shape, strides, block) of a descriptor of a contiguous [rows, features] through which ``functions.store_rows`` stores.

    Rows are clipped at FAR_ROW = 2**30; coordinate FAR_ROW of the first dimension goes 2**64 bytes (a power of two times that), which is
    nowhere, minus FAR_ROW rows.
    """
    huge = 0x7FFF0000
    return (huge, huge, 1 << 30, features), ((1 << 34) - features, features, features, 1), (1, 1, bm, bn)


@dataclass
class _Step:
    """A launch and the names of its pointers."""

    launch: Launch
    names: tuple[str, ...]
    descs: tuple[tuple[int, str, tuple[int, ...], tuple[int, ...], tuple[int, ...]], ...] = ()
    """(position, name of the tensor, shape, strides, block) of each descriptor among the pointers."""


class Plan:
    """All calls with the same shapes, strides, dtypes, alignments and options."""

    def __init__(self, x: Tensor, ids: Tensor, weights: Tensor, lists: Lists, body: Body, config: Config | None = None) -> None:
        self.device, self.index = device_of(x.device), x.device.index
        self.stacked = tuple(len(tensors) > 1 and not describe(tensors, tensors[0].dim()).uniform for tensors in lists)
        w_in, w_up, w_out, b_in, b_up, b_out = lists = self.uniform(lists)
        self.dtype, self.body = x.dtype, body
        self.tokens, self.hidden = x.shape
        self.top_k = ids.shape[1]
        self.slots = self.tokens * self.top_k
        self.experts = w_in[0].shape[0] if len(w_in) == 1 and w_in[0].dim() == 3 else len(w_in)
        self.out, self.inter = w_out[0].shape[-2:]
        mixed = body.gating == "separate" and (len(w_in) > 1) != (len(w_up) > 1)
        mixed_bias = bool(b_in and b_up) and (len(b_in) > 1) != (len(b_up) > 1)
        self.w_in, self.w_out = describe(w_in, 2, mixed), describe(w_out, 2)
        self.w_up = describe(w_up, 2, mixed) if w_up else self.w_in
        self.b_in = describe(b_in, 1, mixed_bias) if b_in else None
        self.b_up = describe(b_up, 1, mixed_bias) if b_up else None if body.gating == "separate" else self.b_in
        self.b_out = describe(b_out, 1) if b_out else None
        self.empty = not (self.slots and self.out and self.experts)
        self.config = config or self._choose(w_in[0])
        self.strides_x, self.strides_ids, self.strides_weights = x.stride(), ids.stride(), weights.stride()
        self.workspace = Workspace()
        self.steps: list[_Step] = []
        self.ready = False
        self.direct: Direct | None = None
        if not self.empty:
            self._build(ids, weights)

    def uniform(self, lists: Lists) -> Lists:
        """The lists as they are; one whose tensors differ in their strides is stacked: there is no single form to read it."""
        if not any(self.stacked):
            return lists
        return tuple([torch.stack(list(t))] if stack else t for t, stack in zip(lists, self.stacked, strict=True))

    # What the kernels share ---------------------------------------------------------------------------------------------------------

    def _choose(self, w: Tensor) -> Config:
        item = self.dtype.itemsize
        problem = Problem(
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
        return choose(problem, self.device.name, self.device.hopper, self.device.shared, item)

    @staticmethod
    def _describable(w: Operand, item: int) -> str:
        """How a descriptor can show the operand as one matrix: "out-in" (E * features rows), "in-out" (E * inputs rows), or "" (not)."""
        e, n, k = w.strides
        if w.table or not w.aligned:
            return ""
        if k == 1 and n > 1 and e % n == 0 and n * item % 16 == 0:
            return "out-in"
        return "in-out" if n == 1 and k > 1 and e % k == 0 and k * item % 16 == 0 else ""

    def _up_desc(self) -> str:
        """The form of the descriptors of ``up_tiles``; an in-out tile must not reach into the next expert's inputs."""
        up, item = self.config.up, self.dtype.itemsize
        a, b = self._describable(self.w_in, item), self._describable(self.w_up, item)
        return a if up.desc and a == b and self.hidden and (a == "out-in" or self.hidden % up.bk == 0) else ""

    def _joined(self, form: str) -> bool:
        """Whether ``up_tiles`` takes gate and up as one block: both halves of every expert in one tensor, which is not an expanded view."""
        e, n, _ = self.w_in.strides
        return (
            self.config.up.join
            and form == "out-in"
            and self.body.gating == "merged"
            and not self.config.up.swap
            and e >= 2 * self.inter * n
        )

    def _down_desc(self) -> str:
        down = self.config.down
        a = self._describable(self.w_out, self.dtype.itemsize)
        return a if down.desc and self.inter and (a == "out-in" or self.inter % down.bk == 0) else ""

    def _matrix(self, w: Operand, form: str, features: int, inputs: int, bn: int, bk: int) -> tuple[Any, ...]:
        """(shape, strides, block) of the descriptor of one operand."""
        rows = self._rows(w, form) * (self.experts - 1)
        if form == "out-in":
            return (rows + features, inputs), (w.strides[1], 1), (bn, bk)
        return (rows + inputs, features), (w.strides[2], 1), (bk, bn)

    @staticmethod
    def _rows(w: Operand, form: str) -> int:
        """Rows from one expert to the next in the matrix of a descriptor."""
        return w.strides[0] // w.strides[1 if form == "out-in" else 2] if form else 0

    @property
    def gating(self) -> str:
        """The kernels' form of the gating: halves of one tensor and two tensors are one form."""
        return {"merged": "halves", "separate": "halves"}.get(self.body.gating, self.body.gating)

    @property
    def firsts(self) -> tuple[int, int]:
        """First feature of gate and of up."""
        if self.body.gating != "merged":
            return 0, 0
        return (self.inter, 0) if self.body.up_first else (0, self.inter)

    def _build(self, ids: Tensor, weights: Tensor) -> None:
        ws, s = self.workspace, self.slots
        ws.add("h", (s, self.inter), self.dtype)
        if self.config.bm:
            self._build_tiles()
        else:
            self._build_vectors()

    def _up_flags(self) -> tuple[bool, ...]:
        """TABLE, ALIGNED, BIAS_A, BIAS_B, BIAS_TABLE."""
        a, b = self.b_in, self.b_up
        aligned = self.w_in.aligned and self.w_up.aligned
        return self.w_in.table, aligned, a is not None, b is not None, (a is not None and a.table) or (b is not None and b.table)

    def _down_flags(self) -> tuple[bool, ...]:
        """TABLE, ALIGNED, BIAS, BIAS_TABLE."""
        b = self.b_out
        return self.w_out.table, self.w_out.aligned, b is not None, b is not None and b.table

    def _wide(self, *operands: Operand) -> bool:
        """64-bit offsets within an expert or a token's row."""
        return any(w.wide for w in operands) or abs(self.strides_x[1]) * self.hidden >= 1 << 31

    def _launch(self, kernel: Any, grid: Sequence[int], rest: Sequence[Any], names: str, part: Any, warps: int = 4, **more: Any) -> None:
        options = {"num_warps": part.warps, "num_stages": max(part.stages, 1)} if part is not None else {"num_warps": warps}
        if self.config.pdl and not INTERPRETED:
            options["launch_pdl"] = True
        self.steps.append(_Step(Launch(kernel, grid, rest, **options), tuple(names.split()), **more))

    # Few slots ----------------------------------------------------------------------------------------------------------------------

    def _build_vectors(self) -> None:
        up, down, body, pdl = self.config.up, self.config.down, self.body, self.config.pdl and not INTERPRETED
        no_bias = (0, 0)
        i, n, h = self.inter, self.out, self.hidden
        self._launch(
            gemv.up_vectors,
            (self.slots, max(-(-i // up.bn), 1)),
            (
                *(self.slots, self.top_k, self.experts, h, i, *body.args),
                *(*self.strides_x, *self.strides_ids, *self.strides_weights, *self.w_in.strides, *self.w_up.strides),
                *(*(self.b_in.strides if self.b_in else no_bias), *(self.b_up.strides if self.b_up else no_bias), *self.firsts),
                *(self.gating, body.up_first and self.gating == "interleaved", body.activation),
                *(*self._up_flags(), body.on_input, self._wide(self.w_in, self.w_up)),
                *(i % up.bn == 0, h % up.bk == 0, up.bn, up.bk, up.stages, pdl),
            ),
            "x ids weights w_in w_up b_in b_up h",
            up,
        )
        if down.parts:
            self._build_parts(down)
            return
        self._launch(
            gemv.down_vectors,
            (self.tokens, -(-n // down.bn)),
            (
                *(self.top_k, self.experts, i, n, *self.strides_ids, *self.strides_weights, *self.w_out.strides),
                *(self.b_out.strides if self.b_out else no_bias),
                *(
                    self.w_out.table,
                    self.w_out.aligned,
                    self.b_out is not None,
                    self.b_out is not None and self.b_out.table,
                    not body.on_input,
                    self._wide(self.w_out),
                ),
                *(n % down.bn == 0, i % down.bk == 0, down.at, down.bn, down.bk, down.stages, pdl),
            ),
            "h ids weights w_out b_out out",
            down,
        )

    def _build_parts(self, down: Vectors) -> None:
        pdl, i, n = self.config.pdl and not INTERPRETED, self.inter, self.out
        span = -(-i // (down.parts * down.bk)) * down.bk
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        self.workspace.add("parts", (self.slots, down.parts, n), wide)
        self._launch(
            gemv.down_parts,
            (self.slots, -(-n // down.bn), down.parts),
            (
                *(self.top_k, self.experts, i, n, span, *self.strides_ids, *self.w_out.strides),
                *(self.w_out.table, self.w_out.aligned, self._wide(self.w_out), n % down.bn == 0, i % down.bk == 0),
                *(down.bn, down.bk, down.stages, pdl),
            ),
            "h ids w_out parts",
            down,
        )
        block = min(power_of_two(n), 256)
        bias = self.b_out
        self._launch(
            combine.combine_parts,
            (self.tokens, -(-n // block)),
            (
                *(self.top_k, self.experts, n, *self.strides_ids, *self.strides_weights, *(bias.strides if bias else (0, 0))),
                *(down.parts, bias is not None, bias is not None and bias.table, not self.body.on_input, block, pdl),
            ),
            "parts ids weights b_out out h",
            None,
        )

    # Many slots ---------------------------------------------------------------------------------------------------------------------

    def _build_routing(self, bm: int, max_tiles: int, inverse: bool) -> None:
        ws, s, e, pdl = self.workspace, self.slots, self.experts, self.config.pdl and not INTERPRETED
        bins = max(power_of_two(e + 1), 32)
        for name, count in (("order", s), ("position", s), ("offsets", e + 1), ("tiles", 2 * max_tiles), ("num_tiles", 1)):
            if name != "position" or inverse:
                ws.add(name, (count,), torch.int32)
        position = "position" if inverse else "order"
        by = (*self.strides_ids, s, e, self.top_k)
        flat = self.strides_ids == (self.top_k, 1)
        if s <= SORT_AT_ONCE:
            rest = (*by, max_tiles, flat, inverse, max(power_of_two(s), 128), bins, bm, pdl)
            names = f"ids order {position} offsets tiles num_tiles"
            self._launch(routing.sort_once, (e + 1,), rest, names, None, warps=4 if s <= 1024 else 8)
            return
        chunks, cols = -(-s // CHUNK), 8
        ws.add("counts", (chunks, bins), torch.int32)
        ws.add("totals", (bins,), torch.int32)
        self._launch(routing.count_chunks, (chunks,), (*by, flat, CHUNK, bins, pdl), "ids counts", None)
        self._launch(routing.scan_chunks, (bins // cols,), (chunks, 128, bins, cols, pdl), "counts totals", None)
        rest = (*by, max_tiles, flat, inverse, CHUNK, bins, bm, pdl)
        names = f"ids counts totals order {position} offsets tiles num_tiles"
        self._launch(routing.place_chunks, (chunks,), rest, names, None)

    def _store(self, parts: int, features: int, bn: int) -> int:
        """In how many blocks of columns rows of ``features`` can be stored through a descriptor; 0 if they cannot."""
        item = self.dtype.itemsize
        return parts if parts and features * item % 16 == 0 and bn // parts * item >= 16 else 0

    def _build_sorted_rows(self) -> None:
        s, h, pdl = self.slots, self.hidden, self.config.pdl and not INTERPRETED
        self.workspace.add("xs", (s, h), self.dtype)
        rows, block = 8, min(power_of_two(h), 256)
        wide = self._wide()
        self._launch(
            routing.sort_rows,
            (-(-s // rows), -(-h // block)),
            (
                *(self.experts, h, self.top_k, *self.strides_x, *self.strides_weights),
                *(self.body.on_input, wide, h % block == 0, rows, block, pdl),
            ),
            "x weights order offsets xs",
            None,
        )

    def _grid(self, part: Tiles, tiles: int) -> tuple[int]:
        return (min(self.device.sms * part.per_sm, max(tiles, 1)),) if part.persistent else (max(tiles, 1),)

    def _build_tiles(self) -> None:
        up, down, body, bm, pdl = self.config.up, self.config.down, self.body, self.config.bm, self.config.pdl and not INTERPRETED
        i, n, h, s = self.inter, self.out, self.hidden, self.slots
        max_tiles = min(s, s // bm + min(self.experts, s))
        item = self.dtype.itemsize
        stored = (self._store(up.store, i, up.bn), self._store(down.store, n, down.bn))
        self._build_routing(bm, max_tiles, stored[1] > 0)
        self.workspace.add("y", (s, n), self.dtype)
        no_bias = (0, 0)
        width = 2 * up.bn if self.gating == "interleaved" else up.bn
        features = {"merged": 2 * i, "interleaved": 2 * i}.get(body.gating, i)
        tail = [part.tail and bm > 16 and not part.flatten for part in (up, down)]
        descs: list[Any] = []
        form = self._up_desc()
        join = self._joined(form)
        if join:
            strides = self.w_in.strides
            descs.append((2, "w_in", (self.experts, 2, i, h), (strides[0], i * strides[1], strides[1], 1), (1, 2, up.bn, up.bk)))
        elif form:
            a, b = ("w_in", self.w_in), ("w_up", self.w_up)
            for position, (name, w) in enumerate((a, b if body.gating == "separate" else a), 2):
                descs.append((position, name, *self._matrix(w, form, features, h, width, up.bk)))
        rows_a, rows_b = self._rows(self.w_in, form), self._rows(self.w_up, form)
        if stored[0]:
            descs.append((7, "h", *rows_descriptor(s, i, bm, up.bn // stored[0])))
        up_rows = up.rows_desc and h > 0 and h * item % 16 == 0
        if up_rows:
            tail[0] = False
            self._build_sorted_rows()
            descs.insert(0, (0, "xs", (s, h), (h, 1), (bm, up.bk)))
        precision = "tf32" if self.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32 else "ieee"
        self._launch(
            gemm.up_tiles,
            self._grid(up, max_tiles * -(-i // up.bn)),
            (
                *(max_tiles, self.top_k, h, i, *body.args, *self.strides_x, *self.strides_weights),
                *(*self.w_in.strides, *self.w_up.strides),
                *(*(self.b_in.strides if self.b_in else no_bias), *(self.b_up.strides if self.b_up else no_bias), *self.firsts),
                *(rows_a, rows_b, self.gating, body.up_first and (join or self.gating == "interleaved"), body.activation),
                *(*self._up_flags(), body.on_input and not up_rows, self._wide(self.w_in, self.w_up)),
                *(i % up.bn == 0, h % up.bk == 0, bm, up.bn, up.bk, up.group, up.swap, form, up_rows),
                *(join, tail[0], up.persistent, up.flatten, stored[0], precision, pdl),
            ),
            ("xs" if up_rows else "x") + " weights w_in w_up b_in b_up h h order offsets tiles num_tiles",
            up,
            descs=tuple(descs),
        )
        descs = []
        rows_desc = down.rows_desc and i > 0 and i * item % 16 == 0
        if rows_desc:
            descs.append((1, "h", (s, i), (i, 1), (bm, down.bk)))
        form = self._down_desc()
        if form:
            descs.append((2, "w_out", *self._matrix(self.w_out, form, n, i, down.bn, down.bk)))
        if stored[1]:
            descs.append((5, "y", *rows_descriptor(s, n, bm, down.bn // stored[1])))
        self._launch(
            gemm.down_tiles,
            self._grid(down, max_tiles * -(-n // down.bn)),
            (
                *(max_tiles, i, n, self._rows(self.w_out, form), *self.w_out.strides, *(self.b_out.strides if self.b_out else no_bias)),
                *(*self._down_flags(), self._wide(self.w_out)),
                *(n % down.bn == 0, i % down.bk == 0, bm, down.bn, down.bk, down.group, down.swap, form),
                *(rows_desc, tail[1], down.persistent, down.flatten, stored[1], precision, pdl),
            ),
            "h h w_out b_out y y order offsets tiles num_tiles",
            down,
            descs=tuple(descs),
        )
        block = min(power_of_two(n), 1024)
        self._launch(
            combine.combine_slots,
            (self.tokens, -(-n // block)),
            (
                *(self.top_k, self.experts, n, *self.strides_ids, *self.strides_weights),
                *(not body.on_input, stored[1] > 0, n % block == 0, block, self.top_k if self.top_k <= UNROLLED else 0, pdl),
            ),
            f"y ids weights {'position' if stored[1] else 'ids'} out",
            None,
        )

    # Running ------------------------------------------------------------------------------------------------------------------------

    def run(self, x: Tensor, ids: Tensor, weights: Tensor, lists: Lists) -> Tensor:
        """The output [T, N] of a call that this plan was made for."""
        if self.empty:
            return x.new_zeros((self.tokens, self.out), dtype=self.body.out_dtype)
        out = torch.empty((self.tokens, self.out), dtype=self.body.out_dtype, device=x.device)
        space = torch.empty(self.workspace.size, dtype=torch.uint8, device=x.device)
        operands = self._operands(lists)
        if not self.ready:
            self._first(x, ids, weights, operands, space, out)
            return out
        base = space.data_ptr()
        at = {name: base + part[0] for name, part in self.workspace.parts.items()}
        at["x"], at["ids"], at["weights"], at["out"] = x.data_ptr(), ids.data_ptr(), weights.data_ptr(), out.data_ptr()
        for name, t in operands.items():
            at[name] = t.data_ptr()
        stream = stream_of(x.device)
        for step in self.steps:
            pointers: list[Any] = [at[name] for name in step.names]
            for position, _, shape, strides, _ in step.descs:
                pointers[position] = Descriptor(Address(pointers[position]), shape, strides)
            step.launch.again(stream, pointers)
        return out

    def _operands(self, lists: Lists) -> dict[str, Tensor]:
        """The tensor behind each weight and bias name; a name without one gets some other tensor, which is not read."""
        w_in, w_up, w_out, b_in, b_up, b_out = lists
        found = {
            "w_in": address_table(w_in) if self.w_in.table else w_in[0],
            "w_out": address_table(w_out) if self.w_out.table else w_out[0],
        }
        found["w_up"] = found["w_in"] if not w_up else address_table(w_up) if self.w_up.table else w_up[0]
        for name, tensors, operand in (("b_in", b_in, self.b_in), ("b_up", b_up, self.b_up), ("b_out", b_out, self.b_out)):
            if tensors and operand:
                found[name] = address_table(tensors) if operand.table else tensors[0]
            else:
                found[name] = found["b_in"] if name == "b_up" else found["w_out"]
        return found

    def _first(self, x: Tensor, ids: Tensor, weights: Tensor, operands: dict[str, Tensor], space: Tensor, out: Tensor) -> None:
        tensors = {**self.workspace.views(space), **operands, "x": x, "ids": ids, "weights": weights, "out": out}
        for step in self.steps:
            pointers: list[Any] = [tensors[name] for name in step.names]
            for position, name, shape, strides, block in step.descs:
                pointers[position] = TensorDescriptor(tensors[name], list(shape), list(strides), list(block))
            step.launch.first(pointers)
        self.ready = all(step.launch.compiled is not None for step in self.steps)
        if self.ready and not any(self.stacked) and not any(operand is not None and operand.table for operand in self._described()):
            try:
                self.direct = Direct(self.steps, self.names)
            except NotImplementedError:
                return

    def _described(self) -> tuple[Operand | None, ...]:
        return self.w_in, self.w_up, self.w_out, self.b_in, self.b_up, self.b_out

    def tables(self, lists: Lists) -> dict[int, Tensor] | None:
        """The tables of addresses that this call launches with, by the index of their name in :data:`INPUTS`.

        None if one of them does not follow from the addresses of a list of several tensors.
        """
        if any(len(tensors) == 1 and operand.table for tensors, operand in zip(lists, self._described(), strict=True) if operand):
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

    def run_flat(self, pointers: Sequence[int]) -> Tensor | None:
        """:meth:`run` given the addresses of :data:`INPUTS`, by direct launches; None if they could not be made."""
        assert self.direct is not None
        out = empty_cuda((self.tokens, self.out), (self.out, 1), self.body.out_dtype)
        space = empty_cuda((self.workspace.size,), (1,), torch.uint8)
        base = space.data_ptr()
        addresses = (out.data_ptr(), *pointers, *[base + part[0] for part in self.workspace.parts.values()])
        return out if self.direct.run(_raw_stream(self.index), addresses) else None
