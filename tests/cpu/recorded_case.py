"""Graphs as Dynamo makes them, recorded while a model runs on fake tensors: a quarter of the time. For models that branch on no data."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.node import map_aggregate
from torch.overrides import TorchFunctionMode, resolve_name

_BOTH_WAYS = ("pow", "sub", "mul", "add", "truediv", "floordiv", "mod")
_OPERATORS = {
    f"__{name.strip('_')}__": getattr(operator, name)
    for name in (*_BOTH_WAYS, "getitem", "setitem", "and_", "or_", "xor", "rshift", "lshift", "eq", "ne", "invert")
}
_SWAPPED = {f"__r{name}__": f"__{name}__" for name in _BOTH_WAYS}


class _Recorder(TorchFunctionMode):
    """``nodes``: what stands for a tensor, by its identity, which ``alive`` keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.graph, self.nodes, self.alive = Graph(), dict[int, Node](), list[Any]()

    def input(self, name: str, value: Tensor) -> None:
        node = self.graph.placeholder(name)
        node.meta["example_value"] = value
        self._is(value, node)

    def _is(self, value: Any, node: Node) -> None:
        self.nodes[id(value)] = node
        self.alive.append(value)

    def node(self, value: Any) -> Any:
        return self.nodes[id(value)] if isinstance(value, Tensor) else value

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.__name__
        if name in ("__get__", "size", "dim") or not isinstance(out, Tensor | tuple | None):
            return out
        given, options = map_aggregate((args, kwargs or {}), self.node)
        made = self._call(func, name, given, options)
        made.meta["example_value"] = out
        for i, part in enumerate(out if isinstance(out, tuple) else ()):
            item = self.graph.call_function(operator.getitem, (made, i))
            item.meta["example_value"] = part
            self._is(part, item)
        if isinstance(out, Tensor):
            self._is(out, made)
        return out

    def _call(self, func: Any, name: str, given: tuple[Any, ...], options: dict[str, Any]) -> Node:
        if name in _SWAPPED:
            name, given = _SWAPPED[name], given[::-1]
        if name in _OPERATORS:
            return self.graph.call_function(_OPERATORS[name], given, options)
        is_method = (resolve_name(func) or "").startswith("torch.Tensor.")
        return self.graph.call_method(name, given, options) if is_method else self.graph.call_function(func, given, options)


def recorded(model: nn.Module, *given: Tensor) -> tuple[GraphModule, list[Tensor]]:
    """The graph of a call in which all sizes are numbers, and its inputs: those of the call, Parameters and buffers."""
    mode, recorder = FakeTensorMode(shape_env=ShapeEnv(allow_dynamic_output_shape_ops=True)), _Recorder()
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    inputs = [*given, *held.values()]
    fakes = [mode.from_tensor(t, static_shapes=True) for t in inputs]
    names = [*(f"l_x{i}_" for i in range(len(given))), *("l_self_parameters_" + n.replace(".", "_") for n in held)]
    for name, value in zip(names, fakes, strict=True):
        recorder.input(name, value)
    with mode, recorder:
        out = torch.func.functional_call(model, dict(zip(held, fakes[len(given) :], strict=True)), tuple(fakes[: len(given)]))
    recorder.graph.output((recorder.node(out),))
    return GraphModule({}, recorder.graph), inputs
