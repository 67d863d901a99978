"""What Dynamo knows about the compilation that is running."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import EntryPoint
from typing import Any, NamedTuple, TypeVar

import torch


def count(name: str, amount: int = 1) -> None:
    """Add to ``torch._dynamo.utils.counters["moefuse"][name]``."""
    from torch._dynamo.utils import counters

    counters["moefuse"][name] += amount


def trace_artifact(name: str, payload: Callable[[], str]) -> None:
    """Write a JSON artifact to TORCH_TRACE; ``payload`` is only called when tracing is on."""
    from torch._logging._internal import trace_structured

    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "json"}, payload_fn=payload, expect_trace_id=False)


def frame_id() -> int | None:
    """Dynamo's number of the frame that is being compiled: equal for a frame and its recompilations; None outside Dynamo."""
    from torch._guards import CompileContext

    compile_id = CompileContext.current_compile_id()
    return None if compile_id is None else compile_id.frame_id


@contextlib.contextmanager
def sizes_of_the_run(mode: Any) -> Iterator[None]:
    """Operations run on fakes in this block may return sizes that only the run knows, here and when the graph is traced again.

    Dynamo allows that by an option that is off; and it wants every such size in the outputs of the call that made it, which is for who
    traces the graph next to see.
    """
    environment = getattr(mode, "shape_env", None)
    if environment is None:
        yield
        return
    environment.settings = dataclasses.replace(environment.settings, allow_dynamic_output_shape_ops=True)
    with environment.ignore_fresh_unbacked_symbols():
        yield


def composites_in_python() -> contextlib.AbstractContextManager[None]:
    """Operations run on fakes in this block are taken apart by torch's Python, as where Dynamo traces them.

    Its C++ would ask whether a dropout has elements at all, and so for sizes that only the run knows.
    """
    from torch._dispatch.python import enable_python_dispatcher

    return enable_python_dispatcher()


@contextlib.contextmanager
def unobserved() -> Iterator[None]:
    """What is computed here is nobody's: the caller's saved-tensor hooks do not see it, and autocast keeps no copy of it.

    Dynamo holds off modes, generators and defaults before it calls a backend, but hooks only while AOTAutograd traces. Grad mode, autocast
    and the default dtype stay: the graph was traced under them.
    """
    set_tracing: Callable[[bool], bool] = torch._C._autograd._saved_tensors_hooks_set_tracing
    cached, traced = torch.is_autocast_cache_enabled(), set_tracing(True)
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(cached)
        set_tracing(traced)


def torch_compile_call() -> object | None:
    """The object that stands for the ``torch.compile`` call which this backend call belongs to; None for a direct call."""
    frame = sys._getframe()
    for _ in range(8):
        if frame.f_back is None:
            return None
        frame = frame.f_back
        if frame.f_code is torch._TorchCompileWrapper.__call__.__code__:
            return call_of(frame.f_locals["self"])
    return None


class Together(dict[str, object]):
    """Options that several ``torch.compile`` calls share; to reports these are one call."""


def call_of(backend: Any) -> object:
    """What stands for the ``torch.compile`` call of a backend object that is one (:func:`is_torch_compile_call`)."""
    options = backend.kwargs.get("options")
    return options if isinstance(options, Together) else backend


_around: list[Callable[[Callable[[], object]], object]] = [lambda action: action()]


def guard_endings(around: Callable[[Callable[[], object]], object]) -> None:
    """Have every action at the end of a call run by ``around``."""
    _around[0] = around


_Kind = TypeVar("_Kind")


def at_each_call(context: Any, kind: type[Any]) -> None:
    """Have calls of what a ``torch.compile`` context compiles make an object of a class at the beginning, and call it at the end."""
    hooks = getattr(context, "enter_exit_hooks", None)
    if isinstance(hooks, list) and kind not in hooks:
        hooks.append(kind)


