"""Values for a verification: real expert weights where they are known, drawn values for everything else that a region reads.

Expert weights are the user's own tensors, so that the proof is about them; where they are neutral (``drawn.py``) the probe reads a copy
with noise. All else that is a float (biases, scales, shared vectors, the base, LoRA factors, tables) is drawn, of the sign and size that
it has. Integers and masks keep their values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Node

from moefuse import _torch_private
from moefuse.passes.encodings.made_up import drawn_like
from moefuse.passes.encodings.part import Coded
from moefuse.passes.graph.calls import fake
from moefuse.passes.graph.modes import entered
from moefuse.passes.graph.sharded import is_gathered, is_root
from moefuse.passes.infer.backward_slice import SMALL, WEIGHT, Older, execute, storages
from moefuse.passes.infer.state import Context
from moefuse.passes.ir.expr import Expr, Gate, Leaf, Linear, SlotWeight, Token, walk
from moefuse.passes.ir.regions import Region
from moefuse.passes.prove.drawn import like, neutral, perturbed

COPIES = 2**28
"""Bytes that the copies of one verification take at most: drawn values, weights with noise, tensors that something writes to. What does
not fit keeps its real values: a misreading that these hide (all zeros, say, in a stacked weight of more than this) is then not found."""


class Inputs:
    """Values for everything that a region reads. The user's own tensors are read, and never written to.

    Args:
        ctx: the region's graph; of it storage, writes, positions and equal views.
        known: real values of the graph's inputs where they are known.
        held: weights that are tensors of a class of their own, and how these hold them. They are made up: their class makes no noise.
    """

    def __init__(self, ctx: Context, region: Region, known: Mapping[Node, Any], held: Mapping[Node, Coded] | None = None) -> None:
        self.ctx, self.region, self.held = ctx, region, held or {}
        self.known = {n: hint(v) for n, v in known.items()}
        self.values: dict[Node, Any] = {}
        self.older: set[int] = set()
        self.left = COPIES
        self.generator = torch.Generator().manual_seed(0)
        self.device = fake(region.value).device
        self.shared = tokens_of_a_row(region)
        self.num_rows = rows_of_ids(region)
        self.num_tokens = self.num_rows * self.shared
        self._made = Older(ctx, region)
        leaves = [e.weight for expr in _expressions(region) for e in walk(expr) if isinstance(e, Linear)]
        self._weights = {n for leaf in leaves for n in leaf.parts or (leaf.source,)}
        self._experts = {root for node in self._weights for root in self._made.roots(node, WEIGHT)}
        self._perturb(leaves)

    def weight(self, node: Node) -> Any:
        """The value of a tensor or number that is older than the region."""
        node = self.ctx.replaced.get(node, node)
        if node not in self.values:
            self.values[node] = _plain(self._root(node) if is_root(node) else self._computed(node))
            self.older |= storages(self.values[node])
        return self.values[node]

    def _root(self, node: Node) -> Any:
        """An input of the graph, a tensor that its module holds, or weights of all ranks."""
        if is_gathered(node):
            return self._for_all_ranks(node)
        if node in self.held and (node not in self.known or self._fits(fake(node))):
            return drawn_like(self.held[node], self.known.get(node, fake(node)), len(self.values))
        if node not in self.known:
            return self._unknown(node)
        real = self.known[node]
        if _torch_private.is_distributed(real):
            return real  # what is drawn is drawn of its local rows
        if node in self._experts or not isinstance(real, torch.Tensor) or not self._fits(real):
            return real
        return like(real, self.generator)

    def _for_all_ranks(self, node: Node) -> torch.Tensor:
        """This rank's experts, or its slices, over and over. Nothing is asked of others: they may not be compiling, or something else."""
        local, shape = self.weight(node.args[0]), [int(n) for n in fake(node).shape]  # type: ignore[arg-type]
        if not local.numel():
            return self.random(fake(node), 1 / math.sqrt(shape[-1]))
        times = [-(-n // held) for n, held in zip(shape, local.shape, strict=True)]
        rows = local.detach().repeat(times)[tuple(slice(n) for n in shape)]
        return rows if node in self._experts or not self._fits(rows) else like(rows, self.generator)

    def _computed(self, node: Node) -> Any:
        """What the graph computes before the region, from the inputs that it is computed from; synthetic where that is not a few steps."""
        steps = self._made.steps(node, WEIGHT if node in self._weights else SMALL)
        if steps is None or any(is_root(n) and n not in self.known and not is_gathered(n) for n in steps):
            return self._unknown(node)
        env: dict[Node, Any] = {}
        for step in steps:
            if not is_root(step):
                args, kwargs = torch.fx.node.map_arg((step.args, step.kwargs), env.__getitem__)
                with entered(self.ctx.mode[step]):
                    env[step] = execute(step, args, kwargs, env.__getitem__, self.older)
                continue
            value = self.weight(step)
            written = isinstance(value, torch.Tensor) and self._made.written(step, steps)
            if written and not self._fits(value):
                return self._unknown(node)
            env[step] = value.clone() if written else value
        return env[node]

    def _unknown(self, node: Node) -> Any:
        value = fake(node)
        return self.random(value) if isinstance(value, torch.Tensor) else hint(value)

    def _fits(self, value: torch.Tensor) -> bool:
        """Whether there is memory left for a copy, which is then taken."""
        size = value.numel() * value.element_size()
        fits = size <= self.left
        self.left -= size if fits else 0
        return fits

    def _perturb(self, leaves: list[Leaf]) -> None:
        """Copies with noise of the inputs that neutral expert weights are made of, the smallest first."""
        roots: dict[Node, torch.Tensor] = {}
        for leaf in leaves:
            if not self.held.keys().isdisjoint(leaf.parts or (leaf.source,)):
                continue
            values = [self.weight(n) for n in leaf.parts or (leaf.source,)]
            if all(isinstance(v, torch.Tensor) for v in values) and neutral(list(values[0].unbind(leaf.along)) if leaf.stacked else values):
                below = (r for n in leaf.parts or (leaf.source,) for r in self._made.roots(n, WEIGHT))
                roots |= {r: v for r in below if isinstance(v := self._real(r), torch.Tensor) and v.dtype.is_floating_point}
        if not roots:
            return
        self.values.clear()
        self.older.clear()
        for root, value in sorted(roots.items(), key=lambda item: item[1].numel()):
            if self._fits(value):
                self.values[root] = perturbed(value, self.generator)
                self.older |= storages(self.values[root])

    def _real(self, root: Node) -> Any:
        """The value of a root, if it is known."""
        return self.weight(root) if is_gathered(root) else self.known.get(root)

    def random(self, of: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """Normal values in the shape, dtype and device of a fake tensor; of conditions half are true."""
        shape = [int(hint(s)) for s in of.shape]
        if of.dtype == torch.bool:
            return (torch.rand(shape, generator=self.generator) < 0.5).to(of.device)
        if not of.dtype.is_floating_point:
            return torch.zeros(shape, dtype=of.dtype, device=of.device)
        return (torch.randn(shape, generator=self.generator) * scale).to(device=of.device, dtype=of.dtype)

    def some(self, ids: torch.Tensor, columns: int) -> torch.Tensor:
        """A 0/1 mask [T, K, columns] of the ids, without every fourth slot or so."""
        mask = ids.unsqueeze(-1) == torch.arange(columns)
        return mask & (torch.rand(ids.shape, generator=self.generator) < 0.75).unsqueeze(-1)

    def draw(self, kind: str) -> dict[Node, Any]:
        """Leaves of one probe: tokens, ids and routing weights; each by the name that the region has for it, and by its name now."""
        region, routing = self.region, self.region.routing
        tokens, experts, top_k = self.num_rows, region.all_experts, routing.top_k
        scores = torch.rand(tokens, max(experts, top_k), generator=self.generator)
        ids = scores.topk(top_k, dim=-1).indices if kind == "random" else torch.arange(top_k).expand(tokens, top_k).clone()
        if self._may_repeat():
            ids[::3, 1] = ids[::3, 0]
        held = fake(routing.node)
        chosen = ids if routing.columns is None else self.some(ids, routing.columns)
        out: dict[Node, Any] = {routing.node: chosen.reshape([int(hint(s)) for s in held.shape]).to(device=held.device, dtype=held.dtype)}
        for e in walk(region.expr):
            if isinstance(e, Gate) and not e.ones and not e.slots:
                out[e.source] = self.table(ids, experts, e.source, turned=e.turned)
            elif isinstance(e, SlotWeight) or (isinstance(e, Gate) and e.slots):
                drawn = self.random(fake(e.source))
                out[e.source] = drawn if drawn.dtype == torch.bool else drawn.abs().clamp(0.1, 2.0)
            elif isinstance(e, Token) and e.source not in out:
                out[e.source] = self.random(fake(e.source))
        if region.base is not None:
            out[region.base] = self.random(fake(region.base))
        if routing.kept is not None and routing.by_slot:
            out[routing.kept] = self.some_of(self.random(fake(routing.kept)).abs().clamp(0.1, 2.0))
        elif routing.kept is not None and routing.kept not in out:
            out[routing.kept] = self.table(ids, experts, routing.kept)
        if routing.valid is not None:
            like = fake(routing.valid)
            some = torch.rand([int(hint(s)) for s in like.shape], generator=self.generator) < 0.75
            out[routing.valid] = some.to(like.device)
        now = {self.ctx.now(n): value for n, value in out.items()}
        return now | {n: now[self.ctx.now(n)] for n in out}

    def _may_repeat(self) -> bool:
        """Whether a token may have an expert twice: nothing shows that it has not, and no table has one weight for the two."""
        routing = self.region.routing
        of_experts = any(isinstance(e, Gate) and not e.ones and not e.slots for e in walk(self.region.expr))
        of_experts = of_experts or (routing.kept is not None and not routing.by_slot)
        return routing.top_k > 1 and not (routing.distinct or routing.columns or of_experts)

    def table(self, ids: torch.Tensor, experts: int, node: Node, *, turned: bool = False) -> torch.Tensor:
        """Weights of the chosen experts as [T, E] (``turned``: [E, T]).

        Where the table says who is left, every fourth entry or so takes its expert away. It may have columns of nobody behind theirs.
        """
        shape = [int(hint(s)) for s in fake(node).shape]
        columns = max(math.prod(shape) // max(len(ids), 1), experts)
        table = torch.zeros(len(ids), columns).scatter(1, ids, torch.rand(ids.shape, generator=self.generator) + 0.1)
        if node is self.region.routing.kept:
            table = self.some_of(table)
        like = fake(node)
        table = table.t() if turned else table
        return table.reshape(shape).to(device=like.device, dtype=like.dtype)

    def some_of(self, weights: torch.Tensor) -> torch.Tensor:
        """Weights of which every fourth or so takes its expert away."""
        some = torch.rand(weights.shape, generator=self.generator).to(weights.device) < 0.75
        return torch.where(some, weights, torch.zeros_like(weights) if self.region.routing.above is None else -weights)


def _plain(value: Any) -> Any:
    """Without gradients, where nothing but torch's own class of tensors says what that is."""
    return value.detach() if type(value) in (torch.Tensor, torch.nn.Parameter) and value.requires_grad else value


def hint(value: Any) -> Any:
    """A concrete number for a size that is symbolic, or for each of several."""
    if isinstance(value, tuple | list):
        return type(value)([hint(one) for one in value])
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


def _expressions(region: Region) -> list[Expr]:
    return [region.expr, *([region.rest.expr] if region.rest is not None else [])]
