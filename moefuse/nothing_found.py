"""Who asked for speed and gets none is told why: the last look at a call in which something was compiled, once it has run.

Only then is known what all frames of the call came to, those behind graph breaks included. Two questions: whether as many layers were fused
as ``options={"expect": N}`` says, and, where nothing was fused and nothing refused, whether the model is built like a mixture of experts
all the same (:mod:`moefuse.suspects`), and what in the way of its experts was.
"""

from __future__ import annotations

import re

from moefuse import _torch_private, history, pipeline
from moefuse.capture import entry
from moefuse.config import Options
from moefuse.errors import CODES, FusionError
from moefuse.opaque import NOTHING_CHOSEN, packing
from moefuse.report import FusionReport, Skipped
from moefuse.suspects import Suspect, suspects

LEFT = "an earlier torch.compile, of another model or backend, had Dynamo skip this code for all; call torch.compiler.reset() first"


def watch(options: Options, owner: object | None = None) -> None:
    """Look at the call around this compilation when it returns."""
    owner = _torch_private.torch_compile_call() if owner is None else owner
    call = _torch_private.running_call() if owner is not None else None
    if call is not None:
        call.at_end("moefuse.nothing_found", lambda: _look(call, options, owner))


def _look(call: _torch_private.RunningCall, options: Options, owner: object) -> None:
    report = history.report_of(owner)
    if report is None:
        return
    if options.expect is not None and options.expect != report.layers[0]:
        raise FusionError(f"options['expect'] is {options.expect}, and {report.layers[0]} layers were fused\n{report}")
    missed = missing(report, (call.function, *call.arguments), options)
    if missed:
        found = FusionReport(skipped=missed)
        history.record(found, owner, "nothing-found")
        pipeline.publish(found, options)


def missing(report: FusionReport, roots: tuple[object, ...], options: Options) -> list[Skipped]:
    """A refusal for each module of ``roots`` that is built like a mixture of experts, if a report says nothing about any."""
    if report.fused or report.skipped:
        return []
    wanted = (s for s in suspects(roots) if options.exclude is None or not re.search(options.exclude, s.name))
    return [_refusal(report, found) for found in wanted]


def _refusal(report: FusionReport, found: Suspect) -> Skipped:
    cause, location = _cause(report, found)
    return Skipped("nothing-found", CODES["nothing-found"].format(what=found.what, cause=cause), module=found.name, location=location)


def _cause(report: FusionReport, found: Suspect) -> tuple[str, str]:
    """(why nothing was found, where to look)."""
    file, lines = found.place
    own = f"{file}:{lines.start}" if file else ""
    packed = packing(found.module)
    if packed is not None:
        return packed, own
    if entry.left_by_another(found.module):
        return LEFT, own
    for stop in report.stops:
        place = stop.inside(file, lines)
        if place is not None:
            reason = stop.text.removesuffix(f" at {place}") + (f"; torch's hint: {stop.hint}" if stop.hint else "")
            return f"the graph breaks inside it ({reason}), and what is left in graphs is no whole layer", place
    texts = [text for text in report.opaque if text != NOTHING_CHOSEN]
    if texts:
        return texts[0], own
    breaks = report.graph_breaks or [stop.text for stop in report.stops]
    if breaks:
        return f"no graph holds its experts; Dynamo left the graph: {breaks[0]}", own
    if not report.graph_count:
        return "Dynamo made no graph of it", own
    if report.opaque:
        return NOTHING_CHOSEN, own
    return "no graph has its experts in it, or none in a form that moefuse reads", own


__all__ = ["missing", "watch"]
