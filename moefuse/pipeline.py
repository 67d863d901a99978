"""What every way into moefuse does with one graph: fuse or leave untouched, report, count, log, warn, and raise if strict."""

from __future__ import annotations

import copy
import functools
import logging
import os
import threading
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch.fx import Node

from moefuse import _torch_private
from moefuse._dynamo import order, relations
from moefuse._dynamo.control import environment
from moefuse._dynamo.values import inputs_of, unbacked_in
from moefuse.capture.assumptions import Undischarged
from moefuse.capture.frame import Frame, refusals
from moefuse.config import Options
from moefuse.errors import CODES, UNCOUNTED, FusionError, first_line, message
from moefuse.explaining import history, opaque, quietly
from moefuse.few_bits import Rounded, rounded
from moefuse.flows import Flow, flow_of
from moefuse.grouping import pattern
from moefuse.module_names import ModuleNames, annotate, roots_of
from moefuse.report import FusionReport, RejectedError, Skipped

# Named after the backend, not after this file: it is the name in the documentation for TORCH_LOGS.
log = logging.getLogger("moefuse.backend")

USER_DECIDED = frozenset({"excluded", "limit", "not-faster"})
"""Codes of regions that an option or a measurement told moefuse to leave: neither a warning nor, under strict, an error."""

_Compiled = TypeVar("_Compiled")

_warned: set[tuple[str, ...]] = set()
_warned_lock = threading.Lock()


def rewrite(
    gm: torch.fx.GraphModule, example_inputs: Sequence[object] | None, options: Options, frame: Frame | None = None
) -> FusionReport:
    """As :func:`rewrite_and_keep`, without the way back."""
    return rewrite_and_keep(gm, example_inputs, options, frame)[0]


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
        if frame is not None and isinstance(error, _torch_private.breaks_the_graph()):
            # Dynamo would log that the backend is broken, and break the graph; it was moefuse that made it trace this far.
            frame.leave_numbers(first_line(error))
            if frame.traces_data and not assumed:
                frame.retreat([], report.skipped, why=f"the compiler cannot take the graph ({first_line(error)})")
        if assumed and isinstance(error, _torch_private.breaks_the_graph()):
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


