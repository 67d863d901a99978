"""What a program multiplies by, found by its own product: on rows of an identity, and on rows that rounding would show on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from moefuse.passes.encodings.elements import is_number
from moefuse.passes.encodings.terms import UnreadError
from moefuse.passes.graph.calls import call_target, fake, tensor
from moefuse.passes.graph.modes import entered
from moefuse.passes.infer.state import Context

_PRODUCTS = frozenset("linear matmul mm bmm grouped_mm".split())
_ROWS = 8
"""How many rows of each kind are tried."""
_MANY = 16
"""How many times as many rows are tried at once."""
_LEVELS = 127
"""Of whole numbers in eight bits: rows halfway between two of them are rounded by as much as they can be."""


@dataclass(frozen=True)
class Product:
    """A product with a weight: the operation, its argument that is the weight, and the views by which that is made."""

    reader: Node
    operand: Node
    steps: tuple[Node, ...]


def products(ctx: Context, weight: Node) -> Iterator[Product]:
    """The products that read a weight that is made of other tensors."""
    open_: list[tuple[Node, tuple[Node, ...]]] = [(weight, ())]
    while open_:
        node, steps = open_.pop(0)
        for user in node.users:
            call = ctx.calls.get(user)
            if call is None or call.inplace:
                continue
            if call.name in _PRODUCTS:
                yield Product(user, node, steps)
            elif type(tensor(user)) is type(tensor(weight)):
                open_.append((user, (*steps, user)))


def multiplied(
    ctx: Context, product: Product, weight: Node, value: Any, rows: Tensor, expert: int, *, bias: Tensor | None = None, grad: bool = False
) -> Tensor:
    """[R, N]: rows [R, K] times the weight of an expert, as the program multiplies if ``value`` is what it has for ``weight``.

    Args:
        bias: what is added, where the program adds something.
        grad: as it does while gradients are recorded.

    Raises:
        UnreadError: the product takes something else besides.
    """
    env: dict[Node, Any] = {weight: value}
    for step in product.steps:
        for n in step.all_input_nodes:
            if n not in env:
                if not is_number(ctx, n, frozenset()):
                    raise UnreadError(step, "takes a part of them that the run chooses")
                env[n] = torch.tensor(expert, device=rows.device)
        args, kwargs = torch.fx.node.map_arg((step.args, step.kwargs), env.__getitem__)
        env[step] = call_target(step, args, kwargs)
    call = ctx.calls[product.reader]
    assert call is not None
    first, last, *more = (*call.args[:2], *call.args[2:], *call.kwargs.values())
    operand, behind = env[product.operand], last is product.operand
    x = first if behind else last
    batch = operand.dim() == 3 and call.name != "grouped_mm"
    given = rows if behind else rows.T
    given = given.expand(operand.shape[0], *given.shape) if batch else given
    taken: dict[Node, Any] = {product.operand: operand, x: given}
    for n in more:
        if isinstance(n, Node):
            taken[n] = bias if call.name == "linear" else _beside(product.reader, call.name, n, operand, expert, len(rows))
    if x is product.operand or any(n not in taken for n in product.reader.all_input_nodes) or not _has_rank(x, given):
        raise UnreadError(product.reader, "multiplies them in a way that cannot be tried")
    args, kwargs = torch.fx.node.map_arg((product.reader.args, product.reader.kwargs), taken.__getitem__)
    with entered(ctx.mode[product.reader]), torch.set_grad_enabled(grad):
        found = call_target(product.reader, args, kwargs)
    own: Tensor = found[expert] if batch else found
    return own if behind else own.t()


def _has_rank(x: Any, given: Tensor) -> bool:
    """Whether a product has one operand for rows, of which any number makes sense."""
    value = tensor(x) if isinstance(x, Node) else None
    return value is not None and (value.dim() == given.dim() or (given.dim() == 2 and value.dim() > 2))


def _beside(reader: Node, name: str, node: Node, operand: Tensor, expert: int, count: int) -> Tensor:
    """What a product is given beside rows and weights: all rows for one expert."""
    value = tensor(node)
    if name != "grouped_mm" or value is None or value.dtype.is_floating_point:
        raise UnreadError(reader, "takes more than rows and weights")
    ends = torch.zeros(operand.shape[0], dtype=value.dtype, device=operand.device)
    ends[expert:] = count
    return ends


def rows_of(ctx: Context, product: Product) -> Any:
    """The rows that the program multiplies, and the bias that it adds: fake ones, None where there is none."""
    call = ctx.calls[product.reader]
    assert call is not None
    x = call.args[0] if call.args[0] is not product.operand else call.args[1]
    bias = (call.args[2] if len(call.args) > 2 else call.kwargs.get("bias")) if call.name == "linear" else None
    return fake(x), tensor(bias) if isinstance(bias, Node) else None


def dtype_of_rows(ctx: Context, product: Product) -> torch.dtype:
    """The dtype of the rows that the program multiplies."""
    dtype: torch.dtype = rows_of(ctx, product)[0].dtype
    return dtype


def columns(inputs: int, most: int) -> Tensor:
    """Inputs whose weights are looked at: all, or the first ones and some everywhere."""
    if inputs <= most:
        return torch.arange(inputs, device="cpu")
    some = torch.linspace(most // 2, inputs - 1, most - most // 2, device="cpu").round().long()
    found: Tensor = torch.cat([torch.arange(most // 2, device="cpu"), some]).unique()
    return found


def rows_that_show(inputs: int, dtype: torch.dtype, device: torch.device) -> Sequence[Tensor]:
    """Rows that come out otherwise if they are rounded to eight bits or fewer first: any, and small ones beside a large one."""
    dice = torch.Generator("cpu").manual_seed(0)
    plain = torch.randn(_ROWS, inputs, generator=dice, device="cpu")
    halfway = (torch.randint(0, 2, (_ROWS, inputs), generator=dice, device="cpu") * 2 - 1) * 0.5 / _LEVELS
    beside = plain.clone()
    for rows, size in ((halfway, 1.0), (beside, max(4.0, inputs**0.5))):
        rows[range(_ROWS), torch.randint(inputs, (_ROWS,), generator=dice, device="cpu")] = size
    # A class may have one kernel for a single row, and another for many.
    return [rows.to(dtype).to(device) for rows in (plain, halfway, beside, halfway[:1], halfway.repeat(_MANY, 1))]


def is_rounded(rows: Tensor, found: Tensor, weight: Tensor) -> bool:
    """Whether a product [R, N] of rows with a weight [N, K] is further from it than one that does not round the rows to fewer bits."""
    truth = rows.double() @ weight.double().T
    bound = max(torch.finfo(found.dtype).eps, 2.0**-9)
    off = (found.double() - truth).square().mean(-1).sqrt()
    return not bool((off <= bound * truth.square().mean(-1).sqrt()).all())


__all__ = ["Product", "columns", "dtype_of_rows", "is_rounded", "multiplied", "products", "rows_of", "rows_that_show"]
