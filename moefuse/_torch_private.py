"""The only door to private torch. Everything here is guarded by tests and works from torch 2.11 on.

Sections: Inductor, caches, errors that cross Dynamo, counters and traces, what Dynamo knows about the current compilation, tracing, CUDA.
torch's compiler modules are imported inside the functions: importing moefuse must stay as cheap as importing torch.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import copy
import ctypes
import dataclasses
import datetime
import functools
import hashlib
import inspect
import os
import platform
import sys
import tempfile
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from moefuse.stops import Stop

if TYPE_CHECKING:
    from torch._inductor.custom_graph_pass import CustomGraphPass as CustomGraphPass

CompiledFn = Callable[..., Any]

# --- Inductor ---------------------------------------------------------------------------------------------------------------------


def inductor_option_names() -> frozenset[str]:
    """Names that ``torch.compile(backend="inductor", options=...)`` accepts."""
    from torch._inductor import list_options

    return frozenset(list_options())


def is_inductor_option(name: str, value: object) -> bool:
    """Whether Inductor knows the option, whatever it thinks of the value."""
    if name.replace("-", "_") in inductor_option_names():
        return True
    try:
        # Since torch 2.15 a device's backend can have options of its own, which the list does not show.
        torch._TorchCompileInductorWrapper(None, {name: value}, None)
    except RuntimeError as error:
        return not str(error).startswith("Unexpected optimization option")
    return True


def inductor_config(mode: str | None, options: Mapping[str, object]) -> dict[str, Any]:
    """Config patches for ``mode`` and ``options``, checked as ``torch.compile(backend="inductor")`` checks them.

    Raises:
        RuntimeError: torch's own error for an unknown mode or a value of the wrong type.
    """
    # torch's own wrapper also applies CompilerBisector and the CUDA-graph workarounds that depend on these settings.
    wrapper = torch._TorchCompileInductorWrapper(mode, dict(options), None)
    return dict(wrapper.config)


def keeps_random_stream() -> bool:
    """Whether Inductor is to draw the random numbers that eager draws, instead of others of the same distribution."""
    from torch._inductor import config

    return bool(config.fallback_random)


@contextlib.contextmanager
def random_stream_of(patches: Mapping[str, Any]) -> Iterator[None]:
    """Let :func:`keeps_random_stream` answer for a compilation with these config patches."""
    if "fallback_random" not in patches:
        yield
        return
    from torch._inductor import config

    with config.patch(fallback_random=patches["fallback_random"]):
        yield


def compile_fx(
    gm: torch.fx.GraphModule, example_inputs: Sequence[object], config_patches: dict[str, Any], name: str | None = None
) -> CompiledFn:
    """Hand the graph to Inductor; ``name`` is what ``torch.compile(name=...)`` calls the region, where torch has that."""
    from torch._inductor.compile_fx import compile_fx as inductor_compile_fx

    keep_what_is_mutated()
    if communicates(gm):
        keep_order()
        # It moves calls, in inference, before there is anything that lowering could hold in order.
        config_patches = {**config_patches, "reorder_for_locality": False}
        if any(map(is_distributed, example_inputs)):
            config_patches = _saving_meshes_last(config_patches)
    inputs: Any = list(example_inputs)
    named: dict[str, Any] = {} if name is None else {"compile_region_name": name}
    return cast(CompiledFn, inductor_compile_fx(gm, inputs, config_patches=config_patches, **named))


@functools.cache
def keep_what_is_mutated() -> None:
    """From now on Inductor's CPU backend still knows that a loop reads what another one has mutated after it has split that loop anew.

    It forgot that (torch 2.11 to 2.13, https://github.com/pytorch/pytorch/issues/185509), and read zeros before anything was scattered into
    them. GPT-OSS with router logits lost the gradient of its router so, in graphs of ours that are right.
    """
    from torch._inductor.scheduler import SchedulerNode

    original = getattr(SchedulerNode, "recompute_size_and_body", None)
    if original is None or not hasattr(SchedulerNode, "set_read_writes"):
        return

    @functools.wraps(original)
    def recompute_size_and_body(node: Any, *args: Any, **kwargs: Any) -> None:
        original(node, *args, **kwargs)
        if getattr(node, "mutation_renames", None):
            node.set_read_writes(node.read_writes.rename(node.mutation_renames))

    SchedulerNode.recompute_size_and_body = recompute_size_and_body  # type: ignore[method-assign,assignment]


_PARTITIONER = "custom_partitioner_fn"


def _saving_meshes_last(patches: dict[str, Any]) -> dict[str, Any]:
    """``patches`` with a partitioner that puts what forward saves for backward into the order that AOTAutograd reads it in.

    The mesh of a distributed input, which its gradient is made with, comes last, but for sizes. Where a checkpoint draws random numbers,
    or could (attention), torch puts the states of the generator behind it, and then takes the mesh for a tensor (torch 2.13).
    """
    from torch._inductor import config

    users = patches.get(_PARTITIONER, getattr(config, _PARTITIONER))
    return {**patches, _PARTITIONER: _partitioner(users)}


def _partitioner(users: Any) -> Any:
    return _partitioner_class()(users)


@functools.cache
def _partitioner_class() -> Any:
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    class Partitioner(CustomPartitionerFn):
        """The user's partitioner or Inductor's own, and the order behind it."""

        def __init__(self, users: Any) -> None:
            self._users = users

        def __call__(self, gm: torch.fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
            forward, backward = (self._users or min_cut_rematerialization_partition)(gm, joint_inputs, **kwargs)
            objects_last(forward, backward, kwargs["num_fwd_outputs"])
            return forward, backward

        def uuid(self) -> Any:
            if self._users is None:
                return "moefuse: objects last"
            users = self._users.uuid()
            return users and f"moefuse: objects last after {users!r}"  # None: Inductor does not cache, as it would not without this

        def __reduce__(self) -> Any:
            # Keys of Inductor's caches have the pickled config, too.
            return _partitioner, (self._users,)

    return Partitioner


def objects_last(forward: torch.fx.GraphModule, backward: torch.fx.GraphModule, outputs: int) -> None:
    """Of what forward saves, behind so many ``outputs``, put objects behind tensors and before sizes; and in backward's inputs."""
    end = forward.graph.output_node()
    given: Any = end.args[0]
    saved = given[outputs:]
    kinds = [_kind(node) for node in saved]
    if "object" not in kinds or "tensor" not in kinds[kinds.index("object") :]:
        return
    in_order = [node for wanted in ("tensor", "object", "size") for node, kind in zip(saved, kinds, strict=True) if kind == wanted]
    end.args = ((*given[:outputs], *in_order),)
    forward.recompile()
    inputs = backward.graph.find_nodes(op="placeholder")[: len(saved)]  # sizes first
    behind = inputs[-1].next
    for node in inputs:
        if _kind(node) == "object":
            behind.prepend(node)
    backward.recompile()


def _kind(node: torch.fx.Node) -> str:
    value = node.meta.get("val")
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return "size"
    return "tensor" if value is None or isinstance(value, torch.Tensor) else "object"


def compile_region(gm: torch.fx.GraphModule, backend: Any) -> CompiledFn:
    """``torch.compile`` of a graph for the sizes that it is called with, numbers of selected rows left open."""
    from torch._dynamo import config

    # Dynamo skips the forward of a graph module that is called by itself; and it counts recompilations per code object.
    def call(*args: Any) -> Any:
        return gm(*args)

    call.__code__ = call.__code__.replace()
    compiled = torch.compile(call, backend=backend, dynamic=False, fullgraph=True)

    def run(*args: Any) -> Any:
        with config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True):
            return compiled(*args)

    return run


