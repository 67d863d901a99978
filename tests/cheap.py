"""What makes compiling cheaper in every process of the tests, of pytest or of a rank."""

from __future__ import annotations

import gc
import importlib.util
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


def _replaced_once() -> None:
    """What the interpreter replaces in Triton's language is looked for at a launch, and not at every call of a function in it."""
    from triton.runtime import interpreter

    replace, replaced = interpreter._patch_lang, set()

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

    interpreter._LangPatchScope, interpreter._patch_lang = Scope, once


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
