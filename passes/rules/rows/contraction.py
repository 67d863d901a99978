"""Contractions. `linear`, `matmul`, `bmm`, `einsum`, grouped GEMMs: rows times an expert weight, or a weighted sum of rows."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch.fx import Node

from moefuse.passes.graph.calls import tensor
from moefuse.passes.graph.equations import equation as equation_of
from moefuse.passes.graph.matmuls import operands
from moefuse.passes.graph.named import counted
from moefuse.passes.graph.sharded import is_root
from moefuse.passes.graph.sizes import same, shape_of
from moefuse.passes.graph.stacks import row_behind
from moefuse.passes.infer.operands import beside, fits, joined, leaf, real
from moefuse.passes.infer.state import Context, out_shape
from moefuse.passes.infer.unpacking import is_unpacked
from moefuse.passes.infer.weight_sums import stack_of_sums
from moefuse.passes.ir.axes import Atom, Axes, Axis, align, fresh, reshape
from moefuse.passes.ir.expr import Cast, Expr, Leaf, Linear, Op, SharedVector
from moefuse.passes.ir.facts import Counts, Domain, Fact, Finding, Lost, Mask, Order, Routing, RowNumber, Rows, Table, View, Weight
from moefuse.passes.rules import rule
from moefuse.passes.rules.routing.masks import mask_table, masked_weight
from moefuse.passes.rules.rows.leaves import slot_value, token
from moefuse.passes.rules.rows.pointwise import domain_of
from moefuse.passes.rules.rows.put_together import apart
from moefuse.passes.rules.sums.reduce import combined

Labels = str


@rule("linear")
def on_linear(ctx: Context, node: Node, x: Any, weight: Any, bias: Any = None) -> Finding:
    rank = len(out_shape(x))
    lead = "abcdgh"[: rank - 1]
    found = contract(ctx, node, x, weight, lead + "i", "oi", lead + "o")
    if bias is None or not isinstance(found, Rows):
        return found
    return with_bias(ctx, node, found, bias)


def with_bias(ctx: Context, node: Node, rows: Rows, bias: Any) -> Finding:
    """Rows plus a bias per expert (or shared)."""
    item = beside(ctx, node, rows.axes, rows.domain, bias)
    if item is None:
        return ctx.lost("no-rule", node, how="a bias that is no vector for each expert, or one for all")
    return replace(rows, expr=Op(node, "add", (rows.expr, item)))


@rule("bmm")
def on_bmm(ctx: Context, node: Node, a: Any, mat2: Any) -> Finding:
    return contract(ctx, node, a, mat2, "bij", "bjk", "bik")


@rule("baddbmm", "addmm", "addbmm")
def on_baddbmm(ctx: Context, node: Node, bias: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Finding:
    name = ctx.calls[node].name  # type: ignore[union-attr]
    if beta != 1 or alpha != 1 or name == "addbmm":
        return None
    labels = ("bij", "bjk", "bik") if name == "baddbmm" else ("ij", "jk", "ik")
    found = contract(ctx, node, a, b, *labels)
    return with_bias(ctx, node, found, bias) if isinstance(found, Rows) else found


@rule("matmul", "mm")
def on_matmul(ctx: Context, node: Node, a: Any, other: Any) -> Finding:
    b = other
    left, right = tensor(a), tensor(b)
    if left is None or right is None or left.dim() < 1 or right.dim() < 2:
        return None
    if left.dim() == 1:
        return None
    batch = max(left.dim(), right.dim()) - 2
    names = "abcdgh"[:batch]
    first = names[batch - (left.dim() - 2) :] + "ij"
    second = names[batch - (right.dim() - 2) :] + "jk"
    return contract(ctx, node, a, b, first, second, names + "ik")


@rule("einsum")
def on_einsum(ctx: Context, node: Node, equation: Any, *given: Any) -> Finding:
    read = equation_of(equation, *given)
    if read is None or len(read.operands) == 1:
        return None
    factors, labels, out = read
    if len(factors) == 2:
        product = _by_element(ctx, node, factors, labels, out)
        if product is not None:
            return product
        return contract(ctx, node, factors[0], factors[1], labels[0], labels[1], out)
    sizes: dict[str, Any] = {}
    for names, value in zip(labels, factors, strict=True):
        sizes |= {c: size for c, size in zip(names, out_shape(value), strict=True) if c not in sizes or same(sizes[c], 1)}
    return _in_pairs(ctx, node, [(names, ctx.fact(value)) for names, value in zip(labels, factors, strict=True)], out, sizes)


def _by_element(ctx: Context, node: Node, factors: Sequence[Any], labels: Sequence[Labels], out: Labels) -> Finding:
    """``einsum("th,t->th", rows, w)``: nothing is summed, and dimensions keep their order, so it is a product element by element."""
    facts = [ctx.fact(value) for value in factors]
    rows = [fact for fact in facts if isinstance(fact, Rows)]
    if not rows or set(out) != set("".join(labels)) or any(list(names) != [c for c in out if c in names] for names in labels):
        return None
    domain = domain_of(rows)
    spread = [
        fact.with_axes(tuple(fact.axes[names.index(c)] if c in names else () for c in out))
        for fact, names in zip(facts, labels, strict=True)
        if isinstance(fact, Fact) and len(fact.axes) == len(names)
    ]
    if domain is None or len(spread) < len(facts):
        return None
    axes = joined([fact.axes for fact in spread if isinstance(fact, Rows)], len(out))
    found = [leaf(ctx, node, axes, domain, fact) for fact in spread]
    return None if None in found else Rows(axes, domain, Op(node, "mul", tuple(found)))


def _in_pairs(ctx: Context, node: Node, terms: list[tuple[Labels, Any]], out: Labels, sizes: dict[str, Any]) -> Finding:
    """An einsum of several operands, two at a time: rows meet an expert weight before anything is summed that both do not have."""
    for (i, (first, x)), (j, (second, y)) in itertools.combinations(enumerate(terms), 2):
        rest = [t for at, t in enumerate(terms) if at not in (i, j)]
        kept = "".join(c for c in dict.fromkeys(first + second) if c in out or any(c in names for names, _ in rest))
        names = kept if rest else out
        found = contracted(ctx, node, x, y, first, second, names, tuple(sizes[c] for c in names))
        if found is None or not rest:
            if found is not None:
                return found
            continue
        if isinstance(found, Lost):
            return found
        return _in_pairs(ctx, node, [(names, found), *rest], out, sizes)
    return None


@rule("grouped_mm")
def on_grouped_mm(ctx: Context, node: Node, x: Any, weight: Any, offs: Any = None, bias: Any = None) -> Finding:
    """A GEMM over rows sorted by expert; ``offs`` must be the ends of the experts in the same order."""
    rows, stack, ends = ctx.fact(x), ctx.fact(weight), ctx.fact(offs)
    if not isinstance(rows, Rows):
        return None
    known = isinstance(ends, Counts) and ends.ends and ends.first == 1 and ends.routing is rows.domain.routing
    if rows.domain.name != "sorted" or not known or bias is not None or not isinstance(stack, View):
        return ctx.lost("tokens-differ", node, detail="the group offsets are not the ends of the experts these rows are sorted by")
    dims = [a[0].index if len(a) == 1 and a[0].kind == "d" else -1 for a in stack.axes]
    if len(dims) != 3 or dims[0] != 0 or sorted(dims) != [0, 1, 2]:
        return None
    if not isinstance(ends, Counts) or not same(ends.axes[0][0].size, stack.axes[0][0].size):
        return ctx.lost(
            "missing-experts", node, detail=f"the counts are not of {counted(stack.axes[0][0].size)} experts, as the weights are"
        )
    weights = Leaf(stack.root, True, None, (dims[2], dims[1]))
    shape = out_shape(node)
    return Rows((rows.axes[0], (Atom("f", 0, shape[-1]),)), rows.domain, Linear(node, rows.expr, weights))


def contract(ctx: Context, node: Node, a: Any, b: Any, first: Labels, second: Labels, out: Labels) -> Finding:
    """A two-operand einsum between facts."""
    x, y, sizes = _stack(ctx, a, node), _stack(ctx, b, node), out_shape(node)
    if len(out) == len(sizes) and (split := apart(y, second, first, out, sizes)) is not None:
        return split.together(contracted(ctx, node, x, split.stack, first, split.labels, split.out, split.sizes))
    if len(out) == len(sizes) and (split := apart(x, first, second, out, sizes)) is not None:
        return split.together(contracted(ctx, node, split.stack, y, split.labels, second, split.out, split.sizes))
    return contracted(ctx, node, x, y, first, second, out, sizes)


def contracted(ctx: Context, node: Node, x: Any, y: Any, first: Labels, second: Labels, out: Labels, shape: tuple[Any, ...]) -> Finding:
    """The fact of a contraction of two facts, whose result has the given sizes."""
    if x is None or y is None or len(first) != len(x.axes if hasattr(x, "axes") else ()) or len(second) != len(getattr(y, "axes", ())):
        return None
    ways = ((x, y, first, second), (y, x, second, first))
    # The weight of a layer says which operand holds rows: a [batch, length, features] input of the graph is no stack.
    tried = ways[:1] if ctx.calls[node].name == "linear" else ways  # type: ignore[union-attr]
    for stacks in (_is_given, _is_summed):
        for left, right, names, others in tried:
            weight = expert_weight(ctx, right, left, others, names, out, stacks(ctx, right, node))
            if weight is not None and isinstance(left, Rows | View):
                found = project(ctx, node, left, weight, names, others, out, shape)
                if found is not None:
                    return found
    for left, right, names, others in ((x, y, first, second), (y, x, second, first)):
        if isinstance(left, Rows) and isinstance(right, View | Table):
            return weighted_sum(ctx, node, left, right, names, others, out)
        if isinstance(left, Mask) and isinstance(right, View):
            return summed_mask(ctx, node, left, right, names, others, out)
    return None


def _stack(ctx: Context, value: Any, node: Node) -> Finding:
    """The fact of an operand. With one A for all experts, B @ A looks like experts on the rows of A."""
    fact = ctx.fact(value)
    rows = isinstance(fact, Rows) and fact.domain.routing is None
    whole = (rows and stack_of_sums(ctx, value, node)) or (isinstance(fact, Lost | View | None) and is_unpacked(ctx, value))
    return View(fresh(out_shape(value)), value) if whole else fact


def _is_given(ctx: Context, value: Any, node: Node) -> bool:
    """Whether the graph is given a tensor, or unpacks it from what it is given in few bits."""
    return isinstance(value, View) and (is_root(ctx.storage[value.root]) or is_unpacked(ctx, value.root))


def _is_summed(ctx: Context, value: Any, node: Node) -> bool:
    """Whether the graph adds low-rank terms to a stack that it is given."""
    return isinstance(value, View) and not _is_given(ctx, value, node) and stack_of_sums(ctx, value.root, node)


def expert_weight(ctx: Context, value: Any, rows: Any, names: Labels, others: Labels, out: Labels, stack: bool) -> Weight | None:
    """A fact as an expert weight: indexed already, a stack (if it may be one; first dim E), or a Parameter of one expert or of all."""
    if isinstance(value, Weight):
        return value
    if not isinstance(value, View) or value.root.op not in ("placeholder", "get_attr", "call_method", "call_function"):
        return None
    dims = [a[0].index if len(a) == 1 and a[0].kind == "d" else -1 for a in value.axes]
    own = isinstance(rows, Rows) and (rows.domain.name in ("selected", "masked") or _is_thin(ctx, value))
    if sorted(dims) == [0, 1] and own:
        return Weight(tuple((a[0]._replace(kind="w"),) for a in value.axes), value.root, -1)
    if sorted(dims) == [0, 1, 2] and stack:
        experts = dims.index(0)
        label = names[experts]
        if label not in out or (isinstance(rows, View) and label in others and not _repeats(rows.axes[others.index(label)])):
            return None
        axes = tuple((a[0]._replace(kind="e" if a[0].index == 0 else "w"),) for a in value.axes)
        return Weight(axes, value.root, None)
    return None


def _is_thin(ctx: Context, value: View) -> bool:
    """Whether a matrix may be an adapter's that all experts share. The ops give each a gradient: of a large one that is memory."""
    shape = out_shape(value.root)
    known = all(isinstance(n, int) for n in shape)
    return is_root(ctx.storage[value.root]) and known and len(shape) == 2 and 2 * min(shape) <= max(shape)


