"""The points of private torch that moefuse uses are where it expects them. When a release moves one, this fails and says which."""

from __future__ import annotations

import contextvars
import datetime
import inspect
import pickle
import types
from collections import deque
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.torch_version import TorchVersion
from torch.utils.checkpoint import checkpoint

from moefuse import _torch_private
from moefuse._torch_private import inductor
from moefuse.capture.dynamo import observed, points
from moefuse.program.runs import Begun
from tests.house import DOORS, private_in, private_names, wrapped

POINTS = {
    "torch._inductor": ["list_options", "list_mode_options"],
    "torch._inductor.codecache": ["CppCodeCache"],
    "torch._inductor.runtime.cache_dir_utils": ["cache_dir"],
    "torch._inductor.compile_fx": ["compile_fx"],
    "torch._inductor.config": [
        *("post_grad_custom_post_pass", "pre_grad_custom_pass", "reorder_for_locality", "custom_partitioner_fn", "fallback_random"),
    ],
    "torch._inductor.ir": ["FallbackKernel"],
    "torch._library.custom_ops": ["OPDEFS"],
    "torch._inductor.lowering": ["fallback_handler", "register_lowering"],
    "torch._inductor.virtualized": ["V"],
    "torch._inductor.custom_graph_pass": ["CustomGraphPass", "CustomPartitionerFn"],
    "torch._dynamo.exc": [
        *("ShortenTraceback", "RestartAnalysis", "SkipFrame", "BackendCompilerFailed", "exceptions_allowed_to_be_fallback"),
        "TorchDynamoException",
    ],
    "torch._dynamo.utils": ["counters", "graph_break_reasons", "_compilation_metrics"],
    "torch._dynamo.convert_frame": ["_compile", "compile_lock", "input_codes"],
    "torch._dynamo.backends.registry": ["_BACKENDS"],
    "torch._dynamo.eval_frame": ["cached_backends", "_debug_get_cache_entry_list", "_stance"],
    "torch._dynamo.guards": ["DeletedGuardManagerWrapper", "GuardBuilder", "_get_closure_vars"],
    "torch._dynamo.pgo": ["_CODE_STATE"],
    "torch._functorch.config": ["enable_autograd_cache"],
    "torch._functorch.partitioners": ["min_cut_rematerialization_partition"],
    "torch._guards": ["CompileContext", "TracingContext"],
    "torch._dynamo.source": ["GlobalStateSource"],
    "torch.autograd.forward_ad": ["_current_level"],
    "torch._subclasses.fake_tensor": ["FakeTensor", "DataDependentOutputException", "DynamicOutputShapeException"],
    "torch._C": [
        "_current_graph_task_id",
        "_get_obj_in_tls",
        "_is_key_in_tls",
        "_dispatch_has_kernel",
        "_dispatch_has_kernel_for_dispatch_key",
        "_DisablePythonDispatcher",
    ],
    "torch._dispatch.python": ["enable_python_dispatcher"],
    "torch._subclasses.functional_tensor": ["FunctionalTensor", "FunctionalTensorMode"],
    "torch._logging._internal": ["trace_structured"],
    "torch.utils._filelock": ["FileLock"],
    "torch.utils._sympy.symbol": ["SymT", "symbol_is_type"],
    "torch._C._autograd": ["_saved_tensors_hooks_set_tracing", "_unsafe_set_version_counter"],
    "torch.utils._python_dispatch": [
        *("TorchDispatchMode", "is_traceable_wrapper_subclass", "is_in_any_mode_without_ignore_compile_internals"),
    ],
    "torch.utils._pytree": ["tree_map_only"],
    "torch._C._dynamo.eval_frame": ["reset_code"],
    "torch._C._functorch": [
        *("is_functorch_wrapped_tensor", "peek_interpreter_stack"),
        *(f"_{kind}_{way}_nesting" for kind in ("grad", "vmap", "jvp", "func") for way in ("increment", "decrement")),
    ],
    # Before 2.12 a graph has the functions of torch._C themselves.
    "torch._functorch.predispatch": ["_enter_dual_level", "_exit_dual_level"] if TorchVersion(torch.__version__) >= (2, 12) else [],
    "torch.distributed.fsdp._fully_shard": ["_fsdp_common"],
    "torch": ["_TorchCompileWrapper", "_TorchCompileInductorWrapper"],
}


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, names in POINTS.items() for name in names])
def test_exists(module: str, name: str) -> None:
    assert hasattr(import_module(module), name)


