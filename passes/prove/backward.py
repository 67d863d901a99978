"""Whether the backward pass that a function brings along (``graph/applied.py``) is the gradient of the product that it computes.

It is if it is linear in the gradient that it is given, reads nothing that rows went into, and multiplies by the transposed weight: both
passes are run on unit vectors, so forward shows the weight, and backward what it multiplies by. They are run on the model's own tensors,
and on made-up ones in the place of all of these: what reads another tensor that has the same numbers now, or forgets a zero point of 0 or
a negative scale, is right on the model's, and would not be after they changed. What the size of a number decides no numbers show, so
nothing of that may be there (``unpacking_again.py``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Interpreter, Node

from moefuse import _torch_private
from moefuse.errors import first_line
from moefuse.passes.graph.applied import Applied, Functions
from moefuse.passes.graph.calls import call_of, call_target, fake, tensor
from moefuse.passes.graph.modes import entered
from moefuse.passes.graph.op_classes import RESHAPES, TURNS
from moefuse.passes.infer.state import Context
from moefuse.passes.ir.facts import Lost
from moefuse.passes.ir.regions import Region
from moefuse.passes.prove.synthetic_inputs import hint
from moefuse.passes.prove.unpacking_again import unread

_LINEAR = RESHAPES | TURNS | frozenset(("matmul", "mm", "bmm", "linear", "to", "contiguous", "t", "mul"))
_MATRIX = 2
_SIZES = (torch.SymInt, torch.SymBool, int, bool, torch.Size)
_BLOCK = 1024
_RUNS = 64
_POWER, _LESS = 40, 8
"""Numbers are tried that are up to 2^40 times as large and as small as those of today; in float16 the power is an eighth of that."""
_BIAS = 1 / 2
"""How far weights may be apart on average, in units of the rounding that each may be: a scale that backward rounds first is so far off."""
_SHAPE = "is of rows in a shape that moefuse does not read"
_NO_NUMBERS = "gives what is no number, or its forward pass does"
_SHARED = 8
"""Times the size of a tensor up to which its storage is made up as a whole, for other tensors that lie in it."""


@dataclass
class Proofs:
    """What was found out of functions whose bodies are alike: empty where the gradient is right."""

    found: dict[str, str] = field(default_factory=dict)


def disproved(ctx: Context, region: Region, known: Mapping[Node, Any], proofs: Proofs) -> Lost | None:
    """A refusal if the backward pass of a function in a region gives another gradient than that of the product, or nobody knows."""
    inside = [f for f in ctx.scratch(Functions).found if not region.nodes.isdisjoint(f.nodes)]
    kinds: dict[str, list[Applied]] = {}
    for one in inside:
        kinds.setdefault(_text(one), []).append(one)
    for text, alike in kinds.items():
        if text not in proofs.found:
            proofs.found[text] = _problem(ctx, alike[0], known) or _problem(ctx, alike[-1], known)
        if proofs.found[text]:
            detail = f"the backward pass of the program's own function {proofs.found[text]}"
            return ctx.lost("verification-failed", alike[0].result, detail=detail)
    return None


def _text(one: Applied) -> str:
    """What tells functions apart that are not alike: their operations and constants, and what they are given."""
    return "\n".join((_body(one.forward.graph), _body(one.backward.graph), str(one.rows)))


def _body(graph: Graph) -> str:
    numbers: dict[Node, str] = {}
    lines = []
    for node in graph.nodes:
        numbers[node] = f"%{len(numbers)}"
        args = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: numbers[n])
        value = tensor(node) if node.op == "placeholder" else None
        shape = "" if value is None else f"{[hint(s) if isinstance(hint(s), int) else 'rows' for s in value.shape]} {value.dtype}"
        target = "" if node.op == "placeholder" else f"{node.target}"
        lines.append(f"{node.op} {target} {args} {shape}")
    return "\n".join(lines)


def _problem(ctx: Context, one: Applied, known: Mapping[Node, Any]) -> str:
    """What is wrong with a backward pass; empty if nothing is."""
    odd = _not_linear(one)
    if odd is not None:
        return odd
    try:
        with torch.no_grad(), entered(ctx.mode[one.result]):
            problem = _compared(one, _Values(ctx, known)) or _read(one, _Values(ctx, known))
            return problem or _compared_made_up(ctx, one, known)
    except Exception as error:  # whatever an author's function raises on unit vectors
        return f"cannot be run on unit vectors: {first_line(error)}"


def _compared_made_up(ctx: Context, one: Applied, known: Mapping[Node, Any]) -> str:
    """On made-up numbers, and on very large and very small ones, as far as these are numbers."""
    any_byte = True
    problem = _compared(one, _MadeUp(ctx, known, any_byte=True))
    if problem == _NO_NUMBERS:
        any_byte = False
        problem = _compared(one, _MadeUp(ctx, known, any_byte=False))
    for power in (-_POWER, -_POWER // 2, _POWER // 2, _POWER):
        if not problem:
            found = _compared(one, _MadeUp(ctx, known, any_byte=any_byte, power=power))
            problem = "" if found == _NO_NUMBERS else found
    return problem


def _not_linear(one: Applied) -> str | None:
    """What keeps backward from being one linear function of the gradient, whatever the rows are."""
    inputs, given = (body.graph.find_nodes(op="placeholder") for body in (one.forward, one.backward))
    (out,), (end,) = (body.graph.find_nodes(op="output") for body in (one.forward, one.backward))
    kept, wanted = _parts(out)[1], _parts(end)[one.rows]
    of_rows = _computed_from({inputs[one.rows]}, one.forward.graph)
    read = next((node.name for node in kept if node in of_rows), None)
    if read is not None or len(given) != 1 + len(kept):
        return f"reads `{read or 'more'}`, which is computed from rows"
    moving = _computed_from({given[0]}, one.backward.graph)
    if wanted not in moving:
        return "gives rows no gradient that depends on that of the result"
    odd = next((node for node in sorted(_needed(wanted) & moving - {given[0]}) if not _is_product(node, moving)), None)
    return None if odd is None else f"is more than a product: `{getattr(call_of(odd), 'name', odd.name)}`"


def _parts(end: Node) -> Any:
    return end.args[0]


def _is_product(node: Node, moving: set[Node]) -> bool:
    """Whether a value is linear in the one that moves."""
    call, value = call_of(node), tensor(node)
    operands = [a for a in _torch_private.tree_leaves((node.args, dict(node.kwargs))) if isinstance(a, Node) and a in moving]
    if call is None or call.inplace or call.name not in _LINEAR or len(operands) != 1:
        return False
    added = call.name == "linear" and (len(call.args) > 2 or call.kwargs.get("bias") is not None)
    return not added and value is not None and value.dtype.is_floating_point and value.dtype.itemsize > 1


def _computed_from(start: set[Node], graph: Graph) -> set[Node]:
    """What some values go into, beside sizes."""
    found = set(start)
    for node in graph.nodes:
        if node.op != "output" and not isinstance(fake(node), _SIZES) and any(i in found for i in node.all_input_nodes):
            found.add(node)
    return found


def _needed(node: Node) -> set[Node]:
    found, stack = {node}, [node]
    while stack:
        new = [i for i in stack.pop().all_input_nodes if i not in found]
        found.update(new)
        stack += new
    return found


class _Values:
    """The model's own tensors, and made-up ones where they are not known."""

    def __init__(self, ctx: Context, known: Mapping[Node, Any]) -> None:
        self.ctx, self.known = ctx, known
        self.made: dict[Node, Any] = {}
        self.dice = torch.Generator("cpu").manual_seed(0)

    def of(self, node: Node) -> Any:
        """The value of a tensor that is older than the function's call."""
        if node not in self.made:
            self.made[node] = self._value(node)
        return self.made[node]

    def _value(self, node: Node) -> Any:
        if node in self.known:
            return self.known[node]
        call = self.ctx.calls.get(node)
        if call is not None and not call.inplace and call.name in RESHAPES | TURNS | {"detach", "to", "t"}:
            return call_target(node, *torch.fx.node.map_arg((node.args, dict(node.kwargs)), self.of))
        return self._drawn(fake(node))

    def _drawn(self, like: Any) -> Any:
        if not isinstance(like, Tensor):
            return hint(like)
        shape = [int(hint(s)) for s in like.shape]
        if not like.dtype.is_floating_point:
            info = torch.iinfo(like.dtype)
            low, high = max(info.min, -(1 << 31)), min(info.max, 1 << 31) + 1
            return torch.randint(low, high, shape, generator=self.dice, device="cpu").to(like.device, like.dtype)
        return (torch.rand(shape, generator=self.dice, device="cpu") + 0.1).to(like.device, like.dtype)


