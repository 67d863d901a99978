"""What capture uses of private torch, by name: a release that moves one of these switches capture off instead of breaking a program."""

from __future__ import annotations

import dataclasses
import inspect
from importlib import import_module
from typing import Any

ARGUMENTS = ("compiler_fn", "one_graph", "export", "speculation_log", "f_locals")
"""Arguments of ``InstructionTranslator.__init__`` that say whose frame it is."""

POINTS: dict[str, tuple[str, ...]] = {
    "torch._dynamo.convert_frame": ("CatchErrorsWrapper.__call__", "ConvertFrame.__call__", "input_codes"),
    "torch._dynamo.eval_frame": ("_TorchDynamoContext.__call__", "_stance"),
    "torch._dynamo.types": ("ConvertFrameReturn",),
    "torch._C._dynamo.eval_frame": ("set_code_exec_strategy", "_debug_get_cache_entry_list", "_FrameAction", "_FrameExecStrategy"),
    "torch._dynamo.symbolic_convert": (
        "InstructionTranslator.__init__",
        "InstructionTranslatorBase.step",
        "InstructionTranslatorBase.run",
        "SpeculationLog.clear",
    ),
    "torch._dynamo.output_graph": (
        "OutputGraph.call_user_compiler",
        "OutputGraph.shape_env",
        "OutputGraph.current_tracer",
        "OutputGraph.guards",
    ),
    "torch._dynamo.side_effects": ("SideEffects.mutation", "SideEffects.store_attr", "SideEffects.register_hook"),
    "torch._dynamo.variables.base": ("MutationType.__init__", "ValueMutationNew", "AttributeMutationNew", "VariableTracker.build"),
    "torch._dynamo.variables.builder": ("wrap_fx_proxy",),
    "torch._dynamo.variables.constant": ("ConstantVariable.create",),
    "torch._dynamo.variables.lists": ("ListVariable", "ListIteratorVariable"),
    "torch._dynamo.variables.iter": ("IteratorVariable.__init__",),
    "torch._dynamo.variables.functions": ("LocalGeneratorObjectVariable.__init__", "UserFunctionVariable"),
    "torch._dynamo.variables.nn_module": ("UnspecializedNNModuleVariable",),
    "torch._dynamo.variables.lazy": ("LazyVariableTracker.realize",),
    "torch._dynamo.variables.tensor": (
        "TensorVariable.method_item",
        "TensorVariable.method_tolist",
        "TensorVariable.unpack_var_sequence",
        "SymNodeVariable",
    ),
    "torch._dynamo.exc": (
        "RestartAnalysis",
        "SpeculationRestartAnalysis",
        "UnspecializeRestartAnalysis",
        "TensorifyScalarRestartAnalysis",
        "TorchDynamoException",
        "SkipFrame",
        "ShortenTraceback",
    ),
    "torch._dynamo.config": ("capture_scalar_outputs", "capture_dynamic_output_shape_ops"),
    "torch.fx.experimental.symbolic_shapes": ("ShapeEnvSettings", "free_unbacked_symbols", "statically_known_true"),
}
"""What capture uses of private torch: module -> dotted names inside it."""


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
        found += [f"torch._dynamo.symbolic_convert.InstructionTranslator.__init__({name})" for name in ARGUMENTS if name not in arguments]
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
