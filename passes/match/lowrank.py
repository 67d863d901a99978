"""Weights that a program adds low-rank terms to, ``W + s * B @ A``, taken apart: the terms go beside the projection, the sum is never made.

What such a weight is, in whatever spelling, ``weight_sums.py`` says. Where the sum is made after all, the region says where and why
(``Region.summed``), and the report passes that on: who adds adapters to save memory is told that a weight's memory is taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from moefuse.passes.graph.calls import fake, location, tensor
from moefuse.passes.graph.matmuls import operands
from moefuse.passes.graph.op_classes import PRODUCTS, SIZE_QUERIES
from moefuse.passes.graph.sizes import shape_of
from moefuse.passes.graph.symbols import hint
from moefuse.passes.infer.state import Context
from moefuse.passes.infer.weight_parts import Addend, OtherError, known_rank
from moefuse.passes.infer.weight_sums import combination, low_rank
from moefuse.passes.ir.expr import ExpertVector, Expr, Leaf, Linear, Op, SharedVector, Token, rebuilt, walk
from moefuse.passes.ir.expr_algebra import Number
from moefuse.passes.ir.facts import Lost
from moefuse.passes.ir.lowrank import thin
from moefuse.passes.ir.regions import Region, Summed
from moefuse.passes.match.refusals import text_of
from moefuse.passes.match.templates import WITH_TERMS, match, one_op

MOST_ROWS = {"cpu": 32}
"""For each expert, by device. With more, the C++ kernels on the sum of weights are faster: beside the products terms have none."""

_STEPS = 64
"""Operations behind a weight among which a product and a sum are looked for."""

_SUMS = frozenset("add sub rsub addcmul lerp sum baddbmm addmm".split())


@dataclass(frozen=True, eq=False)
class Apart:
    """A region with its weights' low-rank terms beside the projections, and the sums that it reads no more."""

    region: Region
    sums: tuple[Node, ...]


def taken_apart(ctx: Context, region: Region) -> Apart | Summed | None:
    """The region with its weights' terms beside the projections, if one op takes them there; else which sum is made, and why.

    None where no weight has any terms.
    """
    found: dict[int, list[Addend]] = {}
    problems: list[Summed] = []
    apart: list[Node] = []
    for linear in (e for e in walk(region.expr) if isinstance(e, Linear)):
        if not _made(ctx, linear.weight):
            continue
        terms = _terms(ctx, linear)
        if isinstance(terms, Summed):
            problems.append(terms)
        elif terms is not None:
            found[id(linear)] = terms
            apart += _made(ctx, linear.weight)
    sums = _in_order(ctx, apart)
    made = _beside_all(region, found, sums) if found else region.expr
    if isinstance(made, Summed):
        return _together(ctx, [*problems, made])
    expr = _with_shared(ctx, region, made)
    problem = _together(ctx, problems) if problems else None
    return problem if expr is region.expr else Apart(replace(region, expr=expr, whole=region, summed=problem), sums)


def _together(ctx: Context, problems: Sequence[Summed]) -> Summed:
    """The first that is made and why, with all the others."""
    first = min(problems, key=lambda p: ctx.position[p.node])
    return replace(first, sums=_in_order(ctx, [node for problem in problems for node in problem.sums]))


def _in_order(ctx: Context, nodes: Iterable[Node]) -> tuple[Node, ...]:
    """Each node once, in the order of the program."""
    return tuple(sorted(set(nodes), key=ctx.position.__getitem__))


def _beside_all(region: Region, found: Mapping[int, list[Addend]], sums: tuple[Node, ...]) -> Expr | Summed:
    device, rows = fake(region.value).device, _rows(region)
    if device.type in MOST_ROWS and rows > MOST_ROWS[device.type] * region.num_experts:
        of = f"an expert has {rows // region.num_experts} rows on average, and with more than {MOST_ROWS[device.type]}"
        return Summed(sums[0], f"{of} that is faster on a {device.type.upper()}", sums)

    def beside(old: Expr, run: Callable[[Any], Any]) -> Expr | None:
        return _beside(old, run(old.child), found[id(old)]) if isinstance(old, Linear) and id(old) in found else None

    expr = rebuilt(region.expr, beside)
    return expr if one_op(expr, device, region.trained) else Summed(sums[0], _not_one_op(region, device), sums)


def _with_shared(ctx: Context, region: Region, expr: Expr) -> Expr:
    """The expression with shared factors in it, if one op takes them as such: a matrix for all experts is applied to a token once."""
    other = of_shared(ctx, region, expr)
    body = None if other is expr else one_op(other, fake(region.value).device, region.trained)
    bases = [] if body is None else [p.weight for p in body.projections if p is not None]
    return expr if body is None or any(leaf.parts and len(set(leaf.parts)) == 1 for leaf in bases) else other


