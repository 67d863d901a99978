"""Python floats that have changed between calls, which Dynamo makes inputs of a graph."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def compiled_for_their_values(gm: torch.fx.GraphModule) -> Iterator[None]:
    """Compile a graph in this block for the floats of this call.

    AOTAutograd makes a float a number where an operation takes no tensor for it (``clamp``), and asks for a guard as it does so. Its cache
    knows neither the number nor the guard: with a float that is in a product as well, what was compiled for 0.7 is taken for 0.3
    (torch 2.13). Inductor's own cache behind it sees the number in the graph.
    """
    if not has_floats(gm):
        yield
        return
    from torch._functorch import config

    with config.patch(enable_autograd_cache=False):
        yield


def has_floats(gm: torch.fx.GraphModule) -> bool:
    """Whether a graph reads a float of the program that is no constant."""
    return any(_of_program(node.meta.get("example_value")) for node in gm.graph.nodes)


def _of_program(value: object) -> bool:
    if not isinstance(value, torch.SymFloat):
        return False
    from torch.utils._sympy.symbol import SymT, symbol_is_type

    return any(symbol_is_type(symbol, SymT.FLOAT) for symbol in value.node.expr.free_symbols)
