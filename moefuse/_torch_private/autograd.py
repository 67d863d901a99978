"""What autograd is doing, and for whom."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import Any

import torch


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
