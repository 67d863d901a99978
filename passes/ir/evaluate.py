"""Running an expression: the operations of the tree on [rows, features] tensors.

`apply` is what the grouped tier emits and what the float64 reference of the verification runs, so the two cannot drift apart.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from moefuse.ops.meaning.encoding import dequantise
from moefuse.ops.meaning.token_codes import as_rounded, unsure
from moefuse.passes.graph.values import tensor
from moefuse.passes.ir.expr import Cast, ExpertVector, Expr, Gate, Held, Leaf, Linear, Op, SharedVector, Slice, SlotWeight, Token

_OPERATORS: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "pow": operator.pow,
}
_BY_DTYPE = frozenset(("mean", "sum", "softmax", "log_softmax", "cumsum", "cumprod"))


def function_of(name: str, kwargs: dict[str, Any]) -> Callable[..., Any]:
    """The torch function behind a canonical name."""
    if name in _OPERATORS and not kwargs:
        return _OPERATORS[name]
    found = getattr(F, name, None) or getattr(torch, name, None) or getattr(torch.special, name, None)
    if name in ("softmax", "layer_norm", "rms_norm", "gelu", "silu"):
        found = getattr(F, name)
    elif hasattr(torch, name):
        found = getattr(torch, name)
    if found is None:
        raise AttributeError(f"no torch function named {name}")
    return found  # type: ignore[no-any-return]


def apply(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one operation by its canonical name."""
    return function_of(name, kwargs)(*args, **kwargs)


def flat_shapes(held: Held) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """[N', K'] and the shape of the scales of a weight that is held in one dimension."""
    assert held.shape is not None
    packing = held.encoding.packing
    return (held.shape if packing is None else packing.words(held.shape)), held.encoding.scales(*held.shape)


def unnested(parts: Sequence[torch.Tensor], every: int) -> torch.Tensor:
    """[..., n]: scales that are held as codes [..., n], with a scale for ``every`` of them, a table [..., 256] and an offset [...]."""
    codes, scale, table, offset = parts
    wide = scale.repeat_interleave(every, -1)[..., : codes.shape[-1]]
    return torch.gather(table, -1, codes.long()) * wide + offset.unsqueeze(-1)


def _wide(value: torch.Tensor) -> torch.Tensor:
    """Numbers in float64; conditions as they are, which is what picks by them."""
    return value if value.dtype == torch.bool else value.double()


