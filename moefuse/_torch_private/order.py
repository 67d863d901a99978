"""The order in which Inductor runs what communicates, and what it may not take for dead."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def never_dead(op: Any) -> None:
    """Compilers keep every call of an operator, whoever reads its result: other ranks take part in it.

    Inductor takes out what a tensor without elements is computed by, which is all of a rank that has no tokens.
    """
    from torch.fx.node import has_side_effect

    has_side_effect(op)
    _never_dead.append(op)


_never_dead: list[Any] = []
"""What communicates."""


def communicates(gm: torch.fx.GraphModule) -> bool:
    """Whether other ranks take part in a graph, or in a part of it: the body of a checkpoint."""
    graphs = (part.graph for part in gm.modules() if isinstance(part, torch.fx.GraphModule))
    return any(node.target in _never_dead for graph in graphs for node in graph.nodes)


def keep_order() -> None:
    """From now on Inductor runs what communicates in the order of a graph.

    By itself it moves what does not depend on one another, so that memory is free early: by sizes, which differ from rank to rank. A call
    would meet another one of the other ranks then.
    """
    _lower_in_order(*_never_dead)


@functools.cache
def _lower_in_order(*ops: Any) -> None:
    """Each call waits for the one before it, as far as the order of a graph's code is concerned."""
    from torch._inductor import ir, lowering
    from torch._inductor.virtualized import V

    def lowered(op: Any) -> Callable[..., Any]:
        fallback = lowering.fallback_handler(op)

        def lower(*args: Any, **kwargs: Any) -> Any:
            graph: Any = V.graph
            known = len(graph.operations)
            out = fallback(*args, **kwargs)
            (kernel,) = (o for o in graph.operations[known:] if isinstance(o, ir.FallbackKernel))
            before = getattr(graph, "_moefuse_last", None)
            if before is not None:
                graph.additional_buffer_deps[kernel.operation_name].add(before)
            graph._moefuse_last = kernel.get_name()
            return out

        return lower

    for op in ops:
        lowering.register_lowering(op, type_promotion_kind=None)(lowered(op))