def build_cpp(source: str, folder: Path) -> Path:
    """The shared library of a C++ text, compiled for this machine with Inductor's compiler and flags unless ``folder`` has it already.

    Raises whatever goes wrong.
    """
    from torch._inductor.cpp_builder import CppBuilder, CppTorchOptions, run_compile_cmd
    from torch.utils._filelock import FileLock

    # Inductor compiles without contraction so that its results equal eager's bit for bit; this has no eager counterpart and gains by FMA.
    # Its loops are vectors already: -O3 takes twice as long and gains nothing.
    options = CppTorchOptions(extra_flags=("-ffp-contract=fast", "-g0", "-O2"))
    command = CppBuilder(name="o", sources="i", BuildOption=options).get_command_line()
    key = hashlib.sha256("\0".join((source, command, torch.__version__, _processor())).encode()).hexdigest()[:24]
    target = folder / f"{key}.so"
    if target.exists():
        return target
    with FileLock(str(folder / f"{key}.lock")):
        if not target.exists():
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                (Path(scratch) / "kernel.cpp").write_text(source)
                # Inductor splits the command at spaces, and quotes no path: inside the folder none has any.
                builder = CppBuilder(name="kernel", sources="kernel.cpp", BuildOption=options)
                run_compile_cmd(builder.get_command_line(), cwd=scratch)
                os.replace(Path(scratch) / builder.get_target_file_path(), target)
    return target


def cpp_compiler() -> str:
    """The C++ compiler that Inductor uses.

    Raises:
        RuntimeError: there is none.
    """
    from torch._inductor.cpp_builder import get_cpp_compiler

    return get_cpp_compiler()


def file_lock(path: Path) -> contextlib.AbstractContextManager[Any]:
    """A lock between processes; the file stays."""
    from torch.utils._filelock import FileLock

    lock: contextlib.AbstractContextManager[Any] = FileLock(str(path))
    return lock


