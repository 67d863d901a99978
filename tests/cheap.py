"""What makes compiling cheaper in every process of the tests, of pytest or of a rank."""

from __future__ import annotations

import gc
import importlib.util
import inspect
import logging
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from typing import Any

import torch._dynamo
import torch._inductor.config


def cheaper_compiles() -> None:
    """Leave out what nobody reads, and most of what garbage collections would look at."""
    # The default lets every few allocations scan what Dynamo keeps of thousands of compilations.
    gc.set_threshold(20_000, 20, 100)
    # A twentieth of the time went into a cold run of every guard, and a fortieth into collections after a compile.
    torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0
    torch._dynamo.config.run_gc_after_compile = False
    # What Dynamo remembers of fake operations is read too seldom in short programs to be worth writing: a tenth of the time.
    torch._dynamo.config.fake_tensor_cache_enabled = False
    # Stacks of what a frame changes are for a log that is off.
    if hasattr(torch._dynamo.config, "side_effect_replay_policy"):
        torch._dynamo.config.side_effect_replay_policy = "silent"
    # Inductor would start processes for Triton's code, each of which imports torch again.
    torch._inductor.config.compile_threads = 1
    # A package has two C++ files, for which two headers would be compiled ahead, and one of them takes long to optimize.
    torch._inductor.config.aot_inductor.precompile_headers = False
    torch._inductor.config.aot_inductor.compile_wrapper_opt_level = "O0"
    _linked_sooner()
    _untraced()


def _linked_sooner() -> None:
    """The linker that comes by default takes a fourth of the time of a C++ kernel: it reads all names of torch's libraries."""
    from torch._inductor import cpp_builder

    flags = cpp_builder._get_optimization_cflags
    if _links_by_gold(cpp_builder.get_cpp_compiler()):
        cpp_builder._get_optimization_cflags = lambda *args: (*flags(*args)[:1], [*flags(*args)[1], "fuse-ld=gold"])


def _links_by_gold(compiler: str) -> bool:
    """Whether it is there, and finds the compiler's own libraries."""
    if shutil.which("ld.gold") is None:
        return False
    command = [compiler, "-shared", "-fuse-ld=gold", "-x", "c++", os.devnull, "-o", os.devnull]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _untraced() -> None:
    """Without TORCH_TRACE there is no trace, as for users.

    pytest listens to every logger that keeps its records to itself; torch takes a listener for a trace that is asked for, and prints each
    graph, guard and break for it: a twentieth of the time.
    """
    if not os.environ.get("TORCH_TRACE"):
        trace = logging.getLogger("torch.__trace")
        trace.handlers.clear()
        trace.propagate = True


def without_code(gm: torch.fx.GraphModule, inputs: Sequence[object], *_: object) -> Callable[..., Any]:
    """For ``_torch_private.compile_fx``: all of Inductor but the code that it writes."""
    from moefuse import _torch_private

    return _torch_private.compile_front(gm, inputs)


def cheaper_interpreter() -> None:
    """Triton's interpreter does much again and again that has one result: two thirds of its time."""
    if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None:
        _replaced_once()
        _types_once()
        _blocks_once()
        _equal_at_once()


def _replaced_once() -> None:
    """What the interpreter replaces in Triton's language is looked for once, and replaced at a launch, not at every call in it."""
    from triton.language import core
    from triton.runtime import interpreter

    replace, replaced, builtins = interpreter._patch_lang, set(), {}

    class Scope(interpreter._LangPatchScope):  # type: ignore[misc]
        def restore(self) -> None:
            """At the end of a launch, and only there."""
            super().restore()
            replaced.clear()

    def once(fn: Any) -> Any:
        module = fn.__globals__["__name__"]
        if module in replaced:
            return None
        replaced.add(module)
        return replace(fn)

    def builtin(package: Any, builder: Any, scope: Any) -> None:
        if package not in builtins:
            builtins[package] = inspect.getmembers(package, core.is_builtin)
        for name, member in builtins[package]:
            interpreter._patch_attr(package, name, member, builder, scope)

    interpreter._LangPatchScope, interpreter._patch_lang, interpreter._patch_builtin = Scope, once, builtin


