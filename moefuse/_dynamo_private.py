"""Where capture reaches into Dynamo's tracing. Beside ``_torch_private.py`` the only module that touches private torch.

Four methods of Dynamo are wrapped, once for the process. Each wrapper first asks whether the frame that is being traced has a
``moefuse_capture`` (only frames for our own backend have); for all others it is the method as it was. :data:`POINTS` names
everything that is used, so that a torch release which moves one switches capture off instead of breaking a program.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import weakref
from collections.abc import Callable
from importlib import import_module
from typing import Any, Protocol

import torch
from torch.fx import Node

POINTS: dict[str, tuple[str, ...]] = {
    "torch._dynamo.symbolic_convert": (
        "InstructionTranslator.__init__",
        "InstructionTranslatorBase.step",
        "InstructionTranslatorBase.run",
        "SpeculationLog.clear",
    ),
    "torch._dynamo.output_graph": ("OutputGraph.call_user_compiler", "OutputGraph.shape_env", "OutputGraph.current_tracer"),
    "torch._dynamo.side_effects": ("SideEffects.mutation", "SideEffects.store_attr", "SideEffects.register_hook"),
    "torch._dynamo.variables.base": ("MutationType.__init__", "ValueMutationNew", "AttributeMutationNew", "VariableTracker"),
    "torch._dynamo.variables.builder": ("wrap_fx_proxy",),
    "torch._dynamo.variables.constant": ("ConstantVariable.create",),
    "torch._dynamo.variables.lists": ("ListVariable", "ListIteratorVariable"),
    "torch._dynamo.variables.iter": ("IteratorVariable.__init__",),
    "torch._dynamo.variables.functions": ("LocalGeneratorObjectVariable.__init__",),
    "torch._dynamo.variables.lazy": ("LazyVariableTracker.realize",),
    "torch._dynamo.variables.tensor": ("TensorVariable.method_item", "TensorVariable.method_tolist", "SymNodeVariable"),
    "torch._dynamo.exc": (
        "UnspecializeRestartAnalysis",
        "TensorifyScalarRestartAnalysis",
        "TorchDynamoException",
        "SkipFrame",
        "ShortenTraceback",
    ),
    "torch._dynamo.config": ("capture_scalar_outputs", "capture_dynamic_output_shape_ops"),
    "torch.fx.experimental.symbolic_shapes": ("ShapeEnvSettings", "free_unbacked_symbols"),
}
"""What capture uses of private torch: module -> dotted names inside it."""

_KEPT = "moefuse_capture"
_SETTINGS = "moefuse_settings"
_ARGUMENTS = ("compiler_fn", "one_graph", "export", "speculation_log")
_ADVANCE = ("next_variable", "tp_iternext_impl")
_clock = itertools.count(1)
_births: dict[int, tuple[Any, int]] = {}


class Observer(Protocol):
    """What a traced frame is told; see moefuse/capture/frame.py."""

    def before(self, translator: Any) -> None: ...
    def mutated(self, variable: Any) -> None: ...
    def advanced(self, iterator: Any) -> None: ...
    def compiled(self) -> None: ...
    def failed(self, error: Exception, environment: Any) -> None: ...
    def rows(self, translator: Any, variable: Any) -> Any: ...
    def read(self, translator: Any, variable: Any) -> None: ...

    @property
    def scalars(self) -> bool: ...


def missing() -> list[str]:
    """The points of Dynamo that this torch does not have; capture needs all of them."""
    found = []
    for module, names in POINTS.items():
        try:
            home: Any = import_module(module)
        except ImportError:
            found.append(module)
            continue
        found += [f"{module}.{name}" for name in names if not _has(home, name)]
    if not found:
        arguments = inspect.signature(import_module("torch._dynamo.symbolic_convert").InstructionTranslator.__init__).parameters
        found += [f"torch._dynamo.symbolic_convert.InstructionTranslator.__init__({name})" for name in _ARGUMENTS if name not in arguments]
        fields = {f.name for f in dataclasses.fields(import_module("torch.fx.experimental.symbolic_shapes").ShapeEnvSettings)}
        wanted = {"allow_scalar_outputs", "allow_dynamic_output_shape_ops"}
        found += [f"torch.fx.experimental.symbolic_shapes.ShapeEnvSettings.{name}" for name in sorted(wanted - fields)]
    return found


def _has(home: Any, dotted: str) -> bool:
    for name in dotted.split("."):
        annotated = name in getattr(home, "__annotations__", {})
        if not hasattr(home, name):
            return annotated
        home = getattr(home, name)
    return True


# --- the hooks --------------------------------------------------------------------------------------------------------------------


def install(start: Callable[[Any, Any, bool], Observer | None]) -> None:
    """Wrap Dynamo's methods.

    ``start(compiler_fn, speculation_log, one_graph)`` gives the observer of a frame, or None to leave the frame alone.
    """
    from torch._dynamo.output_graph import OutputGraph
    from torch._dynamo.side_effects import SideEffects
    from torch._dynamo.symbolic_convert import InstructionTranslator, InstructionTranslatorBase
    from torch._dynamo.variables.base import MutationType
    from torch._dynamo.variables.functions import LocalGeneratorObjectVariable
    from torch._dynamo.variables.iter import IteratorVariable
    from torch._dynamo.variables.tensor import TensorVariable

    if getattr(InstructionTranslatorBase.step, "moefuse", False):
        return
    _wrap(InstructionTranslator, "__init__", functools.partial(_on_init, start, inspect.signature(InstructionTranslator.__init__)))
    _wrap(InstructionTranslatorBase, "step", _on_step)
    _wrap(InstructionTranslatorBase, "run", _on_run)
    _wrap(OutputGraph, "call_user_compiler", _on_compile)
    _wrap(MutationType, "__init__", _on_new)
    _wrap(TensorVariable, "method_item", _on_item)
    _wrap(TensorVariable, "method_tolist", _on_tolist)
    for name in ("mutation", "store_attr", "register_hook"):
        _wrap(SideEffects, name, _on_mutation)
    _wrap(LocalGeneratorObjectVariable, "__init__", _on_iterator)
    _wrap(IteratorVariable, "__init__", _on_iterator)
    for kind in _subclasses(IteratorVariable):
        for name in _ADVANCE:
            if name in vars(kind):
                _wrap(kind, name, _on_advance)


def _subclasses(kind: type) -> list[type]:
    below: list[type] = kind.__subclasses__()
    return [kind, *(deeper for one in below for deeper in _subclasses(one))]


def _wrap(owner: type, name: str, hook: Callable[..., Any]) -> None:
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
    setattr(self.output, _KEPT, observer)
    setattr(self.output.tracing_context, _KEPT, observer)
    if observer.scalars:
        environment = self.output.shape_env
        setattr(self.output, _SETTINGS, environment.settings)
        environment.settings = dataclasses.replace(environment.settings, allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True)


def _on_step(original: Any, self: Any) -> Any:
    observer = getattr(self.output, _KEPT, None)
    if observer is not None:
        observer.before(self)
    return original(self)


def _on_run(original: Any, self: Any) -> Any:
    observer = getattr(self.output, _KEPT, None)
    if observer is None or self.output.root_tx is not self:
        return original(self)
    try:
        result = original(self)
    except Exception as error:
        observer.failed(error, self.output.shape_env)
        raise
    observer.compiled()
    return result


def _on_compile(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    # The compiler shares the environment: with the flags, it would read numbers out of index tensors that it leaves alone without them.
    settings = getattr(self, _SETTINGS, None)
    if settings is not None:
        self.shape_env.settings = settings
    compiled = original(self, *args, **kwargs)
    observer = getattr(self, _KEPT, None)
    if observer is not None:
        observer.compiled()
    return compiled


def _on_new(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    self.moefuse_born = next(_clock)


def _on_mutation(original: Any, self: Any, variable: Any, *args: Any, **kwargs: Any) -> Any:
    output = self.output_graph_weakref()
    observer = getattr(output, _KEPT, None)
    if observer is not None:
        observer.mutated(variable)
    return original(self, variable, *args, **kwargs)


def _on_iterator(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    for made in (self, getattr(self, "inline_tracer", None)):
        if made is not None:
            # Not an attribute: Dynamo copies a variable by calling its class with all of its attributes.
            _births[id(made)] = weakref.ref(made, functools.partial(_forget, id(made))), next(_clock)


def _forget(key: int, dead: Any) -> None:
    if _births.get(key, (None, 0))[0] is dead:
        del _births[key]


def _on_advance(original: Any, self: Any, translator: Any, *args: Any, **kwargs: Any) -> Any:
    observer = getattr(getattr(translator, "output", None), _KEPT, None)
    if observer is not None:
        observer.advanced(self)
    return original(self, translator, *args, **kwargs)


def _on_item(original: Any, self: Any, translator: Any, *args: Any, **kwargs: Any) -> Any:
    observer = getattr(translator.output, _KEPT, None)
    if observer is None or not observer.scalars:
        return original(self, translator, *args, **kwargs)
    observer.read(translator, self)
    from torch._dynamo import config

    with config.patch(capture_scalar_outputs=True):
        return original(self, translator, *args, **kwargs)


def _on_tolist(original: Any, self: Any, translator: Any, *args: Any, **kwargs: Any) -> Any:
    observer = getattr(translator.output, _KEPT, None)
    known = observer.rows(translator, self) if observer is not None else None
    if observer is not None and known is None:
        observer.read(translator, self)
    return original(self, translator, *args, **kwargs) if known is None else known


def current() -> Any:
    """The observer of the frame whose graph is being compiled; None outside Dynamo, or for a frame that is not ours."""
    from torch._guards import TracingContext

    return getattr(TracingContext.try_get(), _KEPT, None)


def restart(speculation_log: Any, reason: str) -> Exception:
    """The exception that makes Dynamo analyse the frame again, from the start and without what it learned about this attempt.

    It is two of Dynamo's restarts at once: the one clears the log of the frame, the other passes through a call of the backend.
    """
    from torch._dynamo.exc import TensorifyScalarRestartAnalysis, UnspecializeRestartAnalysis

    speculation_log.clear()
    kind = type("CaptureRestart", (UnspecializeRestartAnalysis, TensorifyScalarRestartAnalysis), {})
    return kind(restart_reason=reason)  # type: ignore[no-any-return]


def is_restart(error: Exception) -> bool:
    """Whether Dynamo will try the frame again, or was told to leave it."""
    from torch._dynamo.exc import RestartAnalysis, SkipFrame

    return isinstance(error, RestartAnalysis | SkipFrame)


def is_break(error: Exception) -> bool:
    """Whether Dynamo tries the frame again because the graph breaks in it."""
    from torch._dynamo.exc import SpeculationRestartAnalysis

    return isinstance(error, SpeculationRestartAnalysis)


def has_unbacked(environment: Any) -> bool:
    """Whether the frame's sizes include one that only the run knows."""
    return any(unbacked(symbol) for symbol in environment.var_to_range)


