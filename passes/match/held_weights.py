"""Weights of a region that are tensors of a class of their own: how they are held (``encodings/subclass.py``), each kind read once."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Node

from moefuse.errors import first_line
from moefuse.passes.encodings.inner import kind
from moefuse.passes.encodings.part import Coded, Part
from moefuse.passes.encodings.subclass import holds_for, subclass
from moefuse.passes.encodings.terms import UnreadError
from moefuse.passes.encodings.tried import Product, products, rows_of
from moefuse.passes.encodings.weighed import Weighed
from moefuse.passes.graph.calls import tensor
from moefuse.passes.graph.named import named
from moefuse.passes.infer.state import Context
from moefuse.passes.ir.expr import Leaf
from moefuse.passes.ir.facts import Lost

_DIMS = (2, 3)
_OWN = 4
"""Weights of the model of one kind that are multiplied."""


@dataclass
class _Held:
    """Of one graph: what was read of each kind of weight, which product that was tried with, and how many of the model's own agreed."""

    kinds: dict[tuple[object, ...], Coded | str] = field(default_factory=dict)
    tried: dict[Node, tuple[Product, Node, tuple[int, ...]]] = field(default_factory=dict)
    shown: Counter[tuple[object, ...]] = field(default_factory=Counter)


def held(ctx: Context, leaf: Leaf, node: Node, order: tuple[int, ...], count: int) -> Coded | Lost:
    """How a weight of a projection is encoded that its class makes of other tensors, or why that is not known.

    Args:
        node, order: one of the leaf's weights, its dimensions that are experts (of a stack), features and inputs.
        count: how many experts there are.
    """
    if _class_of(node) is None:
        others = next((name for other in leaf.parts if (name := _class_of(other)) is not None), "another class")
        dtype = str(tensor(node).dtype).removeprefix("torch.")  # type: ignore[union-attr]
        return ctx.lost("quantised", node, detail=f"{named(node)} is a plain tensor in {dtype}, beside others that are held as `{others}`")
    found = _held(ctx, leaf, node, order, count)
    if isinstance(found, Coded):
        return found
    return ctx.lost("quantised", node, detail=f"they are held as `{type(tensor(node)).__name__}`, and {found}")


def _class_of(node: Node) -> str | None:
    """The class of a weight that makes it of other tensors; None for a plain one."""
    kind = type(tensor(node))
    return kind.__name__ if hasattr(kind, "__tensor_flatten__") else None


def _held(ctx: Context, leaf: Leaf, node: Node, order: tuple[int, ...], count: int) -> Coded | str:
    value: Any = tensor(node)
    if not ctx.given.packed:
        return "`quantised` is off"
    if node.op not in ("placeholder", "get_attr") or value.dim() != len(order) or value.dim() not in _DIMS or leaf.zeros:
        return "the program makes them of others"
    if ctx.writes.get(ctx.storage[node]) or (value.requires_grad and any(ctx.mode[user].grad for user in node.users)):
        return "they are trained"
    if leaf.stacked and value.shape[leaf.along] != count:
        return "there are others beside them"
    source = node
    of_it = list(products(ctx, node))
    if not of_it:  # the body of a loop that stands for others has the product of one
        source, of_it = next(((n, some) for n in leaf.parts if (some := list(products(ctx, n)))), (node, []))
    if not of_it:
        return "no product with them is tried"
    found = [_of_product(ctx, Weighed(ctx, node, order, product, source)) for product in of_it]
    first, why = found[0], next((one for one in found if isinstance(one, str)), None)
    if why is not None:
        return why
    if any(other != first for other in found):
        return "they are multiplied in two ways"
    ctx.scratch(_Held).tried[node] = of_it[0], source, order
    return first


def _of_product(ctx: Context, weighed: Weighed) -> Coded | str:
    """What a weight is read as, known if one of its kind was tried with a product that is made alike."""
    known, key = ctx.scratch(_Held).kinds, (kind(weighed.value), weighed.order, _how(ctx, weighed.product))
    if key not in known:
        known[key] = _read(weighed)
    found = known[key]
    return found if isinstance(found, str) else moved(found, weighed.node)


def _how(ctx: Context, product: Product) -> tuple[object, ...]:
    """Equal for products that are made alike, of rows and with a bias that want gradients alike."""
    rows, bias = rows_of(ctx, product)
    mode = ctx.mode[product.reader]
    beside = None if bias is None else (bias.dtype, bias.requires_grad and mode.grad)
    return (str(product.reader.target), tuple(str(s.target) for s in product.steps), mode, rows.requires_grad and mode.grad, beside)


def _read(weighed: Weighed) -> Coded | str:
    try:
        with torch.no_grad():
            return subclass(weighed)
    except UnreadError as error:
        return error.why
    except Exception as error:  # whatever the class's own operations raise
        return f"they cannot be tried: {first_line(error)}"


def moved(coded: Coded, node: Node) -> Coded:
    """What was read of a weight, for another one of the same kind."""

    def part(one: Part) -> Part:
        return replace(one, node=node)

    return replace(coded, storage=part(coded.storage), scale=part(coded.scale), zero=None if coded.zero is None else part(coded.zero))


def shows(ctx: Context, node: Node, coded: Coded, value: Any) -> bool:
    """Whether the program's product with the model's own weight shows what was read. Of a kind the first ones do."""
    known = ctx.scratch(_Held)
    product, source, order = known.tried[node]
    own = kind(value)
    if own != kind(tensor(node)):
        return False
    if known.shown[own] == _OWN:
        return True
    with torch.no_grad():
        right = holds_for(Weighed(ctx, node, order, product, source), coded, value)
    known.shown[own] += right
    return right


__all__ = ["held", "moved", "shows"]
