"""A fused region against the program that was matched: both compiled by Inductor, on the same inputs, timed in the same way."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moefuse import _torch_private
from moefuse.passes.lower.program import Input, NotComparableError, Program
from moefuse.tuning.entries import Pair

if TYPE_CHECKING:
    from torch.fx import GraphModule

Timer = Callable[[Callable[[], Any], Callable[[], Any]], tuple[float, float]]
"""(the program before, after) -> microseconds of each."""

SECONDS_PER_NODE = 0.05
"""What Inductor takes for one operation of a program, about; decides whether there is time for it."""


def seconds(program: Program) -> float:
    """How long a comparison takes, about."""
    return 5.0 + SECONDS_PER_NODE * sum(len(gm.graph.nodes) for gm in (program.before, program.after))


def compare(program: Program, tokens: int, timer: Timer, backend: Any = "inductor") -> Pair:
    """Times for ``tokens`` tokens, random ones, on the user's own weights.

    Raises:
        NotComparableError: the program was compiled for other numbers of tokens only, or it cannot be compiled on its own.
    """
    values = inputs(program, tokens)
    calls = [_compiled(gm, [values[i] for i in reads], backend) for gm, reads in zip(_graphs(program), program.reads, strict=True)]
    with torch.no_grad():
        before, after = timer(*calls)
    return Pair(before, after, tokens)


def _graphs(program: Program) -> tuple[GraphModule, GraphModule]:
    return program.before, program.after


def _compiled(gm: GraphModule, values: Sequence[Any], backend: Any) -> Callable[[], Any]:
    compiled = _torch_private.compile_region(gm, backend)
    try:
        with torch.no_grad():
            compiled(*values)
    except Exception as error:
        text = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise NotComparableError(f"it does not compile on its own: {text[:200]}") from error
    return lambda: compiled(*values)


def inputs(program: Program, tokens: int) -> list[Any]:
    """Values of all inputs for ``tokens`` tokens. Small numbers, so that a program that adds to its input stays finite.

    Raises:
        NotComparableError: the sizes of the program do not allow that number.
    """
    known = symbols(program, tokens)
    source = torch.Generator(device=program.device).manual_seed(0)
    count = max(program.experts, program.top_k)
    ids = torch.rand((tokens, count), generator=source, device=program.device).topk(program.top_k, dim=-1).indices % program.experts
    return [_value(one, program, known, ids, source) for one in program.inputs]


def _value(one: Input, program: Program, known: dict[Any, int], ids: Tensor, source: torch.Generator) -> Any:
    if one.role == "size":
        return number(one.value, known)
    tensor = one.weak.tensor() if one.weak is not None else None
    if tensor is not None:
        return tensor
    shape, stride = ([number(s, known) for s in sizes] for sizes in (one.shape, one.stride))
    if one.role == "ids":
        return ids.reshape(shape).to(one.dtype)
    if one.role in ("table", "turned table"):
        table = _table(ids, program.experts, source)
        return (table.t() if one.role == "turned table" else table).reshape(shape).to(one.dtype)
    made = torch.empty_strided(shape, stride, dtype=torch.float32, device=program.device).normal_(std=0.05, generator=source)
    return (made.abs() + 0.1 if one.role == "positive" else made).to(one.dtype)


def _table(ids: Tensor, experts: int, source: torch.Generator) -> Tensor:
    shares = torch.rand(ids.shape, generator=source, device=ids.device) + 0.1
    return torch.zeros((ids.shape[0], experts), device=ids.device).scatter(1, ids, shares)


def symbols(program: Program, tokens: int) -> dict[Any, int]:
    """Values of the program's symbolic sizes with which it has ``tokens`` tokens: all but the last leading size are one."""
    open_sizes = [size for size in program.tokens if not isinstance(size, int)]
    free: list[Any] = list(dict.fromkeys(s for size in open_sizes for s in sorted(size.free_symbols, key=str)))
    known: dict[Any, int] = dict.fromkeys(free[:-1], 1)
    rest = math.prod(number(s, {**known, **dict.fromkeys(free[-1:], 1)}) for s in program.tokens)
    if free and rest > 0 and tokens % rest == 0:
        known[free[-1]] = tokens // rest
    elif free:
        known[free[-1]] = 1
    if math.prod(number(s, known) for s in program.tokens) != tokens:
        raise NotComparableError(f"it was compiled for {' x '.join(map(str, program.tokens))} tokens, which cannot be {tokens}")
    return known


def number(size: Any, known: dict[Any, int]) -> Any:
    """A size with its symbols replaced.

    Raises:
        NotComparableError: a symbol has no value.
    """
    if isinstance(size, int | float):
        return size
    value = size.subs(known)
    if not value.is_number:
        raise NotComparableError(f"a size of it, {size}, is not a matter of the number of tokens")
    return bool(value) if value.is_Boolean else int(value)
