"""Who asked for speed and gets none is told why: the last look at a call in which something was compiled, once it has run.

Only then is known what all frames of the call came to, those behind graph breaks included. Two questions: whether as many layers were fused
as ``options={"expect": N}`` says, and whether a module that was neither fused nor refused is a mixture of experts all the same, and what in
the way of its experts was. It is one if it is built so (``evidence/suspects.py``) and its router decides about its experts: in a graph
(``evidence/flows.py``) or, where no graph has them all, in its code (``evidence/code_order.py``).
"""

from __future__ import annotations

import functools
import os
import re
import sys
from dataclasses import dataclass, replace

from torch import nn

from moefuse import _torch_private
from moefuse.capture import entry
from moefuse.capture.dynamo import left
from moefuse.config import Options
from moefuse.diagnosis import inside_experts
from moefuse.errors import CODES, FusionError, message
from moefuse.evidence.code_order import forward_of, router_decides
from moefuse.evidence.few_bits import held
from moefuse.evidence.suspects import Pair, Suspect, modules_of, place_of, suspects
from moefuse.passes.graph.module_names import in_its_model
from moefuse.pipeline import publish
from moefuse.program.breaks import TORCH, Stop, users_place
from moefuse.program.runs import Begun
from moefuse.report import history
from moefuse.report.compilations import is_in
from moefuse.report.entries import Fused, Skipped
from moefuse.report.report import FusionReport

NOTHING_CHOSEN = "no top-k, sort or argmax is in its graphs: where every token goes to every expert, there is nothing to leave out"
LEFT = "an earlier torch.compile, of another model or backend, had Dynamo skip this code for all; call torch.compiler.reset() first"

_ONCE = "`torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True` does so in forward alone"
_COLLECTED = (
    "the body of a checkpoint adds to a list outside of it. Where that list is made and used up within the compiled call, "
    "`checkpoint(..., use_reentrant=False)` is traced (a Trainer's `gradient_checkpointing_kwargs={'use_reentrant': False}`); "
    f"else {_ONCE}"
)
_WRITTEN = {
    "List": "",
    "NNModule": "sets an attribute of a module",
    "Dict": "writes to a dict outside of it",
    "Set": "adds to a set outside of it",
    "UserDefinedObject": "sets an attribute of an object",
    "Cell": "assigns a variable outside of it",
}
"""What the body of a checkpoint does, by a part of the name of Dynamo's class for what it does it to."""


def _written(stop: Stop) -> str:
    """Why a checkpoint is not traced that changes a Python object, and what to do: eager does it again in backward."""
    does = next((text for kind, text in _WRITTEN.items() if kind in stop.changed), "changes a Python object outside of it")
    advice = "Return the value from the checkpointed function, or do so outside of it"
    return f"the body of a checkpoint {does}. {advice}; else {_ONCE}" if does else _COLLECTED


_INPUTS = (
    "a hook has the embeddings' outputs require gradients, at which torch breaks the graph; where checkpoints have `use_reentrant=False` "
    "nothing needs that, and `model.disable_input_require_grads()` of transformers takes the hook away"
)


def watch(options: Options, owner: object | None = None) -> None:
    """Look at the call around this compilation when it returns."""
    owner = _torch_private.torch_compile_call() if owner is None else owner
    call = _torch_private.running_call() if owner is not None else None
    if call is not None:
        call.at_end("moefuse.diagnosis.missed_layers", lambda: _look(call, options, owner))


def watch_lost(report: FusionReport, options: Options, owner: object | None = None) -> None:
    """Say what an earlier call had fused and this one has not, before ``report`` is recorded: in it, or at the end of the call."""
    owner = _torch_private.torch_compile_call() if owner is None else owner
    call = _torch_private.running_call() if owner is not None else None
    lost = history.lost(report, owner) if call is not None else None
    if call is None or lost is None:
        return
    if report.graph_count and not report.stops:  # nothing comes behind it that may have them
        report.skipped += _given_up(report, lost, owner)
        return
    start = _began(call)
    call.at_end(f"moefuse.lost: {id(report)}", lambda: _tell(report, lost, options, owner, start), before=True)