def _repeats(axis: Axis) -> bool:
    return all(a.kind == "b" or same(a.size, 1) for a in axis)


def project(
    ctx: Context, node: Node, x: Any, weight: Weight, names: Labels, others: Labels, out: Labels, shape: tuple[Any, ...]
) -> Finding:
    """Rows (or plain tokens) times an expert weight over one feature dimension."""
    summed = [c for c in names if c in others and c not in out]
    if len(summed) != 1 or any(c not in out for c in (set(names) | set(others)) - set(summed)):
        return None
    inner = summed[0]
    contracted = weight.axes[others.index(inner)]
    free = [c for c in others if c not in names and any(a.kind == "w" for a in weight.axes[others.index(c)])]
    if [a.kind for a in contracted] != ["w"] or len(free) > 1:
        return None
    left = {c: x.axes[i] for i, c in enumerate(names)}
    right = {c: weight.axes[i] for i, c in enumerate(others)}
    if any(a.kind == "w" for c in others if c not in (inner, *free) for a in right[c]):
        return None
    rows = {c: right[c] for c in others if c not in (inner, *free) and real(right[c])}
    entry = _rows(ctx, node, x, weight, left, rows, inner)
    if entry is None or isinstance(entry, Lost):
        return entry
    domain, expr, axes = entry
    other = None if same_expert(domain, weight) else row_behind(node, weight.root, int(weight.expert or 0))
    if not same_expert(domain, weight) and other is None:
        return ctx.lost("experts-differ", node, expert=str(weight.expert), detail="rows of one expert meet the weight of another")
    if not free and not any(a.kind == "w" and a is not contracted[0] for axis in weight.axes for a in axis):
        return None
    stack = weight.expert != -1
    outer = (
        weight.axes[others.index(free[0])][0].index
        if free
        else next(a.index for axis in weight.axes for a in axis if a.kind == "w" and a is not contracted[0])
    )
    item = Leaf(weight.root, stack, weight.expert if stack else None, (outer, contracted[0].index))
    if other is not None:  # a matrix of a stack that belongs to this expert by another number than its own
        item = Leaf(ctx.first[other], False, None, tuple(d - 1 for d in item.order))
    result: list[Axis] = []
    for i, c in enumerate(out):
        if c in free:
            result.append((Atom("f", 0, shape[i]),))
        else:
            mine, theirs = axes.get(c, ()), rows.get(c, ())
            result.append(mine if real(mine) or not theirs else theirs)
    return Rows(tuple(result), domain, Linear(node, expr, item))