def _not_one_op(region: Region, device: torch.device) -> str:
    if device.type not in WITH_TERMS:
        return f"no op takes adapters apart on {device.type}"
    if match(region.expr, trained=region.trained) is None:
        return "no op of moefuse does all that the expert does, of which adapters would be a part"
    return "the weights have several dtypes"


def observed(ctx: Context, apart: Region, sums: tuple[Node, ...]) -> Summed | None:
    """A value of a sum that has a hook: it would see another gradient, or none."""
    whole = apart.whole.nodes if apart.whole is not None else apart.nodes
    for node in sorted(apart.nodes - whole, key=ctx.position.__getitem__):
        calls = (ctx.calls.get(user) for user in node.users)
        if any(call is not None and call.name in ("register_hook", "retain_grad") for call in calls):
            return Summed(node, "a hook observes it", sums)
    return None


def read_elsewhere(ctx: Context, apart: Region, sums: tuple[Node, ...]) -> Summed | None:
    """Sums that are made for another reader of the program, though the experts read them no more."""
    readers = {node: other for node in sums if (other := _other_reader(ctx, apart, node)) is not None}
    if not readers:
        return None
    first, other = next(iter(readers.items()))
    where = "the graph gives it out" if other.op == "output" else f"it is read at {location(other)}"
    return Summed(first, f"{where}, though not by the experts", tuple(readers), kept=False)


def _other_reader(ctx: Context, apart: Region, node: Node) -> Node | None:
    aliases = (n for name in ctx.memory.storages(node) for n in ctx.aliases[name])
    users = (user for alias in aliases for user in alias.users)
    return next((u for u in users if u not in apart.nodes and not _asks_for_size(ctx, u)), None)


def refused(sums: tuple[Node, ...], lost: Lost) -> Summed:
    """Sums that are made since the program cannot be replaced by one op without them."""
    return Summed(sums[0], text_of(lost), sums)


def summed_up(ctx: Context, apart: Region, lost: Lost) -> Region:
    """The region as the program has it, in place of one that was taken apart and that nothing could be made of."""
    assert apart.whole is not None
    known = {n for e in walk(apart.expr) if isinstance(e, Linear) for n in _sources(e.weight)}
    read = (n for e in walk(apart.whole.expr) if isinstance(e, Linear) for n in _made(ctx, e.weight))
    sums = _in_order(ctx, (n for n in read if n not in known))
    return replace(apart.whole, summed=refused(sums, lost)) if sums else apart.whole


def note(region: Region) -> str:
    """What the report says of a fused region that reads a sum."""
    assert region.summed is not None
    size = sum(map(_bytes, region.summed.sums))
    memory = f" ({size / 2**20:.2g} MiB)" if isinstance(size, int) and size else ""
    kept = ", and kept for the gradients in training" if region.summed.kept else ""
    what = f"the sum of expert weights and their low-rank adapters is made in each call{memory}"
    return f"{what} at {location(region.summed.node)}{kept}: {region.summed.why}"


def _bytes(node: Node) -> Any:
    """A number, or one of a size that only the run knows."""
    known = tensor(node)
    return 0 if known is None else math.prod(known.shape) * known.dtype.itemsize


def _asks_for_size(ctx: Context, node: Node) -> bool:
    call = ctx.calls.get(node)
    return call is not None and call.name in SIZE_QUERIES


def _rows(region: Region) -> int:
    """S, as the program is traced; 0 where that depends on data."""
    sizes = [size if isinstance(size, int) else hint(size) for size in fake(region.value).shape[:-1]]
    return math.prod(size or 0 for size in sizes) * region.routing.top_k


def _terms(ctx: Context, linear: Linear) -> list[Addend] | Summed | None:
    """One weight and its terms, None for a weight without any, or why it is no such sum."""
    sums = _in_order(ctx, _made(ctx, linear.weight))
    try:
        found = combination(ctx, linear.weight, linear.node)
    except OtherError as other:
        return _other(linear, other, tuple(n for n in sums if _has_product(ctx, n)))
    bases = [a for a in found if len(a.leaves) == 1]
    if len(bases) > 1:
        why = f"{len(bases)} tensors of this size are added up there, and what made them is not in this graph"
        return Summed(sums[0], why, sums)
    if not bases or not low_rank(found):
        return None
    if bases[0].scale != 1 or bases[0].by:
        return Summed(sums[0], "the weight itself is scaled there, not only the adapters", sums)
    if not thin([(a.leaves[1], a.leaves[0]) for a in found if len(a.leaves) == 2]):
        return Summed(sums[0], "the ranks are more than half of the weight's smaller side", sums)
    return found