def test_each_backward_pass_has_a_number() -> None:
    """One inside of another has another one, and outside there is none."""
    found: list[int] = []
    x = torch.ones(2, requires_grad=True)

    def inside(_: torch.Tensor) -> None:
        found.append(_torch_private.running_backward())
        with torch.enable_grad():
            y = torch.ones(2, requires_grad=True)
            y.register_hook(lambda _: found.append(_torch_private.running_backward()))
            y.sum().backward()

    x.register_hook(inside)
    x.sum().backward()
    assert _torch_private.running_backward() == -1
    assert len(set(found)) == 2
    assert -1 not in found


def test_what_transforms_a_call() -> None:
    """Asked for each call of an op: forward-mode AD by its level, torch.func by its stack, in whatever order they lie."""
    call = _torch_private.unless_transformed(lambda x: "entry", lambda x: "instead")
    x = torch.ones(2)
    assert (call(x), _torch_private.transform(), _torch_private.forward_level()) == ("entry", "", False)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, x)
        assert (call(x), _torch_private.transform(), _torch_private.forward_level()) == ("instead", "", True)
        assert [_torch_private.has_tangent(t) for t in (x, dual, torch.arange(2))] == [False, True, False]
    found = []

    def note(x: torch.Tensor) -> torch.Tensor:
        found.append((call(x), _torch_private.transform(), _torch_private.forward_level()))
        return x.sum()

    torch.func.grad(note)(x)
    torch.func.vmap(note)(x[None])
    torch.func.jvp(note, (x,), (x,))
    assert found == [("instead", "grad", False), ("instead", "vmap", False), ("instead", "jvp", True)]
    assert not _torch_private.has_tangent(dual)


@pytest.mark.usefixtures("fresh_dynamo")
def test_frames_depend_on_the_level_and_know_fakes() -> None:
    """A frame that asks for the guard is compiled again where a level is open; one that was given fake tensors is known by them."""
    seen: list[tuple[bool, bool]] = []

    def backend(gm: torch.fx.GraphModule, _inputs: object) -> Any:
        _torch_private.guard_forward_level()
        seen.append((_torch_private.forward_level(), _torch_private.given_fakes()))
        return gm.forward

    compiled, x = torch.compile(lambda x: x * 2, backend=backend), torch.ones(2)
    for _ in range(2):
        compiled(x)
        with forward_ad.dual_level():
            compiled(x)
    with FakeTensorMode() as mode:
        compiled(mode.from_tensor(x))
    assert seen == [(False, False), (True, False), (False, True)]
    assert not _torch_private.given_fakes()
    _torch_private.guard_forward_level()


def test_backward_has_the_variables_of_its_caller() -> None:
    """In threads that autograd makes, too, for which a test needs a device. Before torch 2.13 it need not have any."""
    variable = contextvars.ContextVar("variable", default=0)
    found: list[int | None] = []

    def inside(_: torch.Tensor) -> None:
        carried = _torch_private.variables_of_backward()
        found.append(None if carried is None else carried.get(variable))

    x = torch.ones(2, requires_grad=True)
    x.register_hook(inside)
    variable.set(7)
    x.sum().backward()
    assert found == [7] or (found == [None] and TorchVersion(torch.__version__) < (2, 13))
    assert _torch_private.variables_of_backward() is None


def test_capture_finds_its_points() -> None:
    """Names the missing one. Without it capture switches itself off, and loops that depend on data break the graph again."""
    assert points.missing() == []


@pytest.mark.parametrize("ability", points.ABILITIES)
def test_abilities_find_their_points(ability: str) -> None:
    """Without ``checkpoints`` a router loss and gradient checkpointing leave nothing fused; without ``parametrisations`` PEFT's
    ``target_parameters`` breaks the graph several times a layer."""
    assert points.missing(points.ABILITIES[ability]) == [] or (ability != "parametrisations" and TorchVersion(torch.__version__) < (2, 13))


def test_a_point_that_is_gone_is_named() -> None:
    """A method, an attribute that only objects have, and a module."""
    wanted = {"torch._dynamo.output_graph:OutputGraph": "guards nowhere root_tx", "torch._nowhere:A": "b"}
    assert points.missing(wanted) == ["torch._dynamo.output_graph.OutputGraph.nowhere", "torch._nowhere.A.b"]


def test_what_is_wrapped_is_among_the_points() -> None:
    """And what frames of ours have in place of Dynamo's methods."""
    every = [points.POINTS, *points.ABILITIES.values()]
    named = {f"{home.rpartition(':')[2]}.{name}" for found in every for home, names in found.items() for name in names.split()}
    own = {f"{kind.__mro__[1].__name__}.{name}" for kind in observed.classes() for name, value in vars(kind).items() if callable(value)}
    assert wrapped() | own <= named
    assert {"InstructionTranslatorBase.step", "SideEffects.mutation"} <= wrapped() | own