def _began(call: _torch_private.RunningCall) -> int:
    """When a call began; 0 where nobody knows."""
    begun = call.held(Begun)
    return 0 if begun is None else begun.at


def _tell(report: FusionReport, lost: history.Lost, options: Options, owner: object | None, start: int) -> None:
    told = [replace(skipped, combine=skipped.location, given_up=True) for skipped in _given_up(report, lost, owner, start)]
    if told:
        found = FusionReport(skipped=told)
        history.record(found, owner, history.place(found, "lost"))
        publish.publish(found, options)


def _given_up(report: FusionReport, lost: history.Lost, owner: object | None, start: int = 0) -> list[Skipped]:
    stop = next(iter(report.graph_breaks), None)
    cause = "its graph has them in a form that moefuse does not read" if stop is None else f"Dynamo left the graph: {stop}"
    text = CODES["nothing-found"].format(what="experts that are fused in another call", cause=f"for this one, {cause}")
    return [Skipped("nothing-found", text, f.module, f.location) for f in history.give_up(lost, owner, start)]


def kept_out(begun: Begun) -> None:
    """Say of the experts of a call that ran in eager as a whole that they did, and why: something around it keeps Dynamo out."""
    _, own, owner = entry.of_compiler(_torch_private.compiler_of_call())
    call = _torch_private.running_call()
    if own is None or call is None or sys.exc_info()[0] is not None or history.report_in_call(begun.at).fused:
        return
    report = history.report_of(owner)
    if report is not None and report.fused:
        lost = [("experts that are fused in another call", f.module, f.location) for f in report.fused]
    else:
        wanted = [s for s in _suspects((call.function, *call.arguments)) if own.exclude is None or not re.search(own.exclude, s.name)]
        lost = [(s.what, s.name, f"{s.place[0]}:{s.place[1].start}") for s in wanted if s.place[0]]
    cause = f"{begun.kept_out}, and this call runs in eager"
    told = [Skipped("nothing-found", CODES["nothing-found"].format(what=what, cause=cause), name, at) for what, name, at in lost]
    if not told:
        return
    history.lose(owner, lambda _: True, begun.at)
    found = FusionReport(skipped=told)
    history.record(found, owner, history.place(found, "nothing-found"))
    publish.publish(found, replace(own, strict=own.strict or own.expect is not None))


def _look(call: _torch_private.RunningCall, options: Options, owner: object) -> None:
    history.ended(owner)
    report, start = history.report_of(owner), _began(call)
    if report is None:
        return
    missed = missing(report, (call.function, *call.arguments), options, start)
    found = FusionReport(skipped=missed)
    if missed:
        history.lose(owner, lambda f: any(_concerns(f, skipped) for skipped in missed), start)
        history.record(found, owner, history.place(found, "nothing-found"))
        report = history.report_of(owner) or found
    if options.expect is not None and options.expect != (count := _counted(report, call.function, owner)):
        text = publish.text_of(report)
        raise FusionError(f"options['expect'] is {options.expect}, and {count} layers were fused\n{text}")
    if missed:
        publish.publish(found, options)


def _concerns(fused: Fused, skipped: Skipped) -> bool:
    return is_in(fused.module, skipped.module) or is_in(skipped.module, fused.module)


@dataclass(frozen=True)
class _Call:
    """What is known of a call.

    Attributes:
        report: of everything that was compiled.
        roots: what was called, and with what.
        held: for each graph the identities of the model's tensors that it reads, other than for what is fused.
        tensors: of all that the modules in question and those around them hold.
    """

    report: FusionReport
    roots: tuple[object, ...]
    held: tuple[frozenset[int], ...]
    tensors: frozenset[int]

    @functools.cached_property
    def seen(self) -> frozenset[int]:
        return frozenset().union(*self.held)

    @property
    def on_weights_alone(self) -> bool:
        """Whether all that ran is in graphs, and these read nothing but the model's tensors: a penalty on weights, and no layer."""
        whole = not (self.report.stops or self.report.graph_breaks or self.report.opaque)
        return whole and bool(self.report.flows) and not any(flow.steps for flow in self.report.flows)


