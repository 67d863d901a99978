"""The pipeline over a graph, bodies of higher-order operators first.

The graph is interpreted, and its sums over experts are lifted to regions. Each region is then lowered beside the original, gated (device,
cost, verification) and put in, in the order of the program; where any of that fails it stays as it was, and is reported. Behind all regions
what capture recorded is discharged and erased, shared experts and the router's top-k are joined, and the effects are compared.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace as replaced
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Graph, GraphModule, Node

import moefuse.ops  # noqa: F401  (the ops that the rewrite inserts)
from moefuse import _torch_private
from moefuse.errors import UNCOUNTED, first_line
from moefuse.machine import environment
from moefuse.passes.block.router_topk import one_kernel
from moefuse.passes.block.shared_experts import join_shared
from moefuse.passes.encodings.part import Coded
from moefuse.passes.graph.applied import Functions, opened
from moefuse.passes.graph.assumptions import Assumption, Undischarged, erase_dummies
from moefuse.passes.graph.builder import Emitter
from moefuse.passes.graph.calls import location, module_path, steps, traced_path
from moefuse.passes.graph.masked_totals import under_masks
from moefuse.passes.graph.named import named
from moefuse.passes.graph.sharded import merge, sweep
from moefuse.passes.graph.siblings import keep
from moefuse.passes.infer.state import Context, Given, Standin
from moefuse.passes.ir.expr import held_leaves
from moefuse.passes.ir.facts import Lost, Routing
from moefuse.passes.ir.regions import Refused, Region
from moefuse.passes.lower import dce
from moefuse.passes.lower.checkpoints import keep_results
from moefuse.passes.lower.coded import Apart, Packed
from moefuse.passes.lower.cost_gate import looped, not_faster
from moefuse.passes.lower.devices import unsupported
from moefuse.passes.lower.held import UnsupportedError
from moefuse.passes.lower.lower import Lowered, Lowering
from moefuse.passes.lower.recompute import recompute, still_kept
from moefuse.passes.lower.record import remember
from moefuse.passes.lower.rewrite import replace
from moefuse.passes.lower.run_numbers import as_tensors
from moefuse.passes.lower.spread import Spread, sharding
from moefuse.passes.lower.workspace_size import workspace
from moefuse.passes.match import lowrank, unhit_experts, whole_stacks, wide_products
from moefuse.passes.match.coded_weights import Key, coded_weights, disproved
from moefuse.passes.match.encodings import between, needed
from moefuse.passes.match.gathered import standing
from moefuse.passes.match.input_sizes import interpreted
from moefuse.passes.match.lift import lift
from moefuse.passes.match.packed_uses import silent, told as explained
from moefuse.passes.match.refusals import refusals, text_of
from moefuse.passes.match.unexplained import choices, unexplained
from moefuse.passes.prove import backward, discharge
from moefuse.passes.prove.effects import Effects, EffectsDifferError, compare, effects
from moefuse.passes.prove.region_key import signature
from moefuse.passes.prove.surroundings import rounded
from moefuse.passes.prove.unconditional import unconditional
from moefuse.passes.prove.verify import Verdict, verify
from moefuse.program.steps import fold
from moefuse.report.entries import Fused, RejectedError, Skipped
from moefuse.report.quietly import quietly
from moefuse.runtime.groups import Terms

if TYPE_CHECKING:
    from moefuse.config import Options


@dataclass
class GraphResult:
    """What happened to one graph."""

    fused: list[Fused] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    undischarged: list[Undischarged] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    replaced: list[tuple[Region, Node]] = field(default_factory=list)
    """The fused regions, and the nodes that hold their results."""
    written: dict[Node, Node] = field(default_factory=dict)
    """The graph's inputs to whose memory it writes, and where it does so first."""
    crossed: bool = False
    """Whether it does so between what was a fused region, which is one op at its end now; or would be, and is refused for that."""


_OF_SOME = frozenset(("missing-experts", "tokens-differ", "threshold", "no-rule", "not-combined", "not-recognised", "experts-differ"))
"""What the experts of one process look like, of those that are spread over several."""


@dataclass
class _Run:
    options: Options
    assumptions: Sequence[Assumption] = ()
    breaks: bool = False
    looped: bool = False
    """Whether the graph is one layer, and that is faster as it is, with the graph breaks that it has."""
    result: GraphResult = field(default_factory=GraphResult)
    verdicts: dict[Any, Verdict] = field(default_factory=dict)
    numbers: dict[Node, int] = field(default_factory=dict)
    """The fused ops, and where the result says what they are."""
    proofs: backward.Proofs = field(default_factory=backward.Proofs)


