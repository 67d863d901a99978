"""The proof on the model's own weights: the original region and its replacement on synthetic tokens, both against float64.

Compared is what the program's user can see: the sum, whatever else of the region is read behind it, and that nothing older is changed
(``surroundings.py``); on values of which none is neutral (``synthetic_inputs.py``). Gradients are compared where there may be
some (``gradients.py``).

Three routings are tried: random, all tokens on the same experts (so that the others get none), and random again. The reference runs the
recognised expression itself in float64, one expert at a time, on a sample of the tokens: a wrong reading of the program shows as an
original that is far from the reference, a wrong op as a replacement that is.

Where projections round activations to codes, a number in the middle between two codes has the one or the other, by a rounding that two
right programs do not share. Which numbers are that near to a middle is counted on the values of the probe, and what their codes weigh is
allowed on top (``Rows64.loose``). An option may leave activations as they are: then the replacement is compared with experts that round
nothing, and has to be as exact as those, whatever the original loses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from moefuse import _torch_private
from moefuse.passes.encodings.part import Coded
from moefuse.passes.graph.assumptions import Assumption
from moefuse.passes.infer.state import Context
from moefuse.passes.ir.evaluate import Rows64
from moefuse.passes.ir.regions import Region
from moefuse.passes.prove.gradients import Graded, comparable
from moefuse.passes.prove.replay import replay
from moefuse.passes.prove.shown import Shown
from moefuse.passes.prove.surroundings import Around, codes, far, rms, rounding
from moefuse.passes.prove.synthetic_inputs import Inputs

_SAMPLE = 64
_DRAWS = 16  # of tokens, where a few of them do not settle it


@dataclass(frozen=True)
class Verdict:
    """``error``: the replacement's error over its allowance (at most 1 passes). ``problem``: why it failed, or empty."""

    error: float
    problem: str = ""


@torch.no_grad()
def verify(
    ctx: Context,
    region: Region,
    new_nodes: Sequence[Node],
    result: Node,
    known: dict[Node, Any],
    assumptions: Sequence[Assumption] = (),
    held: Mapping[Node, Coded] | None = None,
) -> Verdict:
    """Compare a region with its replacement: the sum, and all that the program around the region may see of it.

    Args:
        ctx: the region's graph.
        new_nodes: the replacement's nodes in order, ending in ``result``.
        known: real values of the graph's inputs where they are known.
        assumptions: what capture assumed; a loop body that stands for several experts is run for each of them.
        held: weights that are tensors of a class of their own, and how these hold them.
    """
    values = Inputs(ctx, region, known, held)
    weight = Shown(region, values.weight, held or {})
    bodies = [a for a in assumptions if (a.row_node is not None or a.kind == "size") and a.nodes & region.nodes]
    around = Around(ctx, region, new_nodes)

    def probe(kind: str) -> Errors | str:
        leaves = values.draw(kind)
        original = replay(around.before, values, leaves, bodies)
        fused = replay(around.after, values, leaves, bodies)
        found = _compare(region, values, weight, leaves, original.value(region.anchor), fused.value(result))
        return found if isinstance(found, str) or found.problem else around.seen(original, fused, result) or found

    worst = 0.0
    for kind in ("random", "one", "random"):
        found = _settled(probe, kind)
        if isinstance(found, str):
            return Verdict(float("inf"), found)
        if found.problem:
            return Verdict(max(found.ours / found.allowed, 1.0), found.problem)
        worst = max(worst, found.ours / found.allowed)
    problem = _gradients(values, around, result, bodies) if comparable(ctx, region) else ""
    return Verdict(float("inf") if problem else worst, problem)


def _gradients(values: Inputs, around: Around, result: Node, bodies: Sequence[Assumption]) -> str:
    """What differs of the gradients, or an empty text, where the region itself has none on made-up values, too."""
    graded = Graded(values.region, values.draw("random"))
    # Hooks of the user's around the call, which count or move what is kept for backward, are not for the proof.
    hooked = torch.autograd.graph.saved_tensors_hooks(_itself, _itself) if _torch_private.keeps_by_hooks() else nullcontext()
    with torch.enable_grad(), hooked:
        try:
            original = replay(around.before, values, graded.leaves, bodies).value(values.region.anchor)
        except RuntimeError:  # an operation that is made for inference
            return ""
        return graded.differ(original, replay(around.after, values, graded.leaves, bodies).value(result), values.generator)


