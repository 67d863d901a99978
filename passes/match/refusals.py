"""Which refusals the user reads: one for each routing, the one that explains most."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch.fx import Node

from moefuse.errors import message
from moefuse.passes.graph.calls import module_path, raw_name, tensor
from moefuse.passes.graph.named import named, operation
from moefuse.passes.graph.op_classes import SAME_NUMBER
from moefuse.passes.infer.state import Context
from moefuse.passes.ir.expr import Gate, has_linear, walk, weight_leaves
from moefuse.passes.ir.facts import Buffer, Lost, Many, Mask, Routing, RowNumber, Rows, Sum, Table
from moefuse.passes.match.families import Families, apart
from moefuse.passes.match.liveness import unread
from moefuse.passes.match.unexplained import choices, decided, of_tokens, weights_of
from moefuse.passes.rules import rule_of
from moefuse.program.breaks import resumed_at

#: what a sum looks like after one expert was lost on the way: the loss says more
_CONSEQUENCES = frozenset(("missing-experts", "experts-differ", "not-weighted", "ids-not-distinct"))

_BY_ROWS = frozenset(("not-row-local", "no-rule", "not-combined", "experts-differ", "tokens-differ", "threshold"))
"""What may be said of any rows that several weights compute."""
_TAKE = SAME_NUMBER | frozenset("index_select select eq where nonzero long unbind".split())
"""What takes some of given numbers and computes none."""
_FAR = 256
"""So many operations are looked at behind ids."""


def text_of(lost: Lost) -> str:
    """What the user reads of a refusal."""
    details = {"name": named(lost.node), "op": operation(lost.node), **lost.details}
    if lost.node.op == "call_function" and details["op"] == raw_name(lost.node):
        details["op"] = operation(lost.node)
    if lost.code == "no-rule" and rule_of(str(details["op"])) is not None:
        details["known"] = True
    return message(lost.code, details)


def refusals(ctx: Context, refused: list[tuple[Lost, Routing | None]], covered: set[Node]) -> list[Lost]:
    """The refusals of a graph in program order.

    Args:
        refused: sums that were refused, with their routing.
        covered: nodes of regions that were fused or refused after they were understood.
    """
    families = Families(ctx)
    out: dict[Any, Lost] = {}
    for lost, routing in refused:
        key = module_path(lost.node) if routing is None else families.of(routing)
        if key not in out or (lost.code == "sum-changed" and out[key].code in _CONSEQUENCES):
            out[key] = lost
        elif routing is not None and (put := apart(ctx, families, routing, out[key], lost)) is not None:
            out[key] = put
    sums = {id(lost) for lost in out.values()}
    ignored = covered | set(unread(ctx))  # no layer is missed there
    for node, fact in ctx.facts.items():
        # An alias that a write made stale is lost before that write; it only matters where it is read behind it.
        if isinstance(fact, Lost) and ctx.position[node] >= ctx.position[fact.node] and node not in ignored:
            key = families.around(node) or module_path(node)
            known = out.get(key)
            # What is done to a value outside of the experts is no reason that it is used there.
            same = known is not None and known.node is node and known.code != "value-escapes"
            earlier = known is not None and id(known) not in sums and ctx.position[fact.node] < ctx.position[known.node]
            by_turns = known is not None and known.code == "sum-changed" and "ways" in fact.details
            if known is None or same or by_turns or earlier or _follows(ctx, known, node) or _is_missing(families, known, node):
                out[key] = fact
    for node, routing in _ends(ctx, covered):
        end = None if routing is None else families.of(routing)
        known = out.get(end)
        if known is None or (known.code == "not-combined" and ctx.position[known.node] < ctx.position[node]):
            out[end] = Lost("not-combined", node)
    for key, lost in out.items():
        out[key] = _behind(ctx, families, key, lost)
    told = [lost for key, lost in out.items() if _of_experts(ctx, key, lost)]
    return sorted(told, key=lambda lost: ctx.position[lost.node])


def _of_experts(ctx: Context, key: Any, lost: Lost) -> bool:
    """Whether what was lost belongs to experts: rows that a choice decided about, and weights of their own for some of them."""
    if isinstance(key, Routing) and (key.choices == 1 or _of_relations(ctx, key)):
        return False  # one that is always chosen is no choice
    if not isinstance(key, Routing):
        # Members of an ensemble are computed like experts, and nothing decides between them.
        return lost.code not in _BY_ROWS | {"capacity"} or decided(ctx, lost.node)
    if lost.code in _BY_ROWS and of_tokens(ctx, key.node):
        return False
    rows = [f for f in ctx.facts.values() if isinstance(f, Rows) and f.domain.routing is key and has_linear(f.expr)]
    own: dict[Any, set[Node]] = defaultdict(set)
    for fact in rows:
        leaves = weight_leaves(fact.expr)
        if any(leaf.stacked or leaf.parts for leaf in leaves) or isinstance(fact.domain.expert, RowNumber) or fact.domain.expert is None:
            return True
        own[fact.domain.expert] |= {leaf.source for leaf in leaves}
    if not rows:
        return not _one_weight(ctx, key.node)
    return len(own) < 2 or len(set(map(frozenset, own.values()))) > 1


def _of_relations(ctx: Context, routing: Routing) -> bool:
    """Whether numbers say what rows are, and no score has chosen them: a kind for each row, from outside, as relations of a graph."""
    given = tensor(routing.node)
    if given is None or given.dim() != 1 or choices(ctx) or resumed_at(routing.node.meta.get("stack_trace") or ""):
        return False
    seen, stack = {routing.node}, [routing.node]
    while stack:
        node = stack.pop()
        call = ctx.calls.get(node)
        if node.op != "placeholder" and (call is None or call.name not in _TAKE):
            return False
        stack += [n for n in node.all_input_nodes if n not in seen]
        seen.update(node.all_input_nodes)
    return True


def _one_weight(ctx: Context, ids: Node) -> bool:
    """Whether the first products behind some ids have one and the same weight, several times: a layer for all groups, not one for each."""
    seen, stack, reads = {ids}, [ids], list[Node]()
    while stack and len(seen) < _FAR:
        for user in stack.pop().users:
            if user in seen or ctx.calls.get(user) is None:
                continue
            seen.add(user)
            weights = weights_of(ctx, user)
            reads += weights
            stack += [] if weights else [user]
    return len(reads) > 1 and len(set(reads)) == 1 and tensor(reads[0]).dim() == 2  # type: ignore[union-attr]


def _behind(ctx: Context, families: Families, key: Any, lost: Lost) -> Lost:
    """What is said of a layer in place of a refusal that comes of something which no rule has refused."""
    if isinstance(key, Routing) and lost.code in ("missing-experts", "sum-changed"):
        hidden = families.unread(key, lost.node)
        if hidden is not None:
            detail = f"no rule reads {named(hidden)}, by which rows of an expert are chosen"
            return Lost("tokens-differ", hidden, {"detail": detail})
        return families.elsewhere(key, lost) or lost
    if "at" in lost.details:
        return Lost(lost.code, lost.details["at"], {name: value for name, value in lost.details.items() if name != "at"})
    if lost.code == "no-rule" and lost.details.keys() == {"op"} and _of_routing(ctx, lost.node):
        made = f"an operation with {named(lost.node)}, which is made of the routing in a way that no rule reads"
        return Lost("no-rule", lost.node, {"how": made})
    return lost


def _of_routing(ctx: Context, node: Node) -> bool:
    """Whether an operation reads masks or weights of a routing, through others that no rule reads, and nothing that an expert computes."""
    seen, stack = {node}, [node]
    found = False
    while stack and len(seen) < _FAR:
        for n in stack.pop().all_input_nodes:
            fact = ctx.facts.get(n)
            if isinstance(fact, Rows) or (ctx.calls.get(n) is None and isinstance(tensor(n), torch.nn.Parameter)):
                return False
            found |= isinstance(fact, Mask | Table)
            if n not in seen and fact is None:
                seen.add(n)
                stack.append(n)
    return found


def _follows(ctx: Context, known: Lost, node: Node) -> bool:
    """Whether a refusal is what comes of an earlier loss."""
    if ctx.position[known.node] <= ctx.position[node]:
        return False
    return known.code in _CONSEQUENCES or (known.code == "sum-changed" and _leads_to(ctx, node, known.node))


def _is_missing(families: Families, known: Lost, node: Node) -> bool:
    """Whether rows are lost of an expert, or of a slot, that a sum is said to be without."""
    return known.code == "missing-experts" and "have" in known.details and families.are_others(node, known.details["have"])


def _leads_to(ctx: Context, node: Node, later: Node) -> bool:
    """Whether ``later`` is computed from a value: what is lost on the way to a sum is added to it as something else."""
    reached = {node}
    behind = sorted((n for n in ctx.calls if ctx.position[node] < ctx.position[n] <= ctx.position[later]), key=ctx.position.__getitem__)
    for n in behind:
        call = ctx.calls[n]
        target = call.targets if call is not None else ()
        if any(i in reached for i in n.all_input_nodes if i not in target):
            reached.add(n)
    return later in reached


def _ends(ctx: Context, covered: set[Node]) -> list[tuple[Node, Routing | None]]:
    """Rows of chosen experts that nothing with a fact reads."""
    out = []
    for node, fact in ctx.facts.items():
        if node in covered or not looks_like_experts(fact) or isinstance(fact, Many):
            continue
        if not any(
            u in covered or looks_like_experts(ctx.facts.get(u)) or isinstance(ctx.facts.get(u), Sum | Lost | Buffer) for u in node.users
        ):
            out.append((node, fact.domain.routing))
    return out


def looks_like_experts(fact: Any) -> bool:
    """Rows of chosen experts after a projection."""
    if isinstance(fact, Many):
        return any(looks_like_experts(f) for f in fact.items)
    if not isinstance(fact, Rows) or not has_linear(fact.expr):
        return False
    return fact.domain.name in ("selected", "slots", "sorted") or any(isinstance(e, Gate) for e in walk(fact.expr))