def _codes(code: types.CodeType) -> list[types.CodeType]:
    """The code of a function and of those inside of it."""
    return [code, *(inner for const in code.co_consts if isinstance(const, types.CodeType) for inner in _codes(const))]


def test_shapes() -> None:
    from torch._dynamo import convert_frame, exc, utils

    assert isinstance(convert_frame.input_codes.seen, list)
    assert isinstance(utils._compilation_metrics, deque)
    assert issubclass(exc.ShortenTraceback, RuntimeError)
    assert list(inspect.signature(torch._TorchCompileInductorWrapper.__init__).parameters)[1:4] == ["mode", "options", "dynamic"]
    assert "inner_compile" in inspect.signature(import_module("torch._inductor.compile_fx").compile_fx).parameters
    assert callable(import_module("torch.utils._python_dispatch").TorchDispatchMode.ignore_compile_internals)
    # Found on the stack by name, with what they hold.
    assert "locals" in inspect.signature(import_module("torch._dynamo.convert_frame")._compile).parameters
    calls = _codes(inspect.unwrap(import_module("torch._dynamo.eval_frame")._TorchDynamoContext.__call__).__code__)
    (call,) = (code for code in calls if code.co_name == "compile_wrapper" and "cleanups" in code.co_varnames + code.co_cellvars)
    assert {"args", "kwargs", "fn", "self"} <= {*call.co_varnames, *call.co_freevars, *call.co_cellvars}
    metric = import_module("torch._dynamo.utils").CompilationMetrics
    assert {"fail_type", "fail_reason", "fail_user_frame_filename", "fail_user_frame_lineno", "co_name", "recompile_reason"} <= set(
        metric.__annotations__
    )


def test_lock_between_processes(tmp_path: Path) -> None:
    with _torch_private.file_lock(tmp_path / "a.lock"):
        assert (tmp_path / "a.lock").exists()


def test_views_share_a_storage() -> None:
    with torch._subclasses.FakeTensorMode():
        a = torch.empty(4, 6)
        assert _torch_private.same_storage(a, a.t()[1:])
        assert not _torch_private.same_storage(a, a.clone())


def test_timeouts_of_process_groups() -> None:
    """Of gloo's; others, such as the fake one, may not say."""
    wanted = datetime.timedelta(seconds=7)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=wanted)
    try:
        assert _torch_private.timeout_of(dist.group.WORLD) == wanted
    finally:
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        assert _torch_private.timeout_of(dist.group.WORLD) is None
    finally:
        dist.destroy_process_group()


DOCUMENTED = {"torch._check", "torch._dynamo.mark_static"}
"""Names of torch's own documentation, underscores or not."""


def test_private_torch_has_two_doors() -> None:
    """Elsewhere in the package nothing private is imported or written out, so a new release is checked in one place."""
    found = {name: rooms - set(DOORS) for name, rooms in private_names().items() if name not in DOCUMENTED}
    assert {name: rooms for name, rooms in found.items() if rooms} == {}


def test_private_names_are_seen() -> None:
    """Imports, whole and in part, and attributes."""
    text = "import torch._inductor.config\nfrom torch._guards import x\ndef f():\n    return torch._ops.OpOverload, torch.ops.aten"
    assert private_in(text) == {"torch._inductor.config", "torch._guards.x", "torch._ops.OpOverload"}


def test_what_communicates_is_lowered_in_order() -> None:
    """Where Inductor keeps what a graph's operations have to wait for, beside their inputs."""
    from torch._inductor.graph import GraphLowering

    source = inspect.getsource(GraphLowering.__init__)
    assert "self.additional_buffer_deps" in source
    assert "self.operations" in source
    outer, inner = torch.fx.Graph(), torch.fx.Graph()
    outer.output(outer.placeholder("x"))
    around = torch.fx.GraphModule({}, outer)
    assert not _torch_private.communicates(around)
    inner.output(inner.call_function(torch.ops.moefuse.ep_combine.default, (inner.placeholder("x"), [], 1, "", "")))
    around.body = torch.fx.GraphModule({}, inner)
    assert _torch_private.communicates(around.body)
    assert _torch_private.communicates(around), "the body of a checkpoint"


