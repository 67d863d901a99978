"""Whatever looks for layers in a graph by the names of ops: each op that takes ids of experts is seen by it, or here is why not.

A new op in ``moefuse/ops/schema.py`` fails here until every feature sees it, or its reason is written down.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node

import moefuse.ops  # noqa: F401  (registers torch.ops.moefuse)
from moefuse.config import Options
from moefuse.ops.schema import SCHEMAS, TAKES_IDS
from moefuse.passes.block import router_topk, shared_experts
from moefuse.passes.lower import cost_gate, devices, recompute
from moefuse.passes.rules import RULES
from moefuse.replay import choices

T, H, I, E, K = 5, 6, 4, 3, 2  # noqa: E741
FAMILY = {str(op).split(".")[1]: op for op in TAKES_IDS}
SIZES: dict[str, tuple[int, ...]] = {"scores": (T, E), "x": (T, H), "w_in": (E, 2 * I, H), "w_out": (E, H, I)}
GIVEN: dict[str, Any] = {
    "scales": [1.0] * 3, "encodings": [""] * 3, "num_experts": E, "terms": "", "layer": "", "slots": 0, "limit": 0, "gating": "merged",
}  # fmt: skip


class Layer:
    """``ids`` of a top-k over ``scores``, and one op that takes them."""

    def __init__(self, op: Any) -> None:
        self.graph, self.mode = Graph(), FakeTensorMode()
        known = {name: self._input(name, shape) for name, shape in SIZES.items()}
        top = self._call(torch.topk, known["scores"], K)
        known["weights"], known["ids"] = (self._call(operator.getitem, top, i) for i in range(2))
        args, options = [], {}
        for a in op._schema.arguments:
            value = known.get(a.name, GIVEN.get(a.name))
            if str(a.type) == "List[Tensor]":
                value = [known["x"], known["weights"]] if a.name == "rows" else [value] if isinstance(value, Node) else []
            if not a.kwarg_only:
                args.append(value)
            elif a.name in GIVEN:
                options[a.name] = value
        self.node = self.graph.call_function(op, tuple(args), options)
        self.node.meta["example_value"] = known["x"].meta["example_value"]
        self.graph.output((self.node,))
        self.inputs = [n.meta["example_value"] for n in self.graph.find_nodes(op="placeholder")]

    @property
    def module(self) -> GraphModule:
        return GraphModule({}, self.graph)

    def _input(self, name: str, shape: tuple[int, ...]) -> Node:
        node = self.graph.placeholder(name)
        with self.mode:
            node.meta["example_value"] = torch.zeros(shape)
        return node

    def _call(self, function: Callable[..., Any], *args: Any) -> Node:
        node = self.graph.call_function(function, args)
        with self.mode:
            node.meta["example_value"] = function(*torch.fx.node.map_arg(args, lambda n: n.meta["example_value"]))
        return node


def _captured(layer: Layer) -> bool:
    return len(choices.opened(layer.module, layer.inputs).choices) == 1


def _is_recomputed(layer: Layer) -> bool:
    module = layer.module
    recompute.recompute(module)
    return any("recomputed" in str(n.target) or n.kwargs.get("recompute") for n in module.graph.nodes)


def _is_topk_replaced(layer: Layer) -> bool:
    return len(router_topk.one_kernel(layer.graph, Options())) == 1


def _name(layer: Layer) -> str:
    return str(layer.node.target).split(".")[1]


FEATURES: dict[str, Callable[[Layer], bool]] = {
    "routing capture and replay": _captured,
    "router's top-k": _is_topk_replaced,
    "recompute": _is_recomputed,
    "kernels of training": lambda layer: _name(layer) in devices._DIFFERENTIATED,
    "the call that kernels take": lambda layer: _name(layer) in devices._CALLS,
    "cost gate, warmup, workspace": lambda layer: cost_gate.experts_call([layer.node]) is layer.node,
    "shared experts beside": lambda layer: shared_experts._worth(layer.node, T),
    "programs that call it": lambda layer: f"moefuse::{_name(layer)}" in RULES,
}
TRAVELS = ("bounded_experts", "ep_experts", "ep_dispatch")
AGAIN = ("recomputed_experts",)
UNSEEN: dict[str, dict[tuple[str, ...], str]] = {
    "recompute": {
        ("permute",): "a note says so: they are grouped products around the program's own operations",
        ("bounded_experts", "ep_dispatch"): "a note says so: `moefuse.parallelize(..., bound=)` is for that",
    },
    "kernels of training": {
        (*AGAIN, *TRAVELS): "made of ops that are asked by themselves, or of what passed before tokens travelled",
    },
    "the call that kernels take": {("permute",): "providers take its arguments as they are", (*AGAIN, *TRAVELS): "no provider's op"},
    "cost gate, warmup, workspace": {
        ("experts_extended", "permute"): "nothing is measured of them: their kernels have tables or rules of their own",
        (*AGAIN, *TRAVELS): "they stand for an op that passed the gate",
    },
    "shared experts beside": {
        (
            "experts_extended",
            "permute",
            "bounded_experts",
            "ep_dispatch",
            *AGAIN,
        ): "they run in the order of the program: no stream is measured",
    },
    "programs that call it": {
        (*AGAIN, *TRAVELS): "moefuse writes them itself; a program that calls them keeps them",
    },
}
"""Feature -> ops that it does not see -> why."""


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("op", FAMILY)
def test_it_is_seen_or_told_why_not(op: str, feature: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_topk, "DEVICES", {"cpu"})
    monkeypatch.setattr(shared_experts, "DEVICES", {"cpu"})
    unseen = {name for names in UNSEEN.get(feature, {}) for name in names}
    seen = FEATURES[feature](Layer(FAMILY[op]))
    assert seen is (op not in unseen), f"{feature}: {'seen after all' if op in unseen else 'not seen'}"


def test_the_family_is_whole() -> None:
    """Ids of experts are the second argument of every op that has them, but of those that make other ids of them."""
    made_of_ids = {"ep_local_ids", "room"}
    named = {name for name in (schema.partition("(")[0] for schema in SCHEMAS) if "ids" in _arguments(name)}
    assert named == set(FAMILY) | made_of_ids


def _arguments(name: str) -> set[str]:
    return {a.name for a in getattr(torch.ops.moefuse, name).default._schema.arguments}
