"""The proof on the model's own weights: the original region and its replacement on synthetic tokens, both against float64.

Three routings are tried: random, all tokens on the same experts (so that the others get none), and random again. The reference runs the
recognised expression itself in float64, one expert at a time, on a sample of the tokens: a wrong reading of the program shows as an
original that is far from the reference, a wrong op as a replacement that is.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from moefuse.capture.assumptions import Assumption
from moefuse.passes.evaluate import Rows64
from moefuse.passes.expr import Gate, SlotWeight, Token, walk
from moefuse.passes.ops import call_of, fake
from moefuse.passes.regions import Region

_SAMPLE = 64
_DRAWS = 16  # of tokens, where a few of them do not settle it
_FAR = 512.0
_SMALL = 16  # a weight is a few views of a Parameter; what has more behind it is an activation that the region only looks at


@dataclass(frozen=True)
class Verdict:
    """``error``: the replacement's error over its allowance (at most 1 passes). ``problem``: why it failed, or empty."""

    error: float
    problem: str = ""


def verify(
    region: Region,
    new_nodes: Sequence[Node],
    result: Node,
    weights: dict[Node, Any],
    same: dict[Node, Node],
    assumptions: Sequence[Assumption] = (),
) -> Verdict:
    """Compare a region with its replacement.

    Args:
        new_nodes: the replacement's nodes in order, ending in ``result``.
        weights: real values of the graph's inputs where they are known.
        same: for each view the first one equal to it, as the region's leaves name them.
        assumptions: what capture assumed; a loop body that stands for several experts is run for each of them.
    """
    values = Inputs(region, weights, same)
    bodies = [a for a in assumptions if a.row_node is not None and a.nodes & region.nodes]
    before = [n for n in region.anchor.graph.nodes if n in region.nodes]

    def probe(kind: str) -> Errors | str:
        leaves = values.draw(kind)
        with torch.no_grad():
            original = _run(before, values, leaves, region.anchor, bodies)
            fused = _run(new_nodes, values, leaves, result)
            return _compare(region, values, leaves, original, fused)

    worst = 0.0
    for kind in ("random", "one", "random"):
        found = _settled(probe, kind)
        if isinstance(found, str):
            return Verdict(float("inf"), found)
        if found.ours > found.allowed:
            return Verdict(found.ours / found.allowed, str(found))
        worst = max(worst, found.ours / found.allowed)
    return Verdict(worst)


@dataclass(frozen=True)
class Errors:
    """Errors of the original and of the replacement on so many rows, relative to the result's size."""

    rows: int
    theirs: float
    ours: float
    eps: float

    @property
    def allowed(self) -> float:
        return 1.1 * self.theirs + 4 * self.eps

    def __str__(self) -> str:
        return f"error {self.ours:.2e} of the result's size, the original has {self.theirs:.2e}"