def _rows(
    ctx: Context, node: Node, x: Any, weight: Weight, left: dict[str, Axis], rows: dict[str, Axis], inner: str
) -> tuple[Domain, Expr, dict[str, Axis]] | Lost | None:
    """The left operand as rows of the domain the weight asks for: (domain, expression, axes by label)."""
    if isinstance(x, Rows):
        if [a.kind for a in left[inner]] != ["f"]:
            return None
        domain = _joined_domain(x.domain, weight)
        if domain is None:
            return ctx.lost("experts-differ", node, expert=str(weight.expert), detail="rows of one expert meet the weight of another")
        for c, axis in rows.items():
            mine = left.get(c, ())
            if real(mine) and not fits((axis,), (mine,)):
                return ctx.lost("tokens-differ", node, detail="rows and gathered expert weights are in different orders")
        return domain, x.expr, left
    return _tokens(ctx, node, x, weight, left, rows, inner)


def same_expert(domain: Domain, weight: Weight) -> bool:
    """Whether a matrix of a stack is that of the expert of some rows, as far as both are known."""
    given = weight.expert is not None and weight.expert >= 0 and domain.expert is not None
    return not given or domain.expert == weight.expert


def _joined_domain(domain: Domain, weight: Weight) -> Domain | None:
    if domain.name in ("selected", "masked"):
        if weight.routing is not None or weight.expert is None:
            return None
        if not same_expert(domain, weight) and any(isinstance(e, RowNumber) for e in (domain.expert, weight.expert)):
            return None
        return domain if domain.expert is not None or weight.expert < 0 else replace(domain, expert=weight.expert)
    if weight.expert == -1 and weight.routing is None:
        return domain  # one weight for all experts
    if domain.name == "dense":
        return domain if weight.expert is None and weight.routing is None else None
    wanted = Domain("sorted" if weight.order is not None else "slots", weight.routing, order=weight.order)
    return domain if weight.routing is not None and domain.same(wanted) else None


