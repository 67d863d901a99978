"""Values for a verification: real weights where they are known, random activations and routing for the rest."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Node

from moefuse.passes.expr import Gate, SlotWeight, Token, walk
from moefuse.passes.ops import call_of, call_target, fake
from moefuse.passes.regions import Region

_SMALL = 16  # a weight is a few views of a Parameter; what has more behind it is an activation that the region only looks at


class Inputs:
    """Values for everything a region reads: real weights, synthetic activations."""

    def __init__(self, region: Region, weights: dict[Node, Any], same: dict[Node, Node]) -> None:
        self.same = same
        self.region, self.known = region, {n: hint(v) for n, v in weights.items()}
        self.generator = torch.Generator().manual_seed(0)
        self.device = fake(region.value).device
        self.shared = tokens_of_a_row(region)
        self.num_rows = rows_of_ids(region)
        self.num_tokens = self.num_rows * self.shared

    def first(self, node: Node) -> Node:
        """The first of several equal views."""
        return self.same.get(node, node)

    def weight(self, node: Node) -> Any:
        """The real value of a weight or constant, computed from the graph's inputs if it is not one; synthetic if unknown."""
        if node not in self.known:
            self.known[node] = self._computed(node)
        return self.known[node]

    def _computed(self, node: Node) -> Any:
        value = fake(node)
        before = _ancestors(node)
        # The known values are the user's own tensors: nothing that writes is ever run on them.
        writes = any(call is not None and call.inplace for call in map(call_of, before))
        if writes or len(before) > _SMALL or any(n.op == "placeholder" and n not in self.known for n in before):
            return self.random(value) if isinstance(value, torch.Tensor) else hint(value)
        args = torch.fx.node.map_arg((node.args, node.kwargs), self.weight)
        with torch.no_grad():
            return call_target(node, *args)

    def random(self, like: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """Normal values in the shape, dtype and device of a fake tensor."""
        shape = [int(hint(s)) for s in like.shape]
        if not like.dtype.is_floating_point:
            return torch.zeros(shape, dtype=like.dtype, device=like.device)
        return (torch.randn(shape, generator=self.generator) * scale).to(device=like.device, dtype=like.dtype)

    def some(self, ids: torch.Tensor, columns: int) -> torch.Tensor:
        """A 0/1 mask [T, K, columns] of the ids, without every fourth slot or so."""
        mask = ids.unsqueeze(-1) == torch.arange(columns)
        return mask & (torch.rand(ids.shape, generator=self.generator) < 0.75).unsqueeze(-1)

    def draw(self, kind: str) -> dict[Node, Any]:
        """Leaves of one probe: tokens, ids and routing weights."""
        region, routing = self.region, self.region.routing
        tokens, experts, top_k = self.num_rows, region.all_experts, routing.top_k
        scores = torch.rand(tokens, max(experts, top_k), generator=self.generator)
        ids = scores.topk(top_k, dim=-1).indices if kind == "random" else torch.arange(top_k).expand(tokens, top_k).clone()
        held = fake(routing.node)
        chosen = ids if routing.columns is None else self.some(ids, routing.columns)
        out: dict[Node, Any] = {routing.node: chosen.reshape([int(hint(s)) for s in held.shape]).to(device=held.device, dtype=held.dtype)}
        for e in walk(region.expr):
            if isinstance(e, Gate) and not e.ones and not e.slots:
                out[e.source] = self.table(ids, experts, e.source)
            elif isinstance(e, SlotWeight) or (isinstance(e, Gate) and e.slots):
                out[e.source] = self.random(fake(e.source)).abs().clamp(0.1, 2.0)
            elif isinstance(e, Token) and e.source not in out:
                out[e.source] = self.random(fake(e.source))
        if region.base is not None:
            out[region.base] = self.random(fake(region.base))
        if routing.kept is not None and routing.kept not in out:
            out[routing.kept] = self.table(ids, experts, routing.kept)
        return out

    def table(self, ids: torch.Tensor, experts: int, node: Node) -> torch.Tensor:
        """Weights of the chosen experts as [T, E]; where the table says who is left, every fourth entry or so takes its expert away."""
        table = torch.zeros(len(ids), experts).scatter(1, ids, torch.rand(ids.shape, generator=self.generator) + 0.1)
        if node is self.region.routing.kept:
            some = torch.rand(table.shape, generator=self.generator) < 0.75
            table = torch.where(some, table, -table if self.region.routing.above else 0.0)
        like = fake(node)
        return table.reshape([int(hint(s)) for s in like.shape]).to(device=like.device, dtype=like.dtype)


def hint(value: Any) -> Any:
    """A concrete number for a size that is symbolic."""
    node = getattr(value, "node", None)
    return node.hint if node is not None and node.hint is not None else value


def rows_of_ids(region: Region) -> int:
    """Rows of the [T, K] ids."""
    sizes = [int(hint(s)) for s in fake(region.routing.node).shape]
    return math.prod(sizes) // (region.routing.top_k * (region.routing.columns or 1))


def tokens_of_a_row(region: Region) -> int:
    """How many tokens share one row of ids."""
    count = len(region.routing.shared)
    return math.prod(int(hint(s)) for s in fake(region.value).shape[:-1][-count:]) if count else 1


def _ancestors(node: Node) -> set[Node]:
    """What a value is computed from; stops counting where it is clearly not a weight."""
    seen: set[Node] = set()
    stack = [node]
    while stack and len(seen) <= _SMALL:
        n = stack.pop()
        if n not in seen:
            seen.add(n)
            stack.extend(n.all_input_nodes)
    return seen