def rewrite_and_keep(
    gm: torch.fx.GraphModule, example_inputs: Sequence[object] | None, options: Options, frame: Frame | None = None
) -> tuple[FusionReport, GraphSnapshot | None]:
    """Fuse the MoE regions of ``gm`` in place.

    An exception inside moefuse restores the graph and becomes an ``internal-error`` in the report: a bug here costs speed, never
    the user's program. Dynamo's own restart exceptions pass.

    Args:
        gm: Dynamo's graph.
        example_inputs: as for a backend; None if unknown.
        options: moefuse's options.
        frame: what capture assumed while it traced this graph. Whatever cannot be discharged makes Dynamo start the frame again.

    Returns:
        The report, and what puts the graph back; None if it is as it was.
    """
    report = FusionReport(graph_count=1)
    _name_modules(gm, example_inputs)
    assumptions = frame.assumptions if frame is not None else []
    stop = _torch_private.graph_break(gm)
    if frame is not None:
        frame.check_closed(stop)
        report.skipped += frame.ledger.refusals
        report.stops += frame.ledger.stops
        report.notes += frame.ledger.notes
    if stop is not None:
        report.graph_breaks.append(stop.text)
        report.stops.append(stop)
        report.followed += [] if frame is None else frame.follows(stop)
    saved = _saved(gm, report)
    if saved is None:
        return _unless_joined(frame, gm, report), None
    try:
        # Imported here, so that a broken install of the passes cannot break a program either.
        from moefuse.passes import driver

        with _torch_private.unobserved(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what the program's operations say of made-up values concerns nobody
            result = driver.fuse(gm, example_inputs, options, **({"assumptions": assumptions} if assumptions else {}))
    except _torch_private.dynamo_control_flow():
        raise
    except RejectedError as error:
        saved.restore()
        log.error("%s at %s: the graph goes to the compiler as it was", error.skipped.message, error.skipped.location or "an unknown place")
        report.skipped.append(error.skipped)
        _retrace(frame, gm, report, options, "the rewritten graph would do something else")
        return report, None
    except Exception as error:
        saved.restore()
        log.exception("moefuse failed on this graph; it goes to the compiler as it was")
        report.skipped.append(_internal_error(error))
        return _unless_joined(frame, gm, report), None
    report.fused += result.fused
    report.notes += [note for note in result.notes if note not in report.notes]
    found = {(skipped.code, skipped.location) for skipped in result.skipped}
    # What an earlier attempt at this frame refused, and this one finds again, is one refusal.
    report.skipped = [skipped for skipped in report.skipped if (skipped.code, skipped.location) not in found] + result.skipped
    if frame is not None and not _related(frame, gm, result, report, saved, options):
        return report, None
    if result.fused and options.verify == "graph":
        difference = _validated(saved, gm, example_inputs, result.replaced, assumptions, report)
        if difference is not None:
            saved.restore()
            report.fused = []
            report.skipped.append(difference)
            _retrace(frame, gm, report, options, "the graphs do not agree")
            return report, None
    if result.fused:
        _torch_private.guard_forward_level()
        _prepare_kernel(example_inputs or ())
    elif not report.skipped:
        report.opaque = opaque.opaque(gm)
    report.flows = _flows(gm, example_inputs)
    report.rounded = [] if report.fused else _rounded(gm)
    quietly(_note_weights, frame, gm, report)
    return report, saved


def _related(frame: Frame, gm: torch.fx.GraphModule, result: Any, report: FusionReport, saved: GraphSnapshot, options: Options) -> bool:
    """Settle what was assumed of data and of memory; False where the graph was put back for the latter."""
    frame.crossed = result.crossed
    overlap = _overlap(frame, gm, result.written)
    if overlap is not None and (result.crossed or frame.assumptions):
        saved.restore()
        report.fused = []
        report.skipped.append(overlap)
        _retrace(frame, gm, report, options, overlap.message)
        return False
    _settle(frame, gm, report, result.undischarged if frame.assumptions else [], options)
    if overlap is not None and frame.joins(environment()):  # nothing was assumed of experts, or fused
        frame.retreat([], report.skipped, why=overlap.message)
    return True


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


def _retrace(frame: Frame | None, gm: torch.fx.GraphModule, report: FusionReport, options: Options, why: str) -> None:
    """A graph that was put back as a whole is traced again where only moefuse could trace it."""
    if frame is not None:
        _settle(frame, gm, report, [Undischarged(a, why) for a in frame.assumptions], options)


def _settle(frame: Frame, gm: torch.fx.GraphModule, report: FusionReport, undischarged: list[Undischarged], options: Options) -> None:
    """The last look before the graph is compiled: every assumption is discharged, and no size is left that only moefuse made traceable."""
    if frame.flags and frame.registering and _repeats_a_write(gm):
        frame.registers(None, REPEATS)
    problems = undischarged if frame.assumptions else []
    left = _left(gm) if frame.traces_data else None
    if left is not None:
        # Tokens are drawn in some number for the check. Where the graph breaks instead, that number is known, and the check is made.
        report.skipped = [skipped for skipped in report.skipped if UNCOUNTED not in skipped.message]
        report.skipped += _beside_fused(_beside_experts(gm), report) if report.fused and not report.skipped else []
    if problems and report.fused and not report.skipped:
        report.skipped += _beside_fused(refusals(problems), report)
    if problems or left is not None:
        if options.strict and not (frame.flags and report.skipped and all(map(_may_wait, report.skipped))):
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


def raise_strict(report: FusionReport) -> None:
    """Raises FusionError with the report as its text, out of Dynamo as itself."""
    with _torch_private.surfacing(FusionError):
        raise FusionError(text_of(report))


def has_data_dependent_sizes(gm: torch.fx.GraphModule) -> bool:
    """Whether some value of the graph, or of a body in it, has a size that only the run knows; how many tokens come from other ranks
    is one that moefuse put there."""
    from moefuse.passes.graph.builder import SIZED_BY_THE_RUN

    nodes = [n for module in gm.modules() if isinstance(module, torch.fx.GraphModule) for n in module.graph.nodes]
    sizes = [unbacked_in(n.meta.get("example_value")) for n in nodes]
    arrived = {s for n, found in zip(nodes, sizes, strict=True) if n.target in SIZED_BY_THE_RUN for s in found}
    return any(found - arrived for found in sizes)


def _prepare_kernel(example_inputs: Sequence[object]) -> None:
    """On a machine where the kernel of this call was never compiled, compile it while Inductor compiles the rest."""
    from moefuse.runtime import native

    if not any(isinstance(t, torch.Tensor) and t.device.type == "cpu" for t in example_inputs):
        return
    trained = torch.is_grad_enabled() and any(isinstance(t, torch.Tensor) and t.requires_grad for t in example_inputs)
    native.start("train" if trained else "infer")


def publish(report: FusionReport, options: Options) -> None:
    """Log, count and trace one graph's report; warn about regions that were left.

    Raises:
        FusionError: under ``strict`` when a region was left for a reason that is not an option.
    """
    quietly(_log, report)
    left = [skipped for skipped in report.skipped if skipped.code not in USER_DECIDED]
    call, owner = _torch_private.running_call(), _torch_private.torch_compile_call()
    waiting = [s for s in left if s.given_up and _may_wait(s)] if call is not None and owner is not None else []
    models = quietly(_models, otherwise=())
    for skipped in waiting:
        call.at_end(f"moefuse: {skipped}", functools.partial(_publish_left, skipped, owner, options, models))  # type: ignore[union-attr]
    left = [skipped for skipped in left if skipped not in waiting]
    if left and options.strict:
        raise FusionError(text_of(report))
    for skipped in left:
        if skipped.code != "internal-error":  # logged with its traceback
            quietly(_warn_once, skipped, models)


def _log(report: FusionReport) -> None:
    _count(report)
    _torch_private.trace_artifact("moefuse_report", report.to_json)
    log.info("%s", _log_line(report))
    for fused in report.fused:
        log.debug("fused %s %s %s", fused.module, fused.location, fused.spec)


def text_of(report: FusionReport) -> str:
    """The text of an error, whatever becomes of the report's."""
    plain = "\n".join(f"{s.location} {s.code}: {s.message}" for s in report.skipped)
    text: str = quietly(str, report, otherwise=plain)
    return text


def say_disabled(options: Options, given: Mapping[str, object] | None) -> None:
    """A report of a graph that moefuse, switched off, has not looked at: under ``strict`` and ``expect`` with a warning, and no error."""
    by = "options={'enabled': False}" if "enabled" in (given or {}) else f"MOEFUSE_DISABLE={os.environ.get('MOEFUSE_DISABLE', '')}"
    report = FusionReport(graph_count=1, disabled=by)
    history.record(report)
    log.info("%s", report.summary)
    asked = [name for name, wanted in (("strict", options.strict), ("expect", options.expect is not None)) if wanted]
    if not asked:
        return
    with _warned_lock:
        known = ("disabled", by, *asked) in _warned
        _warned.add(("disabled", by, *asked))
    if not known:
        log.warning("moefuse is disabled by %s: nothing is fused, and there are no errors of %s", by, " and ".join(asked))


def _may_wait(skipped: Skipped) -> bool:
    """Whether these experts may be fused after all, in a frame that Dynamo makes where this graph is given up."""
    return bool(skipped.combine) and skipped.code not in USER_DECIDED


def _publish_left(skipped: Skipped, owner: object, options: Options, models: tuple[str, ...]) -> None:
    """Say at the end of a call what was refused in a graph that was given up, unless it was fused in another one."""
    report = history.report_of(owner)
    if report is not None and skipped not in report.skipped:
        return
    if options.strict:
        raise FusionError(text_of(report or FusionReport(skipped=[skipped])))
    _warn_once(skipped, models)


class Saved(NamedTuple):
    """A graph module as it was: its nodes then, and the copy of its graph with a node for each."""

    module: torch.fx.GraphModule
    nodes: tuple[torch.fx.Node, ...]
    graph: torch.fx.Graph
    modules: dict[str, Any]
    parameters: dict[str, Any]
    buffers: dict[str, Any]


class GraphSnapshot:
    """The graphs of a module and of the bodies inside it, to put back if a rewrite fails half-way. Copies nodes, not tensors."""

    def __init__(self, gm: torch.fx.GraphModule) -> None:
        self.modules = [
            Saved(
                module,
                tuple(module.graph.nodes),
                copy_graph(module.graph),
                dict(module._modules),
                dict(module._parameters),
                dict(module._buffers),
            )
            for module in gm.modules()
            if isinstance(module, torch.fx.GraphModule)
        ]

    def restore(self) -> None:
        for saved in self.modules:
            # Whatever the rewrite attached goes; nn.Module keeps attributes of these kinds in three dicts.
            saved.module.__dict__.update(_modules=saved.modules, _parameters=saved.parameters, _buffers=saved.buffers)
            saved.module.graph = saved.graph


def copy_graph(graph: torch.fx.Graph) -> torch.fx.Graph:
    """A copy of a graph from Dynamo that AOTAutograd takes for one."""
    copied: torch.fx.Graph = copy.deepcopy(graph)
    for new, old in zip(copied.find_nodes(op="placeholder"), graph.find_nodes(op="placeholder"), strict=True):
        # Dynamo ties inputs to guards by this attribute, and AOTAutograd reads it; a graph copy does not carry attributes.
        if hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source
    return copied


def _internal_error(error: Exception) -> Skipped:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    text = CODES["internal-error"].format(error=f"{type(error).__name__}: {error}")
    return Skipped("internal-error", text, module="", location=f"{frame.filename}:{frame.lineno}")


def _count(report: FusionReport) -> None:
    _torch_private.count("graphs", report.graph_count)
    _torch_private.count("fused", len(report.fused))
    _torch_private.count("skipped", len(report.skipped))
    for skipped in report.skipped:
        _torch_private.count(f"skipped: {skipped.code}")


def _log_line(report: FusionReport) -> str:
    modules = ", ".join(dict.fromkeys(fused.module for fused in report.fused if fused.module))
    return f"{report.summary} ({modules})" if modules else report.summary


def _models() -> tuple[str, ...]:
    """The classes of the models that are compiled."""
    traced = _torch_private.traced()
    return () if traced is None else tuple(sorted(type(root).__qualname__ for root in roots_of(traced).values()))


def _warn_once(skipped: Skipped, models: tuple[str, ...]) -> None:
    # Models of two kinds may share the line, in a helper function, and the reader of one warning would not think of the other model.
    # The text is no part of the key: sizes and names of values in it change from one compilation to the next. The report has them all.
    key = (skipped.code, skipped.location, pattern(skipped.module), *models)
    with _warned_lock:
        if key in _warned:
            return
        _warned.add(key)
    where = " in ".join(part for part in (skipped.location, skipped.module) if part)
    log.warning(
        "mixture-of-experts code at %s was not fused (%s): %s. It still runs, as without moefuse; "
        'silence this with logging.getLogger("moefuse").setLevel("ERROR") or options={"exclude": ...}',
        where or "an unknown place",
        skipped.code,
        skipped.message,
    )
