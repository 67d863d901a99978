"""The arithmetic of a weight: (value - zero) * scale, or value * scale - zero, and in which dtype each step is rounded."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Node

from moefuse.ops.meaning.encoding import EXPONENTS, LDEXP, POWERS, exponents
from moefuse.passes.encodings.table import all_bytes, equal
from moefuse.passes.encodings.terms import CAST, Apply, Read, Term, UnreadError, device_of, evaluate, leaves, reads
from moefuse.passes.graph.calls import tensor

_MULTIPLIES = ("mul", "ldexp")
_TRIED = (0.0, -0.0, 0.5, 1.0, 1.5, 6.0, -6.0, 7.0)
"""Values that ``ldexp`` is tried with."""
_DIFFERENCES = frozenset((torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64))
"""Dtypes that have all whole numbers from -128 to 127."""
_TRIES = 256
"""Values that one number is multiplied by, to see how."""
_EXACT: dict[torch.dtype, frozenset[torch.dtype]] = {
    torch.float16: frozenset((torch.float32, torch.float64)),
    torch.bfloat16: frozenset((torch.float32, torch.float64)),
    torch.float32: frozenset((torch.float64,)),
    torch.float8_e4m3fn: frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64)),
    torch.float8_e5m2: frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64)),
    torch.float8_e8m0fnu: frozenset((torch.bfloat16, torch.float32, torch.float64)),
    torch.uint8: frozenset(
        (torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64)
    ),
    torch.int8: frozenset((torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64)),
    torch.int16: frozenset((torch.int32, torch.int64, torch.float32, torch.float64)),
    torch.int32: frozenset((torch.int64, torch.float64)),
}  # fmt: skip
"""Which dtypes have every number of another one."""


@dataclass(frozen=True, eq=False)
class Formula:
    """A weight as (value - zero) * scale.

    Attributes:
        product: where scales multiply.
        value: the tree of what codes stand for; ``storage``: the input that has them.
        scale, zero: numbers of inputs, as they are.
        zeros: the tree of zeros that are codes themselves, of one input.
        kind: of the scales (``Encoding.scale``).
        wide: the dtype of both steps.
        whole: zeros are subtracted in whole numbers.
        behind: they are subtracted from the product.
    """

    product: Node
    value: Term
    storage: Node
    scale: Read
    zero: Read | None
    zeros: Term | None
    kind: str
    wide: torch.dtype
    whole: bool
    behind: bool


def formula(term: Term, storage: Node) -> Formula:
    """How a weight is computed from the codes in ``storage``.

    Raises:
        UnreadError: it is no such formula.
    """
    casts, product = _uncast(term)
    last = product if isinstance(product, Apply) and product.name == "sub" and storage in reads(product.args[0]) else None
    inside, product = (casts, product) if last is None else _uncast(last.args[0])
    if not isinstance(product, Apply):
        raise UnreadError(storage, "is all that the weight is made of")
    if product.name not in _MULTIPLIES or len(product.args) != 2 or _has_options(product):
        raise UnreadError((last or product).node, "is no product with scales")
    of = [storage in reads(arg) for arg in product.args]
    if of == [True, True] or (product.name == "ldexp" and not of[0]):
        raise UnreadError(product.node, "multiplies codes by codes")
    value, scale = product.args if of[0] else product.args[::-1]
    wide = _wide(product, scale, product.scalars[1 if of[0] else 0])
    if not _rounds_once([product.dtype, *inside], wide):
        raise UnreadError(product.node, "is rounded more than once")
    value, zero, zeros = _zero(value, storage, wide)
    foreign = next(_foreign(value, storage), None)
    if foreign is not None:
        raise UnreadError(foreign, "computes with more than codes")
    factor, kind = _scale(product, scale, wide)
    whole = zero is not None and not value.dtype.is_floating_point
    if last is not None:
        if zero is not None or zeros is not None or kind:
            raise UnreadError(last.node, "subtracts more than zeros from codes, or from numbers of exponents")
        zero = _behind(last, storage, wide, [product.dtype, *inside], casts)
    return Formula(product.node, value, storage, factor, zero, zeros, kind, wide, whole, last is not None)


def _behind(last: Apply, storage: Node, wide: torch.dtype, before: list[torch.dtype], casts: list[torch.dtype]) -> Read:
    """The zeros that are subtracted from products with scales."""
    zero = last.args[-1]
    if len(last.args) != 2 or _has_options(last) or storage in reads(zero):
        raise UnreadError(last.node, "subtracts more than zeros")
    steps, leaf = _uncast(zero)
    if not isinstance(leaf, Read):
        why = "makes zeros that are no tensor of the model's as they are"
        raise UnreadError(_first(zero) or last.node, why, _computed(leaf))
    if last.wide != wide or before != [wide] * len(before):
        raise UnreadError(last.node, f"subtracts in {last.wide}, and the scales multiply in {wide}")
    alike = _rounds_once(steps, leaf.dtype, wide) and not (last.scalars[1] and zero.dtype != wide)
    if not alike or not _rounds_once([last.dtype, *casts], wide):
        raise UnreadError(last.node, "rounds zeros more than once")
    return leaf


def _wide(product: Apply, scale: Term, is_scalar: bool) -> torch.dtype:
    """The dtype of a product. One number without dimensions does not widen the result, but may be multiplied as it is, in float32."""
    if not is_scalar or product.wide not in (torch.bfloat16, torch.float16) or scale.dtype == product.wide:
        return product.wide
    dice = torch.Generator("cpu").manual_seed(0)
    devices = [value.device for value in map(tensor, product.node.all_input_nodes) if value is not None]
    values, factor = torch.randn(_TRIES, generator=dice).to(product.wide), torch.tensor(math.pi / 10).to(scale.dtype)
    given = [factor if arg is scale else values for arg in product.args]
    try:
        found = product.run(*(v.to(device) for v, device in zip(given, devices[:2], strict=True))).cpu()
    except (RuntimeError, AssertionError) as error:  # no such device here
        raise UnreadError(product.node, "multiplies by one number, which may be rounded before") from error
    for wide in (product.wide, torch.float32):
        if equal((values.to(wide) * factor.to(wide).expand(_TRIES)).to(product.wide), found):
            return wide
    raise UnreadError(product.node, f"multiplies by one number of {scale.dtype}")


def _has_options(product: Apply) -> bool:
    """Whether an operation has arguments beside its two tensors."""
    given = [*product.node.args, *(v for k, v in product.node.kwargs.items() if k != "out")]
    return any(not isinstance(v, Node) for v in given)


def _uncast(term: Term) -> tuple[list[torch.dtype], Term]:
    """The dtypes that a value is rounded to, the first one first, and the value before."""
    casts: list[torch.dtype] = []
    while isinstance(term, Apply) and term.name == CAST:
        casts.append(term.dtype)
        term = term.args[0]
    return casts[::-1], term


def _rounds_once(steps: Iterable[torch.dtype], start: torch.dtype, target: torch.dtype | None = None) -> bool:
    """Whether numbers of ``start`` that go through dtypes come out as if they had been rounded to the last one (``target``) at once."""
    chain = [start, *(s for s in steps if s != start), *([target] if target is not None else [])]
    chain = [d for i, d in enumerate(chain) if i == 0 or d != chain[i - 1]]
    rounding = [i for i in range(1, len(chain)) if chain[i] not in _EXACT.get(chain[i - 1], frozenset())]
    if not rounding:
        return True
    # What is rounded to a dtype, and then held as it is by wider ones, is what the last one has only if that is the same dtype.
    return len(rounding) == 1 and rounding[0] == len(chain) - 1


def _zero(value: Term, storage: Node, wide: torch.dtype) -> tuple[Term, Read | None, Term | None]:
    """The codes' value, and the zeros that are subtracted from it."""
    casts, inner = _uncast(value)
    if reads(inner) == {storage} or not isinstance(inner, Apply):
        return value, None, None
    if inner.name != "sub" or len(inner.args) != 2 or _has_options(inner):
        raise UnreadError(inner.node, "computes with more than codes")
    before, zero = inner.args
    if storage in reads(zero):
        raise UnreadError(inner.node, "subtracts codes")
    steps, leaf = _uncast(zero)
    if not isinstance(leaf, Read):
        return before, None, _packed(inner, casts, zero)
    if inner.wide.is_floating_point:
        if inner.wide != wide or any(c != wide for c in casts) or inner.dtype != wide:
            raise UnreadError(inner.node, f"subtracts in {inner.wide}, and the scales multiply in {wide}")
        if not _rounds_once(steps, leaf.dtype, wide) or (inner.scalars[1] and zero.dtype != wide):
            raise UnreadError(inner.node, "rounds zeros more than once")
        return before, leaf, None
    whole = inner.wide in (torch.int16, torch.int32, torch.int64) and inner.dtype == inner.wide and not before.dtype.is_floating_point
    if not whole or leaf.dtype not in (torch.int8, torch.uint8) or not before.dtype.itemsize <= inner.wide.itemsize:
        raise UnreadError(inner.node, f"subtracts in {inner.wide}, which may overflow")
    # Differences of bytes are exact in whole numbers, and rounded once behind that: the same as in the dtype of the product.
    if not _rounds_once(casts, inner.dtype, wide) or not _rounds_once(steps, leaf.dtype, inner.wide):
        raise UnreadError(inner.node, "is rounded more than once")
    return before, leaf, None


