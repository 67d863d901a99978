"""Methods of Dynamo, wrapped once for the process.

Each wrapper first asks whether the frame that is being traced has an observer (only frames for our own backend have); for all others it
is the method as it was. What is asked of a frame's graph and side effects has classes of its own instead, see ``observed``.
"""

from __future__ import annotations

import functools
import logging
import types
from collections.abc import Callable, Collection, Mapping
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from moefuse import _torch_private
from moefuse.capture.dynamo import (
    called,
    checkpoints,
    control,
    creation_clock,
    fresh_leaves,
    in_step,
    inside,
    left,
    observed,
    parametrized_hooks,
    points,
    relations,
)
from moefuse.capture.dynamo.observed import Observer
from moefuse.program.runs import Begun

log = logging.getLogger("moefuse.capture")

Prepare = Callable[[nn.Module, Mapping[str, Any]], Collection[Any] | None]
_prepare: list[Prepare] = []
_tried_again: ContextVar[bool] = ContextVar("_tried_again", default=False)
"""Whether a frame that fails is traced once more, in another way."""


def install(
    start: Callable[[Any, Any, bool], Observer | None],
    codes: Callable[[Any, Any], Collection[types.CodeType] | None] = lambda *_: None,
    limited: Callable[[Any, Any], bool] = lambda *_: False,
    again: Callable[[Any, Any, int], None] = lambda *_: None,
    any_size: Callable[[Any], bool] = lambda _: False,
    elsewhere: inside.Tell = lambda *_: None,
) -> None:
    """Wrap Dynamo's methods.

    Args:
        start: from a compiler, a speculation log and whether it must be one graph, the observer of a frame, or None to leave it alone.
        codes: from a compiler and what it is to compile, the code that another compilation must not have Dynamo leave; None if not ours.
        limited: called with a compiler and a frame with experts of whose code Dynamo compiles nothing more; whether to ask for each call.
        again: called with a compiler, a frame that is left once more although it has experts that are fused in other calls, and when a
            report last said so.
        elsewhere: called with a module that is compiled for us, what Dynamo calls for it, and another compiler that has it in a graph.
        any_size: from a compiler, whether its frames are to take sizes of 0 and 1 for sizes like any other, where they can.
    """
    from torch._dynamo.convert_frame import CatchErrorsWrapper
    from torch._dynamo.eval_frame import _TorchDynamoContext
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase
    from torch._dynamo.variables.base import MutationType
    from torch._dynamo.variables.functions import LocalGeneratorObjectVariable
    from torch._dynamo.variables.tensor import TensorVariable
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    if getattr(InstructionTranslatorBase.step, "moefuse", False):
        return
    _wrap(_TorchDynamoContext, "__call__", functools.partial(_on_context, codes))
    _wrap(CatchErrorsWrapper, "__call__", functools.partial(_on_frame, codes, limited, again, any_size))
    _wrap(InstructionTranslatorBase, "run", functools.partial(_on_run, start, elsewhere))
    _wrap(InstructionTranslatorBase, "step", _on_step)
    _wrap(MutationType, "__init__", _on_new)
    _wrap(LocalGeneratorObjectVariable, "__init__", _on_generator)
    _wrap(TensorVariable, "call_method", called.method)
    _wrap(TensorVariable, "unpack_var_sequence", called.unpacked)
    _wrap(TorchInGraphFunctionVariable, "call_function", called.function)
    if points.has("checkpoints"):
        from torch._dynamo.variables.higher_order_ops import CheckpointHigherOrderVariable

        _wrap(CheckpointHigherOrderVariable, "_call_function", _on_checkpoint)


def before_tracing(prepare: Prepare) -> None:
    """Call ``prepare`` with each module that a frame of ours was called with, and all its arguments, before the frame is traced.

    What it returns are refusals for the report.
    """
    _prepare.append(prepare)


def _wrap(owner: Any, name: str, hook: Callable[..., Any]) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        return hook(original, self, *args, **kwargs)

    wrapper.moefuse = True  # type: ignore[attr-defined]
    setattr(owner, name, wrapper)


def _begin(start: Callable[[Any, Any, bool], Observer | None], translator: Any) -> Observer | None:
    """The observer of a frame that is about to be traced, if it is ours."""
    output = translator.output
    if output.root_tx is not translator or translator.export:
        return None
    observer = start(output.compiler_fn, translator.speculation_log, translator.one_graph)
    if observer is None:
        return None
    left.attempted(observer)
    if _prepare:
        named = {name: translator.f_globals.get(name) for name in translator.f_code.co_names}
        for module in left.modules(named | dict(translator.f_locals)):
            observer.refused_before(_prepared(module, translator.f_locals))
    observed.begin(output, observer)
    return observer


