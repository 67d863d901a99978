"""Facts of small functions without compiling: torch.fx traces, fake tensors give every node its value, the rules run.

The names of a function's parameters say what they are: see :data:`INPUTS`. All sizes are different, so that no dimension is
taken for another by accident.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from moefuse.passes.graph.sizes import same
from moefuse.passes.infer.state import Context
from moefuse.passes.ir.axes import Axes, kinds
from moefuse.passes.ir.expr import show
from moefuse.passes.ir.facts import Lost, Rows
from moefuse.passes.match.interpret import interpret

T, K, E, H, I, B = 7, 2, 3, 5, 11, 13  # noqa: E741  (the letters of moefuse.spec; B is any other size)

INPUTS: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "x": ((T, H), torch.float32),
    "x2": ((T, H), torch.float32),
    "scores": ((T, E), torch.float32),
    "ids": ((T, K), torch.int64),
    "id": ((T,), torch.int64),
    "weights": ((T, K), torch.float32),
    "weight": ((T,), torch.float32),
    "w_in": ((E, 2 * I, H), torch.float32),
    "trained_in": ((E, 2 * I, H), torch.float32),
    "w_up": ((E, I, H), torch.float32),
    "w_out": ((E, H, I), torch.float32),
    "factor_a": ((E, 2, H), torch.float32),
    "factor_b": ((E, I, 2), torch.float32),
    "b_out": ((E, H), torch.float32),
    "one": ((I, H), torch.float32),
    "two": ((H, I), torch.float32),
    "one_b": ((I, H), torch.float32),
    "two_b": ((H, I), torch.float32),
    "one_c": ((I, H), torch.float32),
    "two_c": ((H, I), torch.float32),
    "vector": ((H,), torch.float32),
    "other": ((B, H), torch.float32),
    "grid": ((4, 6), torch.float32),
    "image": ((2, H, 4), torch.float32),
    "steps": ((4, 2, H), torch.float32),
    "image_ids": ((8, K), torch.int64),
    "ids_first": ((2, K, 4), torch.int64),
    "ids_of_steps": ((4, 2, K), torch.int64),
}


@dataclass
class Traced:
    """A traced function and what the rules found."""

    graph: torch.fx.Graph
    ctx: Context

    @property
    def returned(self) -> torch.fx.Node:
        node: Any = next(iter(self.graph.find_nodes(op="output"))).args[0]
        return node  # type: ignore[no-any-return]

    @property
    def fact(self) -> Any:
        """The fact of the returned value."""
        return self.ctx.facts.get(self.returned)


class _Tracer(torch.fx.Tracer):
    """Symbolic tracing that also records calls without a traced argument, and assignments by index."""


def call(function: Callable[..., Any], anchor: Any, *args: Any, **kwargs: Any) -> Any:
    """Record ``function(*args, **kwargs)``, also where fx cannot see it by itself; ``anchor`` is any traced value."""
    return anchor.tracer.create_proxy("call_function", function, args, kwargs)


def assign(target: Any, index: Any, value: Any) -> None:
    """``target[index] = value``."""
    call(operator.setitem, target, target, index, value)


def trace(function: Callable[..., Any]) -> Traced:
    """Run the rules over a function whose parameters are named as in :data:`INPUTS`."""
    graph = _Tracer().trace(function)
    names = list(inspect.signature(function).parameters)
    mode = FakeTensorMode(shape_env=ShapeEnv())
    with mode:
        feeds = {name: torch.empty(INPUTS[name][0], dtype=INPUTS[name][1]) for name in names}
        feeds |= {name: torch.nn.Parameter(feed) for name, feed in feeds.items() if name.startswith("trained")}
        for node in graph.nodes:
            if node.op == "placeholder":
                node.meta["example_value"] = feeds[node.target]
            elif node.op in ("call_function", "call_method"):
                args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["example_value"])
                method = node.op == "call_method"
                node.meta["example_value"] = getattr(args[0], node.target)(*args[1:], **kwargs) if method else node.target(*args, **kwargs)
    return Traced(graph, interpret(graph))


def fact_of(function: Callable[..., Any]) -> Any:
    """The fact of what a function returns."""
    return trace(function).fact


def letters(axes: Axes) -> str:
    """Kinds of atoms by dimension, size-one atoms left out: ``"tk f"``; ``"1"`` for a dimension without any."""
    return " ".join(kinds(tuple(a for a in axis if not same(a.size, 1))) or "1" for axis in axes)


def rows_of(function: Callable[..., Any]) -> tuple[str, str, str]:
    """(domain, axes, expression) of a function that must return rows."""
    fact = fact_of(function)
    assert isinstance(fact, Rows), f"{fact}"
    return fact.domain.name, letters(fact.axes), show(fact.expr)


def lost_code(function: Callable[..., Any]) -> str:
    """The first refusal of a function that must lose its routing somewhere."""
    found = [fact.code for node, fact in trace(function).ctx.facts.items() if isinstance(fact, Lost) and fact.node is node]
    assert found, "nothing was lost"
    return found[0]
