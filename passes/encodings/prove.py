"""The proof of a reading: what the program computes and what the definition says, bit by bit, on the weights of two experts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from moefuse.ops.meaning.encoding import dequantise
from moefuse.passes.encodings.alike import signature
from moefuse.passes.encodings.elements import is_number
from moefuse.passes.encodings.moves import memory_of
from moefuse.passes.encodings.part import Coded, Part
from moefuse.passes.encodings.places import Sample
from moefuse.passes.encodings.read import trees
from moefuse.passes.encodings.table import same_bits
from moefuse.passes.encodings.terms import Const, Read, UnreadError, device_of, evaluate
from moefuse.passes.encodings.weight import Weight, cone, inputs_of, sizes_of, supposed
from moefuse.passes.graph.calls import call_target, tensor
from moefuse.passes.graph.sizes import supposing
from moefuse.passes.infer.state import Context

_AT_ONCE = 1 << 20
"""Weights that are computed one by one at a time, so that no temporary is as large as an expert."""
_RUN = 1 << 22
"""Weights of which all experts are computed by running the program; of more, only those of the experts that are compared."""
Values = Callable[[Node], Tensor]


def holds(
    ctx: Context,
    weight: Weight,
    coded: Coded,
    value: Values,
    *,
    experts: Sequence[int] | None = None,
    most: int | None = None,
    small: bool | None = None,
) -> bool:
    """Whether each weight of ``experts`` (the first and the last) is what the encoding says, NaN for NaN.

    Args:
        value: the tensor of each input of the graph that is a part; of the model, or of :func:`drawn`.
        most: so many weights of an expert are enough, in rows over all of it; None: all of them.
        small: whether the program is run as it is, for all experts, and not element by element; None: by their size.
    """
    weight = replace(weight, given=frozenset(part.node for part in coded.parts if part.node.op not in ("placeholder", "get_attr")))
    with supposing(supposed(ctx, weight)[0]), torch.device("cpu"), torch.no_grad():
        return _holds(ctx, weight, coded, value, experts, most, small)


def _holds(
    ctx: Context, weight: Weight, coded: Coded, value: Values, experts: Sequence[int] | None, most: int | None, small: bool | None
) -> bool:
    count, features, inputs = sizes_of(ctx, weight)
    if small is None:
        small = count * features * inputs <= min(_RUN, most or _RUN) and not weight.rows
    value = functools.cache(lambda node, of=value: of(node).detach())
    lines = features if most is None else max(2, min(features, most // inputs))
    rows = torch.linspace(0, features - 1, lines).round().long().unique()
    for expert in sorted({0, count - 1}) if experts is None else experts:
        parts = [_of_expert(part, expert, value(part.node)) for part in coded.parts]
        wanted = dequantise(coded.encoding, parts[0], parts[1], parts[2] if len(parts) > 2 else None, coded.dtype)
        if wanted.shape != (features, inputs):
            return False
        if small:
            if not same_bits(run(ctx, weight, value, expert), wanted).all():
                return False
            continue
        if not all(_same(ctx, weight, wanted, expert, some, value) for some in rows.split(max(1, _AT_ONCE // inputs))):
            return False
    return True


@dataclass
class _Proved:
    """What was proved in a graph: how weights are computed, and what that was read as."""

    found: dict[tuple[object, ...], bool] = field(default_factory=dict)


def proved(ctx: Context, weight: Weight, coded: Coded, value: Values, *, most: int | None = None) -> bool:
    """As :func:`holds`, once for all weights that are computed alike: what was read goes by operations and places, never by numbers."""
    own = signature(ctx, weight)
    if own is None:
        return holds(ctx, weight, coded, value, most=most)
    key, known = (own.text, *own.plain(coded)), ctx.scratch(_Proved).found
    if key not in known:
        known[key] = holds(ctx, weight, coded, value, most=most)
    return known[key]


def run(ctx: Context, weight: Weight, value: Values, expert: int) -> Tensor:
    """The weight [N, K] of an expert, by running all operations that it is computed by."""
    env: dict[Node, Any] = {}
    device = next(value(n).device for n in inputs_of(cone(ctx, weight), weight.given) if weight.fixed(n) is None)
    for node in cone(ctx, weight):
        if node.op in ("placeholder", "get_attr") or node in weight.given:
            fixed = weight.fixed(node)
            env[node] = value(node) if fixed is None else fixed.to(device)
        elif is_number(ctx, node, weight.rows):
            env[node] = torch.tensor(expert, device=device)
        else:
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
            with torch.no_grad(), device:
                env[node] = call_target(node, args, {**kwargs, "device": device} if "device" in kwargs else kwargs)
    found = env[weight.node]
    assert isinstance(found, Tensor)
    rest = [d for d in range(found.dim()) if d not in weight.order]
    found = found.permute(*weight.order, *rest)
    found = found[expert] if len(weight.order) == 3 else found
    return found.flatten(2)[..., 0] if rest else found


def drawn(coded: Coded, seed: int = 0) -> Values:
    """Made-up tensors for the inputs that are parts: every code, and scales and zeros that differ as far as a dtype can.

    Each is made when it is first asked for.
    """
    roles = {part.node: i for i, part in reversed([*enumerate(coded.parts)])}

    @functools.cache
    def made(node: Node) -> Tensor:
        with torch.device("cpu"):
            return _draw(node, torch.Generator("cpu").manual_seed(seed + roles[node]), roles[node])

    return made


def _draw(node: Node, dice: torch.Generator, role: int) -> Tensor:
    value = tensor(node)
    assert value is not None
    reach = 1 + sum((n - 1) * by for n, by in zip(value.shape, value.stride(), strict=True)) + value.storage_offset()
    dtype: torch.dtype = value.dtype
    if role == 0 or dtype.itemsize == 1:
        high = 128 if role and dtype == torch.int8 else 256
        flat = torch.randint(high, (reach * dtype.itemsize,), generator=dice, dtype=torch.uint8).view(dtype)
    elif dtype.is_floating_point:
        flat = (torch.randperm(reach, generator=dice).double() / reach + 0.5).to(dtype) * (1 if role == 1 else 8)
    else:
        flat = torch.randint(0, 100, (reach,), generator=dice).to(dtype)
    flat = flat.to(device_of(Read(node, torch.zeros(0), dtype)))
    return flat.as_strided(value.shape, value.stride(), value.storage_offset())


def _of_expert(part: Part, expert: int, value: Tensor) -> Tensor:
    shown = part.show(value)
    return shown[expert] if shown.dim() == 3 else shown


def _same(ctx: Context, weight: Weight, wanted: Tensor, expert: int, rows: Tensor, value: Values) -> bool:
    """Whether rows of an expert's weight are what they must be, each weight computed for itself."""
    here = torch.cartesian_prod(rows, torch.arange(wanted.shape[1]))
    of = Sample(torch.full((len(here),), expert), here[:, 0], here[:, 1], sizes_of(ctx, weight))
    block = wanted[rows.to(wanted.device)].flatten()

    def leaf(found: Const | Read) -> Tensor:
        if isinstance(found, Const):
            return found.values.to(wanted.device)
        return memory_of(value(found.node))[found.place.to(wanted.device)]

    try:
        return all(bool(same_bits(evaluate(term, leaf), block[which.to(block.device)]).all()) for which, term in trees(ctx, weight, of))
    except UnreadError:
        return False


__all__ = ["drawn", "holds", "proved", "run"]