def fuse(
    gm: GraphModule,
    example_inputs: Sequence[object] | None,
    options: Options,
    assumptions: Sequence[Assumption] = (),
    breaks: bool = False,
) -> GraphResult:
    """Replace every mixture-of-experts region of a Dynamo-level graph, in place.

    Args:
        gm: the graph module, as a backend receives it.
        example_inputs: the real inputs in the order of the placeholders; None if unknown (then weights are synthetic when verifying).
        options: moefuse's options.
        assumptions: what capture assumed while it traced the graph; those that the fused regions do not discharge are in the result.
        breaks: without moefuse the graph would break where sizes depend on data.
    """
    erase_dummies(gm)
    run = _Run(options, assumptions, breaks)
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


def _fuse_module(gm: GraphModule, known: dict[Node, Any], run: _Run) -> None:
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


def _fuse_graph(gm: GraphModule, known: dict[Node, Any], run: _Run, functions: Functions) -> bool:
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
    fused = _fuse_regions(ctx, known, run)
    run.result.crossed |= any(_crossed(ctx, region) for region in fused) or any(s.code == "mutation" for s in run.result.skipped)
    counted = bool(fused) and as_tensors(ctx)
    if run.assumptions:
        _discharge(ctx, run, claims, fused)
    elif counted or totals.found:
        dce.erase(ctx, set())
    run.result.notes += quietly(_notes, ctx, fused, run.assumptions, otherwise=list)
    run.result.notes += one_kernel(gm.graph, run.options) if fused else []
    if fused and run.options.overlap:
        _join(ctx, known, run)
    taken.undo()
    _gathered(gm.graph, run)
    if fused or run.assumptions:
        _compare(ctx, before)
    functions.close(gm, ctx.now)
    if not fused:
        totals.undo()
    return bool(fused) or bool(run.assumptions) or bool(functions.found)


def _notes(ctx: Context, fused: list[Region], assumptions: Sequence[Assumption]) -> list[str]:
    found = list(dict.fromkeys(lowrank.note(region) for region in fused if region.summed is not None))
    return [*found, *unhit_experts.notes(ctx, fused, assumptions), *wide_products.notes(ctx, fused), *whole_stacks.notes(ctx, fused)]


def _crossed(ctx: Context, region: Region) -> bool:
    """Whether what outlives the graph is written to between the nodes of a region, or behind it while backward is to come.

    The op keeps its tokens for its gradients, and the program may keep gathered rows of them, which no write reaches.
    """
    low, high = min(map(ctx.position.__getitem__, region.nodes)), ctx.position[region.anchor]
    positions = [ctx.position[w] for name, writes in ctx.writes.items() if ctx.memory.outlives(name) for w in writes]
    return any(low < at and (at < high or region.trained) for at in positions)


def _gathered(graph: Graph, run: _Run) -> None:
    """Say where the weights of sharded experts are gathered after all: once for each module that they belong to."""
    told = {skipped.module for skipped in run.result.skipped if skipped.code == "experts-gathered"}
    for call in sweep(graph):
        reader = min(call.users, key=lambda n: not location(n))
        wanted = Terms.parse(call.args[-1]).transport == "gather"  # type: ignore[arg-type]
        if not wanted and module_path(reader) not in told:
            told.add(module_path(reader))
            run.result.skipped.append(_skipped(Lost("experts-gathered", reader, {"detail": "nothing was fused that reads them"})))


def _fuse_regions(ctx: Context, known: dict[Node, Any], run: _Run) -> list[Region]:
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
        problem = _rewrite(ctx, known, run, found)
        if problem is not None and found.whole is not None:
            found = lowrank.summed_up(ctx, found, problem)
            problem = _rewrite(ctx, known, run, found)
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
        _skipped(said, anchors.get(id(lost))) for lost, said in quietly(lambda: list(explained(ctx, told)), otherwise=plain)
    ]
    run.result.skipped += map(_skipped, packed)
    if not fused and not refused and not run.result.skipped:
        run.result.skipped += quietly(_unexplained, ctx, otherwise=list)
    return fused


def _unexplained(ctx: Context) -> list[Skipped]:
    unknown = unexplained(ctx)
    return [] if unknown is None else [_skipped(said) for _, said in explained(ctx, [unknown])]


def _discharge(ctx: Context, run: _Run, claims: list[discharge.Claim], fused: list[Region]) -> None:
    """Erase what is left of captured loops; what the fused regions do not discharge goes into the result."""
    for kept in ctx.graph.find_nodes(op="call_function", target=keep):
        ctx.graph.erase_node(kept)
    harmless = unconditional(ctx, claims) if fused else set()
    dce.erase(ctx, {n for claim in claims for n in claim.assumption.nodes})
    run.result.undischarged += discharge.undischarged(ctx, claims, fused, harmless)


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