def is_tracing(error: Exception) -> bool:
    """Whether an error is Dynamo's own way of saying that it cannot trace something."""
    from torch._dynamo.exc import TorchDynamoException

    return isinstance(error, TorchDynamoException)


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

    return bool(getattr(config, "use_graph_deduplication", False)) or config.repro_after == "dynamo"


# --- what Dynamo knows about values -----------------------------------------------------------------------------------------------


def now() -> int:
    """Later than everything made so far, earlier than everything made from now on."""
    return next(_clock)


def born_inside(variable: Any, clock: int) -> bool:
    """Whether the program made this object itself, and after ``clock``."""
    from torch._dynamo.variables.base import AttributeMutationNew, ValueMutationNew

    kind = variable.mutation_type
    return isinstance(kind, ValueMutationNew | AttributeMutationNew) and getattr(kind, "moefuse_born", 0) > clock


def iterator_born_inside(iterator: Any, clock: int) -> bool:
    """Whether the program made this iterator, or started this generator's frame, after ``clock``."""
    known, born = _births.get(id(iterator), (None, 0))
    return known is not None and known() is iterator and born > clock and getattr(iterator, "source", None) is None


def plain(variable: Any) -> Any:
    """A variable behind Dynamo's laziness, unless looking at it would be its first use."""
    from torch._dynamo.variables.lazy import LazyVariableTracker

    if isinstance(variable, LazyVariableTracker):
        return variable.realize() if variable.is_realized() else variable
    return variable