def _tokens(
    ctx: Context, node: Node, x: View, weight: Weight, left: dict[str, Axis], rows: dict[str, Axis], inner: str
) -> tuple[Domain, Expr, dict[str, Axis]] | Lost | None:
    """A plain tensor: every token (masked, dense), or one row per slot (slots)."""
    features = left[inner]
    plain = {c: a for c, a in left.items() if c != inner}
    if weight.routing is not None:
        if weight.order is not None:
            return ctx.lost("tokens-differ", node, detail="sorted expert weights meet rows that are not sorted")
        return _per_slot(ctx, node, x, weight.routing, plain, features, rows)
    if weight.expert == -1:
        return None
    domain = Domain("masked", expert=weight.expert) if weight.expert is not None else Domain("dense")
    lead = [a for c, a in plain.items() if c not in rows]
    expr = token(node, x, lead, [features])
    if expr is None or any(not _repeats(plain[c]) for c in rows if c in plain):
        return None
    axes = {c: tuple(Atom("t", a.index, a.size) for a in axis if a.kind == "d") for c, axis in plain.items() if c not in rows}
    return domain, expr, {**axes, inner: features}


def _per_slot(
    ctx: Context, node: Node, x: View, routing: Routing, plain: dict[str, Axis], features: Axis, rows: dict[str, Axis]
) -> tuple[Domain, Expr, dict[str, Axis]] | Lost | None:
    wanted: Axis = tuple(a for axis in rows.values() for a in axis)
    mine: list[Atom] = []
    for c, axis in rows.items():
        given = plain.get(c, ())
        mine += given if real(given) else tuple(a._replace(kind="b") for a in axis)
    if any(real(a) for c, a in plain.items() if c not in rows):
        return None
    if [a.kind for a in wanted if not same(a.size, 1)] != sorted([a.kind for a in wanted if not same(a.size, 1)], key="tk".index):
        return None
    cut = align((*(Atom("t", i, s) for i, s in enumerate(routing.tokens)), Atom("k", 0, routing.top_k)), tuple(mine))
    expr = slot_value(node, replace(x, axes=(tuple(mine), features)), routing) if cut is not None else None
    if expr is None:
        expr = _computed(ctx, node, x, routing) or _of_all(ctx, x, routing)
    if expr is None:
        return ctx.lost("tokens-differ", node, detail="the rows beside the gathered weights are not each slot's own token")
    return Domain("slots", routing), expr, dict(rows)


