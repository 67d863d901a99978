"""What every way into moefuse does with one graph: fuse, or leave it untouched and say why."""

from __future__ import annotations

import logging
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from moefuse import _torch_private
from moefuse.capture.dynamo import order
from moefuse.capture.dynamo.control import environment
from moefuse.capture.frame import Frame
from moefuse.config import Options
from moefuse.errors import CODES, CompilerError, first_line, message
from moefuse.evidence.few_bits import Rounded, rounded
from moefuse.evidence.flows import Flow, flow_of
from moefuse.passes.graph.assumptions import Undischarged
from moefuse.passes.graph.module_names import ModuleNames, annotate
from moefuse.passes.graph.snapshot import GraphSnapshot
from moefuse.passes.graph.symbols import inputs_of
from moefuse.pipeline import settled
from moefuse.program.breaks import Stop
from moefuse.report.doors import opaque
from moefuse.report.entries import Fused, RejectedError, Skipped
from moefuse.report.quietly import quietly
from moefuse.report.report import FusionReport
from moefuse.runtime import pieces

if TYPE_CHECKING:
    from moefuse.passes.ir.regions import Region

# Named after the backend, not after this file: it is the name in the documentation for TORCH_LOGS.
log = logging.getLogger("moefuse.backend")

_Compiled = TypeVar("_Compiled")


def rewrite(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[object] | None,
    options: Options,
    frame: Frame | None = None,
    seen: Callable[[Region], None] | None = None,
) -> FusionReport:
    """As :func:`rewrite_and_keep`, without the way back."""
    return rewrite_and_keep(gm, example_inputs, options, frame, seen)[0]


def compile_or_restore(
    gm: torch.fx.GraphModule, report: FusionReport, saved: GraphSnapshot | None, frame: Frame | None, compiler: Callable[[], _Compiled]
) -> _Compiled:
    """Compile the rewritten graph; where the compiler cannot, the graph as it was. A rewrite is no reason for a program to stop."""
    assumed = frame is not None and bool(frame.assumptions)
    try:
        return compiler()
    except _torch_private.dynamo_control_flow():
        raise
    except Exception as error:
        breaks = isinstance(error, _torch_private.breaks_the_graph())
        if frame is not None and frame.traces_data and (isinstance(error, CompilerError) or not (assumed or breaks)):
            # No compiler takes the graph as it was. A loop that breaks it is run by eager mode, which may need no compiler.
            frame.retreat([], [*report.skipped, *(_not_compiled(fused, error) for fused in report.fused)], why=str(error))
        if frame is not None and breaks:
            # Dynamo would log that the backend is broken, and break the graph; it was moefuse that made it trace this far.
            frame.leave_numbers(first_line(error))
            if frame.traces_data and not assumed:
                frame.retreat([], report.skipped, why=f"the compiler cannot take the graph ({first_line(error)})")
        if assumed and breaks:
            raise
        if frame is not None and assumed:
            text = next(iter(str(error).strip().splitlines()), "")
            frame.retreat([Undischarged(a, f"the compiler cannot take the graph ({text})") for a in frame.assumptions], report.skipped)
        if saved is None or not report.fused:
            raise
        saved.restore()
        report.fused.clear()
        compiled = compiler()  # what fails here as well is not the rewrite's doing: torch says it as ever, or breaks the graph there
        log.exception("the compiler fails on the graph that moefuse rewrote; it got the graph as it was")
        report.skipped.append(_internal_error(error))
        return compiled


def _not_compiled(fused: Fused, error: Exception) -> Skipped:
    why = str(error) if isinstance(error, CompilerError) else f"{type(error).__name__}: {first_line(error)}"
    detail = f"the compiler cannot take the graph ({why})"
    text = message("not-captured", {"what": "which rows an expert takes", "detail": detail})
    return Skipped("not-captured", text, fused.module, fused.location)