class _MadeUp(_Values):
    """Any numbers in the place of the model's tensors, the same in those that share memory. Bytes that are exponents may be too much:
    not ``any_byte``, but others of their own. ``power``: of two, that floats are larger by, where their dtype has room."""

    def __init__(self, ctx: Context, known: Mapping[Node, Any], *, any_byte: bool, power: int = 0) -> None:
        super().__init__(ctx, known)
        self.any_byte, self.power = any_byte, power
        self.memory: dict[tuple[int, ...], Tensor] = {}

    def _value(self, node: Node) -> Any:
        value = self.known.get(node)
        if not isinstance(value, Tensor) or hasattr(value, "__tensor_flatten__"):
            return super()._value(node)
        value = value.detach().as_subclass(Tensor)
        storage = value.untyped_storage()
        if storage.nbytes() > _SHARED * value.nbytes:
            key: tuple[int, ...] = (value.data_ptr(), *value.shape, *value.stride())
            if key not in self.memory:
                self.memory[key] = self._any(value.numel(), value).view(value.shape)
            return self.memory[key]
        key = (storage.data_ptr(),)
        if key not in self.memory:
            self.memory[key] = self._any(storage.nbytes() // value.itemsize, value)
        return self.memory[key].view(value.dtype).as_strided(value.shape, value.stride(), value.storage_offset())

    def _any(self, count: int, like: Tensor) -> Tensor:
        """So many numbers in a dtype: finite bytes, both signs otherwise; of wide integers, which may be places, their own."""
        if like.dtype.itemsize == 1 and self.any_byte:
            drawn = torch.randint(0, 256, (count,), generator=self.dice, dtype=torch.uint8, device="cpu").view(like.dtype)
            drawn.view(torch.uint8)[~drawn.float().isfinite()] = 0
            return drawn.to(like.device)
        if like.dtype.itemsize == 1 or not like.dtype.is_floating_point:
            own = torch.empty(0, dtype=torch.uint8 if like.dtype.itemsize == 1 else like.dtype, device=like.device).set_(
                like.untyped_storage()
            )
            picked = torch.randint(0, len(own), (count,), generator=self.dice, device="cpu").to(like.device)
            return own[picked].view(like.dtype)
        sign = torch.randint(0, 2, (count,), generator=self.dice, device="cpu") * 2 - 1
        size = 2.0 ** (self.power if like.dtype != torch.float16 else self.power // _LESS)
        return ((torch.rand(count, generator=self.dice, device="cpu") + 0.1) * sign * size).to(like.device, like.dtype)


@dataclass(frozen=True)
class _Passes:
    """Both passes of a function, on rows in the shape that it takes: ``count`` times ``rest``."""

    one: Applied
    given: tuple[Any, ...]
    count: int
    rest: tuple[int, ...]
    like: Tensor

    @property
    def many(self) -> int:
        """How many rows there are."""
        return self.count * math.prod(self.rest)

    def forward(self, vectors: Tensor) -> Tensor:
        """Results for some rows."""
        (found,), _ = self._forward(self._block(vectors))
        return found.flatten(0, -2)[: len(vectors)]  # type: ignore[no-any-return]

    def backward(self, vectors: Tensor, inputs: int) -> Tensor:
        """Gradients of rows for some gradients of results."""
        _, kept = self._forward(self._block(vectors.new_zeros(0, inputs)))
        found = Interpreter(self.one.backward).run(self._block(vectors), *kept)[self.one.rows]
        return found.flatten(0, -2)[: len(vectors)]  # type: ignore[no-any-return]

    def unread(self, result: torch.dtype) -> str:
        """What backward does that is not read."""
        rows = self._block(torch.zeros(0, int(self.like.shape[-1]), device="cpu"))
        return unread(self.one, (*self.given[: self.one.rows], rows, *self.given[self.one.rows + 1 :]), result)

    def _forward(self, rows: Tensor) -> Any:
        given = (*self.given[: self.one.rows], rows, *self.given[self.one.rows + 1 :])
        return Interpreter(self.one.forward).run(*given)

    def _block(self, vectors: Tensor) -> Tensor:
        """Vectors with zeros after them, in the shape of the rows."""
        block = torch.zeros(self.many, vectors.shape[-1], dtype=self.like.dtype, device=self.like.device)
        block[: len(vectors)] = vectors
        return block.view(self.count, *self.rest, -1)


def _compared(one: Applied, values: _Values) -> str:
    """Both passes on unit vectors, on all of them where that are not too many runs."""
    passes = _passes(one, values)
    if passes is None:
        return _SHAPE
    rows, out = passes.like, tensor(one.result)
    assert out is not None
    inputs, features = int(rows.shape[-1]), int(out.shape[-1])

    def some(size: int) -> tuple[Tensor, list[Tensor]]:
        order = torch.randperm(size, generator=values.dice, device="cpu")[: passes.many * _RUNS]
        unit = [torch.zeros(len(part), size, device="cpu").scatter_(1, part[:, None], 1.0) for part in order.split(passes.many)]
        return order.to(rows.device), unit

    (along, units), (across, others) = some(inputs), some(features)
    added = passes.forward(torch.zeros(1, inputs, device="cpu")).double()
    shown = torch.cat([passes.forward(part) for part in units]).double() - added
    got = torch.cat([passes.backward(part, inputs) for part in others]).double()[:, along]
    return _difference(shown[:, across].t(), got, added[:, across].abs().t(), torch.finfo(rows.dtype).eps)


def _passes(one: Applied, values: _Values) -> _Passes | None:
    """Both passes on some tensors; None for rows in a shape that is not read."""
    rows, out = tensor(one.call.given[one.rows]), tensor(one.result)
    if rows is None or out is None or rows.dim() < _MATRIX or out.dim() != rows.dim():
        return None
    lead = rows.shape[0]
    count = _BLOCK if _varies(lead) else int(lead)
    given = tuple(None if i == one.rows else _given(a, lead, count, values) for i, a in enumerate(one.call.given))
    return _Passes(one, given, count, tuple(int(hint(s)) for s in rows.shape[1:-1]), rows)


def _read(one: Applied, values: _Values) -> str:
    """What of the backward pass is not read."""
    passes, out = _passes(one, values), tensor(one.result)
    if passes is None or out is None:
        return _SHAPE
    odd = passes.unread(out.dtype)
    return odd and f"does not only multiply by what its forward pass unpacks: {odd}"


def _difference(wanted: Tensor, got: Tensor, added: Tensor, eps: float) -> str:
    """``wanted`` [N, K]: weights as forward shows them, beside what it adds [N, 1]; ``got``: as backward does."""
    if wanted.shape != got.shape:
        return f"gives {list(got.shape)} for a weight {list(wanted.shape)}"
    if not bool((wanted + got).isfinite().all()):
        return _NO_NUMBERS
    of = (got - wanted) / (wanted.abs() + added + 1e-30)
    apart, bias = float(of.abs().max()), float(of.mean().abs())
    alike = apart <= eps and (bias <= _BIAS * eps or bool(added.any()))
    return "" if alike else f"multiplies by other numbers than its forward pass (apart by {apart:.1e})"


def _varies(size: Any) -> bool:
    """Whether a size is one that only the run knows, or differs from call to call."""
    return not isinstance(size, int)


def _given(value: Any, lead: Any, count: int, values: _Values) -> Any:
    """An argument of a function; what is as many as there are rows is ``count``."""
    if not isinstance(value, Node):
        return value
    shown = fake(value)
    if isinstance(shown, torch.SymInt) and _varies(lead) and shown.node.expr == lead.node.expr:
        return count
    return values.of(value)


__all__ = ["Proofs", "disproved"]