class Rows64:
    """Values of the leaves for the rows of one expert, in float64.

    Args:
        values: leaf source node -> tensor (any dtype).
        expert: which expert the rows belong to.
        tokens: [n] token numbers of the rows.
        choices: [n] rows of the ids and routing weights that they go by: the tokens, or what several tokens share.
        slots: [n] slot numbers (choice * K + k) of the rows.
        unrounded: quantised activations are not rounded to these.

    Attributes:
        loose: [n] how far, squared and as a part of its size, a row of the result may be away where activations have other codes.
    """

    def __init__(
        self,
        values: Callable[[Any], Any],
        expert: int,
        tokens: torch.Tensor,
        choices: torch.Tensor,
        slots: torch.Tensor,
        *,
        unrounded: bool = False,
    ) -> None:
        self.values, self.expert, self.tokens, self.choices, self.slots = values, expert, tokens, choices, slots
        self.unrounded = unrounded
        self.memo: dict[int, Any] = {}
        self.loose = torch.zeros(len(tokens), dtype=torch.float64, device=tokens.device)

    def weight(self, leaf: Leaf) -> torch.Tensor:
        """This expert's weight, dims in the order the expression sees them."""
        row = self._own(leaf)
        if isinstance(row, float | int):
            return torch.tensor(row, dtype=torch.float64)
        found: torch.Tensor = torch.zeros_like(row, dtype=torch.float64) if self.expert in leaf.zeros else row.double()
        return found

    def _own(self, leaf: Leaf) -> Any:
        """What the leaf has for this expert."""
        if leaf.stacked:
            row = self.values(leaf.source).select(leaf.along, self.expert)
            order = [d - (d > leaf.along) for d in leaf.order]
        else:
            row = self.values(leaf.parts[self.expert] if leaf.parts else leaf.source)
            order = list(leaf.order)
        if isinstance(row, float | int):
            return row
        return row.permute(order) if row.dim() == len(order) else row

    def _held(self, expr: Linear, held: Held) -> torch.Tensor:
        """A product with a weight in few bits: of rows in the program's dtype, rounded as it rounds them."""
        storage, scale = self._own(expr.weight), self._own(held.scale)
        if held.nested:
            scale = unnested((scale, *map(self._own, held.nested)), held.every)
        if held.shape is not None:
            storage, scale = (of.reshape(shape) for of, shape in zip((storage, scale), flat_shapes(held), strict=True))
        scale = scale.reshape(1, 1) if scale.dim() < storage.dim() else scale
        weight = dequantise(held.encoding, storage, scale, None, torch.float64)
        child, how = self.run(expr.child), held.encoding.activation
        if how is None or self.unrounded:
            exact: torch.Tensor = child @ weight.T
            return exact
        shown = tensor(expr.node)
        dtype = torch.float32 if shown is None else shown.dtype
        rows = child.to(dtype)
        found: torch.Tensor = as_rounded(how, rows).double() @ weight.T
        # A token is exact but for the division; behind a product, an activation and another product there are three roundings, and sums.
        f32, eps = torch.finfo(torch.float32).eps, torch.finfo(dtype).eps
        by = 4 * f32 if isinstance(expr.child, Token) else max(1.5 * eps, 64 * f32)
        other = unsure(how, rows, by).double().square() @ weight.square().T
        self.loose += other.mean(-1) / found.square().mean(-1).clamp(min=1e-300)
        return found

    def run(self, expr: Any) -> Any:
        """The value of an expression for these rows, [n, features]; constants as they are, casts without effect."""
        if not isinstance(expr, Expr):
            return expr
        if id(expr) not in self.memo:
            self.memo[id(expr)] = self._run(expr)
        return self.memo[id(expr)]

    def _run(self, expr: Expr) -> Any:
        match expr:
            case Token():
                return _wide(self.values(expr.source).reshape(-1, expr.width)[self.slots if expr.by_slot else self.tokens])
            case SlotWeight():
                return _wide(self.values(expr.source).reshape(-1, 1)[self.slots])
            case Gate():
                return self._gate(expr)
            case Linear(weight=Leaf(held=Held() as held)):
                return self._held(expr, held)
            case Linear():
                return self.run(expr.child) @ self.weight(expr.weight).T
            case ExpertVector():
                return self.weight(expr.vector)
            case SharedVector():
                value = self.values(expr.source)
                return _wide(value) if isinstance(value, torch.Tensor) else value
            case Slice():
                return self.run(expr.child)[:, expr.start : expr.start + expr.step * expr.length : expr.step]
            case Cast():
                return self.run(expr.child).double() if expr.counts else self.run(expr.child)
            case Op(name="dropout"):
                return self.run(expr.args[0])  # a proof is without draws
            case Op():
                options = {k: self.run(v) for k, v in expr.kwargs if not (k == "dtype" and expr.name in _BY_DTYPE)}
                return apply(expr.name, tuple(self.run(a) for a in expr.args), options)
        raise TypeError(f"cannot evaluate {type(expr).__name__}")

    def _gate(self, expr: Gate) -> Any:
        if expr.ones:
            return torch.ones(len(self.tokens), 1, dtype=torch.float64, device=self.tokens.device)
        if expr.slots:
            return _wide(self.values(expr.source).reshape(-1, 1)[self.slots])
        table = self.values(expr.source)
        table = table.reshape(len(table), -1).T if expr.turned else table.reshape(-1, table.shape[-1])
        return table[self.choices, self.expert][:, None].double()