@pytest.fixture
def two_ranks() -> Iterator[DeviceMesh]:
    """Rank 0 of 2, which communicates nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    dist.destroy_process_group()


def test_meshes_are_saved_behind_states_of_generators(two_ranks: DeviceMesh) -> None:
    """A checkpoint that draws numbers and has a distributed Parameter, which AOTAutograd cannot run without moefuse (torch 2.13)."""
    from torch._dynamo.backends.common import aot_autograd

    weight = torch.nn.Parameter(DTensor.from_local(torch.randn(4, 4), two_ranks, [Shard(0)], run_check=False))

    def body(x: torch.Tensor) -> torch.Tensor:
        return torch.dropout(torch.relu(x @ weight.to_local()), 0.5, True)

    patches = inductor.partitioned({"cpp_wrapper": False})
    partition = patches["custom_partitioner_fn"]
    backend = aot_autograd(fw_compiler=lambda gm, _: gm.forward, partition_fn=partition)
    run = torch.compile(lambda x: checkpoint(body, x, use_reentrant=False).sin(), backend=backend, dynamic=True, fullgraph=True)
    for tokens in (3, 5):  # with sizes, which come last
        x = torch.randn(tokens, 4, requires_grad=True)
        torch.manual_seed(0)
        out = run(x)
        found = torch.autograd.grad(out.sum(), [x, weight])
        torch.manual_seed(0)
        wanted = checkpoint(body, x, use_reentrant=False).sin()
        torch.testing.assert_close(out, wanted)
        torch.testing.assert_close(found[0], torch.autograd.grad(wanted.sum(), x, retain_graph=True)[0])
        torch.testing.assert_close(found[1].to_local(), torch.autograd.grad(wanted.sum(), weight)[0].to_local())
    # It is part of the keys of Inductor's caches, and runs what the user has given.
    again = pickle.loads(pickle.dumps(partition))
    assert again.uuid() == partition.uuid()
    over = inductor.partitioned(patches)["custom_partitioner_fn"]
    assert over.uuid() == f"{partition.uuid()} after {partition.uuid()!r}"


def test_hooks_of_gradients(two_ranks: DeviceMesh) -> None:
    """They are with a distributed Parameter whose content ``to_empty`` has swapped, and run."""
    module, fired = torch.nn.Module(), []
    module.w = torch.nn.Parameter(DTensor.from_local(torch.empty(2, 3, device="meta"), two_ranks, [Shard(0)], run_check=False))
    assert _torch_private.hooks_of_gradients(module.w) == []
    module.w.register_post_accumulate_grad_hook(fired.append)
    module.to_empty(device="cpu")
    assert _torch_private.hooks_of_gradients(module.w) == [fired.append]
    module.w.to_local().sum().backward()
    assert len(fired) == 1


def test_parameters_that_ddp_leaves_alone(two_ranks: DeviceMesh) -> None:
    """Names and marks of those that are distributed when DDP asks, and neither when it is taken back."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[0]._ddp_params_and_buffers_to_ignore = ["bias"]
    for layer in model:
        local = layer.weight.detach()
        layer.weight = torch.nn.Parameter(DTensor.from_local(local, two_ranks, [Shard(0)], run_check=False))
    before = [dict(vars(module)) for module in model.modules()]
    marks = {key: dict(value.__dict__) for key, value in model.named_parameters()}
    _torch_private.not_for_ddp(model, [(model[0], "weight")])
    _torch_private.not_for_ddp(model, [(model[1], "weight")])
    assert {"0.weight", "1.weight", "_orig_mod.0.weight"} <= set(model._ddp_params_and_buffers_to_ignore)
    assert {"bias", "weight", ".weight"} <= set(model[0]._ddp_params_and_buffers_to_ignore)
    assert model[0].weight._ddp_ignored
    _torch_private.again_for_ddp(model[1], [(model[1], "weight")])
    full = torch.nn.Parameter(torch.zeros(4, 2))
    weight, model[1].weight = model[1].weight, full
    assert "1.weight" not in set(model._ddp_params_and_buffers_to_ignore)
    model[1].weight = weight
    _torch_private.again_for_ddp(model, [(model[0], "weight"), (model[1], "weight")])
    assert before == [vars(module) for module in model.modules()]
    assert marks == {key: value.__dict__ for key, value in model.named_parameters()}


