"""Statements that write to the memory of ``{v}``: every in-place method, ``out=``, ``inplace=`` and list function that torch has."""

from __future__ import annotations

import functools
import inspect
import random
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.programs.effects.views import NAMES

ARGUMENTS = (
    "", "0.5", "0.25", "1", "2", "0", "-1", "{v}", "{v} * 0.5", "{v} == {v}, 0", "0, 1", "0, 0, 1", "min=0.2", "max=1", "{v}, {v}",
    "0, {v}.new_zeros(1, dtype=torch.long), 0", "0, {v}.new_zeros(1, dtype=torch.long), {v}[:1] * 0.5", "torch.zeros_like({v})",
    "0, torch.zeros_like({v}, dtype=torch.long), 1", "0, torch.zeros_like({v}, dtype=torch.long), {v} + 1",
    "({v}.new_zeros(1, dtype=torch.long),), {v}[:1] + 1", "{v} == {v}, {v} + 1",
)  # fmt: skip

WRITTEN_BY_HAND = (
    "{v}[...] = 1", "{v}[:] = {v}.flip(0)", "{v}[0] = 1", "{v}[-1:] = 0", "{v}[..., 0] = 1", "{v}[..., -1] *= 2", "{v}[{v} > 0] = 1",
    "{v} += 1", "{v} *= 2", "{v} -= {v}", "{v} //= 2", "{v}[::2] = 0", "{v}.copy_({v}.flip(0))", "{v}.copy_({v} * 0.5)",
    "torch.ops.moefuse_effects.scale({v}, 2.0)", "torch.ops.moefuse_effects.swap({v}, {v}.clone() * 2)",
    "torch.nn.init.constant_({v}, 1)", "torch.nn.init.zeros_({v})", "{v}.detach().numpy()[...] = 1", "{v}.numpy(force=True)[...] = 0",
    "np.multiply({v}.detach().numpy(), 2, out={v}.detach().numpy())", "np.asarray({v}.detach())[..., :1] = 0",
    "torch._foreach_copy_([{v}], [{v} * 2])", "torch._foreach_mul_([{v}, {v}.clone()], 2)", "torch.add({v}, {v}, out={v})",
    "torch.mul(input={v}, other=2, out={v})", "torch.where({v} > 0, {v}, {v} + 1, out={v})",
    "{v}.index_fill_(0, {v}.new_zeros(1, dtype=torch.long), 1)", "torch.stack([{v}[0]], out={v}[:1])", "{v}.set_({v} * 2)",
    "{v}.data = {v}.data * 2", "{v}.__setitem__(0, 1)", "{v}.__imul__(2)", "torch.ops.aten.copy_({v}, {v} * 2)",
    "torch.ops.aten.add_.Tensor({v}, {v})", "{v}.scatter_reduce_(0, torch.zeros_like({v}, dtype=torch.long), {v}, 'sum')",
)  # fmt: skip


@torch.library.custom_op("moefuse_effects::scale", mutates_args=("x",))
def scale(x: Tensor, by: float) -> None:
    x.mul_(by)


@torch.library.custom_op("moefuse_effects::swap", mutates_args=("first", "second"))
def swap(first: Tensor, second: Tensor) -> None:
    kept = first.clone()
    first.copy_(second)
    second.copy_(kept)


scale.register_fake(lambda x, by: None)
swap.register_fake(lambda first, second: None)


def executed(statement: str, v: Tensor) -> bool:
    """Run a statement on ``v``; whether it can be."""
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        try:
            exec(statement.replace("{v}", "v"), {**NAMES, "F": F, "v": v})
        except Exception:
            return False
    return True


def _forms() -> Iterator[tuple[str, str]]:
    """(name, statement): everything that might write to ``{v}``."""
    for name in dir(Tensor):
        if name.endswith("_") and not name.startswith("_") and name not in ("requires_grad_", "share_memory_", "set_", "resize_"):
            yield from ((name, f"{{v}}.{name}({given})") for given in ARGUMENTS)
    for name in dir(torch):
        if name.startswith("_foreach_") and name.endswith("_"):
            yield from ((name, f"torch.{name}([{{v}}]{', ' if given else ''}{given})") for given in ("", "0.5", "2", "[{v}]", "[0.5]"))
        elif hasattr(Tensor, name + "_"):
            yield from ((name, f"torch.{name}({{v}}{', ' if given else ''}{given}, out={{v}})") for given in ("", "0.5", "2", "{v}"))
    for name in dir(F):
        if "inplace" in _parameters(getattr(F, name)):
            yield name, f"F.{name}({{v}}, inplace=True)"


def _parameters(function: Any) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return ()


@functools.cache
def writes(integers: bool) -> dict[str, tuple[str, ...]]:
    """Statements that change a matrix of numbers, or of integers, by the name of what they call."""
    found: dict[str, dict[str, None]] = {}
    sample = torch.tensor([[1, 2], [0, 2], [2, 1]]) if integers else torch.linspace(-1, 1.5, 6, dtype=torch.float64).view(3, 2)
    for name, statement in (*_forms(), *((text, text) for text in WRITTEN_BY_HAND)):
        if _changes(statement, sample):
            found.setdefault(name, {})[statement] = None
    return {name: tuple(statements) for name, statements in found.items()}


def _changes(statement: str, sample: Tensor) -> bool:
    """Whether a statement leaves other values in the same memory, and says the same whenever it runs."""
    results = []
    for _ in range(2):
        base = sample.clone()
        if not executed(statement, base.view(base.shape)) or not base.isfinite().all():
            return False
        results.append(base)
    return not torch.equal(results[0], sample) and torch.equal(*results)


def write(rng: random.Random, integers: bool) -> str:
    """Some statement that writes to ``{v}``; it may not fit the shape that ``{v}`` has."""
    table = writes(integers)
    return rng.choice(table[rng.choice(list(table))])