def _compare(ctx: Context, before: Effects) -> None:
    """The graph has the effects that it had; else none of its rewrites may stay, for nobody knows which one is wrong."""
    try:
        compare(ctx, before)
    except EffectsDifferError as error:
        details = {"name": named(error.node), "detail": error.detail}
        raise RejectedError(_skipped(Lost("effects-differ", error.node, details))) from error


def _rewrite(ctx: Context, known: dict[Node, Any], run: _Run, region: Region) -> Lost | None:
    """Lower, gate and replace one region; on any doubt the graph is as it was."""
    unwanted = _unwanted(run, region)
    if unwanted is not None:
        return unwanted
    if run.options.quantised == "weights" and held_leaves(region.expr):
        region = replaced(region, unrounded=True)
    wrong = backward.disproved(ctx, region, known, run.proofs)
    if wrong is not None:
        return wrong
    coded = coded_weights(ctx, region)
    held = {node: of for (node, _), of in coded.items() if of.is_inner}
    wrong = disproved(ctx, coded, known)
    if wrong is not None and (held or needed(ctx, region)):
        return wrong
    if wrong is not None:
        whole_stacks.stay(ctx, region, wrong)
        coded = {}
    emit = Emitter(ctx.graph, region.anchor.next, region.value, ctx.replaced)
    lowering = Packed(region, emit, coded) if held else Apart(region, emit) if coded else Lowering(region, emit)
    made = _lowered(ctx, known, run, region, emit, lowering, held)
    if isinstance(made, Lost):
        emit.undo()
        return made
    if coded and not held:  # no other op takes a tensor of a class of its own, so there is nothing to prove first
        made = _packed(ctx, known, run, region, emit, coded, made[1])
        if isinstance(made, Lost):
            emit.undo()
            return made
    made, sharded = _spread(run, region, emit, *made, ctx.mode[region.anchor].grad)
    _put_in(ctx, known, run, region, emit, *made, sharded)
    return None


def _packed(
    ctx: Context, known: dict[Node, Any], run: _Run, region: Region, emit: Emitter, coded: Mapping[Key, Coded], verdict: Verdict | None
) -> tuple[Lowered, Verdict | None] | Lost:
    """The op that reads weights as they are held, instead of one that was proved with the weights that the program unpacks.

    Where it takes no such experts, what reads those: not where it would unpack more than the program does.
    """
    emit.undo()
    made = _as_held(ctx, region, emit, coded)
    if not isinstance(made, Lost):
        return made, verdict
    emit.undo()
    if needed(ctx, region):
        return made
    whole_stacks.stay(ctx, region, made)
    return _lowered(ctx, known, run, region, emit, Lowering(region, emit), {})


def _as_held(ctx: Context, region: Region, emit: Emitter, coded: Mapping[Key, Coded]) -> Lowered | Lost:
    try:
        made = Packed(region, emit, coded).run()
    except UnsupportedError as error:
        return _no_such_op(region, coded.values(), error)
    except Exception as error:
        return Lost("not-lowered", region.anchor, {"detail": first_line(error)})
    elsewhere = unsupported(emit.nodes, ctx.mode[region.anchor].grad)
    if elsewhere is not None:
        return Lost("device-unsupported", region.anchor, dict(zip(("device", "detail"), elsewhere, strict=True)))
    return made


def _no_such_op(region: Region, coded: Iterable[Coded], error: UnsupportedError) -> Lost:
    encodings = [c.encoding for c in coded] or [leaf.held.encoding for leaf in held_leaves(region.expr) if leaf.held is not None]
    held = "; ".join(dict.fromkeys(encoding.describe() for encoding in encodings))
    return Lost("encoding-unsupported", region.anchor, {"dtype": held, "detail": str(error)})


def _spread(
    run: _Run, region: Region, emit: Emitter, lowered: Lowered, verdict: Verdict | None, grad: bool
) -> tuple[tuple[Lowered, Verdict | None], str]:
    """Where experts are sharded over ranks: tokens travel to them, instead of their weights; and what the report says of it."""
    try:
        where = sharding(region)
        if where is None or where.gathers:
            return (lowered, verdict), "" if where is None else where.describe(region.num_experts)
        emit.undo()
        spread = Spread(region, emit, where, None if grad else environment.workspace())
        new = spread.run()
        return (new, verdict), where.describe(region.num_experts) + spread.travel(new.tier)
    except Exception as error:  # what was proved on all weights is right as it is, and only slower
        lost = Lost("experts-gathered", region.anchor, {"detail": first_line(error)})
        run.result.skipped.append(_skipped(lost, region.anchor))
        emit.undo()
        return (Lowering(region, emit).run(), verdict), ""


def _unwanted(run: _Run, region: Region) -> Lost | None:
    """What the user does not want replaced."""
    options = run.options
    paths = (module_path(region.anchor), traced_path(region.anchor))
    if options.exclude is not None and any(re.search(options.exclude, path) for path in paths):
        return Lost("excluded", region.anchor)
    if options.max_rewrites is not None and len(run.result.fused) >= options.max_rewrites:
        return Lost("limit", region.anchor)
    return None