def missing(report: FusionReport, roots: tuple[object, ...], options: Options, start: int = 0) -> list[Skipped]:
    """A refusal for each module of ``roots`` that has experts of which a report says nothing.

    ``start``: when the call began that it is about. What was fused in others, but runs in eager in it, is told as well.
    """
    if any(skipped.code == "internal-error" for skipped in report.skipped):
        return []
    shards = {whole: id(shard) for root in modules_of(roots) for whole, shard in _torch_private.computed_with(root).items()}
    wanted = [s for s in _suspects(roots) if options.exclude is None or not re.search(options.exclude, s.name)]
    here = history.report_in_call(start) if start else report
    unsaid = [s for s in wanted if not _spoken_of(here, s, shards) and (here is report or not _fine(report, here, s, shards, start))]
    if not unsaid:
        return []
    known = {s.place for s in wanted if s not in unsaid}
    outermost = {id(m): m for m in (s.around[-1] if s.around else s.module for s in unsaid)}
    tensors = frozenset(id(t) for root in outermost.values() for t in (*root.parameters(), *root.buffers()))
    call = _Call(report, roots, tuple(_in_the_model(flow.held(fused=False), shards) for flow in report.flows), tensors)
    found = ((s, _evidence(call, s, s.place in known)) for s in unsaid)
    return [_refusal(call, here, s, evidence, start) for s, evidence in found if evidence is not None]


def _counted(report: FusionReport, function: object, owner: object) -> int:
    """How many layers are fused: of modules that are compiled together, in the one that was called."""
    part = getattr(function, "__self__", function)
    if not isinstance(owner, _torch_private.Together) or not isinstance(part, nn.Module):
        return report.layers[0]
    name = in_its_model(part, "")
    return len({fused.module for fused in report.fused if is_in(fused.module, name)})


def _suspects(roots: tuple[object, ...]) -> list[Suspect]:
    """By the names that reports have."""
    return [replace(s, name=in_its_model(s.around[-1] if s.around else s.module, s.name)) for s in suspects(roots)]


def _fine(report: FusionReport, here: FusionReport, found: Suspect, shards: dict[int, int], start: int) -> bool:
    """Whether enough is said of experts that a call has neither fused nor refused: they did not run in it, or it was said before."""
    if not _spoken_of(report, found, shards):
        return False
    if any(_about(skipped, found) for skipped in report.skipped):
        return True
    tensors = frozenset().union(*(pair.tensors for pair in found.pairs))
    read = any(tensors & _in_the_model(flow.held(fused=False), shards) for flow in here.flows)
    return not (read or _stop_inside(here, found) or any(event.concerns(found.module) for event in left.events(start)))


def _in_the_model(held: frozenset[int] | set[int], shards: dict[int, int]) -> frozenset[int]:
    """The identities of tensors of graphs, and of those that the model has in their place between calls (FSDP's shards)."""
    return frozenset(held).union(shards[number] for number in held if number in shards)


def _spoken_of(report: FusionReport, found: Suspect, shards: dict[int, int]) -> bool:
    """Whether some experts of a module are fused, or a refusal is about it."""
    fused = _in_the_model(frozenset().union(*(flow.held(fused=True) for flow in report.flows)), shards)
    if any(pair.tensors & fused for pair in found.pairs) or any(_about(skipped, found) for skipped in report.skipped):
        return True
    # Where the graphs show whose weights are fused, a name says it only of a module inside, which may have weights of its own.
    if not fused:
        return any(_about(f, found) for f in report.fused)
    if any(f.module and _related(f.module, found.name) for f in report.fused):
        return True
    # Weights that are exchanged for a call are others by now, and may have the identities of those that are gone; names are not.
    return any(f.module == found.name and _placed(f, found) for f in report.fused)


def _about(item: Fused | Skipped, found: Suspect) -> bool:
    return _related(item.module, found.name) or _placed(item, found) or (not item.module and item.location != "")


def _placed(item: Fused | Skipped, found: Suspect) -> bool:
    """Whether a line is one of the module's forward function."""
    file, lines = found.place
    path, _, line = item.location.rpartition(":")
    return path == file != "" and line.isdigit() and int(line) in lines


def _related(module: str, name: str) -> bool:
    """Whether one of two modules is inside the other, or both are one."""
    inner, outer = f"{name}.".lstrip("."), f"{module}.".lstrip(".")
    return outer.startswith(inner) or (bool(module) and inner.startswith(outer))


