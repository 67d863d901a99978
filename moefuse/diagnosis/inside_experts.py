"""What stands in experts where Dynamo, and not a rule of moefuse, has stopped at it."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from moefuse import _torch_private
from moefuse.errors import message
from moefuse.evidence.suspects import Suspect
from moefuse.program.breaks import Stop, users_place
from moefuse.report.entries import Skipped


def refusal(stop: Stop | None, found: Suspect) -> Skipped | None:
    """The refusal of what looks like experts, for a break in its forward function; None where no code but ``nothing-found`` says it."""
    if stop is None:
        return None
    inside = list(_modules(found.module, found.pairs[0].experts_names))
    code, details = "", {}
    if stop.kind == "hooks" and any(m._backward_hooks or m._backward_pre_hooks for m in inside):
        code = "hook"
    elif "batchnorm.py" in stop.place and any(isinstance(m, _torch_private.BatchNorm) and m.training for m in inside):
        code, details = "not-row-local", {"op": "batch_norm"}
    return Skipped(code, message(code, details), found.name, users_place(stop.stack)) if code else None


def _modules(module: nn.Module, names: Iterable[str]) -> Iterable[nn.Module]:
    for name in names:
        held = getattr(module, name, None)
        yield from held.modules() if isinstance(held, nn.Module) else ()


__all__ = ["refusal"]
