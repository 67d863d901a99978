"""What autograd is doing, and for whom."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad


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


def unless_transformed(entry: Callable[..., Any], instead: Callable[..., Any]) -> Callable[..., Any]:
    """``entry``; or ``instead``, where a level of forward-mode AD is open or ``torch.func`` transforms what runs here.

    Asked for every call of an op, so with nothing but two reads.
    """
    active = torch._C._functorch.peek_interpreter_stack

    def call(*args: Any, **kwargs: Any) -> Any:
        if forward_ad._current_level >= 0 or active() is not None:
            return instead(*args, **kwargs)
        return entry(*args, **kwargs)

    return call


def forward_level() -> bool:
    """Whether a level of forward-mode AD is open: tensors may have tangents."""
    return forward_ad._current_level >= 0


def transform() -> str:
    """The transform of ``torch.func`` that runs here, the innermost one; "" outside of any."""
    found = torch._C._functorch.peek_interpreter_stack()
    return "" if found is None else found.key().name.lower()


def has_tangent(t: torch.Tensor) -> bool:
    """Whether a tensor has a tangent at the open level of forward-mode AD."""
    return forward_level() and t.is_floating_point() and forward_ad.unpack_dual(t).tangent is not None


def guard_forward_level() -> None:
    """Let the frame that Dynamo is compiling depend on whether a level of forward-mode AD is open; nothing outside of one."""
    context = torch._guards.TracingContext.try_get()
    if context is None:
        return
    from torch._dynamo.guards import GuardBuilder
    from torch._dynamo.source import GlobalStateSource

    context.guards_context.dynamo_guards.add(GlobalStateSource().make_guard(GuardBuilder.DUAL_LEVEL))
