"""Weights that are tensors of a class of their own, made of codes and scales: how, found by what the program's product makes of them.

Nothing is asked of the class but how it is flattened, and put together again of other tensors. What these may be follows from their dtypes
and shapes (``placed.py``); what they are is found with made-up ones: with scales of one and zeros of none a weight is what its codes stand
for, then everything is drawn, and one reading must give the bits of the program's product with an identity. That says nothing of what the
product does to other rows and to their gradients, so what it computes is followed (``own.py``), and some are multiplied that would show if
they were rounded.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moefuse.errors import first_line
from moefuse.ops.meaning.encoding import BITS, DTYPES, EXPONENTS, MADE, Encoding, codes_of, dequantise
from moefuse.passes.encodings.inner import Inner, inner
from moefuse.passes.encodings.made_up import Roles, drawn, size_of, spread, unscaled
from moefuse.passes.encodings.own import refuse_another_gradient, refuse_limited, refuse_more
from moefuse.passes.encodings.part import Coded, Part
from moefuse.passes.encodings.placed import Form, named, packings, scales_in, storage_in
from moefuse.passes.encodings.terms import UnreadError
from moefuse.passes.encodings.tried import columns, dtype_of_rows, is_rounded, rows_that_show
from moefuse.passes.encodings.weighed import Weighed

_MOST, _SOME = 256, 48
"""Inputs whose weights are looked at, of made-up weights and of the model's."""
_STACK = ("experts", "features", "inputs")
_INDEX = 4
"""Bytes of whole numbers that may be an order of inputs: such a tensor cannot be filled with anything."""


def subclass(weighed: Weighed) -> Coded:
    """How such a weight is encoded.

    Raises:
        UnreadError: it is not known.
    """
    node = weighed.node
    if dtype_of_rows(weighed.ctx, weighed.product) != weighed.dtype:
        raise UnreadError(node, "are multiplied with rows of another dtype")
    if any(not isinstance(n, int) for i in weighed.inner for n in i.value.shape):
        raise UnreadError(node, "have sizes that only the run knows")
    parts = ", ".join(f"{i.name} {str(i.value.dtype).removeprefix('torch.')}{list(i.value.shape)}" for i in weighed.inner)
    why = "nothing gives the weights that the program multiplies by"
    for roles in _roles(weighed):
        try:
            found = _fitted(weighed, roles)
        except UnreadError:
            raise
        except Exception as error:  # whatever a class says of made-up tensors
            why = first_line(error)
            continue
        if found is not None:
            return found
    raise UnreadError(node, f"are made of {parts}: {why}")


def _roles(weighed: Weighed) -> Iterator[Roles]:
    """Which tensor may be what, the largest the codes, and fewer tensors first."""
    held = [i for i in weighed.inner if not i.value.dtype.is_floating_point or i.value.dtype.itemsize == 1]
    if not held:
        return
    storage = max(held, key=lambda i: i.value.numel() * i.value.dtype.itemsize)
    rest = [i for i in weighed.inner if i is not storage]
    if any(not i.value.dtype.is_floating_point and i.value.dtype.itemsize >= _INDEX for i in rest):
        raise UnreadError(weighed.node, f"have whole numbers beside `{storage.name}`")
    scales = [i for i in rest if i.value.dtype.is_floating_point or i.value.dtype == torch.uint8]
    for with_zero in (False, True):
        for scale in scales:
            for zero in [i for i in rest if i is not scale] if with_zero else [None]:
                yield Roles(storage, scale, zero)


def _fitted(weighed: Weighed, roles: Roles) -> Coded | None:
    """The reading that gives the program's weights, if one does."""
    inputs = columns(weighed.form.logical[-1], _MOST)
    plain = weighed.made(functools.partial(unscaled, roles))
    seen = weighed.seen(plain, 0, inputs)
    for first in _tables(weighed, roles, plain, seen, inputs):
        size = size_of(first)
        trials = [_trial(weighed, weighed.made(functools.partial(drawn, roles, size, seed)), inputs) for seed in (0, 1)]
        for encoding in _with_scales(weighed, first, roles):
            if all(_shows(weighed, encoding, roles, trial, inputs) for trial in trials):
                _refuse_others(weighed, encoding, roles, size)
                return _coded(weighed, encoding, roles, Form(tuple(weighed.value.shape), weighed.order), weighed.inner)
    return None


def _with_scales(weighed: Weighed, first: Encoding, roles: Roles) -> Iterator[Encoding]:
    """The encoding with scales, and zeros, of blocks of every size that there may be."""
    kind = EXPONENTS if roles.scale.value.dtype in (torch.float8_e8m0fnu, torch.uint8) else ""
    scale = _of(weighed, roles.scale)
    used = dict.fromkeys((weighed.dtype, torch.float32, roles.scale.value.dtype))
    for block, _ in scales_in(weighed.form, scale):
        for arithmetic in (name for dtype in used for name, known in DTYPES.items() if known == dtype):
            plain = Encoding(first.table, block, arithmetic, kind, roles.zero is not None, first.packing)
            yield plain
            if roles.zero is not None and not kind:
                yield replace(plain, behind=True)


def _of(weighed: Weighed, one: Inner) -> Tensor:
    """A tensor in the shape of a made-up one."""
    if weighed.sizes is None:
        return torch.empty_strided(tuple(one.value.shape), one.value.stride(), device="meta")
    return torch.empty((weighed.sizes[0], *one.value.shape[1:]), device="meta")


