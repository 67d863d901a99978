"""Graphs with nodes in front of what they read, as torch 2.11 leaves them where a hook is on a value whose size depends on data."""

from __future__ import annotations

from torch.fx import Graph, Node


def early(graph: Graph) -> Node | None:
    """The first node that stands in front of something that it reads; None in a graph that is in order."""
    seen: set[Node] = set()
    nodes: list[Node] = list(graph.nodes)
    for node in nodes:
        if not seen.issuperset(node.all_input_nodes):
            return node
        seen.add(node)
    return None


def put_right(graph: Graph) -> None:
    """Put each node behind what it reads, and nothing else. For a graph to be thrown away: nobody knows in which order it writes."""
    if early(graph) is None:
        return
    done: set[Node] = set()
    last: Node | None = None
    for root in list(graph.nodes):
        waiting = [root]
        while waiting:
            node = waiting[-1]
            missing = [given for given in node.all_input_nodes if given not in done]
            if missing:
                waiting += missing
                continue
            waiting.pop()
            if node not in done:
                done.add(node)
                if last is not None:
                    last.append(node)
                last = node


__all__ = ["early", "put_right"]
