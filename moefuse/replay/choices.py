"""The expert ids of a graph as inputs and outputs of it: what ``given`` says is taken, -1 leaves the choice to the router.

    values, ids = topk(scores, K)             ids' = where(given >= 0, given, ids)
    .. experts(x, ids, f(values)) ..    ->    .. experts(x, ids', f(gather(scores, ids'))) ..

Everything that the program computes of ids and values follows: normalised weights, losses, and the gradient of the scores, which is that of
the experts that were taken. Without given ids the values are the same, but for the last bit where Inductor fuses them with other code.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from moefuse import _torch_private
from moefuse.ops.schema import TAKES_IDS
from moefuse.passes.graph.module_names import ModuleNames
from moefuse.passes.graph.snapshot import copy_graph
from moefuse.passes.graph.symbols import unbacked
from moefuse.report.reused_code import nearest_parameter

_VIEWS = frozenset(("view", "reshape", "flatten", "contiguous", "long", "int", "to", "squeeze", "unsqueeze", "detach", "ravel"))

Sizes = Callable[[Sequence[Any]], tuple[int, ...]]


@dataclass(frozen=True)
class Choice:
    """Where one layer of a graph chooses its experts.

    Attributes:
        module: the layer, by the name that it has in the report.
        parameter: name of the Parameter nearest to it, by which layers are told apart that run the same code; empty if there is none.
        at: which of the graph's inputs that is.
        experts: E.
        top_k: K.
        shape: of the ids that the router gives, from the graph's inputs.
        device: where they are.
    """

    module: str
    parameter: str
    at: int
    experts: int
    top_k: int
    shape: Sizes
    device: torch.device


@dataclass(frozen=True)
class Opened:
    """A graph to compile, and ``choices`` in the order of the inputs and outputs that it has in addition.

    ``given``: example inputs for them. ``closed``: layer -> why its choice is none of these.
    """

    graph: GraphModule
    choices: list[Choice]
    given: list[Any]
    closed: dict[str, str]


def opened(gm: GraphModule, example_inputs: Sequence[Any]) -> Opened:
    """A rewritten graph with an input and an output for each choice of experts, behind those that it has. Dynamo goes on with ``gm``."""
    twin = GraphModule(gm, copy_graph(gm.graph))
    vars(twin).update({name: value for name, value in vars(gm).items() if name not in vars(twin)})
    twin.meta = gm.meta
    names = ModuleNames(_torch_private.traced())
    found = Opened(twin, [], [], {})
    _open_all(_Run(names, names.parameters() if names.roots else {}, example_inputs, gm.graph.find_nodes(op="placeholder"), found), twin)
    return found


@dataclass(frozen=True)
class _Run:
    """``top``: the inputs of the whole graph."""

    names: ModuleNames
    parameters: dict[int, str]
    example_inputs: Sequence[Any]
    top: Sequence[Node]
    found: Opened


def _open_all(run: _Run, gm: GraphModule) -> list[Node]:
    """What a graph, or a body that a checkpoint runs, has to be given in addition; it is returned as well."""
    given: list[Node] = []
    outs: list[Node] = []
    for node in list(gm.graph.nodes):
        if node.target in TAKES_IDS:
            made = _open_one(run, gm, node, outs)
        else:
            made = _open_body(run, gm, node)
        given += [g for g, _ in made]
        outs += [o for _, o in made]
    if outs:
        output = gm.graph.output_node()
        output.args = ((*output.args[0], *outs),)  # type: ignore[misc]
        gm.graph.lint()
        gm.recompile()
    return given


def _open_one(run: _Run, gm: GraphModule, op: Node, known: Sequence[Node]) -> list[tuple[Node, Node]]:
    root = _root(op.args[1])
    if root in known or _is_dispatched(root):
        return []
    stack = op.meta.get("nn_module_stack")
    module = run.names.of(stack) if stack else run.names.around(run.example_inputs)
    choice = _choice(run, op, root, module)
    if isinstance(choice, str):
        run.found.closed[module] = choice
        return []
    given = _input(gm, root.meta["example_value"])
    run.found.choices.append(choice)
    run.found.given.append(root.meta["example_value"])
    return [(given, _taken(gm, root, given))]


def _open_body(run: _Run, gm: GraphModule, call: Node) -> list[tuple[Node, Node]]:
    """A checkpoint's body is a graph of its own, which gets its inputs from the call and returns a tuple."""
    if call.target is not getattr(torch.ops.higher_order, "tag_activation_checkpoint", None):
        return []
    body: Any = call.args[0]
    inner = getattr(gm, str(body.target), None) if isinstance(body, Node) and body.op == "get_attr" else None
    if not isinstance(inner, GraphModule) or len(body.users) > 1:
        return []
    count = len(inner.graph.output_node().args[0])  # type: ignore[arg-type]
    made = []
    for at, wanted in enumerate(_open_all(run, inner)):
        given = _input(gm, wanted.meta["example_value"])
        call.args = (*call.args, given)
        with gm.graph.inserting_after(call):
            made.append((given, gm.graph.call_function(operator.getitem, (call, count + at))))
    return made