def realized(variable: Any) -> Any:
    """A variable behind Dynamo's laziness."""
    return variable.realize() if hasattr(variable, "realize") else variable


def tensor_node(variable: Any) -> Node | None:
    """The graph node of a tensor variable; None for anything else."""
    from torch._dynamo.variables.tensor import TensorVariable

    return variable.as_proxy().node if isinstance(variable, TensorVariable) else None


def symbol(variable: Any) -> Any:
    """The SymInt or SymBool of a symbolic number; None for anything else."""
    from torch._dynamo.variables.tensor import SymNodeVariable

    number = variable.sym_num if isinstance(variable, SymNodeVariable) else None
    return number if isinstance(number, torch.SymInt | torch.SymBool) else None


def number_node(variable: Any) -> Node | None:
    """The graph node of a symbolic number; None for anything else."""
    return variable.as_proxy().node if symbol(variable) is not None else None


def unbacked(value: Any) -> set[Any]:
    """Symbols in a size or a tensor's shape whose values only the run knows."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return set(free_unbacked_symbols(value))


def unbacked_in(value: Any) -> set[Any]:
    """Such symbols in whatever a node's value is: a tensor, a number, or a tuple of them."""
    if isinstance(value, tuple | list):
        return {symbol for item in value for symbol in unbacked_in(item)}
    return unbacked(value) if isinstance(value, torch.Tensor | torch.SymInt | torch.SymBool | torch.SymFloat) else set()


