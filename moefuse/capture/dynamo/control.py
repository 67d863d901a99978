"""How a traced frame is started again, what Dynamo's errors mean, and which of its settings matter."""

from __future__ import annotations

from typing import Any

from moefuse.passes.graph import symbols


def restart(speculation_log: Any, reason: str) -> Exception:
    """The exception that makes Dynamo analyse the frame again, from the start and without what it learned about this attempt.

    It combines two restarts of Dynamo: the one clears the log of the frame, the other passes through a call of the backend.
    """
    from torch._dynamo.exc import TensorifyScalarRestartAnalysis, UnspecializeRestartAnalysis

    speculation_log.clear()
    kind = type("CaptureRestart", (UnspecializeRestartAnalysis, TensorifyScalarRestartAnalysis), {})
    return kind(restart_reason=reason)  # type: ignore[no-any-return]


def left(reason: str) -> Exception:
    """The exception that makes Dynamo leave a frame whose graph it has given to the backend."""
    from torch._dynamo.exc import SkipFrame

    return SkipFrame(reason)


def is_restart(error: Exception) -> bool:
    """Whether Dynamo will try the frame again, or was told to leave it."""
    from torch._dynamo.exc import RestartAnalysis, SkipFrame

    return isinstance(error, RestartAnalysis | SkipFrame)


def is_break(error: Exception) -> bool:
    """Whether Dynamo tries the frame again because the graph breaks in it."""
    from torch._dynamo.exc import SpeculationRestartAnalysis

    return isinstance(error, SpeculationRestartAnalysis)


def cut(translator: Any) -> None:
    """Have Dynamo break the graph, by its own means, in front of the instruction that has just run: where it had asked whether to."""
    entry = translator.current_speculation
    if not entry.failed(translator):
        entry.fail_and_restart_analysis(translator.error_on_graph_break)


def environment() -> Any:
    """The sizes of the frame whose graph is being compiled."""
    from torch._guards import TracingContext

    return TracingContext.get().fake_mode.shape_env  # type: ignore[union-attr]


def breaks_in_loop(error: Exception) -> bool:
    """Whether Dynamo leaves the frame because its graph would break in a loop, or around it."""
    from torch._dynamo.exc import Unsupported

    return isinstance(error, Unsupported) and bool(getattr(error, "skip_frame", False))


def has_unbacked(environment: Any) -> bool:
    """Whether the frame's sizes include one that only the run knows."""
    return any(symbols.unbacked(symbol) for symbol in environment.var_to_range)


def asserts_floats(environment: Any) -> bool:
    """Whether the program asserts something of floats that only the run knows: torch leaves some of that out of the graph."""
    return any(environment.deferred_runtime_asserts.get(symbol) for symbol, known in environment.var_to_range.items() if known.is_float)


def place(error: Exception) -> str:
    """`` at file:line`` of the user's statement at which Dynamo stopped; empty where the error does not say."""
    stack = getattr(error, "real_stack", None)
    return f" at {stack[-1].filename}:{stack[-1].lineno}" if stack else ""


def is_tracing(error: Exception) -> bool:
    """Whether an error is Dynamo's own way of saying that it cannot trace something."""
    from torch._dynamo.exc import TorchDynamoException

    return isinstance(error, TorchDynamoException)


def is_programs(error: Exception) -> bool:
    """Whether it is the program that raises: Dynamo ran an operation on tensors without values, and sizes do not fit, for example."""
    from torch._dynamo.exc import ObservedException, TorchRuntimeError

    return isinstance(error, TorchRuntimeError | ObservedException)


def is_backends(error: Exception) -> bool:
    """Whether an error comes out of the backend, and not out of tracing."""
    from torch._dynamo.exc import ShortenTraceback

    return isinstance(error, ShortenTraceback)


def user_flags() -> bool:
    """Whether the user has switched both capture flags on."""
    from torch._dynamo import config

    return bool(config.capture_scalar_outputs and config.capture_dynamic_output_shape_ops)


def copies_nodes() -> bool:
    """Whether a setting makes Dynamo copy parts of the graph on its way to the backend: then nodes cannot be followed."""
    from torch._dynamo import config

    return bool(config.use_graph_deduplication) or config.repro_after == "dynamo"
