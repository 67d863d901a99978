"""What a product of a class's own does to rows, weights and gradients, by every operation that it comes to, not by what it gives.

Each tensor is followed by what it is made of: rows, a bias, a gradient, codes, scales, or constants. An operation is known to be part of
a product with an unpacked weight by what it is given: rows and gradients go through one product with weights and are scaled, in a dtype
that holds as much; weights are unpacked by arithmetic, by bits of codes, and by tables that codes say a place in. All else is refused.
Nothing of that depends on how large a number is; numbers tell the rest (``subclass.py``).
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from moefuse import _torch_private
from moefuse.passes.graph.op_classes import BROADCASTS, COPIES, RESHAPES, TURNS
from moefuse.program.breaks import PACKAGE, of_the_user

ROWS, BIAS, GRADIENT, CODES, SCALES, OTHER = "rows", "a bias", "a gradient", "codes", "scales", "a tensor that is not the weight's own"
_MOVING = frozenset((ROWS, GRADIENT))

_PLACES = RESHAPES | TURNS | BROADCASTS | COPIES | frozenset("_reshape_alias t numpy_T movedim lift_fresh lift_fresh_copy".split())
"""Operations that put numbers in other places and change none."""
_CASTS = frozenset("to _to_copy type_as".split())
_PRODUCTS = frozenset("mm matmul linear bmm _grouped_mm _weight_int8pack_mm".split())
_SCALED = frozenset(("mul", "div"))
_ARITHMETIC = frozenset("mul div add sub rsub neg".split())
_PICKED = frozenset("cat stack concat slice select narrow split split_with_sizes unbind chunk repeat repeat_interleave flip".split())
"""Weights in other places, or several times."""
_BITS = frozenset(
    "bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift __and__ __or__ __xor__ __lshift__ __rshift__ __iand__ "
    "__ior__ __ilshift__ __irshift__ floor_divide remainder".split()
)
"""Operations that only codes go through."""
_POWERS = frozenset("pow exp2 ldexp".split())
_TABLES = frozenset("index embedding gather index_select take".split())
_SHAPES = frozenset("zeros_like ones_like empty_like full_like new_zeros new_ones new_empty new_full new_empty_strided".split())
_READS = frozenset("_local_scalar_dense item is_nonzero equal allclose".split())


@dataclass(frozen=True)
class Made:
    """What a tensor is made of, with which scales, and what was done on the way that is not read."""

    of: frozenset[str] = frozenset()
    odd: str = ""
    scales: frozenset[int] = frozenset()

    def __or__(self, other: Made) -> Made:
        return Made(self.of | other.of, self.odd or other.odd, self.scales | other.scales)


@dataclass
class Followed:
    """The tensors that some code comes to.

    Attributes:
        rows, weight: the dtypes of rows, and of weights that are unpacked.
        trusted: libraries whose operators unpack weights.
    """

    rows: torch.dtype
    weight: torch.dtype
    trusted: frozenset[str] = frozenset()
    known: dict[int, tuple[Tensor, Made]] = field(default_factory=dict)
    asked: str = ""

    def start(self, value: Tensor, of: str) -> None:
        """A tensor that is there before."""
        self.known[id(value)] = value, Made(frozenset((of,)), scales=frozenset((id(value),)) if of == SCALES else frozenset())

    def trust(self, value: Tensor) -> None:
        """A tensor that is known to be right."""
        self.known[id(value)] = value, replace(self.made(value), odd="")

    def made(self, value: Tensor) -> Made:
        """What a tensor is made of."""
        found = self._found(value)
        return Made(frozenset((OTHER,)), OTHER) if found is None else found

    def _found(self, value: Tensor) -> Made | None:
        if id(value) in self.known:
            return self.known[id(value)][1]
        # Autograd keeps tensors for backward, and gives others in the same memory then.
        same = [made for known, made in self.known.values() if _same_place(known, value)]
        return None if not same else _all(same)

    def seen(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """An operation, and what it gave."""
        name = func._schema.name.partition("::")[2]
        given = [a for a in _torch_private.tree_leaves((args, kwargs)) if isinstance(a, Tensor)]
        results = [t for t in _torch_private.tree_leaves(out) if isinstance(t, Tensor)]
        name = name.removesuffix("_") if func._schema.is_mutable else name
        fresh = name in ("lift_fresh", "lift_fresh_copy")
        parts = [Made() if fresh and self._found(a) is None else self.made(a) for a in given]
        if name in _READS and any(part.of - {OTHER} for part in parts):  # which expert it is may be asked
            self.asked = self.asked or self._odd(name, _all(parts))
        if func.namespace not in _torch_private.OF_TORCH:
            self._foreign(func, _all(parts), results)
            return
        made = Made() if name in _SHAPES else self._by(name, func, given, parts, args, kwargs, results)
        for result in results:
            self._set(result, made)
        if func._schema.is_mutable:
            for place, told in enumerate(func._schema.arguments):
                value = args[place] if place < len(args) else kwargs.get(told.name)
                if told.alias_info is not None and told.alias_info.is_write and isinstance(value, Tensor):
                    self._written(value, made)

    def _foreign(self, func: Any, given: Made, results: list[Tensor]) -> None:
        """What a library's operator gives, of which the operations were seen, or were not: in memory that nobody was seen to write to."""
        for result in results:
            found = self._found(result)
            hidden = found is None or not given.of <= found.of
            if func.namespace in self.trusted and not given.of & _MOVING:
                self._set(result, replace(given, of=given.of and frozenset((SCALES,)), scales=given.scales | {id(result)}))
            elif hidden:
                self._set(result, replace(given, odd=given.odd or f"`{func._schema.name}`, which cannot be looked into"))

    def _set(self, value: Tensor, made: Made) -> None:
        self.known[id(value)] = value, made

    def _written(self, value: Tensor, made: Made) -> None:
        """All that lies in the same memory has it, too."""
        for key, (known, before) in list(self.known.items()):
            if known is value or _storage(known) == _storage(value):
                self.known[key] = known, before | made

    def _by(
        self,
        name: str,
        func: Any,
        given: list[Tensor],
        parts: list[Made],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        results: list[Tensor],
    ) -> Made:
        found = _all(parts)
        if found.odd or not found.of:
            return found
        moving = [i for i, part in enumerate(parts) if part.of & _MOVING]
        if moving:
            right = self._of_moving(name, given, parts, args, kwargs, moving, results)
        elif BIAS in found.of:
            right = name in _PLACES or (name in _CASTS and self._wide(results))
        else:
            right = "rounding_mode" not in kwargs and self._of_weights(name, given, parts, found.of, results, _numbers(args))
        return found if right else replace(found, odd=self._odd(name, found))

    def _odd(self, name: str, found: Made) -> str:
        of = next(kind for kind in (GRADIENT, ROWS, BIAS, SCALES, CODES, OTHER) if kind in found.of)
        return f"`{name}` of {of}{_place()}"

    def _of_moving(
        self, name: str, given: list[Tensor], parts: list[Made], args: Any, kwargs: Any, moving: list[int], results: list[Tensor]
    ) -> bool:
        """Whether it is linear in rows, or in gradients, and adds no more than a bias."""
        if len(moving) != 1:
            return False
        (at,) = moving
        others = [part for i, part in enumerate(parts) if i != at]
        plain = all(BIAS not in part.of for part in others)
        if name in _PLACES:
            return not others
        if name in _CASTS:
            return plain and self._wide(results)
        if name in _PRODUCTS:
            biases = [part for part in others if BIAS in part.of]
            return len(biases) <= (name == "linear") and self._wide(results)
        if name in _SCALED:
            return plain and self._wide(results) and (name == "mul" or at == 0) and "rounding_mode" not in kwargs
        if name == "add":
            return len(others) == 1 and others[0].of == {BIAS} and kwargs.get("alpha", 1) == 1 and self._wide(results)
        if name == "addmm":
            return at == 1 and parts[0].of == {BIAS} and kwargs.get("alpha", 1) == 1 == kwargs.get("beta", 1) and self._wide(results)
        return False

    def _wide(self, results: list[Tensor]) -> bool:
        """Whether results hold what rows hold."""
        return all(r.dtype.is_floating_point and torch.promote_types(r.dtype, self.rows) == r.dtype for r in results)

    def _of_weights(
        self, name: str, given: list[Tensor], parts: list[Made], of: frozenset[str], results: list[Tensor], numbers: int
    ) -> bool:
        """Whether it is what unpacks weights."""
        codes = of == {CODES}
        if name in _CASTS or name == "copy":
            return codes or all(self._holds(a.dtype, r.dtype) for a in given for r in results)
        if name in ("view", "view_as_real") and any(a.dtype != r.dtype for a in given for r in results):
            return codes
        if name in _PLACES | _PICKED:
            return True
        if name in _ARITHMETIC:
            return self._linear(name, parts, of, numbers)
        if name in _TABLES:
            index = given[1:] if name != "embedding" else given[1:2]
            return all(not a.dtype.is_floating_point for a in index) and SCALES not in _all(parts[1:]).of
        return codes and (name in _POWERS or (name in _BITS and all(not a.dtype.is_floating_point for a in given)))

    def _linear(self, name: str, parts: list[Made], of: frozenset[str], numbers: int) -> bool:
        """Whether it is linear in each of the scales, and adds nothing that does not shrink with them."""
        if name in ("mul", "div"):
            return len(parts) < 2 or parts[0].scales.isdisjoint(parts[1].scales)
        return name == "neg" or SCALES not in of or (not numbers and all(part.of for part in parts))

    def _holds(self, before: torch.dtype, after: torch.dtype) -> bool:
        """Whether a cast only rounds, as the encoding says that numbers are."""
        if not after.is_floating_point or after.itemsize == 1:
            return False
        return torch.promote_types(before, after) == after or after in (self.weight, self.rows)


