"""Four methods of Dynamo's tracing, and a few of its bookkeeping, wrapped once for the process.

Each wrapper first asks whether the frame that is being traced has a ``moefuse_capture`` (only frames for our own backend have); for all
others it is the method as it was.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
import types
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, Protocol

from torch import nn
from torch.fx import Node

from moefuse import _torch_private
from moefuse.capture.dynamo import (
    armed,
    checkpoints,
    control,
    creation_clock,
    ddp,
    fresh_leaves,
    left,
    module_calls,
    parametrized,
    parametrized_hooks,
    relations,
    told_apart,
    values,
)
from moefuse.program.runs import Begun

log = logging.getLogger("moefuse.capture")

_KEPT = "moefuse_capture"
_SETTINGS = "moefuse_settings"
Prepare = Callable[[nn.Module, Mapping[str, Any]], Collection[Any] | None]
_prepare: list[Prepare] = []


class Observer(Protocol):
    """What a traced frame is told; see moefuse/capture/frame.py."""

    registering: bool
    fused: bool
    related: Sequence[relations.Input]
    crossed: bool
    insists: bool

    def before(self, translator: Any) -> Any: ...
    def cuts(self, translator: Any) -> bool: ...
    def mutated(self, variable: Any) -> None: ...
    def compiling(self, environment: Any) -> None: ...
    def compiled(self, output: Any = None) -> None: ...
    def failed(self, error: Exception, translator: Any) -> None: ...
    def rows(self, translator: Any, variable: Any) -> Any: ...
    def counted(self, translator: Any, ids: Any, args: Sequence[Any], named: Mapping[str, Any]) -> Any: ...
    def read(self, translator: Any, variable: Any) -> Any: ...
    def numbers(self, translator: Any, variable: Any) -> Any: ...
    def joins(self, environment: Any) -> bool: ...
    def outlived(self) -> None: ...
    def leaves_missed(self) -> None: ...
    def refused_before(self, found: Collection[Any]) -> None: ...
    def computed(self, translator: Any, nodes: Collection[Node]) -> bool: ...
    def registers(self, translator: Any, why: str) -> None: ...
    def unrelated(self, why: str) -> None: ...

    @property
    def met(self) -> Sequence[relations.Input]: ...
    @property
    def traced(self) -> Collection[types.CodeType]: ...
    @property
    def scalars(self) -> bool: ...
    @property
    def numbers_traced(self) -> bool: ...
    @property
    def collects(self) -> bool: ...
    @property
    def makes_leaves(self) -> bool: ...
    @property
    def parametrizes(self) -> bool: ...
    @property
    def gave_up(self) -> bool: ...
    @property
    def erred(self) -> bool: ...
    @property
    def seen(self) -> set[str]: ...
    @property
    def apart(self) -> Callable[[nn.Module], Hashable] | None: ...


def install(
    start: Callable[[Any, Any, bool], Observer | None],
    codes: Callable[[Any, Any], Collection[types.CodeType] | None] = lambda *_: None,
    limited: Callable[[Any, Any], bool] = lambda *_: False,
    again: Callable[[Any, Any, int], None] = lambda *_: None,
) -> None:
    """Wrap Dynamo's methods.

    Args:
        start: from a compiler, a speculation log and whether it must be one graph, the observer of a frame, or None to leave it alone.
        codes: from a compiler and what it is to compile, the code that another compilation must not have Dynamo leave; None if not ours.
        limited: called with a compiler and a frame with experts of whose code Dynamo compiles nothing more; whether to ask for each call.
        again: called with a compiler, a frame that is left once more although it has experts that are fused in other calls, and when a
            report last said so.
    """
    from torch._dynamo.convert_frame import CatchErrorsWrapper, ConvertFrame
    from torch._dynamo.eval_frame import _TorchDynamoContext
    from torch._dynamo.output_graph import OutputGraph
    from torch._dynamo.side_effects import SideEffects
    from torch._dynamo.symbolic_convert import InstructionTranslator, InstructionTranslatorBase
    from torch._dynamo.variables.base import MutationType
    from torch._dynamo.variables.functions import LocalGeneratorObjectVariable
    from torch._dynamo.variables.tensor import TensorVariable
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    if getattr(InstructionTranslatorBase.step, "moefuse", False):
        return
    _wrap(InstructionTranslator, "__init__", functools.partial(_on_init, start, inspect.signature(InstructionTranslator.__init__)))
    _wrap(_TorchDynamoContext, "__call__", functools.partial(_on_context, codes))
    _wrap(ConvertFrame, "__call__", functools.partial(_on_convert, limited, again))
    _wrap(CatchErrorsWrapper, "__call__", functools.partial(_on_frame, codes))
    _wrap(InstructionTranslatorBase, "step", _on_step)
    _wrap(InstructionTranslatorBase, "run", _on_run)
    if "speculate" in vars(InstructionTranslatorBase):
        _wrap(InstructionTranslatorBase, "speculate", _on_speculate)
    _wrap(OutputGraph, "call_user_compiler", _on_compile)
    _wrap(MutationType, "__init__", _on_new)
    _wrap(TensorVariable, "call_method", _on_method)
    _wrap(TensorVariable, "unpack_var_sequence", _on_unpack)
    _wrap(TorchInGraphFunctionVariable, "call_function", _on_function)
    for name in ("mutation", "store_attr"):
        _wrap(SideEffects, name, _on_mutation)
    _wrap(LocalGeneratorObjectVariable, "__init__", _on_generator)
    if checkpoints.available():
        from torch._dynamo.variables import higher_order_ops

        _wrap(higher_order_ops.CheckpointHigherOrderVariable, "_call_function", _on_checkpoint)
        _wrap(SideEffects, "should_allow_side_effects_in_hop", _on_allow)
        _wrap(SideEffects, "check_allowed_side_effect", _on_check)
        _wrap(SideEffects, "prune_dead_object_new", _on_prune)
    parametrized_hooks.install(_wrap, _KEPT)


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


def _on_init(
    start: Callable[..., Observer | None], signature: inspect.Signature, original: Any, self: Any, *args: Any, **kwargs: Any
) -> None:
    given = signature.bind(self, *args, **kwargs).arguments
    original(self, *args, **kwargs)
    if given["export"]:
        return
    observer = start(given["compiler_fn"], given["speculation_log"], given["one_graph"])
    if observer is None:
        return
    left.attempted(observer)
    if _prepare:
        named = {name: given["f_globals"].get(name) for name in given["f_code"].co_names}
        for module in left.modules(named | given["f_locals"]):
            observer.refused_before(_prepared(module, given["f_locals"]))
    setattr(self.output, _KEPT, observer)
    setattr(self.output.tracing_context, _KEPT, observer)
    if observer.scalars:
        environment = self.output.shape_env
        setattr(self.output, _SETTINGS, environment.settings)
        environment.settings = dataclasses.replace(environment.settings, allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True)


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
        _torch_private.at_each_call(self, Begun)
    return original(self, compiled)


def _on_convert(
    limited: Callable[[Any, Any], bool],
    again: Callable[[Any, Any, int], None],
    original: Any,
    self: Any,
    frame: Any,
    cache_entry: Any,
    hooks: Any,
    frame_state: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    owner = self._torchdynamo_orig_backend
    splitter = ddp.splitter_of(owner)
    call = functools.partial(original, self, frame, cache_entry, hooks, frame_state, *args, **kwargs)
    program = owner if splitter is None else splitter.backend_compile_fn
    result = left.convert(call, frame, frame_state, program, functools.partial(again, owner, frame))
    if left.limited(frame.f_code, result) and limited(owner, frame):
        result.apply_to_code = False
    return result


def _on_frame(codes: Callable[[Any, Any], object], original: Any, self: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(self, frame, *args, **kwargs)
    if result.guarded_code is None and result.apply_to_code and _torch_private.kept_out() is not None and codes(self, None) is not None:
        result.apply_to_code = False  # what is around the call is the reason, and not the code
    return result


def _on_step(original: Any, self: Any) -> Any:
    observer = getattr(self.output, _KEPT, None)
    if observer is None:
        return original(self)
    answer = observer.before(self)
    if parametrized.active(self.output):
        parametrized_hooks.before(observer, self)
    going = original(self)
    if answer is not None:
        self.stack[-1] = answer
    return going


def _on_speculate(original: Any, self: Any) -> Any:
    """Where Dynamo may break the graph: it does, by its own means, in front of the statement that the observer names."""
    entry = original(self)
    observer = getattr(self.output, _KEPT, None)
    if observer is not None and not self.stack and observer.cuts(self) and not entry.failed(self):
        entry.fail_and_restart_analysis(self.error_on_graph_break)
    return entry


def _on_run(original: Any, self: Any) -> Any:
    observer = getattr(self.output, _KEPT, None)
    if observer is None or self.output.root_tx is not self:
        return original(self)
    try:
        result = original(self)
    except Exception as error:
        observer.seen.update(node.target for node in self.output.graph.nodes if node.op == "placeholder")
        if fresh_leaves.made(self.output) and not (control.is_restart(error) or control.is_backends(error)):
            observer.leaves_missed()
        observer.failed(error, self)
        raise
    observer.compiled(self.output)
    if observer.met:
        relations.watch(self.output, observer.met, exact=False)
    return result


def _on_compile(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    # The compiler shares the environment: with the flags, it would read numbers out of index tensors that it leaves alone without them.
    settings = getattr(self, _SETTINGS, None)
    if settings is not None:
        self.shape_env.settings = settings
    observer = getattr(self, _KEPT, None)
    if observer is None:
        return original(self, *args, **kwargs)
    if fresh_leaves.missed(self):
        observer.leaves_missed()
    observer.compiling(self.shape_env)
    with ddp.split_last(self):
        compiled = original(self, *args, **kwargs)
    observer.compiled()
    if observer.related and (observer.crossed or observer.joins(self.shape_env)):
        why = relations.watch(self, observer.related)
        if why is not None:
            observer.unrelated(why)
    if observer.joins(self.shape_env) or checkpoints.collected(self) or observer.registering:
        module_calls.watch(self, observer.traced)
    if observer.apart is not None:
        told_apart.watch(self, observer.apart)
    armed.watch(self)
    return compiled


def _on_new(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    self.moefuse_created = creation_clock.now()


def _on_mutation(original: Any, self: Any, variable: Any, *args: Any, **kwargs: Any) -> Any:
    output = self.output_graph_weakref()
    observer = getattr(output, _KEPT, None)
    if observer is not None:
        if not parametrized.answering(output):
            observer.mutated(variable)
        if args and parametrized.active(output):
            parametrized_hooks.stored(observer, output, variable, args[0])
    return original(self, variable, *args, **kwargs)


def _on_checkpoint(original: Any, self: Any, translator: Any, args: Any, kwargs: Any) -> Any:
    observer = getattr(translator.output, _KEPT, None)
    if observer is None or not observer.collects:
        return original(self, translator, args, kwargs)
    with checkpoints.begin(self, translator, kwargs):
        return original(self, translator, args, kwargs)


def _on_allow(original: Any, self: Any) -> Any:
    output = self.output_graph_weakref()
    return original(self) and not (output is not None and checkpoints.inside(output))


def _on_check(original: Any, self: Any, variable: Any) -> Any:
    output = self.output_graph_weakref()
    return (output is not None and checkpoints.written(output, variable)) or original(self, variable)


def _on_prune(original: Any, self: Any, translator: Any) -> None:
    original(self, translator)
    observer = getattr(translator.output, _KEPT, None)
    if observer is not None and checkpoints.outlives(self, translator):
        observer.outlived()


def _on_generator(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    creation_clock.record(self.inline_tracer)


def _on_function(original: Any, self: Any, translator: Any, args: Any, kwargs: Any) -> Any:
    observer = getattr(translator.output, _KEPT, None)
    if observer is None:
        return original(self, translator, args, kwargs)
    call = functools.partial(original, self, translator)
    answer = _FUNCTIONS.get(getattr(self.value, "__name__", ""))
    if answer is not None:
        return answer(observer, translator, call, args, kwargs)
    if observer.makes_leaves and fresh_leaves.asked(self.value, kwargs):
        return fresh_leaves.make(translator.output, functools.partial(call, args), kwargs, args)
    return call(args, kwargs)


def _on_method(original: Any, self: Any, translator: Any, name: str, args: Any, kwargs: Any) -> Any:
    observer = getattr(translator.output, _KEPT, None)
    if observer is None:
        return original(self, translator, name, args, kwargs)
    call = functools.partial(original, self, translator, name)
    answer = _METHODS.get(name)
    if answer is not None:
        return answer(observer, translator, call, self, args, kwargs)
    if observer.makes_leaves and fresh_leaves.asked(name, kwargs):
        return fresh_leaves.make(translator.output, functools.partial(call, args), kwargs, [self, *args])
    return call(args, kwargs)


def _split(observer: Observer, translator: Any, call: Any, args: Any, kwargs: Any) -> Any:
    # ``rows.split(list(counts))``: Python makes numbers of these tensors, and Dynamo breaks the graph.
    if not observer.scalars:
        return call(args, kwargs)
    given = {name: values.with_numbers(translator, value) for name, value in kwargs.items()}
    return call([values.with_numbers(translator, value) for value in args], given)


def _split_method(observer: Observer, translator: Any, call: Any, self: Any, args: Any, kwargs: Any) -> Any:
    return _split(observer, translator, call, args, kwargs)


def _count(observer: Observer, translator: Any, call: Any, args: Any, kwargs: Any) -> Any:
    # ``torch.bincount(ids, minlength=E)``, whose length Dynamo does not know.
    ids = [*args, *([kwargs["input"]] if "input" in kwargs else [])]
    named = {key: value for key, value in kwargs.items() if key != "input"}
    known = observer.counted(translator, ids[0], ids[1:], named) if ids else None
    return call(args, kwargs) if known is None else known


def _count_method(observer: Observer, translator: Any, call: Any, self: Any, args: Any, kwargs: Any) -> Any:
    known = observer.counted(translator, self, args, kwargs)
    return call(args, kwargs) if known is None else known


def _item(observer: Observer, translator: Any, call: Any, self: Any, args: Any, kwargs: Any) -> Any:
    known = observer.read(translator, self) if observer.scalars else None
    if known is not None or not observer.numbers_traced:
        return call(args, kwargs) if known is None else known
    from torch._dynamo import config

    with config.patch(capture_scalar_outputs=True):
        return call(args, kwargs)


def _tolist(observer: Observer, translator: Any, call: Any, self: Any, args: Any, kwargs: Any) -> Any:
    known = observer.rows(translator, self)
    if known is None:
        observer.read(translator, self)
    return call(args, kwargs) if known is None else known


def _requires_grad(observer: Observer, translator: Any, call: Any, self: Any, args: Any, kwargs: Any) -> Any:
    turned = observer.makes_leaves and fresh_leaves.told(args, kwargs) and fresh_leaves.turn(translator.output, self)
    return self if turned else call(args, kwargs)


def _hook(observer: Observer, translator: Any, call: Any, self: Any, args: Any, kwargs: Any) -> Any:
    # One on a value that the graph computes is an operation of the graph.
    if self.source is not None and not parametrized.answering(translator.output):
        observer.mutated(self)
    return call(args, kwargs)


_FUNCTIONS: dict[str, Callable[..., Any]] = {"split": _split, "split_with_sizes": _split, "bincount": _count}
_METHODS: dict[str, Callable[..., Any]] = {
    "split": _split_method,
    "split_with_sizes": _split_method,
    "bincount": _count_method,
    "item": _item,
    "tolist": _tolist,
    "requires_grad_": _requires_grad,
    "register_hook": _hook,
    "register_post_accumulate_grad_hook": _hook,
}


def _on_unpack(original: Any, self: Any, translator: Any, *args: Any, **kwargs: Any) -> Any:
    observer = getattr(translator.output, _KEPT, None)
    known = observer.numbers(translator, self) if observer is not None and not args and not kwargs else None
    return original(self, translator, *args, **kwargs) if known is None else known


def current() -> Any:
    """The observer of the frame whose graph is being compiled; None outside Dynamo, or for a frame that is not ours."""
    from torch._guards import TracingContext

    return getattr(TracingContext.try_get(), _KEPT, None)