def _processor() -> str:
    """What -march=native depends on, as far as it can be read without a compiler."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part")))


def libtorch_functions(names: Sequence[str], part: str = "torch_cpu") -> list[int]:
    """Addresses of functions of libtorch's C interface in one of its libraries.

    Raises:
        AttributeError: this libtorch has no such function.
        OSError: libtorch is not where it usually is.
    """
    folder = Path(torch.__file__).parent / "lib"
    name = {"darwin": f"lib{part}.dylib", "win32": f"{part}.dll"}.get(sys.platform, f"lib{part}.so")
    library = ctypes.CDLL(str(folder / name))
    return [ctypes.cast(getattr(library, function), ctypes.c_void_p).value or 0 for function in names]


def records_graphs(patches: Mapping[str, Any]) -> bool:
    """Whether Inductor records CUDA graphs under these patches of its config."""
    from torch._inductor import config

    return bool(patches.get("triton.cudagraphs", config.triton.cudagraphs))


# --- caches -----------------------------------------------------------------------------------------------------------------------

_STAMPED_PASS = "post_grad_custom_post_pass"


def with_stamp(patches: Mapping[str, Any], make_stamp: Callable[[Any], Any]) -> dict[str, Any]:
    """``patches`` plus a stamp behind the passes that the user has in Inductor's last custom-pass slot.

    ``make_stamp`` is called with the pass that the stamp has to run first, or with None.
    """
    from torch._inductor import config, custom_graph_pass

    present = patches.get(_STAMPED_PASS, getattr(config, _STAMPED_PASS))
    if present is None:
        return {**patches, _STAMPED_PASS: make_stamp(None)}
    if not hasattr(custom_graph_pass, "get_custom_graph_passes"):
        # Before torch 2.13 the slot holds one pass and no list.
        return {**patches, _STAMPED_PASS: make_stamp(present)}
    users = list(present) if isinstance(present, list | tuple) else [present]
    return {**patches, _STAMPED_PASS: [*users, make_stamp(None)]}


def __getattr__(name: str) -> object:
    # Inductor's base class for graph passes with a cache key; as an attribute, so that it can be imported and still costs nothing before.
    if name == "CustomGraphPass":
        from torch._inductor.custom_graph_pass import CustomGraphPass

        return CustomGraphPass
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# --- errors that cross Dynamo -----------------------------------------------------------------------------------------------------


def dynamo_control_flow() -> tuple[type[BaseException], ...]:
    """Exceptions by which Dynamo restarts or skips a frame; a backend has to let them through."""
    from torch._dynamo.exc import RestartAnalysis, SkipFrame

    return (RestartAnalysis, SkipFrame)


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
    # Not through __init__, whose signature depends on the class. The frame is where Dynamo cuts its own frames off the traceback.
    raised = cast(Exception, surfaced.__new__(surfaced, *error.args))
    vars(raised)["first_useful_frame"] = frame
    return raised


# --- counters and traces ----------------------------------------------------------------------------------------------------------


def count(name: str, amount: int = 1) -> None:
    """Add to ``torch._dynamo.utils.counters["moefuse"][name]``."""
    from torch._dynamo.utils import counters

    counters["moefuse"][name] += amount


def trace_artifact(name: str, payload: Callable[[], str]) -> None:
    """Write a JSON artifact to TORCH_TRACE; ``payload`` is only called when tracing is on."""
    from torch._logging._internal import trace_structured

    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "json"}, payload_fn=payload, expect_trace_id=False)


# --- the current compilation ------------------------------------------------------------------------------------------------------


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
            owner: object = frame.f_locals["self"]
            return owner
    return None


class RunningCall:
    """The call of a compiled function, from outside of Dynamo, that this thread is in.

    Attributes:
        function: what was compiled.
        arguments: of the call.
    """

    def __init__(self, function: object, arguments: tuple[object, ...], cleanups: list[Callable[[], object]]) -> None:
        self.function, self.arguments, self._cleanups = function, arguments, cleanups

    def at_end(self, name: str, action: Callable[[], object]) -> None:
        """Call ``action`` once when the call returns; of several with one ``name`` the first. Not where it raises."""
        if any(getattr(known, "moefuse", None) == name for known in self._cleanups):
            return

        def run() -> None:
            if sys.exc_info()[0] is None:
                action()

        run.moefuse = name  # type: ignore[attr-defined]
        self._cleanups.append(run)


def running_call() -> RunningCall | None:
    """The innermost call of a compiled function around this call of a backend; None where there is none, or torch keeps it otherwise."""
    frame: Any = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "compile_wrapper" and frame.f_code.co_filename.endswith("eval_frame.py"):
            held = frame.f_locals
            cleanups, function = held.get("cleanups"), held.get("fn")
            if not isinstance(cleanups, list) or not callable(function):
                return None
            return RunningCall(function, (*held.get("args", ()), *held.get("kwargs", {}).values()), cleanups)
        frame = frame.f_back
    return None


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
    frame: types.FrameType | None = sys._getframe()
    scope: Mapping[str, Any] | None = None
    while frame is not None:
        name, home = frame.f_code.co_name, frame.f_globals.get("__name__")
        if scope is None and name == "_compile" and home == "torch._dynamo.convert_frame":
            scope = frame.f_locals["locals"]
        if name == "compile_wrapper" and home == "torch._dynamo.eval_frame":
            found = frame.f_locals
            return Traced(found["fn"], found["args"], found["kwargs"], scope) if scope is not None else None
        frame = frame.f_back
    return None


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


def storage_key(t: torch.Tensor) -> int:
    """Equal for two living tensors exactly if they are views of one allocation. Without such memory: itself."""
    try:
        return int(t.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse and other opaque layouts
        return id(t)


def _operator_name(schema: Any) -> str:
    """The name by which the dispatcher knows an operator."""
    return f"{schema.name}.{schema.overload_name}" if schema.overload_name else str(schema.name)


def has_kernel(schema: Any) -> bool:
    """Whether a schema is that of an operator on tensors, not of a method of TorchScript's lists and dicts, which have the same names."""
    return bool(torch._C._dispatch_has_kernel(_operator_name(schema)))


