"""Experts that another library has sharded as torch shards them, blocks of them over a mesh: read as if ``parallelize`` had."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from moefuse.errors import ParallelError
from moefuse.parallel import views
from moefuse.parallel.api import carrier
from moefuse.parallel.calls import gathering_once
from moefuse.parallel.cost import cheapest
from moefuse.parallel.meshes import register
from moefuse.parallel.placement import linear
from moefuse.parallel.shard import Held, hold
from moefuse.parallel.where import Where
from moefuse.runtime import groups
from moefuse.runtime.groups import Grads, Terms, Tokens


def take_when_loaded(module: nn.Module, mesh: DeviceMesh, tokens: Tokens, grads: Grads) -> None:
    """Spread a module's experts once its weights are there: when it is told its mode, by ``model.eval()`` or ``model.train()``.

    Until then it is what its library has made of it, for that library looks at its Parameters while it loads them.
    """
    kind = type(module)

    def train(self: Any, mode: bool = True) -> Any:
        kind.train(self, mode)
        if not any(p.is_meta for p in self._parameters.values() if p is not None):
            _take(self, kind, mesh, tokens, grads)
        return self

    def forward(self: Any, *_: Any, **__: Any) -> Any:
        raise ParallelError(f"{kind.__name__}: its experts are not spread yet: load its weights, then call model.eval() or model.train()")

    views.with_properties(module, {}, {"train": train, "forward": forward})


def _take(module: nn.Module, kind: type[nn.Module], mesh: DeviceMesh, tokens: Tokens, grads: Grads) -> None:
    parameters: dict[str, Any] = {name: p for name, p in module._parameters.items() if isinstance(p, DTensor)}
    first, name = next(iter(parameters.values())), register(mesh)
    terms = Terms(name, carrier(_wanted(parameters, groups.group(name)), tokens, name), tokens, "any", grads)
    where = Where(mesh, linear(first.shape[0], mesh.size()), terms.text)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return kind.forward(self, *(a.to_local() if isinstance(a, DTensor) else a for a in args), **kwargs)

    hold(module, Held(where, {name: name for name in parameters}), {"train": kind.train, "forward": forward})
    gathering_once(module)


def _wanted(parameters: dict[str, Any], group: groups.Group) -> str:
    row, *_ = [p.shape[-1] * p.dtype.itemsize for p in parameters.values()]
    return cheapest(None, row, sum(p.numel() * p.dtype.itemsize for p in parameters.values()), group.size, group.spans)