def is_list_iterator(variable: Any) -> bool:
    """Whether a variable is the iterator of a list."""
    from torch._dynamo.variables.lists import ListIteratorVariable

    return isinstance(variable, ListIteratorVariable)


def is_constant(variable: Any) -> bool:
    """Whether a variable is a plain Python constant."""
    from torch._dynamo.variables.constant import ConstantVariable

    return isinstance(variable, ConstantVariable)


def constant(value: object) -> Any:
    """A Python constant as Dynamo's variable."""
    from torch._dynamo.variables.constant import ConstantVariable

    return ConstantVariable.create(value)


def known_tensor(value: Any) -> torch.Tensor | None:
    """The value of a one-element fake tensor that was computed from constants alone."""
    known = getattr(value, "constant", None)
    return known if isinstance(known, torch.Tensor) and known.numel() == 1 else None


def row_tensor(translator: Any, literal: object, like: torch.Tensor) -> Any:
    """``torch.tensor(literal)`` on the device of ``like``, recorded in the graph."""
    from torch._dynamo.variables.builder import wrap_fx_proxy

    proxy = translator.output.create_proxy("call_function", torch.tensor, (literal,), {"device": like.device, "dtype": like.dtype})
    return wrap_fx_proxy(translator, proxy)


def new_list(items: list[Any]) -> Any:
    """A new Python list."""
    from torch._dynamo.variables.base import ValueMutationNew
    from torch._dynamo.variables.lists import ListVariable

    return ListVariable(items, mutation_type=ValueMutationNew())


def graph_of(translator: Any) -> torch.fx.Graph:
    """The graph that is being written: the frame's, or that of a higher-order operator's body."""
    return translator.output.current_tracer.graph  # type: ignore[no-any-return]


def python_state(translator: Any) -> tuple[object, ...]:
    """Parts of a frame's state that are neither variables nor nodes, to compare."""
    output = translator.output
    return len(translator.block_stack), len(getattr(output, "random_calls", ())), len(translator.exn_vt_stack)