def is_composite(schema: Any) -> bool:
    """Whether an operator is made of others, or TorchScript's own, so that its schema may keep to itself that the result is an input."""
    return not has_kernel(schema) or bool(
        torch._C._dispatch_has_kernel_for_dispatch_key(_operator_name(schema), "CompositeImplicitAutograd")
    )


def same_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two fake tensors stand for views of one allocation."""
    return storage_key(a) == storage_key(b)


def is_distributed(value: object) -> bool:
    """Whether a value is a tensor of which each rank holds a part."""
    return isinstance(value, torch.Tensor) and type(value) is not torch.Tensor and hasattr(value, "to_local")


@contextlib.contextmanager
def trying_on_fakes(value: object) -> Iterator[None]:
    """Run something on fake tensors for what it shows, as eager would: without decompositions. New symbols that it makes are nobody's."""
    first = next((t for t in (value if isinstance(value, tuple | list) else (value,)) if isinstance(t, torch.Tensor)), None)
    mode = getattr(first, "fake_mode", None)
    environment = getattr(mode, "shape_env", None)
    ignoring = contextlib.nullcontext() if environment is None else environment.ignore_fresh_unbacked_symbols()
    # The mode, since an operator may make tensors on its way: ``where(c, x, 0.0)`` makes one of the number.
    with mode or contextlib.nullcontext(), ignoring, torch.no_grad(), torch._C._DisablePythonDispatcher():
        yield


def source_name(node: torch.fx.Node) -> str:
    """What an input of a graph is in the user's program (``L['self'].bias``); its name in the graph if nobody knows."""
    name = getattr(getattr(node, "_dynamo_source", None), "name", None)
    found = name() if callable(name) else name
    return found if isinstance(found, str) else str(node.target)


def is_transformed(value: torch.Tensor) -> bool:
    """Whether a traced tensor belongs to a level of torch.func: it is batched, or differentiated once more."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(value))


_CAPTURE_FLAGS = ("capture_scalar_outputs", "capture_dynamic_output_shape_ops")
"""Settings that Dynamo advises at breaks which depend on data; moefuse's capture has tried what they do."""


