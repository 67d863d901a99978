"""transformers puts hooks on a model's modules in the first call that collects outputs of layers (router logits, hidden states).

It does so under a lock, which breaks Dynamo's graph, and what is compiled of that call is pieces; where bodies of checkpoints collect,
it stays in pieces. So the hooks are put on before such a call is traced, by transformers' own function, which does nothing a second time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers.utils import output_capturing

from moefuse.capture.dynamo import hooks


def put_on(root: nn.Module, given: Mapping[str, Any]) -> None:
    """Put hooks on the models in a module whose configuration, or the call's arguments, say that they collect outputs in it.

    Args:
        root: a module that is about to be called.
        given: the arguments of its call, those of ``**kwargs`` in a dict of their own.
    """
    named = [given, *(value for value in given.values() if type(value) is dict)]
    asked = {name for some in named for name, value in some.items() if value is True and str(name).startswith("output_")}
    for module in root.modules():
        config = getattr(module, "config", None)
        if config is not None and _collects(module) and _wanted(module, config, asked):
            output_capturing.maybe_install_capturing_hooks(module)


def _collects(module: nn.Module) -> bool:
    """Whether the function that collects is among those around the forward function of a model."""
    function: Any = type(module).forward
    while function is not None and getattr(function, "__globals__", None) is not vars(output_capturing):
        function = getattr(function, "__wrapped__", None)
    return function is not None


def _wanted(module: nn.Module, config: object, asked: set[str]) -> bool:
    names = {f"output_{key}" for key in output_capturing._CAN_RECORD_REGISTRY.get(module) or ()}
    return not names.isdisjoint(asked) or any(getattr(config, name, False) for name in names)


if hasattr(output_capturing, "maybe_install_capturing_hooks") and hasattr(output_capturing, "_CAN_RECORD_REGISTRY"):
    hooks.before_tracing(put_on)