def _numbers(args: tuple[Any, ...]) -> int:
    """How many operands are plain numbers."""
    return sum(isinstance(a, int | float) for a in args)


def _place() -> str:
    """The line of the class that came to the operation that is seen now; empty if torch did by itself."""
    below = False
    for frame in reversed(traceback.extract_stack()):
        inside = frame.filename.startswith(PACKAGE)
        if below and inside:
            return ""
        if not inside and of_the_user(frame.filename):
            return f" at {frame.filename}:{frame.lineno}"
        below = below or not inside
    return ""


def _all(parts: list[Made]) -> Made:
    found = Made()
    for part in parts:
        found |= part
    return found


def _storage(value: Tensor) -> int:
    return int(value.untyped_storage()._cdata)


def _same_place(known: Tensor, value: Tensor) -> bool:
    return (
        _storage(known) == _storage(value)
        and known.dtype == value.dtype
        and (known.storage_offset(), known.shape, known.stride()) == (value.storage_offset(), value.shape, value.stride())
    )


@contextmanager
def following(followed: Followed) -> Iterator[Callable[[Tensor, str], None]]:
    """Follow the operations on this thread."""
    with _torch_private.inner_operations(followed.seen):
        yield followed.start


__all__ = ["BIAS", "CODES", "GRADIENT", "OTHER", "ROWS", "SCALES", "Followed", "Made", "following"]
