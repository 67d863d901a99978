"""One region: the op that takes its place, lowered beside the original, gated, proved and put in. On any doubt the graph is as it was."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace as replaced
from typing import TYPE_CHECKING, Any

from torch.fx import Node

from moefuse import _torch_private
from moefuse.errors import UNCOUNTED, first_line
from moefuse.machine import environment
from moefuse.passes.encodings.part import Coded
from moefuse.passes.graph.assumptions import Assumption, Undischarged
from moefuse.passes.graph.builder import LAYERS, Emitter
from moefuse.passes.graph.calls import location, module_path, steps, traced_path
from moefuse.passes.infer.state import Context
from moefuse.passes.ir.expr import held_leaves
from moefuse.passes.ir.facts import Lost
from moefuse.passes.ir.regions import Region
from moefuse.passes.lower.coded import Packed
from moefuse.passes.lower.cost_gate import not_faster
from moefuse.passes.lower.devices import unsupported
from moefuse.passes.lower.held import UnsupportedError
from moefuse.passes.lower.lower import Lowered, Lowering
from moefuse.passes.lower.recompute import still_kept
from moefuse.passes.lower.record import remember
from moefuse.passes.lower.rewrite import replace
from moefuse.passes.lower.spread import Spread, sharding
from moefuse.passes.lower.workspace_size import workspace
from moefuse.passes.match import unhit_experts, whole_stacks
from moefuse.passes.match.coded_weights import Key, coded_weights, disproved
from moefuse.passes.match.encodings import needed
from moefuse.passes.match.refusals import text_of
from moefuse.passes.prove import backward
from moefuse.passes.prove.region_key import signature
from moefuse.passes.prove.surroundings import rounded
from moefuse.passes.prove.verify import Verdict, verify
from moefuse.program.steps import fold
from moefuse.report.entries import Fused, Skipped
from moefuse.report.quietly import quietly

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


@dataclass
class Run:
    options: Options
    assumptions: Sequence[Assumption] = ()
    breaks: bool = False
    looped: bool = False
    """Whether the graph is one layer, and that is faster as it is, with the graph breaks that it has."""
    result: GraphResult = field(default_factory=GraphResult)
    verdicts: dict[Any, Verdict] = field(default_factory=dict)
    numbers: dict[Node, int] = field(default_factory=dict)
    """The fused ops, and where the result says what they are."""
    seen: Callable[[Region], None] | None = None
    """Called with each region that an op takes the place of, as long as the graph still has its nodes."""
    proofs: backward.Proofs = field(default_factory=backward.Proofs)


def rewrite(ctx: Context, known: dict[Node, Any], run: Run, region: Region) -> Lost | None:
    """Put an op in the place of a region; what is in the way, if it stays."""
    if (unwanted := _unwanted(run, region)) is not None:
        return unwanted
    if run.options.quantised == "weights" and held_leaves(region.expr):
        region = replaced(region, unrounded=True)
    if (wrong := backward.disproved(ctx, region, known, run.proofs)) is not None:
        return wrong
    coded = _readable(ctx, region, known)
    if isinstance(coded, Lost):
        return coded
    emit = Emitter(ctx.graph, region.anchor.next, region.value, ctx.replaced)
    replacement = _Replacement(ctx, known, run, region, emit, coded, ctx.mode[region.anchor].grad)
    made = replacement.made()
    if isinstance(made, Lost):
        emit.undo()
        return made
    replacement.put_in(*made)
    return None


def _unwanted(run: Run, region: Region) -> Lost | None:
    """What the user does not want replaced."""
    options = run.options
    paths = (module_path(region.anchor), traced_path(region.anchor))
    if options.exclude is not None and any(re.search(options.exclude, path) for path in paths):
        return Lost("excluded", region.anchor)
    if options.max_rewrites is not None and len(run.result.fused) >= options.max_rewrites:
        return Lost("limit", region.anchor)
    return None


def _readable(ctx: Context, region: Region, known: dict[Node, Any]) -> Mapping[Key, Coded] | Lost:
    """The quantised weights that the op may read as they are held; a refusal where it would have to, and their reading is disproved."""
    coded = coded_weights(ctx, region)
    wrong = disproved(ctx, coded, known)
    if wrong is None:
        return coded
    if any(of.is_inner for of in coded.values()) or needed(ctx, region):
        return wrong
    whole_stacks.stay(ctx, region, wrong)
    return {}


Made = tuple[Lowered, Verdict | None]


@dataclass
class _Replacement:
    """What takes the place of one region, on its way there."""

    ctx: Context
    known: dict[Node, Any]
    run: Run
    region: Region
    emit: Emitter
    coded: Mapping[Key, Coded]
    grad: bool
    sharded: str = ""
    """What the report says of experts that are sharded over ranks."""

    def made(self) -> Made | Lost:
        """The op that is put in, and what was found of it, or of what computes the same with the weights that the program unpacks."""
        inner = {node: of for (node, _), of in self.coded.items() if of.is_inner}
        if inner:
            made = self._proved(Packed(self.region, self.emit, self.coded), inner)
        elif self.coded:  # no other op takes a tensor of a class of its own, so there is nothing to prove first
            made = self._packed(self._proved(Lowering(self.region, self.emit)))
        else:
            made = self._proved(Lowering(self.region, self.emit))
        return made if isinstance(made, Lost) else self._spread(*made)

    def _packed(self, proved: Made | Lost) -> Made | Lost:
        """The op that reads weights as they are held, instead of one that was proved with the weights that the program unpacks.

        Where it takes no such experts, what reads those: not where it would unpack more than the program does.
        """
        if isinstance(proved, Lost):
            return proved
        self.emit.undo()
        made = self._lowered(Packed(self.region, self.emit, self.coded), self.coded)
        if not isinstance(made, Lost):
            return made, proved[1]
        self.emit.undo()
        if needed(self.ctx, self.region):
            return made
        whole_stacks.stay(self.ctx, self.region, made)
        return self._proved(Lowering(self.region, self.emit))

    def _spread(self, lowered: Lowered, verdict: Verdict | None) -> Made:
        """Where experts are sharded over ranks: tokens travel to them, instead of their weights."""
        region, emit = self.region, self.emit
        try:
            where = sharding(region)
            if where is None:
                return lowered, verdict
            self.sharded = where.describe(region.num_experts)
            if where.gathers:
                return lowered, verdict
            emit.undo()
            spread = Spread(region, emit, where, self.grad, environment.workspace())
            new = spread.run()
            self.sharded += spread.travel(new.tier)
            return new, verdict
        except Exception as error:  # what was proved on all weights is right as it is, and only slower
            lost = Lost("experts-gathered", region.anchor, {"detail": first_line(error)})
            self.run.result.skipped.append(skipped(lost, region.anchor))
            emit.undo()
            self.sharded = ""
            return Lowering(region, emit).run(), verdict

    def _lowered(self, lowering: Lowering, coded: Mapping[Any, Coded]) -> Lowered | Lost:
        """The nodes of a replacement, if an op on this device takes it."""
        anchor = self.region.anchor
        try:
            lowered = lowering.run()
        except UnsupportedError as error:
            return self._no_such_op(coded, error)
        except Exception as error:  # a replacement that cannot be built is no reason to stop the user's program
            return Lost("not-lowered", anchor, {"detail": first_line(error)})
        elsewhere = unsupported(self.emit.nodes, self.grad)
        return lowered if elsewhere is None else Lost("device-unsupported", anchor, dict(zip(("device", "detail"), elsewhere, strict=True)))

    def _no_such_op(self, coded: Mapping[Any, Coded], error: UnsupportedError) -> Lost:
        leaves = held_leaves(self.region.expr)
        encodings = [c.encoding for c in coded.values()] or [leaf.held.encoding for leaf in leaves if leaf.held is not None]
        held = "; ".join(dict.fromkeys(encoding.describe() for encoding in encodings))
        return Lost("encoding-unsupported", self.region.anchor, {"dtype": held, "detail": str(error)})

    def _proved(self, lowering: Lowering, inner: Mapping[Node, Coded] | None = None) -> Made | Lost:
        """The replacement beside the original, if every gate lets it through, and what the verification found."""
        lowered = self._lowered(lowering, inner or {})
        if isinstance(lowered, Lost):
            return lowered
        slower = quietly(not_faster, self.region, self.emit.nodes, self.grad) if self.run.options.cost_gate else None
        if slower is None and self.run.looped:
            slower = {"count": self.region.all_experts}
        if slower is not None:
            return Lost("not-faster", self.region.anchor, slower)
        verdict = self._verdict(lowered, inner or {}) if self.run.options.verify != "off" else None
        return verdict if isinstance(verdict, Lost) else (lowered, verdict)

    def _verdict(self, lowered: Lowered, inner: Mapping[Node, Coded]) -> Verdict | Lost:
        """The verification of this region, or of an identical one."""
        ctx, region, run, nodes = self.ctx, self.region, self.run, self.emit.nodes
        key = signature(ctx, region, nodes, lowered.tier, self.known, run.assumptions)
        if key not in run.verdicts:
            try:
                run.verdicts[key] = verify(ctx, region, nodes, lowered.result, self.known, run.assumptions, inner)
            except Exception as error:  # whatever a user's region raises on synthetic tokens
                if isinstance(error, _torch_private.asks_for_size()):
                    return Lost("verification-error", region.anchor, {"detail": UNCOUNTED, "why": "uncounted"})
                return Lost("verification-error", region.anchor, {"detail": f"{type(error).__name__}: {first_line(error)}"})
        verdict = run.verdicts[key]
        if not verdict.problem:
            return verdict
        return rounded(region) or Lost("verification-failed", region.anchor, {"detail": verdict.problem})

    def put_in(self, lowered: Lowered, verdict: Verdict | None) -> None:
        """Let the program read the replacement, and report it."""
        ctx, region, run, nodes = self.ctx, self.region, self.run, self.emit.nodes
        anchor = region.anchor
        before, after = fold(steps(sorted(region.nodes, key=ctx.position.__getitem__))), fold(steps(nodes))
        if run.seen is not None:
            run.seen(region)
        quietly(remember, ctx, self.known, run.assumptions, region, self.emit, lowered)
        result = unhit_experts.without_tokens(region, run.assumptions, self.emit, lowered.result)
        replace(ctx, region, result)
        run.result.replaced.append((region, result))
        notes = still_kept(anchor, nodes, lowered.tier, self.grad) if run.options.recompute else []
        run.result.notes += [note for note in notes if note not in run.result.notes]
        run.numbers |= {n: len(run.result.fused) for n in nodes if n.target in LAYERS}
        size, tokens = workspace(nodes, self.grad) or (None, None)
        run.result.fused.append(
            Fused(
                module_path(anchor),
                location(anchor),
                lowered.spec,
                region.domain,
                lowered.tier,
                None if verdict is None else verdict.error,
                workspace=size,
                tokens=tokens,
                parallel=self.sharded,
                before=before,
                after=after,
            )
        )


def skipped(lost: Lost, anchor: Node | None = None) -> Skipped:
    """A refusal as the report has it; ``anchor``: the sum over experts that it is about."""
    combine = location(anchor) if anchor is not None else ""
    return Skipped(lost.code, text_of(lost), module_path(lost.node), location(lost.node), combine, cause=lost.details.get("why", ""))