def rewrite_and_keep(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[object] | None,
    options: Options,
    frame: Frame | None = None,
    seen: Callable[[Region], None] | None = None,
) -> tuple[FusionReport, GraphSnapshot | None]:
    """Fuse the MoE regions of ``gm`` in place.

    An exception inside moefuse restores the graph and becomes an ``internal-error`` in the report: a bug here costs speed, never
    the user's program. Dynamo's own restart exceptions pass.

    Args:
        gm: Dynamo's graph.
        example_inputs: as for a backend; None if unknown.
        options: moefuse's options.
        frame: what capture assumed while it traced this graph. Whatever cannot be discharged makes Dynamo start the frame again.
        seen: called with each region that is fused, as long as the graph has its nodes.

    Returns:
        The report, and what puts the graph back; None if it is as it was.
    """
    report = FusionReport(graph_count=1)
    _name_modules(gm, example_inputs)
    assumptions = frame.assumptions if frame is not None else []
    stop = _torch_private.graph_break(gm)
    if frame is not None:
        stop = frame.cause(stop)
        frame.check_closed(stop)
        report.skipped += frame.ledger.refusals
        report.stops += frame.ledger.stops
        report.notes += frame.ledger.notes
    _note_break(report, stop, frame)
    saved = _saved(gm, report)
    if saved is None:
        return _unless_joined(frame, gm, report), None
    try:
        # Imported here, so that a broken install of the passes cannot break a program either.
        from moefuse.passes import driver

        with _torch_private.unobserved(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what the program's operations say of made-up values concerns nobody
            result = driver.fuse(gm, example_inputs, options, assumptions, frame is not None and bool(frame.flags), seen)
    except _torch_private.dynamo_control_flow():
        raise
    except RejectedError as error:
        log.error("%s at %s: the graph goes to the compiler as it was", error.skipped.message, error.skipped.location or "an unknown place")
        return _put_back(saved, error.skipped, frame, gm, report, options, "the rewritten graph would do something else")
    except Exception as error:
        saved.restore()
        log.exception("moefuse failed on this graph; it goes to the compiler as it was")
        report.skipped.append(_internal_error(error))
        return _unless_joined(frame, gm, report), None
    if frame is not None:
        frame.check_worth(bool(result.fused) and not result.skipped, stop)
    report.fused += result.fused
    report.notes = list(dict.fromkeys([*report.notes, *result.notes]))  # layers of one class have one line
    found = {(skipped.code, skipped.location) for skipped in result.skipped}
    # What an earlier attempt at this frame refused, and this one finds again, is one refusal.
    report.skipped = [skipped for skipped in report.skipped if (skipped.code, skipped.location) not in found] + result.skipped
    if frame is not None and (overlap := settled.related(frame, gm, result, report, options)) is not None:
        return _put_back(saved, overlap, frame, gm, report, options, overlap.message)
    if result.fused and options.verify == "graph":
        difference = _validated(saved, gm, example_inputs, result.replaced, assumptions, report)
        if difference is not None:
            return _put_back(saved, difference, frame, gm, report, options, "the graphs do not agree")
    _leave_pieces(frame, gm, report)
    if result.fused:
        _torch_private.guard_forward_level()
        _prepare_kernel(example_inputs or ())
    elif not report.skipped:
        report.opaque = opaque.opaque(gm)
    report.flows = _flows(gm, example_inputs)
    report.rounded = [] if report.fused else _rounded(gm)
    quietly(_note_weights, frame, gm, report)
    return report, saved


def _leave_pieces(frame: Frame | None, gm: torch.fx.GraphModule, report: FusionReport) -> None:
    """A piece of a layer that gathers weights as often as a rank's tokens ask for them is no graph."""
    if frame is not None and pieces.inside() and not report.fused and _torch_private.communicates(gm):
        frame.leave(report)


def _note_break(report: FusionReport, stop: Stop | None, frame: Frame | None) -> None:
    if stop is not None:
        report.graph_breaks.append(stop.text)
        report.stops.append(stop)
        report.followed += [] if frame is None else frame.follows(stop)


def _put_back(
    saved: GraphSnapshot, refusal: Skipped, frame: Frame | None, gm: torch.fx.GraphModule, report: FusionReport, options: Options, why: str
) -> tuple[FusionReport, None]:
    """The graph as it was, and what is said of that; it is traced again where only moefuse could trace it."""
    saved.restore()
    report.fused = []
    report.skipped.append(refusal)
    if frame is not None:
        settled.settle(frame, gm, report, [Undischarged(a, why) for a in frame.assumptions], options)
    return report, None


def _note_weights(frame: Frame | None, gm: torch.fx.GraphModule, report: FusionReport) -> None:
    """Note of which weights experts were fused, and what else the graph reads."""
    if frame is None:
        return
    frame.fused = bool(report.fused)
    names = inputs_of(gm.graph)
    report.weights = frozenset(names[i] for flow in report.flows for i in flow.held(fused=True) if i in names)
    report.seen = frozenset(names[i] for flow in report.flows for i in flow.held(fused=False) if i in names) | frame.seen


def _flows(gm: torch.fx.GraphModule, example_inputs: Sequence[object] | None) -> list[Flow]:
    """What depends on what in a graph; nothing if that cannot be read, on which nothing but a text of the report hangs."""
    try:
        return [flow_of(gm, example_inputs)]
    except Exception:
        log.debug("moefuse cannot read what depends on what in this graph", exc_info=True)
        return []


def _rounded(gm: torch.fx.GraphModule) -> list[Rounded]:
    """The weights that a graph rounds to few bits, for a text of the report as well."""
    try:
        return rounded(gm)
    except Exception:
        log.debug("moefuse cannot read what this graph rounds", exc_info=True)
        return []


def _name_modules(gm: torch.fx.GraphModule, example_inputs: Sequence[object] | None) -> None:
    """Note the user's names of modules in the graph. Without them a report has Dynamo's."""
    try:
        annotate(gm, ModuleNames(_torch_private.traced()), example_inputs)
    except Exception:
        log.debug("moefuse cannot find the names of modules", exc_info=True)


_SPREAD = (
    'verify="graph": a graph with experts on several ranks is not run as a whole, which would wait for ranks that may not be compiling; '
    "its regions were compared one by one"
)


def _validated(
    saved: GraphSnapshot, gm: torch.fx.GraphModule, inputs: Sequence[object] | None, replaced: Any, assumptions: Any, report: FusionReport
) -> Skipped | None:
    """How the rewritten graph differs from the snapshot as a whole; one that cannot be compared gets a note."""
    from moefuse.passes.prove.validate import Verdict, validate

    if _torch_private.communicates(gm):
        report.notes += [note for note in [_SPREAD] if note not in report.notes]
        return None
    try:
        verdict = validate(saved.modules, gm, inputs, replaced, assumptions)
    except Exception as error:
        log.exception("moefuse cannot compare this graph as a whole; its regions were compared one by one")
        verdict = Verdict(note=f'verify="graph": the graphs were not compared ({type(error).__name__}: {error})')
    report.notes += [verdict.note] if verdict.note and verdict.note not in report.notes else []
    return verdict.difference


def _unless_joined(frame: Frame | None, gm: torch.fx.GraphModule, report: FusionReport) -> FusionReport:
    """The report of a graph that stays as it is; one that only capture made a graph must not, for the compiler would never have seen it."""
    if frame is not None and (frame.assumptions or frame.joins(environment())):
        order.put_right(gm.graph)  # else Dynamo fails while it clears the graph
        frame.retreat([Undischarged(a, "moefuse failed") for a in frame.assumptions], report.skipped, why="moefuse cannot read the graph")
    return report


def _saved(gm: torch.fx.GraphModule, report: FusionReport) -> GraphSnapshot | None:
    """A copy of a graph to put back; None, and a refusal, for one that cannot be copied, which is left alone."""
    try:
        return GraphSnapshot(gm)
    except Exception as error:
        early = order.early(gm.graph)
        if early is None:
            log.exception("moefuse cannot copy this graph; it goes to the compiler as it is")
            report.skipped.append(_internal_error(error))
            return None
    from moefuse.passes.graph.calls import location, module_path

    detail = f"Dynamo has put it in front of what it reads (`{early.name}`), as torch 2.11 does where a hook is on a value of the loop"
    text = message("not-captured", {"what": "this statement", "detail": detail})
    report.skipped.append(Skipped("not-captured", text, module_path(early), location(early)))
    return None


def _prepare_kernel(example_inputs: Sequence[object]) -> None:
    """On a machine where the kernel of this call was never compiled, compile it while Inductor compiles the rest."""
    from moefuse.runtime import native

    if not any(isinstance(t, torch.Tensor) and t.device.type == "cpu" for t in example_inputs):
        return
    trained = torch.is_grad_enabled() and any(isinstance(t, torch.Tensor) and t.requires_grad for t in example_inputs)
    native.start("train" if trained else "infer")


def _internal_error(error: Exception) -> Skipped:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    text = CODES["internal-error"].format(error=f"{type(error).__name__}: {error}")
    return Skipped("internal-error", text, module="", location=f"{frame.filename}:{frame.lineno}")
