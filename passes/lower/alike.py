"""What every rank has alike beside experts that are spread: a rank's experts see the tokens of others, who must not miss what is theirs.

Parameters are alike, as data parallelism has them, and so is what is computed of Parameters alone. A buffer may be a statistic of a rank's
own tokens, and anything else may be made of these tokens: such a layer gathers, so that each rank reads its own.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.fx import Node

from moefuse.passes.graph.calls import call_of, tensor
from moefuse.passes.graph.named import named
from moefuse.passes.graph.op_classes import draws
from moefuse.passes.graph.sharded import NotLocalError, is_gathered
from moefuse.passes.graph.storage import Memory
from moefuse.runtime.groups import weight_of


def check_alike(values: Iterable[Node]) -> None:
    """Raises:
    NotLocalError: one of these may be another on other ranks.
    """
    left, seen, memory = list(values), set[Node](), None
    while left:
        node = left.pop()
        if node in seen:
            continue
        seen.add(node)
        if is_gathered(node):
            raise NotLocalError(
                f"it computes weights from all of {weight_of(node.args[-1])[1] or named(node)} in each call: only views of sharded weights "  # type: ignore[arg-type]
                "stay where they are"
            )
        memory = memory or Memory(node.graph)
        if not _made_alike(node) or any(memory.writes.get(name) for name in memory.storages(node)):
            raise NotLocalError(
                f"{named(node)} may differ from rank to rank: only Parameters are alike, and what is computed of them alone"
            )
        left += node.all_input_nodes


def _made_alike(node: Node) -> bool:
    if node.op in ("placeholder", "get_attr"):
        return isinstance(tensor(node), torch.nn.Parameter)
    call = call_of(node)
    return bool(node.all_input_nodes) and call is not None and not draws(call)