def _root(ids: Any) -> Any:
    """What ids are views of."""
    while isinstance(ids, Node) and ids.op in ("call_method", "call_function") and _name(ids) in _VIEWS and isinstance(ids.args[0], Node):
        ids = ids.args[0]
    return ids


def _name(node: Node) -> str:
    return node.target if isinstance(node.target, str) else str(getattr(node.target, "__name__", node.target))


def _value(node: Any) -> Any:
    return node.meta.get("example_value") if isinstance(node, Node) else None


def _is_dispatched(root: Any) -> bool:
    """Whether ids came from other ranks, for which they were chosen by the ids that were dispatched."""
    source: Any = root.args[0] if isinstance(root, Node) and _name(root) == "getitem" else None
    return isinstance(source, Node) and source.target is torch.ops.moefuse.ep_dispatch.default


def _chooser(root: Any) -> Node | None:
    """The top-k or argmax over the last dimension whose ids ``root`` is."""
    if not isinstance(root, Node):
        return None
    if _name(root) == "argmax":
        return root if _is_over_last(root, 1, None) else None
    chooser: Any = root.args[0] if _name(root) == "getitem" and root.args[1] == 1 else None
    if not isinstance(chooser, Node) or _name(chooser) not in ("topk", "topk.default"):
        return None
    return chooser if _is_over_last(chooser, 2, -1) else None


def _is_over_last(chooser: Node, place: int, default: int | None) -> bool:
    scores = _value(chooser.args[0])
    dim = chooser.kwargs.get("dim", chooser.args[place] if len(chooser.args) > place else default)
    return isinstance(scores, torch.Tensor) and dim in (-1, scores.dim() - 1)


def _choice(run: _Run, op: Node, root: Any, module: str) -> Choice | str:
    chooser = _chooser(root)
    scores = chooser.args[0] if chooser is not None else None
    weights = _reached(_weights(op), chooser or root)
    follows = isinstance(root, Node) and not _is_one_of_several(root) and root in weights
    if chooser is None and not follows:
        return "its experts are not the result of `topk` or `argmax` over the last dimension of scores"
    if chooser is not None and chooser not in weights and any(n.op == "placeholder" for n in weights):
        return "its routing weights are computed beside its choice of experts, and would be those of others"
    ids = _value(root)
    experts = _count(op) if scores is None else _value(scores).shape[-1]
    if not isinstance(experts, int) or ids.dtype not in (torch.int64, torch.int32):
        return "the number of its experts is not known"
    shape = _sizes(ids.shape, run.top)
    if shape is None:
        return "its number of tokens depends on data"
    flat = chooser is not None and root is chooser and not _keeps(chooser)
    at, name = nearest_parameter(module, run.parameters, run.example_inputs) or (-1, "")
    return Choice(module, name, at, experts, 1 if flat else int(ids.shape[-1]), shape, ids.device)


def _keeps(argmax: Node) -> bool:
    return bool(argmax.kwargs.get("keepdim", argmax.args[2] if len(argmax.args) > 2 else False))


def _is_one_of_several(node: Node) -> bool:
    return _name(node) == "getitem" and not isinstance(_value(node.args[0]), torch.Tensor)