def _packed(inner: Apply, casts: list[torch.dtype], zero: Term) -> Term:
    """Zeros that are made of one input, in whole numbers so small that all dtypes have their differences, but for unsigned ones."""
    first = _first(zero) or inner.node
    if len(reads(zero)) != 1:
        raise UnreadError(first, "makes zeros of more than one tensor", _computed(_uncast(zero)[1]))
    if any(dtype not in _DIFFERENCES for dtype in (inner.wide, inner.dtype, *casts)):
        raise UnreadError(inner.node, f"subtracts in {inner.wide}, which may overflow")
    return zero


def _scale(product: Apply, scale: Term, wide: torch.dtype) -> tuple[Read, str]:
    """The scales as the model has them, and their kind."""
    steps, leaf = _uncast(scale)
    if product.name == "mul" and isinstance(leaf, Read) and leaf.dtype != torch.float8_e8m0fnu:
        if not _rounds_once(steps, leaf.dtype, wide):
            raise UnreadError(product.node, "rounds scales more than once")
        return leaf, ""
    found = list(leaves(scale))
    if len(found) != 1 or not isinstance(found[0], Read) or found[0].dtype.itemsize != 1:
        why = "makes scales that are no tensor of the model's as they are"
        raise UnreadError(_first(scale) or product.node, why, _computed(leaf))
    codes = all_bytes(found[0].dtype)
    device = device_of(product)
    factor = evaluate(scale, lambda _: codes.to(device))
    kind = _ldexp(product, codes, factor) if product.name == "ldexp" else _power(codes, factor.to(wide).cpu())
    if kind is not None:
        return found[0], kind
    raise UnreadError(_first(scale) or product.node, "makes scales of bytes that are no powers of two", _computed(leaf))


