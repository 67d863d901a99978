"""The last look at a graph before it is compiled: whether what was assumed of data and of memory while it was traced holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from moefuse import _torch_private
from moefuse.capture.dynamo import relations
from moefuse.capture.dynamo.control import environment
from moefuse.capture.frame import Frame
from moefuse.capture.ledger import refusals
from moefuse.config import Options
from moefuse.errors import message
from moefuse.passes.graph.assumptions import Undischarged
from moefuse.passes.graph.symbols import unbacked_in
from moefuse.pipeline.publish import USER_DECIDED, may_wait, raise_strict
from moefuse.program.runs import Begun
from moefuse.report.entries import Skipped
from moefuse.report.report import FusionReport


def related(frame: Frame, gm: torch.fx.GraphModule, result: Any, report: FusionReport, options: Options) -> Skipped | None:
    """Settle what was assumed of data and of memory; why the graph has to be put back, for the latter."""
    if (inference := _in_inference(result)) is not None:
        return inference
    frame.crossed = result.crossed
    overlap = _overlap(frame, gm, result.written)
    if overlap is not None and (result.crossed or frame.assumptions):
        return overlap
    settle(frame, gm, report, result.undischarged if frame.assumptions else [], options)
    if overlap is not None and frame.joins(environment()):  # nothing was assumed of experts, or fused
        frame.retreat([], report.skipped, why=overlap.message)
    return _old_values(frame, gm, result)


def _old_values(frame: Frame, gm: torch.fx.GraphModule, result: Any) -> Skipped | None:
    """Have gradients see what inputs were before a graph of ours writes to them; why they cannot."""
    from moefuse.passes.graph.calls import location, module_path
    from moefuse.passes.graph.named import named
    from moefuse.passes.lower.old_values import gains_gradients, keep

    if not torch.is_grad_enabled() or not (result.fused or frame.joins(environment())):
        return None
    node, detail = gains_gradients(result.written), {"into": "the next call"}
    if node is None:
        node, detail = keep(gm, result.written), {"before": "what else lies in its memory"}
    if node is None:
        return None
    text = message("mutation", {"name": named(node), **detail})
    return Skipped("mutation", text, module_path(result.written[node]), location(result.written[node]))


def _in_inference(result: Any) -> Skipped | None:
    """The refusal of experts whose gradients are recorded in a call under inference mode: autograd cannot keep that call's own tensors."""
    call = _torch_private.running_call()
    begun = None if call is None else call.held(Begun)
    if begun is None or not begun.inference or not any(region.trained for region, _ in result.replaced):
        return None
    detail = "the call is under inference mode, and gradients of the experts are recorded"
    return Skipped("context-differs", message("context-differs", {"detail": detail}), result.fused[0].module, result.fused[0].location)


_UNSEEN = "it lies in the memory of {other}, and torch takes them for apart (one memory in two storages, as NumPy's views of an array are)"
_UNASKED = "no guard can tell that in each call ({why})"


def _overlap(frame: Frame, gm: torch.fx.GraphModule, written: Mapping[Node, Node]) -> Skipped | None:
    """The refusal of a graph that writes to an input of which nothing, or nothing true, is known of what else lies in its memory.

    What is known, the frame guards: the code is for calls whose inputs lie like this.
    """
    from moefuse.passes.graph.calls import location, module_path
    from moefuse.passes.graph.named import named

    frame.related = relations.given(gm, written)
    if len(frame.related) < 2:
        frame.related = []
        return None
    name, detail = frame.related[0].node, ""
    if (met := relations.unseen(frame.related)) is not None:
        name, detail = met[0], _UNSEEN.format(other=named(met[1]))
    elif frame.ledger.unrelated:
        name, detail = next(iter(written)), _UNASKED.format(why=frame.ledger.unrelated)
    if not detail:
        return None
    details = {"name": named(name), "detail": detail}
    return Skipped("overlap", message("overlap", details), module_path(written[name]), location(written[name]))


def settle(frame: Frame, gm: torch.fx.GraphModule, report: FusionReport, undischarged: list[Undischarged], options: Options) -> None:
    """The last look before the graph is compiled: every assumption is discharged, and no size is left that only moefuse made traceable."""
    if frame.flags and frame.registering and _repeats_a_write(gm):
        frame.registers(None, REPEATS)
    problems = undischarged if frame.assumptions else []
    left = _left(gm) if frame.traces_data else None
    if left is not None:
        # Tokens are drawn in some number for the check. Where the graph breaks instead, that number is known, and the check is made.
        report.skipped = [skipped for skipped in report.skipped if skipped.cause != "uncounted"]
        report.skipped += _beside_fused(_beside_experts(gm), report) if report.fused and not report.skipped else []
    if problems and report.fused and not report.skipped:
        report.skipped += _beside_fused(refusals(problems) or refusals(problems, of_any=True), report)
    if problems or left is not None:
        if options.strict and not (frame.flags and report.skipped and all(map(may_wait, report.skipped))):
            # Instead of another attempt, which would break the graph where this says.
            report.skipped += [] if report.skipped else refusals(problems)
            if any(skipped.code not in USER_DECIDED for skipped in report.skipped):
                raise_strict(report)
        frame.retreat(problems, report.skipped, why=left or "")
    frame.settled |= set(frame.assumptions)


def _beside_fused(found: list[Skipped], report: FusionReport) -> list[Skipped]:
    """Refusals of numbers that the program reads for itself, in a graph whose experts are all understood.

    Those may be fused behind the break; if they are, at the end of the call, the break is all that is to say.
    """
    places = {fused.location for fused in report.fused}
    combine = places.pop() if len(places) == 1 else ""
    return [replace(skipped, combine=combine) for skipped in found]


def _beside_experts(gm: torch.fx.GraphModule) -> list[Skipped]:
    """What uses the rows of experts that were fused, so that their sizes are left."""
    from moefuse.passes.prove.beside import beside

    found = beside(gm.graph)
    return [] if found is None else [found]


REPEATS = "a function that is run again in backward writes to what was there before"


def _left(gm: torch.fx.GraphModule) -> str | None:
    """What a graph that only moefuse made traceable must not have."""
    if has_data_dependent_sizes(gm):
        return "sizes that depend on data are left in the graph"
    return REPEATS if _repeats_a_write(gm) else None


def _repeats_a_write(gm: torch.fx.GraphModule) -> bool:
    """Whether a checkpoint writes. In eager, and so in pieces of a broken graph, it runs twice; in one graph it does not write again."""
    from moefuse.passes.graph.writes import repeats_a_write

    return repeats_a_write(gm)


def has_data_dependent_sizes(gm: torch.fx.GraphModule) -> bool:
    """Whether some value of the graph, or of a body in it, has a size that only the run knows; how many tokens come from other ranks
    is one that moefuse put there."""
    from moefuse.passes.graph.builder import SIZED_BY_THE_RUN

    nodes = [n for module in gm.modules() if isinstance(module, torch.fx.GraphModule) for n in module.graph.nodes]
    sizes = [unbacked_in(n.meta.get("example_value")) for n in nodes]
    arrived = {s for n, found in zip(nodes, sizes, strict=True) if n.target in SIZED_BY_THE_RUN for s in found}
    return any(found - arrived for found in sizes)
