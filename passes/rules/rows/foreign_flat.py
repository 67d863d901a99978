"""An operator that multiplies rows by weights of four bits, held with their scales as rows of numbers in one dimension.

What its codes stand for is read from the operator, which is run on codes and scales that are made up (``foreign_table.py``).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Node

from moefuse.ops.meaning.encoding import Encoding
from moefuse.passes.graph.calls import tensor
from moefuse.passes.graph.sizes import same, same_shape, shape_of
from moefuse.passes.infer.operands import real
from moefuse.passes.infer.state import Context, out_shape
from moefuse.passes.ir.axes import Atom
from moefuse.passes.ir.expr import Held, Leaf, Linear
from moefuse.passes.ir.facts import Finding, Lost, Rows, View
from moefuse.passes.rules import ANY, rule
from moefuse.passes.rules.rows.contraction import with_bias
from moefuse.passes.rules.rows.foreign_ops import arguments
from moefuse.passes.rules.rows.foreign_table import read

_SIGNATURE = (
    ("A", "tensor"), ("B", "tensor"), ("shapeB", "ints"), ("absmax", "tensor"), ("blocksize", "int"), ("quant_type", "text"),
    ("bias", "tensor?"), ("absmax_8bit", "tensor?"), ("absmax_code", "tensor?"), ("absmax_offset", "tensor?"),
)  # fmt: skip
_NESTED = ("absmax", "absmax_code", "absmax_offset")
_EVERY = 256
"""Scales that are codes, for one scale of their own."""
_OWN = ("selected", "masked")
QUICKER = ("cuda",)
"""Devices where all experts in one op are quicker than the operator for each. On a CPU it has a kernel of its own, which unpacks as it
multiplies: with 16 experts it takes 0.8 of the op's time for one token, and 0.45 for 64."""


@rule(ANY + "gemm_4bit")
def on_flat(ctx: Context, node: Node, *args: Any, **kwargs: Any) -> Finding:
    """Rows of an expert times its own weight."""
    given = arguments(_SIGNATURE, node.target, args, kwargs)
    rows = None if given is None else ctx.fact(given["A"])
    if given is None or not isinstance(rows, Rows) or rows.domain.name not in _OWN or [a.kind for a in rows.axes[-1]] != ["f"]:
        return None
    if not ctx.given.packed:
        return _unread(ctx, node, given, "`quantised` is off")
    value = tensor(given["A"])
    if value is not None and value.device.type not in QUICKER:
        return _unread(ctx, node, given, f"on {value.device.type} nothing is quicker than the operator")
    held = _held(ctx, node, given)
    if not isinstance(held, Held):
        return _unread(ctx, node, given, held)
    storage = ctx.fact(given["B"])
    expr = Linear(node, rows.expr, Leaf(storage.root, False, None, (0, 1), held=held))
    found = Rows((*rows.axes[:-1], (Atom("f", 0, out_shape(node)[-1]),)), rows.domain, expr)
    return found if given["bias"] is None else with_bias(ctx, node, found, given["bias"])


def _held(ctx: Context, node: Node, given: dict[str, Any]) -> Held | str:
    """How the weight is held, or why that is not known."""
    values = {name: tensor(given[name]) for name in ("A", "B", "absmax")}
    rows, storage, scale = values.values()
    features = tuple(given["shapeB"])
    if rows is None or storage is None or scale is None or len(features) != 2 or not all(isinstance(n, int) for n in features):
        return "the operator is given what is no tensor, or sizes that the run has"
    n, k = features
    block, nested = given["blocksize"], given["absmax_8bit"] is not None
    if storage.dtype != torch.uint8:
        return f"four bits in {_named(storage.dtype)}"
    if not same(shape_of(rows)[-1], k) or k % block or math.prod(shape_of(storage)) * 2 != n * k:
        return f"a weight [{n}, {k}] with scales of {block} weights, which are of several features"
    found = read(node.target, given["quant_type"], block, rows.dtype, storage.device)
    if not isinstance(found, Encoding):
        return found
    names = ("absmax_8bit", *_NESTED) if nested else ("absmax",)
    count = n * k // block
    sizes = dict.fromkeys(names, (count,)) | (
        {"absmax": (-(-count // _EVERY),), "absmax_code": (_EVERY,), "absmax_offset": ()} if nested else {}
    )
    dtypes = dict.fromkeys(names, torch.float32) | ({"absmax_8bit": torch.uint8} if nested else {})
    for name in names:
        value = tensor(given[name])
        if value is None or value.dtype != dtypes[name] or not same_shape(shape_of(value), sizes[name]):
            return f"`{name}` is not {list(sizes[name])} in {_named(dtypes[name])}"
    leaves = [_whole(ctx, given[name]) for name in ("B", *names)]
    if None in leaves:
        return "the operator is given a part of a tensor, or what the program computes"
    _, of, *more = (leaf for leaf in leaves if leaf is not None)
    return Held(found, of, (n, k), tuple(more), _EVERY if nested else 0)


def _whole(ctx: Context, node: Node) -> Leaf | None:
    """A tensor of the model's that the program shows as it lies in memory."""
    fact = ctx.fact(node)
    root = tensor(fact.root) if isinstance(fact, View) else None
    if root is None or fact.root.op not in ("placeholder", "get_attr") or not root.is_contiguous():
        return None
    shown, there = (
        [s for s in sizes if not same(s, 1)] for sizes in ([a.size for axis in fact.axes for a in axis if real(axis)], shape_of(root))
    )
    order = [a.index for axis in fact.axes for a in axis if not same(a.size, 1)]
    plain = all(a.kind == "d" for axis in fact.axes for a in axis if not same(a.size, 1))
    if not plain or order != sorted(order) or not same_shape(shown, there) or len(there) > 1:
        return None
    return Leaf(fact.root, False, None, tuple(range(root.dim())))


def _unread(ctx: Context, node: Node, given: dict[str, Any], detail: str) -> Lost:
    storage = tensor(given["B"])
    held = "few bits" if storage is None else _named(storage.dtype)
    name = str(ctx.calls[node].name).rpartition("::")[2]  # type: ignore[union-attr]
    return ctx.lost("encoding-unknown", node, dtype=held, detail=f"`{name}`: {detail}")


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


__all__ = ["QUICKER", "on_flat"]