def _of_all(ctx: Context, x: View, routing: Routing) -> Expr | None:
    """A per-slot value that one matrix for all experts makes of each slot's token."""
    call = ctx.calls[x.root]
    found = None if call is None else operands(call)
    before, matrix = (None, None) if found is None else (ctx.fact(found.x), tensor(found.weight))
    if found is None or found.bias is not None or not isinstance(before, View) or matrix is None or matrix.dim() != 2:
        return None
    lead = tuple(a for axis in before.axes[:-1] for a in axis)
    if not _is_thin(ctx, View(fresh(shape_of(matrix)), found.weight)):
        return None
    inner = slot_value(x.root, replace(before, axes=(lead, before.axes[-1])), routing)
    return None if inner is None else Linear(x.root, inner, Leaf(found.weight, False, None, (0, 1) if found.out_first else (1, 0)))


def _computed(ctx: Context, node: Node, x: View, routing: Routing) -> Expr | None:
    """A per-slot value computed before any expert was involved: repeated tokens times the routing weights."""
    call, shape = ctx.calls[x.root], out_shape(x.root)
    value = tensor(x.root)
    if call is not None and call.name in ("to", "type_as") and isinstance(call.args[0], Node) and value is not None:
        inner = _computed(ctx, node, replace(x, root=call.args[0]), routing)
        return None if inner is None else Cast(x.root, inner, value.dtype)
    if call is None or call.name != "mul" or len(shape) not in (2, 3):
        return None
    slots: Axes = ((*(Atom("t", i, s) for i, s in enumerate(routing.tokens)), Atom("k", 0, routing.top_k)),)
    rows = reshape(slots, shape[:-1])
    if rows is None:
        return None
    axes = (*rows, (Atom("f", 0, shape[-1]),))
    factors = (*call.args, *call.kwargs.values())
    items = [leaf(ctx, node, axes, Domain("slots", routing), ctx.fact(a)) if isinstance(a, Node) else None for a in factors]
    return Op(x.root, "mul", tuple(items)) if len(items) == 2 and None not in items else None


