"""What modules inside of an expert in a list say where they are used apart from the list, which holds their weights."""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn

from moefuse.errors import ParallelError

_WRAPPERS = ("_checkpoint_wrapped_module.", "_fsdp_wrapped_module.", "_orig_mod.")
"""What wrappers put into the names of a state and take out of its keys."""


def methods(kind: type[nn.Module], layer: str, path: str) -> dict[str, Any]:
    """Of a module whose Parameters the list has: methods of a subclass of ``kind``.

    Args:
        layer: for people.
        path: of the module, from the list: ``"1.up"``.
    """

    def to_state(self: Any, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        _in_a_whole(prefix, "state_dict")
        kind._save_to_state_dict(self, destination, prefix, keep_vars)

    def from_state(self: Any, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        _in_a_whole(prefix, "load_state_dict")
        kind._load_from_state_dict(self, state, prefix, *rest)

    def _in_a_whole(prefix: str, what: str) -> None:
        for wrapper in _WRAPPERS:
            prefix = prefix.replace(wrapper, "")
        if not f".{prefix}".endswith(f".{path}."):
            raise ParallelError(
                f"{what} of a part of an expert of {layer}, whose weights moefuse.parallelize has put into the list of all of them: "
                "call it on the list or on a module around it"
            )

    return {"_save_to_state_dict": to_state, "_load_from_state_dict": from_state}


def freezing(kind: type[nn.Module], layer: str) -> dict[str, Any]:
    """Of an expert, and of all modules in it that have Parameters."""

    def requires_grad_(self: Any, requires_grad: bool = True) -> Any:
        warnings.warn(
            f"requires_grad_({requires_grad}) of an expert of {layer} changes nothing: moefuse.parallelize has put its weights into the "
            "list of all of them. Call it on the list, or on plan.parameters",
            stacklevel=2,
        )
        return kind.requires_grad_(self, requires_grad)

    return {"requires_grad_": requires_grad_}