def _evidence(call: _Call, found: Suspect, shared: bool) -> str | None:
    """Where the router of a module decides about its experts, empty if nobody knows the line; None where nothing says that it does.

    ``shared``: another module is known to run the same code, so that a break in it is no sign of this one.
    """
    if call.on_weights_alone:
        return None
    inside = not shared and (_stop_inside(call.report, found) or _in_eager(call, found) is not None)
    for pair in found.pairs:
        place = _decided(call, found, pair, inside)
        if place is not None:
            return place
    return None


def _decided(call: _Call, found: Suspect, pair: Pair, inside: bool) -> str | None:
    """As :func:`_evidence`, for one router and its experts."""
    if pair.router is not None:
        places = (flow.meeting(pair.router, pair.tensors, by_choice=pair.loose) for flow in call.report.flows)
        place = next((place for place in places if place is not None), None)
        if place is not None:
            return place
        if any(pair.router in held and all(expert & held for expert in pair.experts) for held in call.held):
            return None  # a graph has them all, and keeps them apart
    part = bool(call.seen & call.tensors)
    ran = inside or not part or pair.router in call.seen or not call.seen.isdisjoint(pair.tensors)
    if not ran or (pair.loose and not inside):
        return None
    functions = (forward_of(found.module), *map(forward_of, found.around), *call.roots)
    router = (pair.router_name,) if pair.router_name is not None else ()
    said = router_decides(functions, found.module, router, pair.experts_names)
    return "" if said or (said is None and inside and not pair.loose) else None


def _stop_inside(report: FusionReport, found: Suspect) -> bool:
    """Whether a graph breaks in the forward function of a module, or a function is skipped in one around it."""
    own = (stop.inside(*found.place) for stop in report.stops)
    skipped = (stop for stop in report.stops if stop.kind == "skipped")
    around = (stop.inside(*place_of(module)) for stop in skipped for module in found.around)
    return any(place is not None for place in (*own, *around))


def _in_eager(call: _Call, found: Suspect) -> Stop | None:
    """A break in a module around that no graph has anything of: what runs its body in eager keeps Dynamo out, as a checkpoint does."""
    outer = (place_of(m) for m in found.around if call.seen.isdisjoint(map(id, m.parameters())))
    return next((stop for place in outer for stop in call.report.stops if stop.inside(*place) is not None), None)


def _refusal(call: _Call, here: FusionReport, found: Suspect, evidence: str, start: int) -> Skipped:
    held = _in_few_bits(call.report, found, evidence)
    if held is not None:
        return held
    # What this call met says more than what others did.
    met = here if here.stops or here.graph_breaks else call.report
    known = inside_experts.refusal(_stop(met, found), found)
    if known is not None:
        return known
    cause, location = _limit(met, found, evidence, start) or _cause(met, found, evidence, _in_eager(call, found))
    return Skipped("nothing-found", CODES["nothing-found"].format(what=found.what, cause=cause), module=found.name, location=location)


def _in_few_bits(report: FusionReport, found: Suspect, evidence: str) -> Skipped | None:
    """The refusal of experts in few bits, with the line where the graph breaks in their products."""
    tensors = found.pairs[0].tensors
    owners = ([t for t in (*m._parameters.values(), *m._buffers.values()) if id(t) in tensors] for m in found.module.modules())
    known = next((how for own in owners if (how := held(t for t in own if t is not None)) is not None), None)
    first = next((r for r in report.rounded if r.weight in tensors), None)
    if known is None and first is None:
        return None
    file, lines = found.place
    stop = next((stop for stop in report.stops if stop.inside(file, lines) is not None), None)
    if stop is None:
        location, said = evidence or (f"{file}:{lines.start}" if file else ""), "no graph has their products in a form that moefuse reads"
    else:
        path, line = stop.stack[-1]
        location, said = f"{path}:{line}", f"the graph breaks where they are multiplied ({stop.text})"
    if first is not None and (known is None or known[0] != "quantised"):
        details = {"dtype": first.dtype, "detail": f"the program rounds them in each call ({first.text}), and {said}"}
        return Skipped("encoding-unknown", message("encoding-unknown", details), found.name, location)
    code, kind = known or ("", "")
    detail = f"they are held as `{kind}`, and {said}" if code == "quantised" else said
    return Skipped(code, message(code, {"dtype": kind, "detail": detail}), found.name, location)


