"""Weights of a model that are held in few bits, or that a program rounds to few bits in each call, where no graph has the whole layer.

Only for what a reader is told about a layer that was not found (:mod:`moefuse.diagnosis.missed_layers`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from moefuse.passes.graph.symbols import example_of

_ROUNDS = frozenset(("round", "round_"))


@dataclass(frozen=True)
class Rounded:
    """A weight that a graph makes codes of.

    Attributes:
        weight: the identity of the model's tensor.
        dtype: in which the model holds it.
        text: the operation that rounds, and its ``file:line``.
    """

    weight: int
    dtype: str
    text: str


def rounded(gm: torch.fx.GraphModule) -> list[Rounded]:
    """The weights that a graph rounds to few bits, once each: fake quantisation, whatever comes behind it."""
    from moefuse.passes.graph.calls import location

    made: dict[torch.fx.Node, int | None] = {}
    found: dict[int, Rounded] = {}
    weights = {node: example for node in gm.graph.find_nodes(op="placeholder") if (example := _own(node)) is not None}
    known = {id(t): str(t.dtype).removeprefix("torch.") for t in weights.values()}
    for node in gm.graph.nodes:
        inputs = [i for i in node.all_input_nodes if isinstance(i.meta.get("example_value"), torch.Tensor)]
        if node in weights:
            made[node] = id(weights[node]) if weights[node].dim() > 1 and not few_bits(weights[node].dtype) else None
        elif node.op in ("call_function", "call_method") and all(i in made for i in inputs):
            of = next((made[i] for i in inputs if made[i] is not None), None)
            made[node] = of
            if of is not None and of not in found and _rounds(node):
                name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
                found[of] = Rounded(of, known[of], f"`{name}` at {location(node)}")
    return list(found.values())


def _own(node: torch.fx.Node) -> torch.Tensor | None:
    """The model's own tensor that a graph is given."""
    example = example_of(node)
    own = isinstance(example, torch.nn.Parameter) or any(part in str(node.target) for part in ("_buffers_", "_parameters_"))
    return example if isinstance(example, torch.Tensor) and own else None


def _rounds(node: torch.fx.Node) -> bool:
    value: Any = node.meta.get("example_value")
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return isinstance(value, torch.Tensor) and value.dim() > 1 and (name in _ROUNDS or few_bits(value.dtype))


def held(tensors: Iterable[torch.Tensor]) -> tuple[str, str] | None:
    """(the code of the refusal, how they are held) of weights, if the largest of them are in few bits; None if they are not."""
    weights = sorted((t for t in tensors if t.dim() > 1), key=lambda t: t.numel() * t.element_size(), reverse=True)
    for weight in weights:
        kind = type(weight)
        # torch's own subclasses (DTensor) are none: FSDP's hooks have plain tensors in their place when forward runs.
        if hasattr(kind, "__tensor_flatten__") and not kind.__module__.startswith("torch."):
            return "quantised", kind.__name__
    return ("encoding-unknown", str(weights[0].dtype).removeprefix("torch.")) if weights and few_bits(weights[0].dtype) else None


def few_bits(dtype: torch.dtype) -> bool:
    """Whether a dtype holds codes: whole numbers, and floats of eight bits."""
    return dtype != torch.bool and (not dtype.is_floating_point or dtype.itemsize == 1) and dtype.itemsize < torch.int64.itemsize


__all__ = ["Rounded", "few_bits", "held", "rounded"]
