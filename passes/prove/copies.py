"""Copies of a graph's inputs, for running it without touching the user's: perturbed, and views of one tensor still views of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from moefuse import _torch_private
from moefuse.passes.graph.calls import call_of, fake, tensor
from moefuse.passes.prove.drawn import jittered
from moefuse.passes.prove.synthetic_inputs import hint


class Drawn:
    """What every run of one graph gets: the same noise for the same tensor.

    Args:
        perturb: False gives tensors their real values.
    """

    def __init__(self, perturb: bool) -> None:
        self.perturb = perturb
        self._seeds: dict[int, int] = {}
        self._kept: list[Any] = []

    def generator(self, of: Any) -> torch.Generator:
        if id(of) not in self._seeds:
            self._kept.append(of)  # an id is one object's as long as that lives
            self._seeds[id(of)] = len(self._seeds)
        return torch.Generator().manual_seed(self._seeds[id(of)])


class Copies:
    """The copies of one run.

    Attributes:
        leaves: those that have a gradient, by their names.
    """

    def __init__(self, drawn: Drawn) -> None:
        self._drawn = drawn
        self._storages: dict[int, torch.UntypedStorage] = {}
        self.leaves: dict[str, Tensor] = {}

    def of(self, real: Tensor, name: str) -> Tensor:
        """A copy of a tensor, perturbed unless another view of it is a copy already."""
        if type(real) not in (Tensor, torch.nn.Parameter) or real.layout != torch.strided:
            raise TypeError(f"a {type(real).__name__} cannot be copied")
        storage = real.untyped_storage()
        first = storage._cdata not in self._storages
        with torch.no_grad():
            if first:
                self._storages[storage._cdata] = storage.clone()
            held = self._storages[storage._cdata]
            made = torch.empty(0, dtype=real.dtype, device=real.device)
            made.set_(held, real.storage_offset(), real.shape, real.stride())
            if first and self._drawn.perturb and not _overlaps(real):
                made.copy_(jittered(real, self._drawn.generator(real)))
        return self._differentiable(made, real, name)

    def synthetic(self, node: Node, name: str) -> Tensor:
        """Values for an input of which only size and dtype are known."""
        like: Any = tensor(node)
        shape, generator = [int(hint(s)) for s in like.shape], self._drawn.generator(node)
        if like.dtype.is_floating_point:
            made = torch.randn(shape, generator=generator) / (max(shape[-1], 1) ** 0.5 if len(shape) > 1 else 1)
        else:
            made = torch.randint(_below(node), shape, generator=generator)
        return self._differentiable(made.to(device=like.device, dtype=like.dtype), like, name)

    def _differentiable(self, made: Tensor, like: Tensor, name: str) -> Tensor:
        if not like.requires_grad or torch.is_inference_mode_enabled():
            return made
        self.leaves[name] = made.requires_grad_()
        # What is no leaf may be written to.
        return made if like.is_leaf else made.clone()


def inputs(placeholders: Sequence[Node], given: Sequence[object] | None, copies: Copies) -> dict[Node, Any]:
    """Values for the inputs of a graph."""
    reals: Mapping[Node, object] = dict(zip(placeholders, given or [], strict=False))
    return {node: _value(node, reals.get(node), copies) for node in placeholders}


def _value(node: Node, real: object, copies: Copies) -> Any:
    if isinstance(real, Tensor) and not isinstance(real, _torch_private.FakeTensor):
        return copies.of(real, _torch_private.source_name(node))
    if tensor(node) is not None:
        return copies.synthetic(node, _torch_private.source_name(node))
    value = hint(fake(node) if real is None else real)
    if isinstance(value, bool | int | float | str | None):
        return value
    raise TypeError(f"the input {node.name} is a {type(value).__name__}")


def _overlaps(value: Tensor) -> bool:
    """Whether elements of a tensor may be one and the same."""
    return any(stride == 0 and size > 1 for size, stride in zip(value.shape, value.stride(), strict=True))


def _below(node: Node) -> int:
    """What integers have to be less than: the size of every table that they index."""
    tables = [tensor(a) for u in node.users if (call := call_of(u)) is not None and call.name == "embedding" for a in u.all_input_nodes]
    sizes = [int(hint(t.shape[0])) for t in tables if t is not None and t.dtype.is_floating_point]
    return min(sizes, default=1)