def _lowered(
    ctx: Context, known: dict[Node, Any], run: _Run, region: Region, emit: Emitter, lowering: Lowering, held: Mapping[Node, Coded]
) -> tuple[Lowered, Verdict | None] | Lost:
    """The replacement beside the original, if every gate lets it through, and what the verification found."""
    anchor = region.anchor
    try:
        lowered = lowering.run()
    except UnsupportedError as error:
        return _no_such_op(region, held.values(), error)
    except Exception as error:  # a replacement that cannot be built is no reason to stop the user's program
        return Lost("not-lowered", anchor, {"detail": first_line(error)})
    elsewhere = unsupported(emit.nodes, ctx.mode[anchor].grad)
    if elsewhere is not None:
        return Lost("device-unsupported", anchor, dict(zip(("device", "detail"), elsewhere, strict=True)))
    slower = quietly(not_faster, region, emit.nodes, ctx.mode[anchor].grad) if run.options.cost_gate else None
    if slower is None and run.looped:
        slower = {"count": region.all_experts}
    if slower is not None:
        return Lost("not-faster", anchor, slower)
    verdict = _verdict(ctx, known, run, region, emit, lowered, held)
    return verdict if isinstance(verdict, Lost) else (lowered, verdict)


def _put_in(
    ctx: Context, known: dict[Node, Any], run: _Run, region: Region, emit: Emitter, lowered: Lowered, verdict: Verdict | None, sharded: str
) -> None:
    """Let the program read the replacement, and report it."""
    anchor = region.anchor
    before = fold(steps(sorted(region.nodes, key=ctx.position.__getitem__)))
    after = fold(steps(emit.nodes))
    quietly(remember, ctx, known, run.assumptions, region, emit, lowered)
    result = unhit_experts.without_tokens(region, run.assumptions, emit, lowered.result)
    replace(ctx, region, result)
    run.result.replaced.append((region, result))
    notes = still_kept(anchor, emit.nodes, lowered.tier, ctx.mode[anchor].grad) if run.options.recompute else []
    run.result.notes += [note for note in notes if note not in run.result.notes]
    measured = None if verdict is None else verdict.error
    run.numbers |= {n: len(run.result.fused) for n in emit.nodes if n.target is torch.ops.moefuse.experts.default}
    size, tokens = workspace(emit.nodes, ctx.mode[anchor].grad) or (None, None)
    place = (module_path(anchor), location(anchor))
    run.result.fused.append(
        Fused(
            *place,
            lowered.spec,
            region.domain,
            lowered.tier,
            measured,
            workspace=size,
            tokens=tokens,
            parallel=sharded,
            before=before,
            after=after,
        )
    )


def _join(ctx: Context, known: dict[Node, Any], run: _Run) -> None:
    for joined in join_shared(ctx.graph, known, run.options.overlap or 0, run.options.verify != "off"):
        ctx.results[joined.result] = Standin((joined.add,), frozenset((joined.add,)))
        ctx.memory.introduce(joined.result, joined.add)
        at = run.numbers[joined.experts]
        entry = run.result.fused[at]
        run.result.fused[at] = replaced(
            entry, shared=True, error=max(entry.error or 0.0, joined.error or 0.0) if joined.error else entry.error
        )


def _verdict(
    ctx: Context, known: dict[Node, Any], run: _Run, region: Region, emit: Emitter, lowered: Lowered, held: Mapping[Node, Coded]
) -> Verdict | Lost | None:
    """The verification of this region, or of an identical one; None when switched off."""
    if run.options.verify == "off":
        return None
    key = signature(ctx, region, emit.nodes, lowered.tier, known, run.assumptions)
    if key not in run.verdicts:
        try:
            run.verdicts[key] = verify(ctx, region, emit.nodes, lowered.result, known, run.assumptions, held)
        except Exception as error:  # whatever a user's region raises on synthetic tokens
            if isinstance(error, _torch_private.asks_for_size()):
                return Lost("verification-error", region.anchor, {"detail": UNCOUNTED})
            return Lost("verification-error", region.anchor, {"detail": f"{type(error).__name__}: {first_line(error)}"})
    verdict = run.verdicts[key]
    if not verdict.problem:
        return verdict
    return rounded(region) or Lost("verification-failed", region.anchor, {"detail": verdict.problem})


def _skipped(lost: Lost, anchor: Node | None = None) -> Skipped:
    """A refusal as the report has it; ``anchor``: the sum over experts that it is about."""
    return Skipped(lost.code, text_of(lost), module_path(lost.node), location(lost.node), location(anchor) if anchor is not None else "")


__all__ = ["GraphResult", "fuse"]