class RunningCall:
    """The call of a compiled function, from outside of Dynamo, that this thread is in.

    Attributes:
        function: what was compiled.
        arguments: of the call.
    """

    def __init__(self, function: object, arguments: tuple[object, ...], cleanups: list[Callable[[], object]]) -> None:
        self.function, self.arguments, self._cleanups = function, arguments, cleanups

    def held(self, kind: type[_Kind]) -> _Kind | None:
        """What one of the context's hooks, a class, has made when the call began; see :func:`at_each_call`."""
        return next((known for known in self._cleanups if isinstance(known, kind)), None)

    def at_end(self, name: str, action: Callable[[], object], *, before: bool = False) -> None:
        """Call ``action`` once when the call returns; of several with one ``name`` the first. Not where it raises.

        Args:
            name: of the action.
            action: without arguments.
            before: call it before the actions that are waiting.
        """
        if any(getattr(known, "moefuse", None) == name for known in self._cleanups):
            return

        def run() -> None:
            if sys.exc_info()[0] is None:
                _around[0](action)

        run.moefuse = name  # type: ignore[attr-defined]
        # Behind torch's own, which puts back what the call has changed.
        waiting = (i for i, known in enumerate(self._cleanups) if hasattr(known, "moefuse"))
        self._cleanups.insert(next(waiting, len(self._cleanups)) if before else len(self._cleanups), run)


def _to_the_call() -> Iterator[types.FrameType]:
    """The frames around this one, inner first, up to the innermost call of a compiled function, whose frame is the last if there is one."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = None if _is_call(frame) else frame.f_back


def _is_call(frame: types.FrameType) -> bool:
    return frame.f_code.co_name == "compile_wrapper" and frame.f_globals.get("__name__") == "torch._dynamo.eval_frame"


def _call() -> Mapping[str, Any]:
    """The variables of the innermost call of a compiled function; empty where there is none."""
    return next((frame.f_locals for frame in _to_the_call() if _is_call(frame)), {})


def running_call() -> RunningCall | None:
    """The innermost call of a compiled function around this call of a backend; None where there is none, or torch keeps it otherwise."""
    held = _call()
    cleanups, function = held.get("cleanups"), held.get("fn")
    if not isinstance(cleanups, list) or not callable(function):
        return None
    return RunningCall(function, (*held.get("args", ()), *held.get("kwargs", {}).values()), cleanups)


def called_from(theirs: Callable[[str], bool], own: types.CodeType) -> bool:
    """Whether code of the program runs, in eager mode, between the call of what was compiled and the frame that is compiled.

    Args:
        theirs: whether a module, by its name, is the program's.
        own: the code that is compiled.
    """
    around = (frame for frame in _to_the_call() if not _is_call(frame) and frame.f_code is not own)
    return any(theirs(str(frame.f_globals.get("__name__", ""))) for frame in around)


class Traced(NamedTuple):
    """What is being compiled now.

    Attributes:
        function: what the user gave to ``torch.compile``; of a module, its bound ``__call__``.
        args: the positional arguments of the call that Dynamo compiles for.
        kwargs: its keyword arguments.
        local_scope: the variables of the frame that is traced: of ``function``, or of one that it calls.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    local_scope: Mapping[str, Any]


def traced() -> Traced | None:
    """What Dynamo is tracing, or calls a backend for; None outside of a call of a compiled function."""
    scope: Mapping[str, Any] | None = None
    for frame in _to_the_call():
        if scope is None and frame.f_code.co_name == "_compile" and frame.f_globals.get("__name__") == "torch._dynamo.convert_frame":
            scope = frame.f_locals["locals"]
        if _is_call(frame) and scope is not None:
            found = frame.f_locals
            return Traced(found["fn"], found["args"], found["kwargs"], scope)
    return None


def given_fakes() -> bool:
    """Whether the call that Dynamo compiles for is one with fake tensors: a program that is looked at and not run.

    Dynamo has taken the mode of fakes away by now, as it takes all modes; what the frame was given is what remains of it.
    """
    known = traced()
    if known is None:
        return False
    from torch._subclasses.fake_tensor import FakeTensor

    given = torch.utils._pytree.tree_leaves((known.args, known.kwargs, dict(known.local_scope)))
    modules = (value for value in given if isinstance(value, torch.nn.Module) and hasattr(value, "_parameters"))  # not in its __init__
    first = (next((p for part in value.modules() for p in part._parameters.values() if p is not None), None) for value in modules)
    return any(isinstance(value, FakeTensor) for value in (*given, *first))


def compiled_code_is_stored() -> bool:
    """Whether Dynamo stores what a backend returns, which must be what Inductor returned then."""
    from torch._dynamo import config

    return bool(getattr(config, "caching_precompile", False))