def _weights(op: Node) -> Any:
    """The routing weights that belong to the ids of an op."""
    if op.target is torch.ops.moefuse.ep_dispatch.default:
        return op.args[0][1] if len(op.args[0]) > 1 else None  # type: ignore[index,arg-type]
    if op.target is not torch.ops.moefuse.permute.default:
        return op.args[2]
    orders = {user for user in op.users if _name(user) == "getitem" and user.args[1] == 1}
    combines = (n for n in op.graph.nodes if n.target is torch.ops.moefuse.combine.default and n.args[2] in orders)
    return next((n.args[1] for n in combines), None)


def _reached(node: Any, end: Any) -> set[Node]:
    """What a node is computed of; what ``end`` is computed of is left out."""
    seen: set[Node] = set()
    wanted = [node] if isinstance(node, Node) else []
    while wanted:
        node = wanted.pop()
        if node not in seen:
            seen.add(node)
            wanted += [] if node is end else node.all_input_nodes
    return seen


def _count(op: Node) -> Any:
    """E, where the op says it; None of tokens that travel to other ranks."""
    if op.target is torch.ops.moefuse.permute.default:
        return op.args[2]
    if op.target is torch.ops.moefuse.ep_dispatch.default:
        return None
    if op.target is torch.ops.moefuse.ep_experts.default:
        return _value(op.kwargs["place"]).shape[0] if op.kwargs["place"] is not None else None
    down: Any = op.args[5]
    return len(down) if len(down) > 1 else _value(down[0]).shape[0]


def _sizes(shape: Sequence[Any], placeholders: Sequence[Node]) -> Sizes | None:
    """The sizes of a call from the inputs of the graph; None if they are not functions of these."""
    if all(isinstance(size, int) for size in shape):
        known = tuple(int(size) for size in shape)
        return lambda _: known
    if any(unbacked(size) for size in shape):
        return None
    places: dict[Any, tuple[int, int]] = {}
    for at, node in enumerate(placeholders):
        value = node.meta.get("example_value")
        for dim, size in enumerate(value.shape) if isinstance(value, torch.Tensor) else [(-1, value)]:
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                places.setdefault(size.node.expr, (at, dim))
    wanted = [size.node.expr if isinstance(size, torch.SymInt) else size for size in shape]
    if any(symbol not in places for expr in wanted for symbol in getattr(expr, "free_symbols", ())):
        return None

    def sizes(args: Sequence[Any]) -> tuple[int, ...]:
        now = {symbol: args[at] if dim < 0 else args[at].shape[dim] for symbol, (at, dim) in places.items()}
        return tuple(expr if isinstance(expr, int) else int(expr.xreplace(now)) for expr in wanted)

    return sizes


def _input(gm: GraphModule, like: Any) -> Node:
    """Another input, behind those that there are."""
    last = gm.graph.find_nodes(op="placeholder")[-1]
    with gm.graph.inserting_after(last):
        made = gm.graph.placeholder(f"moefuse_given_{len(gm.graph.find_nodes(op='placeholder'))}")
    made.meta["example_value"] = like
    made._dynamo_source = None
    return made


def _taken(gm: GraphModule, root: Node, given: Node) -> Node:
    """The ids that the program goes on with, and the values that belong to them."""
    graph, chooser = gm.graph, _chooser(root)
    scores: Any = None
    if chooser is not None and chooser is not root:
        scores = chooser.args[0]
        chooser.append(root)
    with graph.inserting_after(root):
        is_given = graph.call_function(torch.ge, (given, 0))
    with graph.inserting_after(is_given):
        taken = graph.call_function(torch.where, (is_given, given, root))
    root.replace_all_uses_with(taken, delete_user_cb=lambda user: user is not taken)
    values = [n for n in (chooser.users if scores is not None and chooser is not None else ()) if _name(n) == "getitem" and n.args[1] == 0]
    with graph.inserting_after(taken):
        for value in values:
            again = graph.call_function(torch.gather, (scores, -1, taken))
            again.meta = dict(value.meta)
            value.replace_all_uses_with(again)
            graph.erase_node(value)
    taken.meta = dict(root.meta)
    return taken
