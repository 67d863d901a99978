"""What capture uses of private torch, by name: a release that moves one of these switches capture off instead of breaking a program.

What only one ability needs is beside it in :data:`ABILITIES`: without that, programs break the graph there, as ever.
"""

from __future__ import annotations

import functools
import inspect
import types
from importlib import import_module
from typing import Any

_Points = dict[str, str]

POINTS: _Points = {
    "torch._dynamo.convert_frame:CatchErrorsWrapper": "__call__ _torchdynamo_orig_backend",
    "torch._dynamo.convert_frame": "ConvertFrame input_codes",
    "torch._dynamo.eval_frame:_TorchDynamoContext": "__call__ callback",
    "torch._dynamo.eval_frame": "_stance",
    "torch._dynamo.types:ConvertFrameReturn": "apply_to_code guarded_code frame_exec_strategy",
    "torch._C._dynamo.eval_frame": "set_code_exec_strategy _debug_get_cache_entry_list _FrameAction _FrameExecStrategy",
    "torch._dynamo.symbolic_convert:InstructionTranslatorBase": "step run",
    "torch._dynamo.symbolic_convert:SpeculationEntry": "fail_and_restart_analysis failed",
    "torch._dynamo.symbolic_convert:SpeculationLog": "clear",
    "torch._dynamo.symbolic_convert:InstructionTranslator": (
        "one_graph export output stack symbolic_locals instructions instruction_pointer f_code f_locals f_globals lineno "
        "current_instruction block_stack speculation_log current_speculation error_on_graph_break exn_vt_stack "
        "nn_module_stack"
    ),
    "torch._dynamo.symbolic_convert:InliningInstructionTranslator": "parent",
    "torch._dynamo.output_graph:OutputGraph": (
        "call_user_compiler compile_subgraph shape_env current_tracer root_tracer guards root_tx current_tx compiler_fn "
        "side_effects tracing_context graph global_scope local_scope create_proxy backward_state random_calls"
    ),
    "torch._dynamo.output_graph:SubgraphTracer": "parent graph",
    "torch._dynamo.guards:GuardBuilder": "EMPTY_NN_MODULE_HOOKS_DICT guard_manager",
    "torch._dynamo.source": "GlobalStateSource",
    "torch._dynamo.side_effects:SideEffects": (
        "mutation store_attr prune_dead_object_new check_allowed_side_effect clone output_graph_weakref store_attr_mutations "
        "id_to_variable tensor_hooks save_for_backward has_pending_mutation_of_attr is_modified"
    ),
    "torch._dynamo.variables.base:MutationType": "__init__",
    "torch._dynamo.variables.base": "ValueMutationNew AttributeMutationNew",
    "torch._dynamo.variables.base:VariableTracker": "build visit mutation_type source is_python_constant as_python_constant",
    "torch._dynamo.variables.builder": "wrap_fx_proxy",
    "torch._dynamo.variables.builder:SourcelessBuilder": "create",
    "torch._dynamo.variables.builtin:BuiltinVariable": "fn",
    "torch._dynamo.variables.constant:ConstantVariable": "create",
    "torch._dynamo.variables.lists:BaseListVariable": "items",
    "torch._dynamo.variables.lists": "ListVariable TupleVariable ListIteratorVariable RangeVariable",
    "torch._dynamo.variables.iter": "IteratorVariable",
    "torch._dynamo.variables.functions:LocalGeneratorObjectVariable": "__init__ inline_tracer",
    "torch._dynamo.variables.functions:UserFunctionVariable": "fn",
    "torch._dynamo.variables.misc": "AutogradFunctionContextVariable NullVariable",
    "torch._dynamo.variables.nn_module:UnspecializedNNModuleVariable": "value",
    "torch._dynamo.variables.lazy:LazyVariableTracker": "realize is_realized original_value original_source",
    "torch._dynamo.variables.tensor:TensorVariable": "call_method unpack_var_sequence requires_grad",
    "torch._dynamo.variables.tensor": "NumpyNdarrayVariable",
    "torch._dynamo.variables.tensor:SymNodeVariable": "sym_num evaluate_expr",
    "torch._dynamo.variables.torch:TorchInGraphFunctionVariable": "call_function value",
    "torch._dynamo.exc": (
        "RestartAnalysis SpeculationRestartAnalysis UnspecializeRestartAnalysis TensorifyScalarRestartAnalysis "
        "TorchDynamoException SkipFrame ShortenTraceback Unsupported ObservedException TorchRuntimeError"
    ),
    "torch._dynamo.config": (
        "capture_scalar_outputs capture_dynamic_output_shape_ops rewrite_assert_with_torch_assert repro_after use_graph_deduplication"
    ),
    "torch._guards:TracingContext": "try_get",
    "torch.nn:ModuleList": "_get_abs_string_index __getitem__",
    "torch.fx.experimental.symbolic_shapes:ShapeEnvSettings": "allow_scalar_outputs allow_dynamic_output_shape_ops",
    "torch.fx.experimental.symbolic_shapes:ShapeEnv": "deferred_runtime_asserts settings var_to_range",
    "torch.fx.experimental.symbolic_shapes": "free_unbacked_symbols statically_known_true",
}
"""Module, or module and class -> names inside it. An attribute that objects have is one that their class declares, or sets."""

ABILITIES: dict[str, _Points] = {
    "checkpoints": {
        "torch._dynamo.config": "skip_fwd_side_effects_in_bwd_under_checkpoint",
        "torch._dynamo.side_effects:SideEffects": "should_allow_side_effects_in_hop _maybe_record_side_effect",
        "torch._dynamo.variables.base": "is_side_effect_safe",
        "torch._dynamo.variables.higher_order_ops:CheckpointHigherOrderVariable": "_call_function allow_side_effects",
    },
    "deferred checks": {
        "torch._dynamo.side_effects:SideEffects": "defer_side_effect_checks",
    },
    "lengths": {
        "torch._subclasses.fake_impls": "op_implementations_dict",
        "torch.fx.experimental.symbolic_shapes": "_constrain_range_for_size",
    },
    "parametrisations": {
        "torch._dynamo.variables.functions:UserFunctionVariable": "call_function",
        "torch._dynamo.variables.nn_module:UnspecializedNNModuleVariable": (
            "call_obj_hasattr is_state_mutated manually_trace_nn_module_getattr"
        ),
        "torch.nn.utils.parametrize": "_cache_enabled _register_parameter_or_buffer ParametrizationList",
    },
}
"""What an ability needs beside them."""


def missing(points: _Points = POINTS) -> list[str]:
    """The points that this torch does not have; without one of :data:`POINTS` there is no capture."""
    return [f"{home.replace(':', '.')}.{name}" for home, names in points.items() for name in names.split() if not _is_there(home, name)]


@functools.cache
def has(ability: str) -> bool:
    """Whether this torch has what an ability needs."""
    return not missing(ABILITIES[ability])


def _is_there(home: str, name: str) -> bool:
    module, _, owner = home.partition(":")
    try:
        found: Any = import_module(module)
        found = getattr(found, owner) if owner else found
    except (ImportError, AttributeError):
        return False
    return hasattr(found, name) or (isinstance(found, type) and any(_gives(kind, name) for kind in found.__mro__))


def _gives(kind: type, name: str) -> bool:
    """Whether objects of a class have an attribute: it is declared, or set when one is made."""
    made = [inspect.unwrap(vars(kind)[method]) for method in ("__init__", "_init") if method in vars(kind)]
    codes = [function.__code__ for function in made if isinstance(function, types.FunctionType)]
    return name in vars(kind).get("__annotations__", {}) or any(name in code.co_names for code in codes)