def _limit(report: FusionReport, found: Suspect, evidence: str, start: int) -> tuple[str, str] | None:
    """As :func:`_cause`, where torch's limit of graphs is in the way and no line of the module's own."""
    file, lines = found.place
    event = next((event for event in left.events(start) if event.limit), None) if start else None
    stops = (stop for stop in report.stops if stop.stack and stop.inside(file, lines) is not None)
    if event is None or any(stop.inside(file, lines) == "{}:{}".format(*stop.stack[-1]) for stop in stops):
        return None
    code = event.code
    limit = entry.LIMIT.format(instead=entry.ONE_FOR_ALL)
    text = f"{limit}: `{code.co_name}` at {code.co_filename}:{code.co_firstlineno}, which modules are called through"
    return f"{text}; what it runs further, it runs in eager. Raise that limit", evidence or (f"{file}:{lines.start}" if file else "")


def _stop(report: FusionReport, found: Suspect) -> Stop | None:
    """The break in a module's forward function that is in the way."""
    file, lines = found.place
    first = next((stop for stop in report.stops if stop.inside(file, lines) is not None), None)
    if first is None:
        return None
    # One place may have stopped several attempts. Capture had taken a size that depends on data, and was stopped by something else; a loop
    # is only around what has stopped it. Of the rest, what a reader meets elsewhere, too, is what Dynamo did there in the end.
    here = [stop for stop in report.stops if stop.inside(file, lines) == first.inside(file, lines)]
    told = [stop for stop in here if stop.kind not in ("size", "loop")] or here
    return next((stop for stop in told if stop.text in report.graph_breaks), told[0])


def _cause(report: FusionReport, found: Suspect, evidence: str, around: Stop | None) -> tuple[str, str]:
    """(why nothing was found, where to look)."""
    file, lines = found.place
    own = evidence or (f"{file}:{lines.start}" if file else "")
    if entry.left_by_another(found.module):
        return LEFT, own
    stop = _stop(report, found)
    if stop is not None:
        place = stop.inside(file, lines) or ""
        hint = _written(stop) if stop.kind == "write" else f"torch's hint: {stop.hint}"
        reason = _users(stop, place) + (f"; {hint}" if stop.hint else "")
        return f"the graph breaks inside it ({reason}), and what is left in graphs is no whole layer", place
    if around is not None:
        hint = f"; {_INPUTS}" if any(other.kind == "requires-grad" for other in report.stops) else ""
        return f"the graph breaks in what is around it ({_users(around)}), and all of that runs in eager{hint}", own
    if report.opaque:
        return report.opaque[0], own
    if evidence:
        routed = [pair for pair in found.pairs if pair.router is not None]
        chosen = any(flow.meeting(pair.router, pair.tensors, by_choice=True) for flow in report.flows for pair in routed)
        return "its graph has its experts in a form that moefuse does not read" if chosen else NOTHING_CHOSEN, own
    breaks = report.graph_breaks or [stop.text for stop in report.stops]
    if breaks:
        return f"no graph holds its experts; Dynamo left the graph: {breaks[0]}", own
    if not report.graph_count:
        return "Dynamo made no graph of it", own
    if report.flows:
        given_up = "Dynamo has given up on the function that runs them in an earlier compilation, and leaves it to Python"
        return f"{given_up}; torch.compiler.reset() lets it try again", own
    return "no graph has its experts in it, or none in a form that moefuse reads", own


def _users(stop: Stop, said: str = "") -> str:
    """The text of a break, with the user's line where its place is torch's own code; without the place that is said already."""
    own, reason = stop.place, stop.reason
    if own.startswith(TORCH):
        own, reason = users_place(stop.stack), f"{reason} in {os.path.basename(own.rpartition(':')[0])}"
        reason = reason if own else stop.reason
    return reason if own in ("", said) else f"{reason} at {own}"


__all__ = ["missing", "watch"]