def _itself(value: torch.Tensor) -> torch.Tensor:
    return value


@dataclass(frozen=True)
class Errors:
    """Errors of the original and of the replacement on so many rows, relative to the result's size."""

    rows: int
    theirs: float
    ours: float
    eps: float
    codes: float = 0.0
    """What activations near the middle of two codes weigh."""
    size: float = 1.0
    """Of the result, root mean square."""
    most: float = math.inf
    """What is allowed whatever the original loses; finite where it rounds activations and the replacement does not."""

    @property
    def allowed(self) -> float:
        return min(self.most, 1.1 * self.theirs + max(4 * self.eps, self.codes))

    @property
    def differs(self) -> bool:
        """Whether the original is no rounding of its recognised meaning."""
        return math.isinf(self.most) and not self.theirs <= far(self.eps) + 2 * self.codes

    @property
    def problem(self) -> str:
        """What is wrong beyond rounding, or an empty text."""
        if self.differs:
            return f"the original differs from its recognised meaning by {self.theirs:.2e} of its size"
        if not self.ours <= self.allowed:
            return f"error {self.ours:.2e} of the result's size, the original has {self.theirs:.2e}"
        return ""


def _settled(probe: Callable[[str], Errors | str], kind: str) -> Errors | str:
    """The errors of one kind of routing. On few rows either may be luck: where that decides, more tokens are drawn."""
    found = probe(kind)
    if isinstance(found, str) or not found.problem or found.rows >= _SAMPLE:
        return found
    every = [found]
    for _ in range(min(-(-_SAMPLE // found.rows), _DRAWS) - 1):
        again = probe(kind)
        if isinstance(again, str):
            return again
        every.append(again)
    # Of all draws together: one whose result is next to nothing, as one number that cancels may be, has a large error of its own size.
    size = math.hypot(*(e.size for e in every)) + 1e-30
    theirs, ours = (math.hypot(*part) / size for part in zip(*((e.theirs * e.size, e.ours * e.size) for e in every), strict=True))
    return Errors(found.rows * len(every), theirs, ours, found.eps, max(e.codes for e in every), size, found.most)


def _compare(
    region: Region, values: Inputs, weight: Callable[[Node], Any], leaves: dict[Node, Any], original: torch.Tensor, fused: torch.Tensor
) -> Errors | str:
    """Errors against the reference, or what is wrong beyond rounding."""
    tokens = values.num_tokens * (region.routing.top_k if region.per_slot else 1)
    eps = rounding(region, original)
    if tuple(original.shape) != tuple(fused.shape) or original.dtype != fused.dtype:
        return f"{list(original.shape)} {original.dtype} became {list(fused.shape)} {fused.dtype}"
    if tokens == 0:
        return Errors(0, 0.0, 0.0, eps)
    sample = torch.randperm(tokens, generator=values.generator)[:_SAMPLE].to(original.device)
    flat, new = original.reshape(tokens, -1).double(), fused.reshape(tokens, -1).double()
    loose = torch.zeros(len(sample), dtype=torch.float64, device=sample.device)

    def error(of: torch.Tensor, truth: torch.Tensor) -> float:
        return rms(of[sample] - truth) / (rms(truth) + 1e-30)

    truth = _truth(region, values, weight, leaves, sample, loose=loose)
    by_codes = math.sqrt(float(loose.mean())) / (rms(truth) + 1e-30)
    found = Errors(len(sample), error(flat, truth), error(new, truth), eps, by_codes, rms(truth))
    if region.unrounded and not found.differs:
        truth = _truth(region, values, weight, leaves, sample, unrounded=True)
        found = Errors(len(sample), error(flat, truth), error(new, truth), eps, 0.0, rms(truth), far(eps))
    distance, size = rms(flat - new), rms(flat) + 1e-30
    if tokens > len(sample) and not distance <= (2 * far(eps) + codes(region)) * size:
        return f"tokens outside the sample differ by {distance / size:.2e} of the result's size"
    return found


def _truth(
    region: Region, values: Inputs, weight: Callable[[Node], Any], leaves: dict[Node, Any], sample: torch.Tensor, **how: Any
) -> torch.Tensor:
    """The region's result for some tokens, what it is added to included."""
    found = reference(region, weight, leaves, sample, values.shared, **how)
    if region.base is None:
        return found
    tokens = values.num_tokens * (region.routing.top_k if region.per_slot else 1)
    old = leaves[region.base].reshape(tokens, -1)[sample].double()
    return torch.where(_has_expert(region, leaves, sample, values.shared), found, old) if region.replaced else found + old


def _has_expert(region: Region, leaves: dict[Node, Any], sample: torch.Tensor, shared: int) -> torch.Tensor:
    """[n, 1]: whether any slot of these tokens has an expert."""
    ids = _ids(region, leaves, sample, shared)
    return ((ids >= 0) & (ids < region.all_experts)).any(-1, keepdim=True)


def _ids(region: Region, leaves: dict[Node, Any], sample: torch.Tensor, shared: int) -> torch.Tensor:
    """[n, K]: the experts of some tokens (or [n, 1]: of some slots), -1 for a slot without any."""
    top_k, columns = 1 if region.per_slot else region.routing.top_k, region.routing.columns
    ids = leaves[region.routing.node].reshape(-1, top_k, *(() if columns is None else (columns,)))[sample // shared].long()
    ids = ids if columns is None else torch.where(ids.any(-1), ids.argmax(-1), -1)
    if region.routing.valid is not None:
        valid = leaves[region.routing.valid]
        by_slot = valid.numel() == leaves[region.routing.node].numel()
        row = sample // shared if by_slot or not region.per_slot else sample // region.routing.top_k
        ids = ids.masked_fill(~valid.reshape(-1, top_k if by_slot else 1)[row], -1)
    if region.routing.kept is None:
        return ids
    if region.routing.by_slot:
        entry = leaves[region.routing.kept].reshape(-1, top_k)[sample // shared]
    else:
        table = leaves[region.routing.kept].flatten(0, -2)
        entry = table[sample // (region.routing.top_k if region.per_slot else shared)].gather(1, ids)
    return torch.where(entry != 0 if region.routing.above is None else entry > region.routing.above, ids, -1)


def reference(
    region: Region,
    weight: Callable[[Node], Any],
    leaves: dict[Node, Any],
    sample: torch.Tensor,
    shared: int = 1,
    *,
    unrounded: bool = False,
    loose: torch.Tensor | None = None,
) -> torch.Tensor:
    """The region's sum for some tokens (or a row for some slots) in float64, [n, features]; ``shared`` tokens share a row of ids.

    ``unrounded``: of experts that do not round activations. ``loose`` [n]: is added how far, squared, other codes may take each.
    """
    top_k = 1 if region.per_slot else region.routing.top_k
    ids = _ids(region, leaves, sample, shared)
    out: torch.Tensor | None = None
    for expert in range(region.all_experts):
        row, slot = torch.where(ids == expert)
        if not len(row):
            continue
        tokens = sample[row]
        rows = tokens // shared
        at = (
            (tokens // region.routing.top_k, rows // region.routing.top_k, tokens)
            if region.per_slot
            else (tokens, rows, rows * top_k + slot)
        )
        values = Rows64(lambda n: leaves[n] if n in leaves else weight(n), expert, *at, unrounded=unrounded)
        part = values.run(region.expr if region.rest is None or expert not in region.rest.numbers else region.rest.expr)
        if out is None:
            out = torch.zeros(len(sample), part.shape[-1], dtype=torch.float64, device=part.device)
        out.index_add_(0, row, part.expand(len(row), -1).contiguous())
        if loose is not None:
            loose.index_add_(0, row, values.loose * part.square().mean(-1))
    return out if out is not None else torch.zeros(len(sample), 1, dtype=torch.float64)