def test_whether_a_compiled_program_calls() -> None:
    """Between two graphs it does, elsewhere it does not."""
    found = []

    @torch.compiler.disable
    def ask() -> None:
        found.append(_torch_private.in_compiled_call())

    def program(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        ask()
        return y + 1

    torch.compile(program, backend="eager")(torch.zeros(1))
    assert found == [True]
    assert not _torch_private.in_compiled_call()


def test_whether_callees_are_compiled() -> None:
    """Between two graphs they are, in what is disabled and elsewhere they are not."""
    found = []

    def ask() -> None:
        torch._dynamo.graph_break()
        found.append(_torch_private.compiles_callees())

    def program(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        ask()
        torch.compiler.disable(ask)()
        return y + 1

    torch.compile(program, backend="eager")(torch.zeros(1))
    assert found == [True, False]
    assert not _torch_private.compiles_callees()


def test_static_sizes(no_code: None) -> None:
    """Also where a program is being traced, and with ``dynamic=True``."""
    kept, shapes = torch.zeros(3), list[Any]()

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        found = [node.meta["example_value"] for node in graph.graph.nodes if node.op == "placeholder"]
        shapes.extend(value.shape for value in found if isinstance(value, torch.Tensor))
        return graph

    _torch_private.static_sizes(kept)
    torch.compile(lambda x: x.sum() + kept.sum(), backend=backend, dynamic=True)(torch.zeros(4))
    assert sorted(type(shape[0]) is int for shape in shapes) == [False, True]


def test_static_address() -> None:
    assert _torch_private.static_address(torch.zeros(1))._dynamo_static_input_type == "unguarded"  # type: ignore[attr-defined]


def test_what_dynamo_says_of_inputs_and_endings() -> None:
    """A module's tensors have the same address in each call; a graph in front of a break does not end its frame."""
    found: list[tuple[bool, set[bool]]] = []

    def backend(gm: torch.fx.GraphModule, _: object) -> Any:
        places = gm.graph.find_nodes(op="placeholder")
        found.append((_torch_private.ends_frame(gm), {_torch_private.has_static_address(node) for node in places}))
        return gm.forward

    def program(x: torch.Tensor) -> torch.Tensor:
        y = norm.weight + norm.running_mean
        torch._dynamo.graph_break()
        return y + x

    norm = torch.nn.BatchNorm1d(3)
    torch.compile(program, backend=backend)(torch.zeros(3))
    assert found == [(False, {True}), (True, {False})]


def test_tensors_in_memory() -> None:
    """Those with addresses, and what a tensor of a class of its own is made of."""
    from torch.testing._internal.two_tensor import TwoTensor

    plain = torch.ones(3)
    assert _torch_private.in_memory(plain) == [plain]
    assert [t.data_ptr() for t in _torch_private.in_memory(TwoTensor(plain, plain))] == [plain.data_ptr()] * 2  # type: ignore[no-untyped-call]
    assert _torch_private.in_memory(torch.ones(3, device="meta")) == []
    assert _torch_private.in_memory(torch.eye(2).to_sparse()) == []


def test_names_in_guards() -> None:
    """What Dynamo's expressions for inputs call."""
    assert {"___from_numpy", "torch", "device"} <= set(_torch_private.guard_names())


def test_endings_are_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """An action at the end of a call that raises changes nothing of it, unless it is an error that the user asked for."""
    from moefuse import FusionError
    from moefuse.report import quietly

    def run(error: Exception) -> torch.Tensor:
        def backend(gm: torch.fx.GraphModule, _: object) -> object:
            call = _torch_private.running_call()
            assert call is not None

            def raises() -> None:
                raise error

            call.at_end("a test", raises)
            return gm.forward

        torch._dynamo.reset()
        result: torch.Tensor = torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
        return result

    monkeypatch.setattr(quietly, "_said", {})  # what is said is a note of later reports
    torch.testing.assert_close(run(KeyError("made for this test")), torch.full((2,), 2.0))
    with pytest.raises(FusionError, match="asked for"):
        run(FusionError("asked for"))


def test_the_beginning_of_a_call() -> None:
    """A hook of the context makes an object in each call, which is among what the call ends with; reset() makes another epoch."""
    found = []

    def backend(gm: torch.fx.GraphModule, _inputs: object) -> object:
        call = _torch_private.running_call()
        assert call is not None
        found.append(call.held(Begun))
        return gm.forward

    torch._dynamo.reset()
    compiled = torch.compile(lambda x: x + 1, backend=backend)
    compiled(torch.ones(3))
    assert found == [None]  # of ours only
    context = torch._dynamo.eval_frame.optimize(backend=backend)
    _torch_private.at_each_call(context, Begun)
    context(lambda x: x + 2)(torch.ones(3))
    assert isinstance(found[1], Begun)
    before = _torch_private.epoch()
    assert _torch_private.epoch() is before
    torch._dynamo.reset()
    assert _torch_private.epoch() is not before
