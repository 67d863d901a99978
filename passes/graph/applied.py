"""Functions with a backward pass of their own (``autograd.Function``) that multiply rows by quantised weights.

Dynamo calls such a function with two bodies, those of forward and of backward. While a graph is read, the operations of forward stand in
the place of the call, so that rules see what is multiplied. What is not replaced is the call again afterwards: its backward pass is its
author's. Whether that is the gradient of the product is another question (``prove/backward.py``), which is answered before anything is
replaced.

Only calls of which one result is read, and one argument gets a gradient: where there are no rows, there is nothing then that has one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from moefuse import _torch_private
from moefuse.passes.graph.assumptions import DUMMY, Assumption
from moefuse.passes.graph.calls import call_of, tensor
from moefuse.passes.graph.op_classes import MODES, draws
from moefuse.passes.graph.writes import changed

APPLY = getattr(torch.ops.higher_order, "autograd_function_apply", None)
_KNOWN = frozenset(("non_differentiable_idx", "saved_for_backward_idx"))
_PACKED = frozenset((torch.int8, torch.uint8, torch.int16, torch.int32, torch.float8_e4m3fn, torch.float8_e5m2))
_PARTS = 2
"""How many parts forward returns: its results, and what it keeps for backward."""
_GRAD_MODE = "_set_grad_enabled"


@dataclass(frozen=True)
class Call:
    """A call of such a function as it was: its bodies' names, the arguments behind them, and the meta of the call and of its result."""

    target: Any
    names: tuple[str, str]
    given: tuple[Any, ...]
    kwargs: dict[str, Any]
    meta: tuple[dict[str, Any], dict[str, Any]]


@dataclass(eq=False)
class Applied:
    """Operations that stand for a call.

    Attributes:
        forward, backward: the bodies, of one result.
        rows: which of the arguments gets a gradient.
        nodes, result: the operations, and the one that gives the result.
    """

    call: Call
    forward: GraphModule
    backward: GraphModule
    rows: int
    nodes: list[Node]
    result: Node


@dataclass
class Functions:
    """Those of one graph."""

    found: list[Applied] = field(default_factory=list)

    def close(self, gm: GraphModule, now: Callable[[Node], Node]) -> None:
        """Call what was not replaced; ``now`` gives the node that an argument is by now."""
        for one in self.found:
            if not one.result._erased and one.result.users:
                _call(gm.graph, one, now)
            else:
                _forget(gm, one.call)
            for node in reversed(one.nodes):
                if not node._erased and not node.users:
                    gm.graph.erase_node(node)


def opened(gm: GraphModule, assumptions: Sequence[Assumption] = ()) -> Functions:
    """Let operations stand in the place of such calls, for capture's assumptions too."""
    nodes = [] if APPLY is None else list(gm.graph.find_nodes(op="call_function", target=APPLY))
    return Functions([one for node in nodes if (one := _opened(gm, node, assumptions)) is not None])


def _opened(gm: GraphModule, node: Node, assumptions: Sequence[Assumption]) -> Applied | None:
    forward, backward = (_body(gm, a) for a in node.args[:2])
    given, known = node.args[2:], not set(node.kwargs) - _KNOWN and not node.kwargs.get("non_differentiable_idx")
    if forward is None or backward is None or not known:
        return None
    single = _single(forward, backward)
    taken = [u for u in node.users if u.target is operator.getitem and u.args[1] == 0]
    trained = _trained(backward.graph, given, early=any(a.graph is forward.graph for a in assumptions))
    packed = any((value := tensor(a)) is not None and value.dtype in _PACKED for a in given)
    plain = len(forward.graph.find_nodes(op="placeholder")) == len(given) and all(isinstance(a, Node | int) for a in given)
    if len(trained) != 1 or not packed or not plain or not taken or len(taken) != len(node.users):
        return None
    if single is None or _result(single[0].graph) is None or not _computes(forward.graph) or not _gives_gradients(backward.graph):
        return None
    names = (str(node.args[0].target), str(node.args[1].target))  # type: ignore[union-attr]
    call = Call(node.target, names, given, dict(node.kwargs), (dict(node.meta), dict(taken[0].meta)))
    nodes, result = _inline(node, call, forward.graph, assumptions)
    return Applied(call, *single, trained[0], nodes, result)


def _body(gm: GraphModule, value: Any) -> GraphModule | None:
    body = getattr(gm, str(value.target), None) if isinstance(value, Node) and value.op == "get_attr" else None
    return body if isinstance(body, GraphModule) else None


def _single(forward: GraphModule, backward: GraphModule) -> tuple[GraphModule, GraphModule] | None:
    """The bodies with nothing but the first result, if backward reads the gradient of no other one.

    Behind those that are its own Dynamo has forward return what it computes on the way: torch 2.11 always, later ones after a side effect.
    """
    (out,) = forward.graph.find_nodes(op="output")
    results: Any = out.args[0]
    if len(results) != _PARTS or not results[0]:
        return None
    more = len(results[0]) - 1
    others = backward.graph.find_nodes(op="placeholder")[1 : 1 + more]
    if not more:
        return forward, backward
    if len(others) != more or any(n.users for n in others):
        return None
    return _copied(forward, ((results[0][0],), results[1])), _copied(backward, without=others)


