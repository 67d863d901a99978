"""A router that was read from the graph, and whether ``moefuse::route`` does the same on random logits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from moefuse.ops.meaning.recipe import Recipe
from moefuse.passes.graph.calls import call_target, fake, tensor
from moefuse.passes.prove.synthetic_inputs import hint

_ROWS = 64
_TOLERANCE = 1e-5


@dataclass
class Router:
    """What is between ``logits`` (and ``bias`` [E]) and ``ids`` and ``weights``."""

    logits: Node
    bias: Node | None
    ids: Node
    weights: Node
    recipe: Recipe

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The op's arguments after logits and bias."""
        value = tensor(self.weights)
        assert value is not None
        return *self.recipe.arguments, value.dtype


@torch.no_grad()
def agrees(router: Router, inside: list[Node]) -> bool:
    """Whether the nodes and the op give the same on random logits: the same ids but where scores are nearly equal, and their weights."""
    logits, bias = tensor(router.logits), router.bias
    assert logits is not None
    shape = [int(hint(s)) for s in logits.shape]
    rows = math.prod(shape[:-1])
    if not rows:
        return False
    source = torch.Generator().manual_seed(0)
    turns = max(3, -(-_ROWS // rows))
    unlike = 0
    for turn in range(turns):
        drawn = _draw(shape, logits.dtype, (0.3, 1.0, 3.0)[turn % 3], source).to(logits.device)
        values: dict[Node, Any] = {router.logits: drawn.abs() if _divides(router.recipe) else drawn}
        if bias is not None:
            values[bias] = torch.randn(shape[-1], generator=source).to(logits.device) * 0.3
        op = torch.ops.moefuse.route(values[router.logits].clone(), values.get(bias), *router.arguments)  # type: ignore[arg-type]
        _run(inside, values)
        unlike_here = _unlike((values[router.weights], values[router.ids]), op)
        if unlike_here is None:
            return False
        unlike += unlike_here
    return unlike <= rows * turns // 100


def _divides(recipe: Recipe) -> bool:
    """Whether weights are divided by a sum of what may be negative, and the sum so near zero that any rounding shows."""
    return recipe.renormalise and recipe.score == recipe.weight == "identity"


def _run(nodes: list[Node], values: dict[Node, Any]) -> None:
    for node in nodes:
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: values[n] if n in values else hint(fake(n)))
        values[node] = call_target(node, args, kwargs)


def _draw(shape: list[int], dtype: torch.dtype, scale: float, source: torch.Generator) -> torch.Tensor:
    """Logits, no two of which are equal in a row."""
    if dtype == torch.float32:
        return torch.randn(shape, generator=source) * scale
    # The bits of numbers one after another, in any order, every other one negative.
    place = torch.rand(shape, generator=source).argsort(-1)
    size = (0x3C00 + place * max(1024 // shape[-1], 1)).to(torch.int16).view(dtype)
    return torch.where(place % 2 == 0, size, -size)


def _unlike(a: tuple[torch.Tensor, torch.Tensor], b: tuple[torch.Tensor, torch.Tensor]) -> int | None:
    """In how many rows other ids were chosen; None if weights of the same ids differ, or shapes or dtypes do."""
    if any(x.shape != y.shape or x.dtype != y.dtype for x, y in zip(a, b, strict=True)):
        return None
    (wa, ia), (wb, ib) = ((w.gather(-1, i.argsort(-1)).double(), i.sort(-1).values) for w, i in (a, b))
    alike = (ia == ib).all(-1)
    tolerance = max(_TOLERANCE, torch.finfo(a[0].dtype).eps)
    return int((~alike).sum()) if torch.allclose(wa[alike], wb[alike], rtol=tolerance, atol=1e-7) else None
