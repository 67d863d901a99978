"""transformers puts hooks on a model's modules in the first call that collects outputs of layers (router logits, hidden states).

It does so under a lock, which breaks Dynamo's graph, and what is compiled of that call is pieces; where bodies of checkpoints collect,
it stays in pieces. So the hooks are put on before such a call is traced, by transformers' own function, which does nothing a second time.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.utils import output_capturing

from moefuse._dynamo import hooks


def put_on(root: nn.Module) -> None:
    """Put hooks on the models in a module whose configuration says that their next call collects outputs."""
    for module in root.modules():
        config = getattr(module, "config", None)
        if config is not None and _collects(module) and _wanted(module, config):
            output_capturing.maybe_install_capturing_hooks(module)


def _collects(module: nn.Module) -> bool:
    """Whether the function that collects is among those around the forward function of a model."""
    function: Any = type(module).forward
    while function is not None and getattr(function, "__globals__", None) is not vars(output_capturing):
        function = getattr(function, "__wrapped__", None)
    return function is not None


def _wanted(module: nn.Module, config: object) -> bool:
    return any(getattr(config, f"output_{key}", False) for key in output_capturing._CAN_RECORD_REGISTRY.get(module) or ())


if hasattr(output_capturing, "maybe_install_capturing_hooks") and hasattr(output_capturing, "_CAN_RECORD_REGISTRY"):
    hooks.before_tracing(put_on)
