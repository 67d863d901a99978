"""Guards of ours: functions of a frame's locals, asked in each call of the frame before those that Dynamo has on what the locals hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Check = Callable[[Mapping[str, Any]], bool]


def ask(output: Any, check: Check, text: str, first: bool = False) -> None:
    """Have a frame's guards ask ``check``.

    Args:
        output: what Dynamo makes of the frame.
        check: called with the frame's locals; False has the frame compiled again. Must not raise.
        text: what it asks, for the reason of a recompilation.
        first: before all others of ours, whose answers may depend on what this one does.
    """
    from torch._dynamo.source import GlobalStateSource

    # Guards without a name of a value are sorted by the line of the function that makes them: these two have to stand in this order.
    def before(builder: Any, guard: Any) -> None:
        _add(builder, check, text)

    def after(builder: Any, guard: Any) -> None:
        _add(builder, check, text)

    output.guards.add(GlobalStateSource().make_guard(before if first else after))


def _add(builder: Any, check: Check, text: str) -> None:
    root = builder.guard_manager.root
    try:
        root.add_lambda_guard(check, [text], None)
    except TypeError:  # before torch 2.12 there is no place for the user's stack
        root.add_lambda_guard(check, [text])
