"""Weights that a program adds low-rank terms to, ``W + s * B @ A``, taken apart: the terms go beside the projection, the sum is never made.

What such a weight is, in whatever spelling, ``weight_sums.py`` says. Where the sum is made after all, the region says where and why
(``Region.summed``), and the report passes that on: who adds adapters to save memory is told that a weight's memory is taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from moefuse._dynamo.values import hint
from moefuse.errors import message
from moefuse.passes.graph.calls import fake, location, tensor
from moefuse.passes.graph.matmuls import operands
from moefuse.passes.graph.op_classes import PRODUCTS, SIZE_QUERIES
from moefuse.passes.graph.sizes import shape_of
from moefuse.passes.infer.state import Context
from moefuse.passes.infer.weight_parts import Addend, OtherError, known_rank
from moefuse.passes.infer.weight_sums import combination, low_rank
from moefuse.passes.ir.expr import ExpertVector, Expr, Leaf, Linear, Op, SharedVector, Token, rebuilt, walk
from moefuse.passes.ir.expr_algebra import Number
from moefuse.passes.ir.facts import Lost
from moefuse.passes.ir.lowrank import thin
from moefuse.passes.ir.regions import Region, Summed
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
    sums: Mapping[int, Node]


def taken_apart(ctx: Context, region: Region) -> Apart | Summed | None:
    """The region with its weights' terms beside the projections, if one op takes them there; else which sum is made, and why.

    None where no weight has any terms.
    """
    found: dict[int, list[Addend]] = {}
    problem: Summed | None = None
    for linear in (e for e in walk(region.expr) if isinstance(e, Linear)):
        if not any(_computed(ctx, n) for n in _sources(linear.weight)):
            continue
        terms = _terms(ctx, linear)
        if isinstance(terms, Summed):
            problem = problem or terms
        elif terms is not None:
            found[id(linear)] = terms
    made = _beside_all(region, found) if found else region.expr
    if isinstance(made, Summed):
        return problem or made
    expr = _with_shared(ctx, region, made)
    sums = {id(e): _sources(e.weight)[0] for e in walk(region.expr) if isinstance(e, Linear) and id(e) in found}
    return problem if expr is region.expr else Apart(replace(region, expr=expr, whole=region, summed=problem), sums)


def _beside_all(region: Region, found: Mapping[int, list[Addend]]) -> Expr | Summed:
    first = next(_sources(e.weight)[0] for e in walk(region.expr) if isinstance(e, Linear) and id(e) in found)
    device, rows = fake(region.value).device, _rows(region)
    if device.type in MOST_ROWS and rows > MOST_ROWS[device.type] * region.num_experts:
        of = f"an expert has {rows // region.num_experts} rows on average, and with more than {MOST_ROWS[device.type]}"
        return Summed(first, f"{of} that is faster on a {device.type.upper()}")

    def beside(old: Expr, run: Callable[[Any], Any]) -> Expr | None:
        return _beside(old, run(old.child), found[id(old)]) if isinstance(old, Linear) and id(old) in found else None

    expr = rebuilt(region.expr, beside)
    return expr if one_op(expr, device) else Summed(first, _not_one_op(region, device))


def _with_shared(ctx: Context, region: Region, expr: Expr) -> Expr:
    """The expression with shared factors in it, if one op takes them as such: a matrix for all experts is applied to a token once."""
    other = of_shared(ctx, region, expr)
    body = None if other is expr else one_op(other, fake(region.value).device)
    bases = [] if body is None else [p.weight for p in body.projections if p is not None]
    return expr if body is None or any(leaf.parts and len(set(leaf.parts)) == 1 for leaf in bases) else other


def _not_one_op(region: Region, device: torch.device) -> str:
    if device.type not in WITH_TERMS:
        return f"no op takes adapters apart on {device.type}"
    if match(region.expr) is None:
        return "no op of moefuse does all that the expert does, of which adapters would be a part"
    return "the weights have several dtypes"


def observed(ctx: Context, apart: Region) -> Summed | None:
    """A value of a sum that has a hook: it would see another gradient, or none."""
    whole = apart.whole.nodes if apart.whole is not None else apart.nodes
    for node in sorted(apart.nodes - whole, key=ctx.position.__getitem__):
        calls = (ctx.calls.get(user) for user in node.users)
        if any(call is not None and call.name in ("register_hook", "retain_grad") for call in calls):
            return Summed(node, "a hook observes it")
    return None


def read_elsewhere(ctx: Context, apart: Region, sums: Mapping[int, Node]) -> Summed | None:
    """A sum that is made for another reader of the program, though the experts read it no more."""
    for node in sums.values():
        for alias in (n for name in ctx.memory.storages(node) for n in ctx.aliases[name]):
            other = next((u for u in alias.users if u not in apart.nodes and not _asks_for_size(ctx, u)), None)
            if other is not None:
                where = "the graph gives it out" if other.op == "output" else f"it is read at {location(other)}"
                return Summed(node, f"{where}, though not by the experts", kept=False)
    return None


def refused(node: Node, lost: Lost) -> Summed:
    """A sum that is made since the program cannot be replaced by one op without it."""
    return Summed(node, message(lost.code, {"name": lost.node.name, "op": lost.node.name, **lost.details}))


def summed_up(apart: Region, lost: Lost) -> Region:
    """The region as the program has it, in place of one that was taken apart and that nothing could be made of."""
    assert apart.whole is not None
    known = {e.weight.source for e in walk(apart.expr) if isinstance(e, Linear)}
    sums = (e.weight.source for e in walk(apart.whole.expr) if isinstance(e, Linear) and e.weight.source not in known)
    node = next(sums, None)
    return apart.whole if node is None else replace(apart.whole, summed=refused(node, lost))


def note(region: Region) -> str:
    """What the report says of a fused region that reads a sum."""
    assert region.summed is not None
    node, known = region.summed.node, tensor(region.summed.node)
    size = math.prod(known.shape) * known.dtype.itemsize * (region.num_experts if known.dim() == 2 else 1) if known is not None else 0
    memory = f" ({size / 2**20:.2g} MiB)" if isinstance(size, int) and size else ""
    kept = ", and kept for the gradients in training" if region.summed.kept else ""
    what = f"the sum of expert weights and their low-rank adapters is made in each call{memory}"
    return f"{what} at {location(node)}{kept}: {region.summed.why}"


def _asks_for_size(ctx: Context, node: Node) -> bool:
    call = ctx.calls.get(node)
    return call is not None and call.name in SIZE_QUERIES


def _rows(region: Region) -> int:
    """S, as the program is traced; 0 where that depends on data."""
    sizes = [size if isinstance(size, int) else hint(size) for size in fake(region.value).shape[:-1]]
    return math.prod(size or 0 for size in sizes) * region.routing.top_k


def _terms(ctx: Context, linear: Linear) -> list[Addend] | Summed | None:
    """One weight and its terms, None for a weight without any, or why it is no such sum."""
    node = _sources(linear.weight)[0]
    try:
        found = combination(ctx, linear.weight, linear.node)
    except OtherError as other:
        return Summed(other.node, other.why) if _has_product(ctx, node) else None
    bases = [a for a in found if len(a.leaves) == 1]
    if len(bases) > 1:
        return Summed(node, f"{len(bases)} tensors of this size are added up there, and what made them is not in this graph")
    if not bases or not low_rank(found):
        return None
    if bases[0].scale != 1 or bases[0].by:
        return Summed(node, "the weight itself is scaled there, not only the adapters")
    if not thin([(a.leaves[1], a.leaves[0]) for a in found if len(a.leaves) == 2]):
        return Summed(node, "the ranks are more than half of the weight's smaller side")
    return found


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