def _tables(weighed: Weighed, roles: Roles, value: Any, seen: Tensor, inputs: Tensor) -> Iterator[Encoding]:
    """What codes may stand for, and how they may be packed, if these are the weights of the first expert without scales."""
    whole: Tensor = functools.reduce(getattr, roles.storage.path, value)
    form, one = Form(tuple(value.shape), weighed.order), torch.ones(1, 1, device=weighed.device)
    for packing in (None, *packings(whole.dtype)):
        at = storage_in(form, whole, packing)
        storage = None if at is None else whole.as_strided(*at)
        if storage is None:
            continue
        storage = storage[0] if storage.dim() == len(_STACK) else storage
        known = [] if packing is None else [table_of(codes_of(storage, packing)[:, inputs], seen)]
        for table in named(whole.dtype) if packing is None else known:
            if table is not None:
                encoding = Encoding(table, (0, 0), packing=packing)
                if _equal(dequantise(encoding, storage, one, None, weighed.dtype)[:, inputs], seen):
                    yield encoding


def table_of(codes: Tensor, seen: Tensor) -> tuple[float, ...] | None:
    """The sixteen numbers that codes stand for, if they all occur; one of those that have a name if these are as large."""
    found, first = torch.full((1 << BITS,), torch.nan, dtype=torch.float64, device="cpu"), seen.double().flatten()
    if codes.shape != seen.shape:
        return None
    found[codes.flatten().long().cpu()] = first.cpu()
    if found.isnan().any():
        return None
    table = tuple(found.tolist())
    return next((made for made in MADE.values() if made == table), table)


def _trial(weighed: Weighed, value: Any, inputs: Tensor) -> tuple[Any, dict[int, Tensor]]:
    """A made-up weight, and what the program's product shows of some experts."""
    return value, {e: weighed.seen(value, e, inputs) for e in weighed.experts(value)}


def _shows(weighed: Weighed, encoding: Encoding, roles: Roles, trial: tuple[Any, dict[int, Tensor]], inputs: Tensor) -> bool:
    """Whether the program's product with a weight shows what an encoding gives."""
    value, seen = trial
    found = list(inner(value))
    coded = _coded(weighed, encoding, roles, Form(tuple(value.shape), weighed.order), found)
    if coded is None:
        return False
    return all(_equal(unpacked(coded, value, e)[:, inputs], of) for e, of in seen.items())


def _equal(found: Tensor, seen: Tensor) -> bool:
    """Whether these are the same numbers. A product with an identity loses the sign of zeros."""
    return found.shape == seen.shape and found.dtype == seen.dtype and bool((found == seen).all())


def unpacked(coded: Coded, value: Any, expert: int) -> Tensor:
    """The weight [N, K] of an expert, given what has all parts."""
    parts = [part.show(value) for part in coded.parts]
    shown = [part[expert] if part.dim() == 3 else part for part in parts]
    return dequantise(coded.encoding, shown[0], shown[1], shown[2] if len(shown) > 2 else None, coded.dtype)


def _coded(weighed: Weighed, encoding: Encoding, roles: Roles, form: Form, parts: list[Inner]) -> Coded | None:
    """What an encoding reads, of a weight of such a form that is made of such tensors."""
    values = {i.path: i.value for i in parts}
    at = storage_in(form, values[roles.storage.path], encoding.packing)
    found: list[Part] = []
    for one in (roles.scale, roles.zero) if roles.zero is not None else (roles.scale,):
        layout = dict(scales_in(form, values[one.path])).get(encoding.block)
        if layout is None:
            return None
        found.append(Part(weighed.node, *layout, 0, one.path))
    if at is None:
        return None
    storage = Part(weighed.node, *at, 0, roles.storage.path)
    return Coded(encoding, storage, found[0], found[1] if len(found) > 1 else None, weighed.dtype)


def _refuse_others(weighed: Weighed, encoding: Encoding, roles: Roles, size: float) -> None:
    """Raises where the product rounds rows to few bits, too, or is more than a product in another way."""
    value, weight = _whole(weighed, encoding, roles, functools.partial(drawn, roles, size, 2))
    for rows in rows_that_show(weight.shape[1], weighed.dtype, weighed.device):
        if is_rounded(rows, weighed.multiplied(value, rows, 0), weight):
            raise UnreadError(weighed.node, "are multiplied with rows that are rounded to few bits in each call")
    refuse_more(weighed, value)
    refuse_limited(weighed, value, weight, size)
    refuse_another_gradient(weighed, value, weight)
    for seed in (3, 4):
        value, weight = _whole(weighed, encoding, roles, functools.partial(spread, roles, size, seed, weighed.dtype))
        inputs = columns(weight.shape[1], _SOME)
        if not _equal(weight[:, inputs], weighed.seen(value, 0, inputs)):
            raise UnreadError(weighed.node, "are other numbers where scales are very large or small")
        refuse_another_gradient(weighed, value, weight)


def _whole(weighed: Weighed, encoding: Encoding, roles: Roles, fill: Any) -> tuple[Any, Tensor]:
    """A made-up weight, and what the first expert has of it by an encoding."""
    value = weighed.made(fill)
    coded = _coded(weighed, encoding, roles, Form(tuple(value.shape), weighed.order), list(inner(value)))
    assert coded is not None
    return value, unpacked(coded, value, 0)


def holds_for(weighed: Weighed, coded: Coded, value: Any) -> bool:
    """Whether the program's product with the model's own weight shows what was read, by a part of it."""
    inputs = columns(coded.encoding.logical(coded.storage.sizes)[-1], _SOME)
    _, seen = _trial(weighed, value, inputs)
    return all(_equal(unpacked(coded, value, e)[:, inputs], of) for e, of in seen.items())


__all__ = ["holds_for", "subclass", "unpacked"]
