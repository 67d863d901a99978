"""Which frames capture watches: those whose compiler is a function that was marked with :func:`enable`."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import sys
import threading
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn

from moefuse import _torch_private
from moefuse.capture.dynamo import control, ddp, hooks, left, lengths, points
from moefuse.capture.frame import Frame
from moefuse.capture.ledger import Ledger
from moefuse.config import Options
from moefuse.errors import CODES
from moefuse.report import history
from moefuse.report.doors import module_names, suspects
from moefuse.report.entries import Fused, Skipped
from moefuse.report.quietly import guarded
from moefuse.report.report import FusionReport

log = logging.getLogger("moefuse.capture")

LIMIT = "torch compiles no further graph of this code (torch._dynamo.config.recompile_limit; {instead})"
ONE_FOR_ALL, DIFFERS = "moefuse.compile_layers(model) needs one for all sizes", "TORCH_LOGS=recompiles says what differs between calls"

_MARK = "moefuse_captures_for"
_LEDGER = "moefuse_ledger"
_lock = threading.Lock()
_missing: list[str] | None = None

_Backend = TypeVar("_Backend", bound=Callable[..., Any])


@dataclass(frozen=True)
class _Mark:
    """What a frame of this backend needs to know. ``backend``: a decorator that copies attributes must not copy the mark."""

    backend: object
    options: Callable[[Mapping[str, Any]], Options | None]
    skipped: Callable[[FusionReport, Options, object], None]


def enable(
    backend: _Backend,
    options: Callable[[Mapping[str, Any]], Options | None],
    skipped: Callable[[FusionReport, Options, object], None],
) -> _Backend:
    """Capture loops in frames that this Dynamo backend compiles. It must hand every graph to :func:`moefuse.pipeline.rewrite.rewrite`.

    Args:
        backend: a function; returned as it is.
        options: moefuse's options from the keyword arguments that ``torch.compile`` passes to the backend; None to stay away.
        skipped: what to do with the report of a frame for which the backend is never called; its arguments are the report, the options,
            and the object that stands for the ``torch.compile`` call.
    """
    setattr(backend, _MARK, _Mark(backend, options, skipped))
    if "torch._dynamo.symbolic_convert" in sys.modules:
        unavailable()
    else:
        # Dynamo takes a second to import: wait for the first torch.compile call.
        _torch_private.before_torch_compile(unavailable)
    return backend


def unavailable() -> str | None:
    """Why this torch has no capture, or None. The first call puts the hooks in place, and logs if it cannot."""
    global _missing
    with _lock:
        if _missing is None:
            _missing = points.missing()
            if _missing:
                log.warning("%s", _reason())
            else:
                hooks.install(_start, guarded(_codes), guarded(_limited, False), guarded(_again), guarded(_any_size, False), _elsewhere)
                lengths.keep_open()
    return _reason()


def _reason() -> str | None:
    if not _missing:
        return None
    return f"capture of data-dependent expert loops is off: this torch has no {', '.join(_missing)}; all else works"


def frame() -> Frame | None:
    """The record of the attempt whose graph the backend is called with; None if capture does not watch it."""
    found: Frame | None = hooks.current()
    if found is not None:
        found.has_graph = True
    return found


def _start(compiler_fn: Any, speculation_log: Any, one_graph: bool) -> Frame | None:
    """The observer of a new attempt at a frame; None if the frame is not ours."""
    mark, arguments, owner = _find(compiler_fn)
    own = mark.options(arguments) if mark is not None else None
    if mark is None or own is None or not own.enabled or _torch_private.given_fakes():
        return None
    ledger: Ledger = vars(speculation_log).setdefault(_LEDGER, Ledger())
    if not own.capture or control.copies_nodes():
        ledger.off = True
    ledger.collects = ledger.collects and own.capture
    ledger.makes_leaves = ledger.makes_leaves and own.capture
    ledger.counts = ledger.counts and own.capture
    ledger.parametrizes = ledger.parametrizes and own.capture
    flags = not one_graph and not control.user_flags()
    insists = _insists(own)

    def skipped(report: FusionReport) -> None:
        mark.skipped(report, own, owner)

    return Frame(ledger, speculation_log, flags=flags, skipped=skipped, exclude=own.exclude, insists=insists)


def _codes(compiler_fn: Any, compiled: Any) -> list[types.CodeType] | None:
    """The code of a program that is to be compiled for us, and of what looks like experts in it; None of any other."""
    mark, _, _ = _find(compiler_fn)
    if mark is None:
        return None
    root = getattr(compiled, "__self__", compiled)
    found = [root if isinstance(root, nn.Module) else compiled, *(suspect.module for suspect in suspects.suspects((compiled,)))]
    return [code for one in found if (code := _code(one)) is not None]


def _limited(compiler_fn: Any, frame: Any) -> bool:
    """Dynamo compiles nothing more of code with experts, which run in eager from now on; whether every such call is an error."""
    mark, own, owner = of_compiler(compiler_fn)
    if mark is None or own is None:
        return False
    lost = history.limited(owner, left.frame_of(frame.f_code), left.modules(frame.f_locals))
    return _lost(mark, own, owner, frame, lost, LIMIT.format(instead=DIFFERS if own.any_size else ONE_FOR_ALL))


def _again(compiler_fn: Any, frame: Any, said: int) -> None:
    """A frame is left as in an earlier call, and its experts are fused in others: its report may have changed since."""
    mark, own, owner = of_compiler(compiler_fn)
    number = left.frame_of(frame.f_code)
    if mark is None or own is None or not (_insists(own) or history.fused_since(owner, number, said)):
        return
    lost = history.unsaid(owner, number, left.modules(frame.f_locals), _insists(own))
    if lost:
        _lost(mark, own, owner, frame, lost, "Dynamo left this function in an earlier call of this kind")


def of_compiler(compiler_fn: Any) -> tuple[_Mark | None, Options | None, object]:
    """The mark of one of our compilers, its options unless they switch it off, and what stands for the torch.compile call."""
    mark, arguments, owner = _find(compiler_fn)
    own = mark.options(arguments) if mark is not None else None
    return mark, (own if own is not None and own.enabled else None), owner


def _any_size(compiler_fn: Any) -> bool:
    _, own, _ = of_compiler(compiler_fn)
    return own is not None and own.any_size


def _elsewhere(module: nn.Module, callback: Any, compiler_fn: Any) -> None:
    """Another compiler has a module in its graph that is compiled for us: what is in it is not fused there."""
    mark, own, owner = of_compiler(callback)
    if mark is None or own is None or _find(compiler_fn)[0] is not None:
        return
    found = suspects.suspects((module,))
    if not found:
        return
    name = getattr(compiler_fn, "compiler_name", None) or getattr(compiler_fn, "__name__", type(compiler_fn).__name__)
    file, lines = found[0].place
    cause = f"the code around it is compiled with backend={name!r}, which has it in its own graph; compile that with backend='moefuse' too"
    text = CODES["nothing-found"].format(what=f"a layer that is compiled with moefuse ({type(module).__name__})", cause=cause)
    skipped = Skipped("nothing-found", text, module_names.in_its_model(module, ""), f"{file}:{lines.start}")
    mark.skipped(FusionReport(skipped=[skipped]), own, owner)


def _insists(own: Options) -> bool:
    return own.strict or own.expect is not None


def _lost(mark: _Mark, own: Options, owner: object, frame: Any, lost: list[Fused], why: str) -> bool:
    """Say of what was fused that this call runs it in eager; whether that is an error."""
    code = frame.f_code
    text = CODES["nothing-found"].format(what="experts that are fused in another call", cause=f"{why}, and this call runs in eager")
    told = [Skipped("nothing-found", text, f.module, f.location) for f in lost]
    told = told or [Skipped("nothing-found", text, "", f"{code.co_filename}:{code.co_firstlineno}")]
    mark.skipped(FusionReport(skipped=told), dataclasses.replace(own, strict=_insists(own)), owner)
    return _insists(own)


def left_by_another(module: nn.Module) -> bool:
    """Whether Dynamo does not look at the forward of a module, because of what some other program had compiled."""
    code = _code(module)
    return code is not None and left.left_by_another(code)


def _code(called: Any) -> types.CodeType | None:
    function = inspect.unwrap(type(called).forward if isinstance(called, nn.Module) else called)
    function = getattr(function, "__func__", function)
    return function.__code__ if isinstance(function, types.FunctionType) else None


def _find(compiler_fn: Any) -> tuple[_Mark | None, dict[str, Any], object | None]:
    """The mark behind what torch wraps around a backend, the keyword arguments it adds, and what stands for the torch.compile call."""
    arguments: dict[str, Any] = {}
    owner = None
    splitter = ddp.splitter_of(compiler_fn)
    compiler_fn = compiler_fn if splitter is None else splitter.backend_compile_fn
    for _ in range(8):
        inner, given = _torch_private.unwrap_backend(compiler_fn)
        if inner is None:
            break
        arguments = {**given, **arguments}
        owner = _torch_private.call_of(compiler_fn) if _torch_private.is_torch_compile_call(compiler_fn) else owner
        compiler_fn = inner
    mark = vars(compiler_fn).get(_MARK) if isinstance(compiler_fn, types.FunctionType) else None
    return (mark if mark is not None and mark.backend is compiler_fn else None), arguments, owner