def _other(linear: Linear, other: OtherError, sums: tuple[Node, ...]) -> Summed | None:
    """What is no combination, and a sum all the same: where that one operation is, or the first sum of a list of weights."""
    if not sums or not linear.weight.parts:
        return Summed(other.node, other.why, sums) if sums else None
    here, there = location(sums[0]), location(other.node)
    of_all = other.node is linear.node or there == here
    return Summed(sums[0], other.why if of_all else f"{other.why} at {there}", sums)


def _beside(old: Linear, child: Expr, found: Sequence[Addend]) -> Expr:
    """``linear(x, W) + s * linear(linear(x, A), B)``."""
    base = next(a.leaves[0] for a in found if len(a.leaves) == 1)
    out: Expr = Linear(old.node, child, base)
    for addend in (a for a in found if len(a.leaves) == 2):
        b, a = addend.leaves
        term: Expr = Linear(old.node, Linear(old.node, child, a), b)
        for numbers in addend.by:
            term = Op(old.node, "mul", (term, _number(old.node, numbers)))
        out = Op(old.node, "add", (out, Op(old.node, "mul", (term, addend.scale))))
    return out


def _number(node: Node, numbers: tuple[Node, ...]) -> Number:
    first = numbers[0]
    return SharedVector(node, first) if len(numbers) == 1 else ExpertVector(node, Leaf(first, False, None, (), numbers))


def of_shared(ctx: Context, region: Region, expr: Expr) -> Expr:
    """The expression in which a token that one matrix for all experts made of another token (``x @ A.T``, A shared) is that product."""
    tokens = {e.source: e for e in walk(expr) if isinstance(e, Token)}
    made = {id(e): found for e in walk(expr) if isinstance(e, Token) and (found := _product_of(ctx, e, tokens, region)) is not None}
    return rebuilt(expr, lambda old, _: made.get(id(old))) if made else expr


def _product_of(ctx: Context, old: Token, tokens: Mapping[Node, Token], region: Region) -> Expr | None:
    node, scale, mode = old.source, 1.0, ctx.mode[region.anchor]
    call = ctx.calls.get(node)
    while call is not None and ctx.mode[node] == mode and not call.inplace and ctx.memory.storage[node] not in ctx.writes:
        if call.name == "mul" and len(call.args) == 2 and isinstance(call.args[1], int | float):
            node, scale = call.args[0], scale * call.args[1]
            call = ctx.calls.get(node)
            continue
        found = operands(call)
        rows = None if found is None or found.bias is not None else tokens.get(found.x)
        if found is None or rows is None or rows is old or rows.by_slot != old.by_slot or known_rank(found.weight) != 2:
            return None
        leaf = Leaf(found.weight, False, None, (0, 1) if found.out_first else (1, 0), (found.weight,) * region.num_experts)
        return Op(node, "mul", (Linear(node, rows, leaf), scale))
    return None


def _sources(leaf: Leaf) -> tuple[Node, ...]:
    return leaf.parts or (leaf.source,)


def _made(ctx: Context, leaf: Leaf) -> list[Node]:
    """What the program computes of a weight: of a list, some experts' perhaps."""
    return [node for node in _sources(leaf) if _computed(ctx, node)]


def _computed(ctx: Context, node: Node) -> bool:
    return not all(ctx.memory.outlives(name) for name in ctx.memory.storages(node))


def _has_product(ctx: Context, node: Node) -> bool:
    """Whether a product of two matrices, of one expert's weight's size at least, and a sum are among what makes a weight."""
    known = tensor(node)
    least = _size(node) // (shape_of(known)[0] if known is not None and known.dim() == 3 and isinstance(shape_of(known)[0], int) else 1)
    stack, seen, names = [node], {node}, set()
    while stack and len(seen) < _STEPS:
        value = stack.pop()
        call = ctx.calls.get(value)
        names.add("" if call is None else call.name)
        below = [n for n in value.all_input_nodes if 2 * _size(n) >= least]
        written = [w for name in ctx.memory.storages(value) for w in ctx.writes.get(name, ())]
        below += [n for w in written for t in ctx.memory.targets[w] for n in w.all_input_nodes if 2 * _size(n) >= _size(t)]
        new = [n for n in dict.fromkeys((*below, *written)) if n not in seen]
        seen.update(new)
        stack.extend(new)
    return not names.isdisjoint(PRODUCTS - {"linear"}) and not names.isdisjoint(_SUMS)


def _size(node: Node) -> int:
    known = tensor(node)
    sizes = [] if known is None else [s if isinstance(s, int) else hint(s) or 1 for s in known.shape]
    return math.prod(sizes) if known is not None else 0