def graph_break(made: object) -> Stop | None:
    """Why Dynamo ended a graph early, from the graph or from what wrote it (an OutputGraph); None if it did not."""
    reason = getattr(made, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    return Stop(_break_text(reason.reason, reason.user_stack), _places(reason.user_stack), _setting(reason.reason))


def tracing_stop(error: BaseException) -> Stop:
    """Where and why an error ended Dynamo's tracing."""
    stack = getattr(error, "real_stack", None) or ()
    return Stop(_break_text(str(error).strip() or type(error).__name__, stack), _places(stack), _setting(error))


def _setting(message: object) -> str:
    """The first of Dynamo's hints that is about a setting."""
    hints = (line.strip().partition("Hint: ")[2] for line in str(message).splitlines() if line.strip().startswith("Hint: "))
    return next((hint for hint in hints if "torch._dynamo.config." in hint and not any(flag in hint for flag in _CAPTURE_FLAGS)), "")


def _places(stack: Sequence[Any]) -> tuple[tuple[str, int], ...]:
    return tuple((frame.filename, frame.lineno) for frame in stack)


# --- Dynamo's state, for looking without leaving a trace --------------------------------------------------------------------------


@dataclasses.dataclass
class TraceLog:
    """What Dynamo gave up on while it traced, and why it compiled frames again."""

    breaks: list[str] = dataclasses.field(default_factory=list)
    recompiles: list[str] = dataclasses.field(default_factory=list)
    refresh: Callable[[], None] = lambda: None


@contextlib.contextmanager
def borrowed_dynamo() -> Iterator[TraceLog]:
    """Trace as in a fresh process and leave Dynamo as it was: caches of what the user compiled, counters, recorded sizes.

    ``torch._dynamo.reset()`` would throw away everything that the user has compiled. The log is filled when the block ends, and by its
    ``refresh``. Inside another such block, what that one compiled is kept.
    """
    from torch._dynamo import convert_frame, eval_frame, pgo, utils

    log = TraceLog()
    with convert_frame.compile_lock:
        seen = _seen_codes()
        for code in seen:
            # A frame that Dynamo skipped earlier has no compiled code to lose; it has to be tried again to learn why.
            if not eval_frame._debug_get_cache_entry_list(code):
                reset_code(code)
        kept = {code: set(map(id, eval_frame._debug_get_cache_entry_list(code))) for code in seen}
        backends = set(eval_frame.cached_backends)
        counters = {name: dict(counter) for name, counter in utils.counters.items()}
        sizes = copy.deepcopy(pgo._CODE_STATE)
        reasons = len(utils.graph_break_reasons)
        metrics = utils._compilation_metrics
        utils._compilation_metrics = collections.deque()

    def refresh() -> None:
        log.breaks = [_break_text(reason.reason, reason.user_stack) for reason in utils.graph_break_reasons[reasons:]]
        log.breaks += _given_up(utils._compilation_metrics)
        log.recompiles = [_guard(m.recompile_reason) for m in utils._compilation_metrics if m.recompile_reason]

    log.refresh = refresh
    try:
        yield log
    finally:
        with convert_frame.compile_lock:
            refresh()
            utils._compilation_metrics = metrics
            del utils.graph_break_reasons[reasons:]
            pgo._CODE_STATE = sizes
            utils.counters.clear()
            for name, values in counters.items():
                utils.counters[name].update(values)
            for new in set(eval_frame.cached_backends) - backends:
                del eval_frame.cached_backends[new]
            for code in _seen_codes():
                _drop_new_entries(code, kept.get(code))


def compile_isolated(fn: Callable[..., Any], backend: CompiledFn) -> Callable[..., Any]:
    """``torch.compile`` whose recompilations do not count against the user's, where torch can do that."""
    options: dict[str, Any] = {"isolate_recompiles": True} if "isolate_recompiles" in inspect.signature(torch.compile).parameters else {}
    compiled: Callable[..., Any] = torch.compile(fn, backend=backend, **options)
    return compiled


@contextlib.contextmanager
def not_compiled(model: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """The callable under ``torch.compile``, ``model.compile()`` and ``submodule.compile()``, for as long as the block runs."""
    # A compiled module has both attributes, and the second is only its forward, without hooks.
    found: Any = getattr(model, "_orig_mod", None) or getattr(model, "_torchdynamo_orig_callable", model)
    inner: Callable[..., Any] = found
    modules = list(inner.modules()) if isinstance(inner, torch.nn.Module) else []
    compiled = {module: module.__dict__.pop("_compiled_call_impl") for module in modules if "_compiled_call_impl" in module.__dict__}
    try:
        yield inner
    finally:
        for module, call in compiled.items():
            module.__dict__["_compiled_call_impl"] = call


def compile_front(gm: torch.fx.GraphModule, example_inputs: Sequence[object]) -> CompiledFn:
    """What Inductor does with a graph up to where it writes code: its errors are Inductor's; what it returns runs in eager.

    Nothing is taken from torch's caches of compiled code or put there.
    """
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx as inductor_compile_fx

    def as_it_is(traced: torch.fx.GraphModule, *_: Any, **__: Any) -> CompiledFn:
        return traced.forward

    inputs, instead = cast(Any, list(example_inputs)), cast(Any, as_it_is)
    with config.patch(enable_autograd_cache=False):
        return cast(CompiledFn, inductor_compile_fx(gm, inputs, inner_compile=instead))


def compiler_failed(error: BaseException) -> bool:
    """Whether an error comes from a backend, by way of Dynamo, and not from the program."""
    from torch._dynamo.exc import BackendCompilerFailed

    return isinstance(error, BackendCompilerFailed)


def map_tensors(change: Callable[[torch.Tensor], torch.Tensor], values: Any) -> Any:
    """Nested containers with other tensors in the place of theirs."""
    from torch.utils import _pytree

    return _pytree.tree_map_only(torch.Tensor, change, values)


@contextlib.contextmanager
def before_writes(save: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Call ``save`` with every tensor that an operation is about to write to, in compiled and in plain code, on this thread."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        supports_higher_order_operators = True

        @classmethod
        def ignore_compile_internals(cls) -> bool:
            return True  # else Dynamo would compile nothing

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            for value in _written(func, args, kwargs):
                if _made_of_others(value) is not None:
                    return NotImplemented  # its own operations are seen instead
                save(value)
            return func(*args, **kwargs)

    with Watch():  # type: ignore[no-untyped-call]
        yield


@contextlib.contextmanager
def after_operations(seen: Callable[[Any, Sequence[Any], dict[str, Any], Any], None]) -> Iterator[None]:
    """Call ``seen`` after every operation on this thread, with the operator, its arguments and what it returned."""
    with _after_operations()(seen):
        yield


@functools.cache
def _after_operations() -> Any:
    from torch.utils._python_dispatch import TorchDispatchMode

    class After(TorchDispatchMode):
        def __init__(self, seen: Any) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.seen = seen

        @classmethod
        def ignore_compile_internals(cls) -> bool:
            return True

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            self.seen(func, args, kwargs or {}, out)
            return out

    return After


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors that an operator writes to. A higher-order operator in a compiled graph writes to nothing from outside."""
    if not isinstance(func, torch._ops.OpOverload):
        return []
    found: list[Any] = []
    for place, name in _written_places(func):
        value = args[place] if place < len(args) else kwargs.get(name)
        found += value if isinstance(value, list | tuple) else [value]
    return [value for value in found if isinstance(value, torch.Tensor)]


@functools.cache
def _written_places(func: Any) -> list[tuple[int, str]]:
    def writes(argument: Any) -> bool:
        # Old batch norms update running statistics and do not say so.
        declared = argument.alias_info is not None and argument.alias_info.is_write
        return declared or argument.name in ("running_mean", "running_var")

    return [(place, argument.name) for place, argument in enumerate(func._schema.arguments) if writes(argument)]


def storages_of(tensor: torch.Tensor) -> list[torch.UntypedStorage]:
    """Where a tensor keeps its numbers: nowhere on the meta device, in several places for a class made of other tensors."""
    if (inner := _made_of_others(tensor)) is not None:
        return [storage for name in inner for storage in storages_of(getattr(tensor, name))]
    if tensor.device.type == "meta" or tensor.layout != torch.strided or torch.nn.parameter.is_lazy(tensor):
        return []
    return [tensor.untyped_storage()]


def _made_of_others(tensor: Any) -> list[str] | None:
    """Attributes with the tensors that a tensor of a class of its own is made of; None for a tensor that has numbers itself."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    if not is_traceable_wrapper_subclass(tensor):
        return None
    # Beside tensors, a distributed one has its mesh there.
    return [name for name in tensor.__tensor_flatten__()[0] if isinstance(getattr(tensor, name), torch.Tensor)]


def tensor_state(tensor: torch.Tensor) -> Callable[[], None]:
    """A function that gives a tensor back the storage, shape, gradient and version that it has now; not its content."""
    if torch.nn.parameter.is_lazy(tensor):
        return lambda: None
    grad, leaf, trained = tensor.grad if tensor.is_leaf else None, tensor.is_leaf, tensor.requires_grad
    alias, version = tensor.detach(), None if tensor.is_inference() else tensor._version

    def restore() -> None:
        if leaf and not tensor._is_view() and tensor.grad_fn is not None:
            tensor.detach_()
        if _place(tensor) != _place(alias):
            tensor.data = alias
        if leaf and tensor.is_leaf:
            if tensor.requires_grad != trained:
                tensor.requires_grad_(trained)
            if tensor.grad is not grad:
                tensor.grad = grad
        if version is not None and tensor._version != version:
            # Autograd compares versions in a backward that the user may still have to run.
            torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))

    return restore


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    storages = [storage._cdata for storage in storages_of(tensor)]
    strided = tensor.layout == torch.strided
    return (storages, tensor.shape, tensor.dtype, tensor.device, *((tensor.stride(), tensor.storage_offset()) if strided else ()))


def never_dead(op: Any) -> None:
    """Compilers keep every call of an operator, whoever reads its result: other ranks take part in it.

    Inductor takes out what a tensor without elements is computed by, which is all of a rank that has no tokens.
    """
    from torch.fx.node import has_side_effect

    has_side_effect(op)
    _never_dead.append(op)


_never_dead: list[Any] = []
"""What communicates."""


def communicates(gm: torch.fx.GraphModule) -> bool:
    """Whether other ranks take part in a graph, or in a part of it: the body of a checkpoint."""
    graphs = (part.graph for part in gm.modules() if isinstance(part, torch.fx.GraphModule))
    return any(node.target in _never_dead for graph in graphs for node in graph.nodes)


def keep_order() -> None:
    """From now on Inductor runs what communicates in the order of a graph.

    By itself it moves what does not depend on one another, so that memory is free early: by sizes, which differ from rank to rank. A call
    would meet another one of the other ranks then.
    """
    _lower_in_order(*_never_dead)


@functools.cache
def _lower_in_order(*ops: Any) -> None:
    """Each call waits for the one before it, as far as the order of a graph's code is concerned."""
    from torch._inductor import ir, lowering
    from torch._inductor.virtualized import V

    def lowered(op: Any) -> Callable[..., Any]:
        fallback = lowering.fallback_handler(op)

        def lower(*args: Any, **kwargs: Any) -> Any:
            graph: Any = V.graph
            known = len(graph.operations)
            out = fallback(*args, **kwargs)
            (kernel,) = (o for o in graph.operations[known:] if isinstance(o, ir.FallbackKernel))
            before = getattr(graph, "_moefuse_last", None)
            if before is not None:
                graph.additional_star_deps[kernel.operation_name].add(before)
            graph._moefuse_last = kernel.get_name()
            return out

        return lower

    for op in ops:
        lowering.register_lowering(op, type_promotion_kind=None)(lowered(op))


def timeout_of(group: Any) -> datetime.timedelta | None:
    """How long a process group waits for other ranks; None if its backend does not say."""
    try:
        found = group._get_backend(group._device_types[0]).options._timeout
    except (AttributeError, RuntimeError, IndexError):
        return None
    return found if isinstance(found, datetime.timedelta) else None


def coalesced(group: Any, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """All-gathers that are launched together when the block ends, where the backend of a device can do that.

    Without its argument ``device``: with it torch's NCCL group holds the tensors until a thread of its own lets them go, which is an error
    where a CUDA graph is warmed up.
    """
    manager = getattr(torch.distributed.distributed_c10d, "_coalescing_manager", None)
    if manager is None or device.type == "cpu":
        return contextlib.nullcontext()
    found: contextlib.AbstractContextManager[Any] = manager(group=group, async_ops=False)
    return found


def symmetric_memory(size: int, device: torch.device) -> torch.Tensor:
    """[size] bytes that other ranks can be let to write; not for CUDA graphs."""
    from torch.distributed import _symmetric_memory

    with _without_multicast():
        return _symmetric_memory.empty(size, dtype=torch.uint8, device=device)


def symmetric_peers(memory: torch.Tensor, group: Any) -> list[int]:
    """Let the ranks of a group write each other's ``memory``, and its addresses [P]; a collective call, and not for CUDA graphs."""
    from torch.distributed import _symmetric_memory

    with _without_multicast():
        handle = _symmetric_memory.rendezvous(memory, group)
    return [int(p) for p in handle.buffer_ptrs]


@contextlib.contextmanager
def _without_multicast() -> Iterator[None]:
    """In this block torch binds no memory to NVLink's multicast objects: nothing here reads them, and not every host has them to give."""
    name = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def when_backward_ends(call: Callable[[], None]) -> None:
    """Run ``call`` at the end of the backward pass that is running."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def running_backward() -> int:
    """A number of the backward pass that is running, -1 outside of one."""
    return torch._C._current_graph_task_id()


def variables_of_backward() -> contextvars.Context | None:
    """The context variables of the thread that called the backward pass that is running, as torch has them in every thread of it.

    None where torch does not carry them, as it need not before 2.13.
    """
    found = torch._C._get_obj_in_tls("context") if torch._C._is_key_in_tls("context") else None
    return found if isinstance(found, contextvars.Context) else None


def keeps_by_hooks() -> bool:
    """Whether what autograd keeps for gradients goes through hooks, as in an activation checkpoint."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def hooks_of_gradients(parameter: torch.nn.Parameter) -> list[Any]:
    """What ``register_post_accumulate_grad_hook`` was given, and runs again where ``Module.to_empty`` has let autograd forget it.

    A distributed tensor's content is swapped there: the hooks stay with the object and not with the content.
    """
    hooks: Any = parameter._post_accumulate_grad_hooks
    if not hooks:
        return []
    parameter._post_accumulate_grad_hooks = hooks
    return list(hooks.values())


class NotForDDP:
    """Names of what ``DistributedDataParallel`` of a module is to leave alone, as they are when it asks: also if the module is compiled."""

    def __init__(self, root: torch.nn.Module, held: Sequence[tuple[torch.nn.Module, str]], before: Iterable[str]) -> None:
        self.root, self.held, self.before = root, held, before

    def __iter__(self) -> Iterator[str]:
        from torch.distributed.tensor import DTensor

        yield from self.before
        paths = {id(module): path for path, module in self.root.named_modules()}
        for module, name in self.held:
            parameter: Any = module._parameters.get(name)
            if not isinstance(parameter, DTensor):
                continue  # a full one again
            setattr(parameter, "_ddp_ignored", True)  # noqa: B010  (for Dynamo's buckets; a Parameter that was moved has it no more)
            # A compiled module looks like this one, and has it as a child. What is the root's own, DDP calls ".name" in places.
            path = f"{paths[id(module)]}.{name}"
            yield from (path, path.lstrip("."), f"_orig_mod.{path.lstrip('.')}")


_FOR_DDP = "_ddp_params_and_buffers_to_ignore"


def not_for_ddp(model: torch.nn.Module, held: Sequence[tuple[torch.nn.Module, str]]) -> None:
    """Let ``DistributedDataParallel`` of a model, or of a part of it, leave these distributed Parameters (module, name) alone.

    Beside those that it was told to ignore before.
    """
    holders = {id(module) for module, _ in held}
    for root in model.modules():
        inner = {id(module) for module in root.modules()}
        if not holders.isdisjoint(inner):
            setattr(root, _FOR_DDP, NotForDDP(root, [h for h in held if id(h[0]) in inner], getattr(root, _FOR_DDP, ())))


def again_for_ddp(model: torch.nn.Module, held: Iterable[tuple[torch.nn.Module, str]]) -> None:
    """Take back :func:`not_for_ddp` for these Parameters, which are to be full ones."""
    gone = set()
    for module, name in held:
        gone.add((id(module), name))
        module._parameters[name].__dict__.pop("_ddp_ignored", None)
    for root in model.modules():
        known = root.__dict__.pop(_FOR_DDP, ())
        while isinstance(known, NotForDDP) and gone.issuperset((id(module), name) for module, name in known.held):
            known = known.before
        if known != ():
            setattr(root, _FOR_DDP, known)


def sharded_over(mesh: Any) -> Any:
    """What FSDP's ``shard_placement_fn`` returns for a Parameter that is sharded over a mesh of its own; None where torch has no such."""
    from torch.distributed.fsdp._fully_shard import _fsdp_common
    from torch.distributed.tensor import Shard

    result = getattr(_fsdp_common, "ShardPlacementResult", None)
    return None if result is None else result(Shard(0), _fsdp_common.FSDPMeshInfo(mesh, shard_mesh_dim=0))


def static_address(tensor: torch.Tensor) -> torch.Tensor:
    """Let CUDA graphs of compiled code read a tensor where it is, as they do Parameters and buffers, and not copy it in each call."""
    from torch._dynamo import mark_static_address

    mark_static_address(tensor)
    return tensor


def in_compiled_call() -> bool:
    """Whether the caller was called from a program that Dynamo has compiled, between two graphs of it for instance."""
    from torch._dynamo import eval_frame

    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == eval_frame.__file__:
            return True
        frame = frame.f_back
    return False


def inlined_only(function: Any) -> None:
    """Dynamo traces a function where compiled code calls it, and leaves it alone where eager code does."""
    from torch._dynamo.eval_frame import skip_code

    skip_code(inspect.unwrap(function).__code__)


def _seen_codes() -> list[types.CodeType]:
    from torch._dynamo import convert_frame

    return [code for weak in convert_frame.input_codes.seen if (code := weak()) is not None]


def reset_code(code: types.CodeType) -> None:
    """Forget what was compiled of this code."""
    torch._C._dynamo.eval_frame.reset_code(code)


def _drop_new_entries(code: types.CodeType, kept: set[int] | None) -> None:
    from torch._dynamo import eval_frame
    from torch._dynamo.guards import DeletedGuardManagerWrapper

    if not kept:
        reset_code(code)
        return
    for entry in eval_frame._debug_get_cache_entry_list(code):
        manager = entry.guard_manager
        if id(entry) not in kept and manager.extra_state is not None:
            manager.extra_state.invalidate(entry, DeletedGuardManagerWrapper("moefuse.explain"))


def _given_up(metrics: Iterable[Any]) -> list[str]:
    """Frames that Dynamo runs in eager altogether: its break counters do not show them, its metrics do."""
    texts = []
    for metric in metrics:
        # SkipFrame alone is no loss: it means a frame without tensor operations.
        if metric.fail_type in (None, "SkipFrame"):
            continue
        place = f" at {metric.fail_user_frame_filename}:{metric.fail_user_frame_lineno}" if metric.fail_user_frame_filename else ""
        texts.append(f"{_first_line(metric.fail_reason or metric.fail_type)} (all of {metric.co_name} runs in eager){place}")
    return texts


def _break_text(reason: object, user_stack: Sequence[Any]) -> str:
    place = f" at {user_stack[-1].filename}:{user_stack[-1].lineno}" if user_stack else ""
    line = _first_line(reason)
    # Dynamo names the bytecode here, and the cause only in its log.
    return f"{'Data-dependent branching' if line.startswith('generic_jump') else line}{place}"


def _guard(reason: str) -> str:
    """``0/1: self.n == 1   # self.n += 1  # my.py:3 in forward (HINT: ...)`` -> ``self.n == 1``."""
    return _first_line(reason).partition(": ")[2].partition("  #")[0].strip()


def _first_line(text: object) -> str:
    lines = str(text).strip().splitlines()
    return lines[0] if lines else "unknown reason"


# --- tracing ----------------------------------------------------------------------------------------------------------------------


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


# --- the dispatcher ---------------------------------------------------------------------------------------------------------------


def on_cpu(op: Any, *args: Any) -> Any:
    """What is registered for CPU tensors now; a call may find what was there before, since Python's dispatcher remembers its answers."""
    return op.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *args)


# --- CUDA -------------------------------------------------------------------------------------------------------------------------


def raw_stream(device: int) -> int:
    """The current stream of a CUDA device as the driver knows it."""
    return int(torch._C._cuda_getCurrentRawStream(device))


def current_device() -> int:
    """The current CUDA device, which some CUDA tensor exists on."""
    return int(torch._C._cuda_getDevice())


def _slow_empty_cuda(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="cuda")


empty_cuda: Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor] = getattr(
    getattr(getattr(torch._C, "_dynamo", None), "guards", None), "_empty_strided_cuda", _slow_empty_cuda
)
"""An uninitialised tensor on the current CUDA device, by the function that Inductor's generated code calls."""
