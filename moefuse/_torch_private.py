"""The only door to private torch. Everything here is guarded by tests and works from torch 2.11 on.

Sections: Inductor, caches, errors that cross Dynamo, counters and traces, what Dynamo knows about the current compilation.
torch's compiler modules are imported inside the functions: importing moefuse must stay as cheap as importing torch.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch

CompiledFn = Callable[..., Any]

# --- Inductor ---------------------------------------------------------------------------------------------------------------------


def inductor_option_names() -> frozenset[str]:
    """Names that ``torch.compile(backend="inductor", options=...)`` accepts."""
    from torch._inductor import list_options

    return frozenset(list_options())


def inductor_config(mode: str | None, options: Mapping[str, object]) -> dict[str, Any]:
    """Config patches for ``mode`` and ``options``, checked as ``torch.compile(backend="inductor")`` checks them.

    Raises:
        RuntimeError: torch's own error for an unknown mode or a value of the wrong type.
    """
    # torch's own wrapper also applies CompilerBisector and the CUDA-graph workarounds that depend on these settings.
    wrapper = torch._TorchCompileInductorWrapper(mode, dict(options), None)
    return dict(wrapper.config)


def compile_fx(gm: torch.fx.GraphModule, example_inputs: Sequence[object], config_patches: dict[str, Any]) -> CompiledFn:
    """Hand the graph to Inductor."""
    from torch._inductor.compile_fx import compile_fx as inductor_compile_fx

    inputs: Any = list(example_inputs)
    return cast(CompiledFn, inductor_compile_fx(gm, inputs, config_patches=config_patches))


# --- caches -----------------------------------------------------------------------------------------------------------------------

_STAMPED_PASS = "post_grad_custom_post_pass"


def with_stamp(patches: Mapping[str, Any], stamp: object) -> dict[str, Any]:
    """``patches`` plus ``stamp`` behind the passes that the user has in Inductor's last custom-pass slot."""
    from torch._inductor import config

    present = patches.get(_STAMPED_PASS, getattr(config, _STAMPED_PASS))
    present = [] if present is None else list(present) if isinstance(present, list | tuple) else [present]
    return {**patches, _STAMPED_PASS: [*present, stamp] if present else stamp}


def custom_graph_pass() -> type:
    """Inductor's base class for graph passes with a cache key."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    return CustomGraphPass


# --- errors that cross Dynamo -----------------------------------------------------------------------------------------------------


def dynamo_control_flow() -> tuple[type[BaseException], ...]:
    """Exceptions by which Dynamo restarts or skips a frame; a backend has to let them through."""
    from torch._dynamo.exc import TorchDynamoException

    return (TorchDynamoException,)


@contextlib.contextmanager
def surfacing(*kinds: type[Exception]) -> Iterator[None]:
    """Let errors of these kinds reach the caller of the compiled function as themselves.

    Dynamo wraps what a backend raises in BackendCompilerFailed, except for subclasses of its ShortenTraceback. So the error is raised
    as a subclass of both: ``except moefuse.FusionError`` works, and the text is the error's own.
    """
    try:
        yield
    except kinds as error:
        raise _surfaced_class(type(error))(*error.args, first_useful_frame=None) from error.__cause__


def _surfaced_class(kind: type[Exception]) -> Callable[..., Exception]:
    from torch._dynamo.exc import ShortenTraceback

    if issubclass(kind, ShortenTraceback):
        return kind
    # Same name and module: in a traceback the user reads the documented class.
    return type(kind.__name__, (kind, ShortenTraceback), {"__module__": kind.__module__, "__qualname__": kind.__qualname__})


# --- counters and traces ----------------------------------------------------------------------------------------------------------


def count(name: str, amount: int = 1) -> None:
    """Add to ``torch._dynamo.utils.counters["moefuse"][name]``."""
    from torch._dynamo.utils import counters

    counters["moefuse"][name] += amount


def trace_artifact(name: str, payload: Callable[[], str]) -> None:
    """Write a JSON artifact to TORCH_TRACE; ``payload`` is only called when tracing is on."""
    from torch._logging._internal import trace_structured

    trace_structured(
        "artifact", metadata_fn=lambda: {"name": name, "encoding": "json"}, payload_fn=payload, expect_trace_id=False
    )


# --- the current compilation ------------------------------------------------------------------------------------------------------


def frame_id() -> int | None:
    """Dynamo's number of the frame that is being compiled: equal for a frame and its recompilations; None outside Dynamo."""
    from torch._guards import CompileContext

    compile_id = CompileContext.current_compile_id()
    return None if compile_id is None else compile_id.frame_id


def torch_compile_call() -> object | None:
    """The object that stands for the ``torch.compile`` call which this backend call belongs to; None for a direct call."""
    frame = sys._getframe()
    for _ in range(8):
        if frame.f_back is None:
            return None
        frame = frame.f_back
        if frame.f_code is torch._TorchCompileWrapper.__call__.__code__:
            owner: object = frame.f_locals["self"]
            return owner
    return None


def graph_break(gm: torch.fx.GraphModule) -> str | None:
    """Why Dynamo ended this graph early, as ``reason at file:line``; None if it did not."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    first_line = str(reason.reason).strip().splitlines()[0]
    if not reason.user_stack:
        return first_line
    place = reason.user_stack[-1]
    return f"{first_line} at {place.filename}:{place.lineno}"