def _types_once() -> None:
    """Types of elements are found by their names, and nobody asks for the type of a shape."""
    from triton.language import core
    from triton.runtime import interpreter

    of_element, of_values, numbers, known = interpreter._get_np_dtype, core._type_for_tuple_values, core.tuple_type([]), {}

    def element(type_: Any) -> Any:
        scalar = type_.scalar
        if scalar.name not in known:
            known[scalar.name] = of_element(scalar)
        return known[scalar.name]

    def values_type(values: Any, fields: Any = None) -> Any:
        return numbers if fields is None and all(type(v) in (int, core.constexpr) for v in values) else of_values(values, fields)

    interpreter._get_np_dtype, core._type_for_tuple_values = element, values_type


def _blocks_once() -> None:
    """What follows from a block's shape is found once: each operation makes several types of blocks, and tensors of them."""
    from triton.language import core

    known: dict[tuple[int, ...], tuple[Any, ...]] = {}
    alone = core.tuple([]), core.constexpr(1)

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(core._unwrap_if_constexpr(size) for size in shape)
        if sizes not in known:
            if not sizes:
                raise TypeError("0d block_type is forbidden")
            whole, numel = core.tuple(sizes), core.validate_block_shape(list(sizes))
            known[sizes] = whole, numel, str(whole), core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(numel)
        self.element_ty = element_ty
        self.shape, self.numel, text, self.sizes, self.count = known[sizes]
        self.name = f"<{text}, {element_ty}>"

    def tensor(self: Any, handle: Any, of: Any) -> None:
        self.handle, self.type, self.dtype = handle, of, of.scalar
        self.shape, self.numel = (of.sizes, of.count) if of.is_block() else alone

    core.block_type.__init__, core.tensor.__init__ = block, tensor


def _equal_at_once() -> None:
    """Most operands have one type and one shape, which are the same objects; and no integer is computed twice.

    Triton computes sums and products of integers once more, in 64 bits, for an assertion that only ``debug`` has.
    """
    from triton.language import core
    from triton.language.semantic import TritonSemantic
    from triton.runtime.interpreter import InterpreterOptions

    unwrap, equal, plain = core._unwrap_if_constexpr, core.dtype.__eq__, {int, bool, float, str, core.dtype, core.tensor}
    broadcast, cast, promoted = TritonSemantic.broadcast_impl_value, TritonSemantic.cast, TritonSemantic.computation_type_impl

    def unwrapped(value: Any) -> Any:
        kind = type(value)
        return value.value if kind is core.constexpr else value if kind in plain else unwrap(value)

    def alike(self: Any, lhs: Any, rhs: Any) -> Any:
        known = [of.type.shape if of.type.is_block() else None for of in (lhs, rhs)]
        return (lhs, rhs) if known[0] is known[1] else broadcast(self, lhs, rhs)

    def casted(self: Any, value: Any, dtype: Any, fp_downcast_rounding: Any = None) -> Any:
        return value if value.type.scalar is dtype.scalar else cast(self, value, dtype, fp_downcast_rounding)

    def common(self: Any, a: Any, a_is_scalar: bool, b: Any, b_is_scalar: bool, div_or_mod: bool) -> Any:
        return a if a is b and not div_or_mod else promoted(self, a, a_is_scalar, b, b_is_scalar, div_or_mod)

    assert not InterpreterOptions.debug
    core._unwrap_if_constexpr, core.dtype.__eq__ = unwrapped, lambda self, other: self is other or equal(self, other)
    TritonSemantic.broadcast_impl_value, TritonSemantic.cast, TritonSemantic.computation_type_impl = alike, casted, common
    TritonSemantic.binary_op_sanitize_overflow_impl = lambda *_: None