def _computed(term: Term) -> Node | None:
    """The operation that makes numbers, if these are what its result is."""
    return term.node if isinstance(term, Apply) else None


def _power(codes: Tensor, factor: Tensor) -> str | None:
    """The kind of scales that are these numbers, for all bytes."""
    kinds = (kind for kind in (EXPONENTS, POWERS) if equal(exponents(codes, factor.dtype, nan=kind == EXPONENTS), factor))
    return next(kinds, None)


def _ldexp(product: Apply, codes: Tensor, exponent: Tensor) -> str | None:
    """The kind of scales with which ``ldexp`` computes here: some releases of torch multiply by a power, others are exact."""
    values = torch.tensor(_TRIED).to(product.args[0].dtype)[:, None].expand(-1, len(codes)).flatten()
    found = product.run(values.to(exponent.device), exponent.repeat(len(_TRIED))).cpu()
    powers, value = exponents(codes, torch.float64, nan=False).repeat(len(_TRIED)), values.to(product.wide)
    if equal((value.double() * powers).to(product.wide), found):
        return LDEXP
    return POWERS if equal(value * powers.to(product.wide), found) else None


def _first(term: Term) -> Node | None:
    """The first operation of a tree, in the order of the program."""
    if not isinstance(term, Apply):
        return None
    return next(filter(None, map(_first, term.args)), term.node)


def _foreign(term: Term, storage: Node) -> Iterator[Node]:
    """Operations that read anything but codes and constants, the first ones first."""
    if isinstance(term, Apply) and reads(term) != {storage}:
        for arg in term.args:
            yield from _foreign(arg, storage)
        yield term.node


__all__ = ["Formula", "formula"]
