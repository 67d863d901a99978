"""The pipeline over a graph, bodies of higher-order operators first.

The graph is interpreted, and its sums over experts are lifted to regions. Each region is then lowered beside the original, gated (device,
cost, verification) and put in, in the order of the program; where any of that fails it stays as it was, and is reported. Behind all regions
what capture recorded is discharged and erased, shared experts and the router's top-k are joined, and the effects are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace as replaced
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Graph, GraphModule, Node

import moefuse.ops  # noqa: F401  (the ops that the rewrite inserts)
from moefuse import _torch_private
from moefuse.passes.block.router_topk import one_kernel
from moefuse.passes.block.shared_experts import join_shared
from moefuse.passes.graph.applied import Functions, opened
from moefuse.passes.graph.assumptions import Assumption, erase_dummies
from moefuse.passes.graph.masked_totals import Totals, under_masks
from moefuse.passes.graph.named import named
from moefuse.passes.graph.sharded import merge
from moefuse.passes.graph.siblings import keep
from moefuse.passes.infer.state import Context, Given, Standin
from moefuse.passes.ir.facts import Lost, Routing
from moefuse.passes.ir.regions import Refused, Region
from moefuse.passes.lower import dce
from moefuse.passes.lower.checkpoints import keep_results
from moefuse.passes.lower.cost_gate import looped
from moefuse.passes.lower.recompute import recompute
from moefuse.passes.lower.run_numbers import as_tensors
from moefuse.passes.match import lowrank, unhit_experts, whole_stacks, wide_products
from moefuse.passes.match.encodings import between
from moefuse.passes.match.gathered import standing
from moefuse.passes.match.input_sizes import interpreted
from moefuse.passes.match.lift import lift
from moefuse.passes.match.packed_uses import silent, told as explained
from moefuse.passes.match.refusals import refusals
from moefuse.passes.match.unexplained import choices, unexplained
from moefuse.passes.match.weight_reads import gathered
from moefuse.passes.prove import discharge
from moefuse.passes.prove.effects import Effects, EffectsDifferError, compare, effects
from moefuse.passes.prove.unconditional import unconditional
from moefuse.passes.replacement import GraphResult, Run, rewrite, skipped
from moefuse.report.entries import RejectedError, Skipped
from moefuse.report.quietly import quietly

if TYPE_CHECKING:
    from moefuse.config import Options


_OF_SOME = frozenset(("missing-experts", "tokens-differ", "threshold", "no-rule", "not-combined", "not-recognised", "experts-differ"))
"""What the experts of one process look like, of those that are spread over several."""


def fuse(
    gm: GraphModule,
    example_inputs: Sequence[object] | None,
    options: Options,
    assumptions: Sequence[Assumption] = (),
    breaks: bool = False,
    seen: Callable[[Region], None] | None = None,
) -> GraphResult:
    """Replace every mixture-of-experts region of a Dynamo-level graph, in place.

    Args:
        gm: the graph module, as a backend receives it.
        example_inputs: the real inputs in the order of the placeholders; None if unknown (then weights are synthetic when verifying).
        options: moefuse's options.
        assumptions: what capture assumed while it traced the graph; those that the fused regions do not discharge are in the result.
        breaks: without moefuse the graph would break where sizes depend on data.
        seen: called with each region that an op takes the place of, as long as the graph still has its nodes.
    """
    erase_dummies(gm)
    run = Run(options, assumptions, breaks, seen=seen)
    run.result.undischarged += discharge.out_of_sight(gm, assumptions)
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    known = dict(zip(placeholders, example_inputs, strict=False)) if example_inputs is not None else {}
    _fuse_module(gm, {n: v for n, v in known.items() if _is_real(v)}, run)
    if assumptions:
        run.result.undischarged += discharge.lost_track(gm, assumptions)
    if options.recompute and run.result.fused:
        recompute(gm)
    return run.result


def _is_real(value: object) -> bool:
    return not isinstance(value, _torch_private.FakeTensor)


def _fuse_module(gm: GraphModule, known: dict[Node, Any], run: Run) -> None:
    functions = opened(gm, run.assumptions)
    for body, inputs in _bodies(gm, known):
        _fuse_module(body, inputs, run)
    changed = _fuse_graph(gm, known, run, functions)
    if keep_results(gm) or changed:
        gm.graph.lint()
        gm.recompile()


def _bodies(gm: GraphModule, known: dict[Node, Any]) -> list[tuple[GraphModule, dict[Node, Any]]]:
    """Bodies of higher-order operators, with the values of the arguments they are called with."""
    out: dict[str, tuple[GraphModule, dict[Node, Any]]] = {}
    for node in gm.graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, _torch_private.HigherOrderOperator):
            continue
        rest = [a for a in node.args if not (isinstance(a, Node) and a.op == "get_attr")]
        operands = [b for a in rest for b in (a if isinstance(a, tuple | list) else (a,))]
        for attr in (a for a in node.args if isinstance(a, Node) and a.op == "get_attr"):
            body = getattr(gm, str(attr.target), None)
            if isinstance(body, GraphModule):
                names = [n for n in body.graph.nodes if n.op == "placeholder"]
                same = len(names) == len(operands)
                values = {n: known[a] for n, a in zip(names, operands, strict=True) if a in known} if same else {}
                out.setdefault(str(attr.target), (body, values))
    return list(out.values())


@dataclass
class _Graph:
    """One graph between its regions and its end."""

    gm: GraphModule
    known: dict[Node, Any]
    run: Run
    ctx: Context
    before: Effects
    claims: list[discharge.Claim]
    totals: Totals
    fused: list[Region]


def _fuse_graph(gm: GraphModule, known: dict[Node, Any], run: Run, functions: Functions) -> bool:
    """Whether the graph is another one now."""
    merge(gm.graph)
    totals = under_masks(gm.graph, run.assumptions)
    ctx, taken = standing(gm.graph, _given(gm.graph, run.assumptions, run.options.quantised != "off"), interpreted)
    ctx.scratch(Functions).found = functions.found
    before = effects(ctx)
    run.result.written = {
        n: w[0] for n in gm.graph.find_nodes(op="placeholder") for s in ctx.memory.storages(n) if (w := ctx.writes.get(s))
    }
    for node in gm.graph.nodes:
        if node.op == "get_attr" and isinstance(getattr(gm, str(node.target), None), torch.Tensor):
            known[node] = getattr(gm, str(node.target))
    claims = discharge.claims(ctx, run.assumptions)
    graph = _Graph(gm, known, run, ctx, before, claims, totals, _fuse_regions(ctx, known, run))
    for step in (_crossings, _discharge, _notes, _join):
        step(graph)
    taken.undo()
    for step in (_gathered, _compare):
        step(graph)
    functions.close(gm, ctx.now)
    if not graph.fused:
        totals.undo()
    return bool(graph.fused or run.assumptions or functions.found)


def _crossings(graph: _Graph) -> None:
    """Note whether memory that outlives the graph is written to between what was a fused region, or would have been one."""
    result = graph.run.result
    result.crossed |= any(_crossed(graph.ctx, region) for region in graph.fused) or any(s.code == "mutation" for s in result.skipped)


def _notes(graph: _Graph) -> None:
    ctx, fused, result = graph.ctx, graph.fused, graph.run.result

    def found() -> list[str]:
        sums = list(dict.fromkeys(lowrank.note(region) for region in fused if region.summed is not None))
        unhit = unhit_experts.notes(ctx, fused, graph.run.assumptions)
        return [*sums, *unhit, *wide_products.notes(ctx, fused), *whole_stacks.notes(ctx, fused)]

    result.notes += quietly(found, otherwise=list)
    result.notes += one_kernel(ctx.graph, graph.run.options) if fused else []


def _crossed(ctx: Context, region: Region) -> bool:
    """Whether what outlives the graph is written to between the nodes of a region, or behind it while backward is to come.

    The op keeps its tokens for its gradients, and the program may keep gathered rows of them, which no write reaches.
    """
    low, high = min(map(ctx.position.__getitem__, region.nodes)), ctx.position[region.anchor]
    positions = [ctx.position[w] for name, writes in ctx.writes.items() if ctx.memory.outlives(name) for w in writes]
    return any(low < at and (at < high or region.trained) for at in positions)


def _gathered(graph: _Graph) -> None:
    """Say where the weights of sharded experts are gathered after all: once for each module that they belong to."""
    result = graph.run.result
    lost, notes = gathered(graph.gm, {known.module for known in result.skipped if known.code == "experts-gathered"})
    result.skipped += map(skipped, lost)
    result.notes += notes


def _fuse_regions(ctx: Context, known: dict[Node, Any], run: Run) -> list[Region]:
    """Replace the regions that can be, in the order of the program, and report the others."""
    refused: list[tuple[Lost, Routing | None]] = []
    anchors: dict[int, Node | None] = {}
    covered: set[Node] = set()
    fused: list[Region] = []
    every = sorted(lift(ctx), key=lambda f: ctx.position[f.lost.node if isinstance(f, Refused) else f.anchor])
    alone = every[0] if len(every) == 1 else None
    run.looped = run.breaks and run.options.cost_gate and isinstance(alone, Region) and looped(ctx, alone)
    for found in every:
        if isinstance(found, Refused):
            refused.append((found.lost, found.routing))
            anchors[id(found.lost)] = found.anchor
            continue
        covered |= found.nodes
        problem = rewrite(ctx, known, run, found)
        if problem is not None and found.whole is not None:
            found = lowrank.summed_up(ctx, found, problem)
            problem = rewrite(ctx, known, run, found)
        if problem is None:
            fused.append(found)
        else:
            refused.append((problem, found.routing))
            anchors[id(problem)] = found.anchor
    told = quietly(refusals, ctx, refused, covered, otherwise=[lost for lost, _ in refused])
    if any(lost.code in _OF_SOME for lost in told) and (apart := between(ctx, choices(ctx))) is not None:
        told = [apart, *(lost for lost in told if lost.code not in _OF_SOME)]
    places = (*(lost.node for lost in told), *(region.anchor for region in fused))
    packed = quietly(lambda: list(silent(ctx, places)), otherwise=list)
    plain = [(lost, lost) for lost in told]
    run.result.skipped += [
        skipped(said, anchors.get(id(lost))) for lost, said in quietly(lambda: list(explained(ctx, told)), otherwise=plain)
    ]
    run.result.skipped += map(skipped, packed)
    if not fused and not refused and not run.result.skipped:
        run.result.skipped += quietly(_unexplained, ctx, otherwise=list)
    return fused


def _unexplained(ctx: Context) -> list[Skipped]:
    unknown = unexplained(ctx)
    return [] if unknown is None else [skipped(said) for _, said in explained(ctx, [unknown])]


def _discharge(graph: _Graph) -> None:
    """Erase what is left of captured loops; what the fused regions do not discharge goes into the result."""
    ctx, run, fused = graph.ctx, graph.run, graph.fused
    counted = bool(fused) and as_tensors(ctx)
    if not run.assumptions:
        if counted or graph.totals.found:
            dce.erase(ctx, set())
        return
    for kept in ctx.graph.find_nodes(op="call_function", target=keep):
        ctx.graph.erase_node(kept)
    harmless = unconditional(ctx, graph.claims) if fused else set()
    dce.erase(ctx, {n for claim in graph.claims for n in claim.assumption.nodes})
    run.result.undischarged += discharge.undischarged(ctx, graph.claims, fused, harmless)


def _given(graph: Graph, assumptions: Sequence[Assumption], packed: bool) -> Given:
    """What capture says of one graph."""
    sizes = [a.subject if isinstance(a.subject, tuple) else (a.subject,) for a in assumptions if a.kind == "size"]
    return Given(
        {a.row_node: a.members for a in assumptions if a.row_node is not None and a.graph is graph},
        {a.row_node: a for a in assumptions if a.row_node is not None and a.siblings},
        {symbol for some in sizes for symbol in some},
        frozenset(node for a in assumptions if a.graph is graph and a.kind != "end" and not a.dummy for node in a.nodes),
        packed,
        frozenset(node for a in assumptions if a.graph is graph and a.kind in ("row", "element") for node in a.nodes),
    )


def _compare(graph: _Graph) -> None:
    """The graph has the effects that it had; else none of its rewrites may stay, for nobody knows which one is wrong."""
    if not graph.fused and not graph.run.assumptions:
        return
    try:
        compare(graph.ctx, graph.before)
    except EffectsDifferError as error:
        details = {"name": named(error.node), "detail": error.detail}
        raise RejectedError(skipped(Lost("effects-differ", error.node, details))) from error


def _join(graph: _Graph) -> None:
    """Have shared experts run beside the router."""
    ctx, run = graph.ctx, graph.run
    if not graph.fused or not run.options.overlap:
        return
    for joined in join_shared(ctx.graph, graph.known, run.options.overlap, run.options.verify != "off"):
        ctx.results[joined.result] = Standin((joined.add,), frozenset((joined.add,)))
        ctx.memory.introduce(joined.result, joined.add)
        at = run.numbers[joined.experts]
        entry = run.result.fused[at]
        error = max(entry.error or 0.0, joined.error or 0.0) if joined.error else entry.error
        run.result.fused[at] = replaced(entry, shared=True, error=error)


__all__ = ["GraphResult", "fuse"]