def _settled(probe: Callable[[str], Errors | str], kind: str) -> Errors | str:
    """The errors of one kind of routing. On few rows either may be luck: where that decides, more tokens are drawn."""
    found = probe(kind)
    if isinstance(found, str) or found.ours <= found.allowed or found.rows >= _SAMPLE:
        return found
    every = [found]
    for _ in range(min(-(-_SAMPLE // found.rows), _DRAWS) - 1):
        again = probe(kind)
        if isinstance(again, str):
            return again
        every.append(again)
    theirs, ours = (math.sqrt(sum(v * v for v in part) / len(every)) for part in zip(*((e.theirs, e.ours) for e in every), strict=True))
    return Errors(found.rows * len(every), theirs, ours, found.eps)


class Inputs:
    """Values for everything a region reads: real weights, synthetic activations."""

    def __init__(self, region: Region, weights: dict[Node, Any], same: dict[Node, Node]) -> None:
        self.same = same
        self.region, self.known = region, {n: hint(v) for n, v in weights.items()}
        self.generator = torch.Generator().manual_seed(0)
        self.device = fake(region.value).device
        self.shared = _tokens_of_a_row(region)
        self.num_rows = _rows_of_ids(region)
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


def _rows_of_ids(region: Region) -> int:
    """Rows of the [T, K] ids."""
    sizes = [int(hint(s)) for s in fake(region.routing.node).shape]
    return math.prod(sizes) // (region.routing.top_k * (region.routing.columns or 1))


def _tokens_of_a_row(region: Region) -> int:
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


def _run(nodes: Sequence[Node], values: Inputs, leaves: dict[Node, Any], result: Node, bodies: Sequence[Assumption] = ()) -> torch.Tensor:
    """Execute nodes in order on real tensors, the body of a loop once for every expert it stands for."""
    env: dict[Node, Any] = {}

    def value(node: Node) -> Any:
        if node in env:
            return env[node]
        first = values.first(node)
        if first in leaves and node not in leaves:
            return value(first)
        if node in leaves:
            env[node] = leaves[node].clone() if isinstance(leaves[node], torch.Tensor) else leaves[node]
            return env[node]
        return values.weight(node)

    def run(node: Node) -> None:
        if node in leaves:
            return
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), value)
        call = call_of(node)
        if call is not None and any(t not in env for t in call.targets):
            raise ValueError(f"{node.name} would write to a tensor of the user's")
        if call is not None and call.name == "bincount" and len(args) == 1:
            # All iterations of a captured loop are here, each with an element of its own; a run leaves out the last ones without tokens.
            least: Any = kwargs.get("minlength", 0)
            kwargs = {**kwargs, "minlength": max(least, values.region.all_experts)}
        env[node] = call_target(node, args, kwargs)

    for step in _steps(nodes, bodies, values):
        if isinstance(step, Node):
            run(step)
        else:
            env.update(step(env))
    if node_writes(result):
        return value(result.args[0])  # type: ignore[arg-type, no-any-return]
    return env[result]  # type: ignore[no-any-return]


def _steps(
    nodes: Sequence[Node], bodies: Sequence[Assumption], values: Inputs
) -> Iterator[Node | Callable[[dict[Node, Any]], dict[Node, Any]]]:
    """Nodes in the order to run them, and what to set in between: the number of an expert, and what its turn carries over to the next."""
    done: set[Node] = set()
    for node in nodes:
        body = next((b for b in bodies if node in b.nodes), None)
        if body is None:
            yield node
        elif node not in done:
            inside = [n for n in nodes if n in body.nodes]
            done.update(inside)
            for member in body.members:
                yield functools.partial(_set_row, body, member, values)
                yield from inside
                yield functools.partial(_carry, body)
            yield functools.partial(_set_row, body, body.row, values)


def _set_row(body: Assumption, member: int, values: Inputs, env: dict[Node, Any]) -> dict[Node, Any]:
    assert body.row_node is not None
    own = {node: values.weight(same[member]) for node, same in body.siblings.items()}
    return own | {body.row_node: torch.full_like(fake_zeros(body.row_node), member)}


def _carry(body: Assumption, env: dict[Node, Any]) -> dict[Node, Any]:
    return {old: env[new] for _, old, new in body.carried if new in env}


def fake_zeros(node: Node) -> torch.Tensor:
    """A real tensor of a node's shape, dtype and device."""
    value = fake(node)
    return torch.zeros(tuple(value.shape), dtype=value.dtype, device=value.device)


def call_target(node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one node's operation."""
    if isinstance(node.target, str):
        return getattr(args[0], node.target)(*args[1:], **kwargs)
    return node.target(*args, **kwargs)


def node_writes(node: Node) -> bool:
    """Whether a node is an assignment by index, whose result is its target."""
    call = call_of(node)
    return call is not None and call.name == "setitem"


def _compare(region: Region, values: Inputs, leaves: dict[Node, Any], original: torch.Tensor, fused: torch.Tensor) -> Errors | str:
    """Errors against the reference, or what is wrong beyond rounding."""
    tokens = values.num_tokens * (region.routing.top_k if region.apart else 1)
    eps = torch.finfo(_lowest(region, original.dtype)).eps
    if tuple(original.shape) != tuple(fused.shape) or original.dtype != fused.dtype:
        return f"{list(original.shape)} {original.dtype} became {list(fused.shape)} {fused.dtype}"
    if tokens == 0:
        return Errors(0, 0.0, 0.0, eps)
    sample = torch.randperm(tokens, generator=values.generator)[:_SAMPLE].to(original.device)
    flat, new = original.reshape(tokens, -1).double(), fused.reshape(tokens, -1).double()
    truth = reference(region, values.weight, leaves, sample, values.shared)
    if region.base is not None:
        old = leaves[region.base].reshape(tokens, -1)[sample].double()
        truth = torch.where(_has_expert(region, leaves, sample, values.shared), truth, old) if region.replaced else truth + old
    size = _rms(truth) + 1e-30
    theirs, ours = _rms(flat[sample] - truth) / size, _rms(new[sample] - truth) / size
    if not theirs <= _FAR * eps:
        return f"the original differs from its recognised meaning by {theirs:.2e} of its size"
    if not ours <= 2 * _FAR * eps:
        return str(Errors(len(sample), theirs, ours, eps))
    apart = _rms(flat - new)
    if not apart <= 2 * _FAR * eps * (_rms(flat) + 1e-30):
        return f"tokens outside the sample differ by {apart / (_rms(flat) + 1e-30):.2e} of the result's size"
    return Errors(len(sample), theirs, ours, eps)


def _has_expert(region: Region, leaves: dict[Node, Any], sample: torch.Tensor, shared: int) -> torch.Tensor:
    """[n, 1]: whether any slot of these tokens has an expert."""
    ids = _ids(region, leaves, sample, shared)
    return ((ids >= 0) & (ids < region.all_experts)).any(-1, keepdim=True)


def _rms(x: torch.Tensor) -> float:
    return float(x.square().mean().sqrt()) if x.numel() else 0.0


def _lowest(region: Region, out: torch.dtype) -> torch.dtype:
    """The coarsest dtype that the region computes in."""
    from moefuse.passes.expr import weight_leaves

    found: list[torch.dtype] = [*(fake(leaf.source).dtype for leaf in weight_leaves(region.expr)), out]
    return max(found, key=lambda d: torch.finfo(d).eps)


def _ids(region: Region, leaves: dict[Node, Any], sample: torch.Tensor, shared: int) -> torch.Tensor:
    """[n, K]: the experts of some tokens (or [n, 1]: of some slots), -1 for a slot without any."""
    top_k, columns = 1 if region.apart else region.routing.top_k, region.routing.columns
    ids = leaves[region.routing.node].reshape(-1, top_k, *(() if columns is None else (columns,)))[sample // shared].long()
    ids = ids if columns is None else torch.where(ids.any(-1), ids.argmax(-1), -1)
    if region.routing.kept is None:
        return ids
    entry = leaves[region.routing.kept][sample // (region.routing.top_k if region.apart else shared)].gather(1, ids)
    return torch.where(entry > 0 if region.routing.above else entry != 0, ids, -1)


def reference(
    region: Region, weight: Callable[[Node], Any], leaves: dict[Node, Any], sample: torch.Tensor, shared: int = 1
) -> torch.Tensor:
    """The region's sum for some tokens (or a row for some slots) in float64, [n, features]; ``shared`` tokens share a row of ids."""
    top_k = 1 if region.apart else region.routing.top_k
    ids = _ids(region, leaves, sample, shared)
    out: torch.Tensor | None = None
    for expert in range(region.all_experts):
        row, slot = torch.where(ids == expert)
        if not len(row):
            continue
        tokens = sample[row]
        rows = tokens // shared
        at = (tokens // region.routing.top_k, rows // region.routing.top_k, tokens) if region.apart else (tokens, rows, rows * top_k + slot)
        values = Rows64(lambda n: leaves[n] if n in leaves else weight(n), expert, *at)
        part = values.run(region.expr if region.rest is None or expert not in region.rest.numbers else region.rest.expr)
        if out is None:
            out = torch.zeros(len(sample), part.shape[-1], dtype=torch.float64, device=part.device)
        out.index_add_(0, row, part.expand(len(row), -1).contiguous())
    return out if out is not None else torch.zeros(len(sample), 1, dtype=torch.float64)
