"""What makes compiling cheaper in every process of the tests, of pytest or of a rank."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch._dynamo


def cheaper_compiles() -> None:
    """Leave out what nobody reads, and most of what garbage collections would look at."""
    # The default lets every few allocations scan what Dynamo keeps of thousands of compilations.
    gc.set_threshold(20_000, 20, 100)
    # A twentieth of the time went into a cold run of every guard, and a fortieth into collections after a compile.
    torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0
    torch._dynamo.config.run_gc_after_compile = False
    # What Dynamo remembers of fake operations is read too seldom in short programs to be worth writing: a tenth of the time.
    torch._dynamo.config.fake_tensor_cache_enabled = False


def without_code(gm: torch.fx.GraphModule, inputs: Sequence[object], *_: object) -> Callable[..., Any]:
    """For ``_torch_private.compile_fx``: all of Inductor but the code that it writes."""
    from moefuse import _torch_private

    return _torch_private.compile_front(gm, inputs)
