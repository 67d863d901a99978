"""Experts that another library has sharded as torch shards them, blocks of them over a mesh: read as if ``parallelize`` had."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from moefuse import _torch_private
from moefuse.errors import ParallelError
from moefuse.parallel import views
from moefuse.parallel.cost import cheapest
from moefuse.parallel.meshes import hosts, register
from moefuse.parallel.placement import linear
from moefuse.parallel.shard import Held, Where, hold
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
    first = next(iter(parameters.values()))
    terms = Terms(register(mesh), _transport(parameters, mesh, tokens), tokens, "any", grads)
    where = Where(mesh, linear(first.shape[0], mesh.size()), terms.text)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        args = tuple(a.to_local() if isinstance(a, DTensor) else a for a in args)
        if torch.compiler.is_compiling():
            return kind.forward(self, *args, **kwargs)
        with views.once():
            return kind.forward(self, *args, **kwargs)

    held = Held(where, {name: name for name in parameters})
    body = {name: property(_reader(name, where.of(name))) for name in parameters}
    hold(module, held, {**body, "train": kind.train, "forward": forward})


def _reader(name: str, of: views.Of) -> Callable[[Any], Any]:
    """A Parameter in full where it is this rank's experts; as it is where FSDP has cut these once more, which looks at it between calls."""

    def read(module: Any) -> Any:
        parameter = module._parameters[name]
        return views.full(module, name, of) if len(parameter.placements) == 1 else parameter

    _torch_private.inlined_only(read)
    return read


def _transport(parameters: dict[str, Any], mesh: DeviceMesh, tokens: Tokens) -> Any:
    if tokens == "replicated":
        return "all_reduce"
    rows = [p.shape[-1] * p.dtype.itemsize for p in parameters.values()]
    return cheapest(None, rows[0], sum(p.numel() * p.dtype.itemsize for p in parameters.values()), mesh.size(), hosts(mesh))
