"""Errors that cross Dynamo, and the reasons that it gives for breaking a graph."""

from __future__ import annotations

import contextlib
import re
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any, cast

from moefuse.program.breaks import Kind, Stop

FAKES_LOG = "torch._subclasses.fake_tensor"
"""The log to which an operation that cannot be is written with its traceback, before it raises."""


def dynamo_control_flow() -> tuple[type[BaseException], ...]:
    """Exceptions by which Dynamo restarts or skips a frame; a backend has to let them through."""
    from torch._dynamo.exc import RestartAnalysis, SkipFrame

    return (RestartAnalysis, SkipFrame)


def beneath(error: BaseException) -> BaseException:
    """What a program raised, for an error that Dynamo raised around it, whose first line says only that Dynamo was at work."""
    dynamos = getattr(sys.modules.get("torch._dynamo.exc"), "TorchDynamoException", ())
    while isinstance(error, dynamos) and (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    return error


def asks_for_size() -> type[BaseException]:
    """The exception where a size has to be known that only the run knows."""
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    return GuardOnDataDependentSymNode


def depends_on_data() -> tuple[type[BaseException], ...]:
    """Exceptions of an operation on fake tensors whose result has a size, or is a number, that only the run knows."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

    return (DataDependentOutputException, DynamicOutputShapeException)


def breaks_the_graph() -> tuple[type[BaseException], ...]:
    """Exceptions of a compiler that make Dynamo break the graph at the operation that the compiler cannot take."""
    from torch._dynamo.exc import exceptions_allowed_to_be_fallback

    found: tuple[type[BaseException], ...] = exceptions_allowed_to_be_fallback
    return found


@contextlib.contextmanager
def surfacing(*kinds: type[Exception]) -> Iterator[None]:
    """Let errors of these kinds reach the caller of the compiled function as themselves.

    Dynamo wraps what a backend raises in BackendCompilerFailed, except for subclasses of its ShortenTraceback. So the error is raised
    as a subclass of both: ``except moefuse.FusionError`` works, and the text is the error's own.
    """
    try:
        yield
    except kinds as error:
        raise _surfaced(error, sys._getframe()) from error.__cause__


def _surfaced(error: Exception, frame: types.FrameType) -> Exception:
    from torch._dynamo.exc import ShortenTraceback

    kind, text = type(error), str(error)
    if isinstance(error, ShortenTraceback):
        return error
    bases = (ShortenTraceback,) if issubclass(ShortenTraceback, kind) else (kind, ShortenTraceback)
    # Name and module: in a traceback the user reads the documented class. __str__: Dynamo adds advice on its own bugs to the arguments.
    body = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__str__": lambda self: text}
    surfaced = type(kind.__name__, bases, body)
    # Not through its own __init__, whose signature depends on the class. The frame is where Dynamo cuts its own frames off the traceback.
    raised = cast(Any, surfaced.__new__(surfaced, *error.args))
    ShortenTraceback.__init__(raised, *error.args, first_useful_frame=frame)
    return cast(Exception, raised)


_CAPTURE_FLAGS = ("capture_scalar_outputs", "capture_dynamic_output_shape_ops")
"""Settings that Dynamo advises at breaks which depend on data; moefuse's capture has tried what they do."""


def graph_break(made: object) -> Stop | None:
    """Why Dynamo ended a graph early, from the graph or from what wrote it (an OutputGraph); None if it did not."""
    reason = getattr(made, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    return _stop(reason.reason, reason.user_stack)


def ends_frame(made: object) -> bool:
    """Whether what a graph from Dynamo returns is what the traced function returns, and no other graph of it reads it."""
    reason = getattr(made, "compile_subgraph_reason", None)
    return reason is not None and not reason.graph_break


def tracing_stop(error: BaseException) -> Stop:
    """Where and why an error ended Dynamo's tracing."""
    return _stop(str(error).strip() or type(error).__name__, getattr(error, "real_stack", None) or ())


def _stop(reason: object, stack: Sequence[Any]) -> Stop:
    said, places = in_words(reason), tuple((frame.filename, frame.lineno) for frame in stack)
    kind = next((kind for phrase, kind in _KINDS.items() if re.search(phrase, said)), "")
    return Stop(break_text(reason, stack), said, places, _setting(reason), _changed(reason), cast(Kind, kind))


_KINDS: dict[str, Kind] = {
    r"^Skip": "skipped",
    r"(?i)^dynamic shape operator": "size",
    r"(?i)^(dynamic slicing|data[- ]dependent|unsupported tensor\.(item|tolist))": "number",
    r"^graph break in loop": "loop",
    r"HOP: Unsafe side effect": "write",
    r"requires_grad_\(\) intermediate": "requires-grad",
    r"backwards hooks": "hooks",
}
"""What Dynamo stops at, by its text, which is read here alone."""


def _setting(message: object) -> str:
    """The first of Dynamo's hints that is about a setting."""
    hints = (line.strip().partition("Hint: ")[2] for line in str(message).splitlines() if line.strip().startswith("Hint: "))
    return next((hint for hint in hints if "torch._dynamo.config." in hint and not any(flag in hint for flag in _CAPTURE_FLAGS)), "")


def _changed(message: object) -> str:
    """The kind of object that a traced function must not write to, if that is why Dynamo stopped."""
    found = re.search(r"Attempted to mutate (\w+?)Variable", str(message))
    return "" if found is None else found[1]


def compiler_failed(error: BaseException) -> bool:
    """Whether an error comes from a backend, by way of Dynamo, and not from the program."""
    from torch._dynamo.exc import BackendCompilerFailed

    return isinstance(error, BackendCompilerFailed)


def break_text(reason: object, user_stack: Sequence[Any]) -> str:
    place = f" at {user_stack[-1].filename}:{user_stack[-1].lineno}" if user_stack else ""
    return f"{in_words(reason)}{place}"


_WORDS = {
    "generic_jump": "Data-dependent branching",
    "Missing tp_iternext": "Dynamo does not iterate over this object",
    "step_unsupported": "Dynamo cannot break the graph at this statement alone",
}
"""Where Dynamo's text is a name of its own, of a bytecode or a slot of a type, what happened there."""


def in_words(reason: object) -> str:
    """The first line of why Dynamo stopped, for a reader who knows the program and not Dynamo."""
    line = first_line(reason)
    if "data-dependent expression" in line:
        return "A number decides here that depends on data"
    return next((text for name, text in _WORDS.items() if name in line), line)


def guard_text(reason: str) -> str:
    """``0/1: self.n == 1   # self.n += 1  # my.py:3 in forward (HINT: ...)`` -> ``self.n == 1``."""
    return first_line(reason).partition(": ")[2].partition("  #")[0].strip()


def first_line(text: object) -> str:
    lines = str(text).strip().splitlines()
    return lines[0] if lines else "unknown reason"