def _copied(body: GraphModule, returned: Any = None, without: Sequence[Node] = ()) -> GraphModule:
    """A body that returns something else, or is not given all that it is."""
    graph, env = Graph(), dict[Node, Node]()
    for node in body.graph.nodes:
        if node not in without:
            env[node] = graph.node_copy(node, env.__getitem__)
    if returned is not None:
        (out,) = graph.find_nodes(op="output")
        out.args = (torch.fx.node.map_arg(returned, env.__getitem__),)
    return GraphModule(body, graph)


def _trained(backward: Graph, given: tuple[Any, ...], *, early: bool) -> list[int]:
    """Which arguments want a gradient, and get one. In a function that returns ``early`` nobody knows what backward would do then."""
    (out,) = backward.find_nodes(op="output")
    gradients: Any = out.args[0]
    wanted = [i for i, a in enumerate(given) if (value := tensor(a)) is not None and value.requires_grad]
    return [i for i in wanted if early or gradients[i] is not None]


def _result(graph: Graph) -> Node | None:
    """What forward returns, if that is one new tensor."""
    (out,) = graph.find_nodes(op="output")
    results: Any = out.args[0]
    return results[0][0] if isinstance(results[0][0], Node) and results[0][0].op != "placeholder" else None


def _computes(graph: Graph) -> bool:
    """Whether all that forward does is to compute, and to switch gradients off meanwhile."""
    for node in graph.nodes:
        call = call_of(node)
        if node.op in ("get_attr", "call_module") or isinstance(node.target, _torch_private.HigherOrderOperator):
            return False
        if call is not None and (call.inplace or draws(call) or (call.name in MODES and call.name != _GRAD_MODE)):
            return False
    return True


def _gives_gradients(graph: Graph) -> bool:
    """Whether all that backward does is to compute gradients."""
    calls = [call_of(node) for node in graph.nodes if not isinstance(node.target, _torch_private.HigherOrderOperator)]
    return len(calls) == len(graph.nodes) and not changed(graph) and not any(call is not None and draws(call) for call in calls)


def _inline(node: Node, call: Call, inner: Graph, assumptions: Sequence[Assumption]) -> tuple[list[Node], Node]:
    """Forward's operations in place of a call; and which of them gives the result."""
    graph, nodes = node.graph, list[Node]()
    env: dict[Node, Any] = dict(zip(inner.find_nodes(op="placeholder"), call.given, strict=True))
    with graph.inserting_before(node):
        for old in inner.nodes:
            found = None if old.meta.get(DUMMY) else call_of(old)
            if found is not None and found.name != _GRAD_MODE:
                env[old] = graph.node_copy(old, env.__getitem__)
                nodes.append(env[old])
    result: Node = env[_result(inner)]  # type: ignore[index]
    result.meta["example_value"] = call.meta[1].get("example_value")
    for assumption in assumptions:
        _assume(assumption, node, nodes, inner, env)
    for taken in list(node.users):
        taken.replace_all_uses_with(result)
        graph.erase_node(taken)
    bodies = [a for a in node.args[:2] if isinstance(a, Node)]
    graph.erase_node(node)
    for body in bodies:
        if not body.users:
            graph.erase_node(body)
    return nodes, result


def _assume(assumption: Assumption, node: Node, nodes: list[Node], inner: Graph, env: dict[Node, Any]) -> None:
    """What capture assumed of a call, or while it traced the body of forward, is assumed of the operations."""
    if node in assumption.nodes:
        assumption.nodes.update(nodes)
    if assumption.graph is inner:
        assumption.graph, assumption.returned = node.graph, env.get(assumption.returned)  # type: ignore[arg-type]
        assumption.nodes = {env[n] for n in assumption.nodes if env.get(n) in nodes}


def _call(graph: Graph, one: Applied, now: Callable[[Node], Node]) -> None:
    """The call again, for whoever reads its result."""
    call = one.call
    with graph.inserting_before(one.result):
        bodies = [graph.get_attr(name) for name in call.names]
        given = [now(a) if isinstance(a, Node) else a for a in call.given]
        node = graph.call_function(call.target, (*bodies, *given), call.kwargs)
        taken = graph.call_function(operator.getitem, (node, 0))
    node.meta, taken.meta = call.meta
    one.result.replace_all_uses_with(taken)


def _forget(gm: GraphModule, call: Call) -> None:
    """The bodies of a call that is not there any more, unless another one has them too."""
    named = {str(n.target) for n in gm.graph.find_nodes(op="get_attr")}
    for name in call.names:
        if name not in named and name in gm._modules:
            delattr(gm, name)


__all__ = ["Applied", "Call", "Functions", "opened"]