def _prepared(module: nn.Module, arguments: Mapping[str, Any]) -> list[Any]:
    refused: list[Any] = []
    for prepare in _prepare:
        try:
            refused += prepare(module, arguments) or ()
        except Exception:  # of somebody else's library, which has the same to do in the call
            log.debug("%s failed before tracing", prepare, exc_info=True)
    return refused


def _on_context(codes: Callable[[Any, Any], Collection[types.CodeType] | None], original: Any, self: Any, compiled: Any) -> Any:
    found = codes(self.callback, compiled)
    if found is not None:
        left.look_again(found)
        inside.compiled(self.callback, compiled)
        _torch_private.at_each_call(self, Begun)
    return original(self, compiled)


def _on_frame(
    codes: Callable[[Any, Any], object],
    limited: Callable[[Any, Any], bool],
    again: Callable[[Any, Any, int], None],
    any_size: Callable[[Any], bool],
    original: Any,
    self: Any,
    frame: Any,
    cache_entry: Any,
    frame_state: Any,
) -> Any:
    call = functools.partial(original, self, frame, cache_entry, frame_state)
    converter = self._torchdynamo_orig_backend
    if type(converter).__name__ == "ConvertFrame":
        owner = converter._torchdynamo_orig_backend
        convert = functools.partial(left.convert, call, frame, frame_state, owner, functools.partial(again, owner, frame))
        result = _of_any_size(convert) if any_size(owner) else convert()
        if left.limited(frame.f_code, result) and limited(owner, frame):
            result.apply_to_code = False
    else:
        result = call()
    if result.guarded_code is None and result.apply_to_code and _torch_private.kept_out() is not None and codes(self, None) is not None:
        result.apply_to_code = False  # what is around the call is the reason, and not the code
    return result


def _of_any_size(convert: Callable[[], Any]) -> Any:
    """A size of 1 that is spread over others (masks, positions) has to be one: then torch compiles for 0 and 1 what it does."""
    if torch.is_grad_enabled():
        return convert()
    token = _tried_again.set(True)
    try:
        with _torch_private.any_size():
            return convert()
    except Exception:
        log.debug("no code for any size", exc_info=True)
    finally:
        _tried_again.reset(token)
    return convert()


def _on_step(original: Any, self: Any) -> Any:
    observer = observed.of(self.output)
    if observer is None:
        return original(self)
    answer = observer.before(self)
    parametrized_hooks.before(observer, self)
    speculation = self.current_speculation
    going = original(self)
    if answer is not None:
        self.stack[-1] = answer
    if observer.cut and self.current_speculation is not speculation:
        control.cut(self)
    return going


def _on_run(start: Callable[[Any, Any, bool], Observer | None], elsewhere: inside.Tell, original: Any, self: Any) -> Any:
    observer = _begin(start, self)
    if observer is None:
        if observed.of(self.output) is None:
            return inside.run(original, self, elsewhere)
        in_step.told(self)
        return original(self)
    try:
        result = original(self)
    except Exception as error:
        observer.seen.update(node.target for node in self.output.graph.nodes if node.op == "placeholder")
        if fresh_leaves.made(self.output) and not (control.is_restart(error) or control.is_backends(error)):
            observer.leaves_missed()
        observer.failed(error, self, again=_tried_again.get())
        raise
    observer.compiled(self.output)
    if observer.met:
        relations.watch(self.output, observer.met, exact=False)
    return result


def _on_new(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    self.moefuse_created = creation_clock.now()


def _on_checkpoint(original: Any, self: Any, translator: Any, args: Any, kwargs: Any) -> Any:
    observer = observed.of(translator.output)
    if observer is None or not observer.collects:
        return original(self, translator, args, kwargs)
    with checkpoints.begin(self, translator, kwargs):
        return original(self, translator, args, kwargs)


def _on_generator(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    creation_clock.record(self.inline_tracer)


def current() -> Any:
    """The observer of the frame whose graph is being compiled; None outside Dynamo, or for a frame that is not ours."""
    from torch._guards import TracingContext

    return observed.of(TracingContext.try_get())