def weighted_sum(ctx: Context, node: Node, rows: Rows, value: Any, names: Labels, others: Labels, out: Labels) -> Finding:
    """A contraction of rows with routing weights over the slots of a token (or over all experts)."""
    summed = [c for c in names if c not in out]
    if len(summed) != 1 or summed[0] not in others:
        return None
    full: Axes = rows.axes
    theirs = tuple(value.axes[others.index(c)] if c in others else () for c in names)
    if any(c not in names and real(value.axes[i]) for i, c in enumerate(others)):
        return ctx.lost("no-rule", node, op=ctx.calls[node].name)  # type: ignore[union-attr]
    domain = rows.domain
    if isinstance(value, Table):
        if domain.routing is not None and domain.routing is not value.routing:
            return None
        domain = replace(domain, routing=value.routing)
    weight = leaf(ctx, node, full, domain, replace(value, axes=theirs))
    if weight is None or isinstance(weight, SharedVector):
        return ctx.lost("tokens-differ", node, detail="the weights of the sum are not the routing weights of these rows")
    scaled = Rows(full, domain, Op(node, "mul", (rows.expr, weight)))
    order = [names.index(c) if c in names else None for c in out]
    left = tuple(full[i] if i is not None else () for i in order)
    return combined(ctx, node, scaled, full[names.index(summed[0])], left)


def summed_mask(ctx: Context, node: Node, mask: Mask, weight: View, names: Labels, others: Labels, out: Labels) -> Finding:
    """``einsum("tk,tke->te")``: weights times a one-hot mask, summed over the slots."""
    summed = [c for c in names if c not in out]
    if [a.kind for c in summed for a in mask.axes[names.index(c)]] != ["k"] or any(c not in names for c in others):
        return None
    theirs = tuple(weight.axes[others.index(c)] if c in others else () for c in names)
    product = masked_weight(ctx, node, replace(mask, axes=mask.axes), replace(weight, axes=theirs)) if mask.weight is None else None
    if product is None:
        return None
    return mask_table(ctx, node, product, tuple(mask.axes[names.index(c)] for c in out))


__all__ = ["Order", "contract", "on_einsum"]
