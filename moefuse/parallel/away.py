"""Parametrisations that a call of a layer registers and takes back, as PEFT's ``target_parameters`` do, in eager mode.

torch deletes the Parameter, and has what was read of it take its place as ``original``: here all of the weight, put together from all
ranks. When it is taken back, that is registered in the Parameter's place. Nothing of it may last longer than the call: the weight would
be that of this call for good. So the Parameter is kept aside in the meantime, comes back as it was, and a layer that is called without it
is an error (``views.full``). In a program that is compiled nothing is registered (``capture/dynamo/parametrized.py``).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor, nn

from moefuse.parallel import views


def body(kind: type[nn.Module], names: Collection[str]) -> dict[str, Any]:
    """What the class of a module has whose Parameters of these names other ranks have, too."""

    def delete(self: Any, name: str) -> None:
        call = views.in_call()
        if name in names and name in self._parameters and call is not None:
            vars(self).setdefault(views.AWAY, {})[name] = call, self._parameters[name]
        kind.__delattr__(self, name)

    def register(self: Any, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        kept = views.away(self)
        if name not in kept:
            kind.register_buffer(self, name, tensor, persistent)
            return
        _, self._parameters[name] = kept.pop(name)

    return {"__delattr__": delete, "register_buffer": register}