def before_torch_compile(action: Callable[[], object]) -> None:
    """Call ``action`` when ``torch.compile`` is called for the first time, with Dynamo imported. Does not import Dynamo itself."""
    owner: Any = torch._TorchCompileWrapper
    original = owner.__init__
    if getattr(original, "moefuse", False):
        return

    @functools.wraps(original)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        action()

    wrapper.moefuse = True  # type: ignore[attr-defined]
    owner.__init__ = wrapper


def name_backend(name: str, target: str) -> None:
    """Let Dynamo know a backend by name and load it when it is asked for, as for an entry point, which takes its place where there is one.

    Only for when Dynamo's registry of backends has been imported.
    """
    sys.modules["torch._dynamo.backends.registry"]._BACKENDS.setdefault(name, EntryPoint(name, target, "torch_dynamo_backends"))


def unwrap_backend(backend: Any) -> tuple[Any, dict[str, Any]]:
    """(what a backend object calls, with which keyword arguments) for what torch wraps around backends; (None, {}) for anything else."""
    if isinstance(backend, functools.partial):
        return backend.func, dict(backend.keywords)
    if isinstance(backend, torch._TorchCompileWrapper):
        return backend.compiler_fn, dict(backend.kwargs)
    if isinstance(backend, types.FunctionType):
        return None, {}
    return getattr(backend, "_torchdynamo_orig_backend", None), {}


def is_torch_compile_call(backend: object) -> bool:
    """Whether a backend object is the one that stands for a ``torch.compile`` call, see :func:`torch_compile_call`."""
    return isinstance(backend, torch._TorchCompileWrapper)


def kept_out() -> str | None:
    """What keeps Dynamo from compiling a call that begins here, in words; None where nothing does."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "a transform of torch.func is around the compiled call; compile the function that has the transform in it"
    if torch.utils._python_dispatch.is_in_any_mode_without_ignore_compile_internals():
        return "a TorchDispatchMode (a FlopCounterMode, for instance) is around the call"
    stance = sys.modules["torch._dynamo.eval_frame"]._stance.stance
    if stance in ("force_eager", "eager_on_recompile"):
        return f'`torch.compiler.set_stance("{stance}")` is on'
    return None


def compiler_of_call() -> Any:
    """What the innermost call of a compiled function around this is compiled with; None where there is none."""
    return getattr(_call().get("self"), "callback", None)


def source_name(node: torch.fx.Node) -> str:
    """What an input of a graph is in the user's program (``L['self'].bias``); its name in the graph if nobody knows."""
    name = getattr(getattr(node, "_dynamo_source", None), "name", None)
    found = name() if callable(name) else name
    return found if isinstance(found, str) else str(node.target)


def in_compiled_call() -> bool:
    """Whether the caller was called from a program that Dynamo has compiled, between two graphs of it for instance."""
    from torch._dynamo import eval_frame

    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == eval_frame.__file__:
            return True
        frame = frame.f_back
    return False


def compiles_callees() -> bool:
    """Whether Dynamo looks at the functions that are called here, as it does between two graphs, and not in what is disabled."""
    from torch._C._dynamo.eval_frame import get_eval_frame_callback

    return get_eval_frame_callback() is not None


def inlined_only(function: Any) -> None:
    """Dynamo traces a function where compiled code calls it, and leaves it alone where eager code does."""
    from torch._dynamo.eval_frame import skip_code

    skip_code(inspect.unwrap(function).__code__)


def when_functionalized(name: str, library: torch.library.Library, instead: Callable[..., Callable[..., Any] | None]) -> None:
    """Trace other operations in place of an op of ``library`` where AOTAutograd makes the graph that Inductor compiles.

    ``instead(*args)`` gives the function to trace, called with the same arguments, or None to leave the op in the graph. It is not asked
    where a graph is exported, or where tensors are of a class of their own.
    """
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode

    known = (torch.Tensor, torch.nn.Parameter, FakeTensor, FunctionalTensor)

    def rule(mode: Any, op: Any, types: Any, args: Any, kwargs: Any) -> Any:
        plain = not kwargs and not torch.compiler.is_exporting() and all(t in known for t in types)
        function = instead(*args) if plain else None
        if function is None:
            return mode.__torch_dispatch__(op, types, args, kwargs)
        with mode:
            return function(*args)

    torch.library.register_torch_dispatch(name, FunctionalTensorMode, rule, lib=library)
