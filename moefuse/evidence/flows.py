"""What in a graph depends on what: which of the model's weights meet, kept for the last look at a call (``diagnosis/``).

Experts are told from equal layers by data: some value that a router's weight gave says which of them runs, or how much its result counts.
A graph that has both and does not let them meet is proof that there are none.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from moefuse import _torch_private
from moefuse.passes.graph.symbols import unbacked_in
from moefuse.program.breaks import place_in

_JOINS = frozenset(
    "mul multiply matmul mm bmm addmm baddbmm einsum tensordot linear bilinear dot where gather take_along_dim index_select getitem "
    "embedding index index_add index_put index_copy index_reduce setitem scatter scatter_add scatter_reduce masked_fill masked_scatter "
    "masked_select repeat_interleave split lerp addcmul pow div truediv segment_reduce grouped_mm _grouped_mm "
    "scaled_dot_product_attention".split()
)
"""Where one value says how much of another counts, or which part of it. Sums, differences and concatenations do not."""
_SIZES = frozenset("size shape dim numel stride len ndimension sym_size sym_numel getattr is_floating_point".split())
_VIEWS = frozenset(
    "getitem select narrow view reshape flatten unflatten transpose t permute squeeze unsqueeze chunk split expand detach".split()
)
_WRITES = frozenset(("setitem", "iadd", "imul", "isub", "itruediv"))
_KNOWN = frozenset(("aten", "prims", "prim", "moefuse", "inductor", "_c10d_functional", "fsdp"))


@dataclass(frozen=True)
class Step:
    """One operation on a value that is not the model's alone.

    Attributes:
        inputs: the numbers of the steps that it reads.
        held: identities of the model's tensors that it reads, through whatever is computed from those alone.
        joins: one of its arguments may weigh another, or choose from it.
        chosen: its result is integers or booleans.
        fused: it is an operation of moefuse.
        place: the user's ``file:line``, where ``joins``.
    """

    inputs: tuple[int, ...]
    held: frozenset[int]
    joins: bool
    chosen: bool
    fused: bool
    place: str = ""


@dataclass(frozen=True)
class Flow:
    """The steps of one graph, in order."""

    steps: tuple[Step, ...]

    def held(self, *, fused: bool) -> set[int]:
        """Identities of the model's tensors that operations of moefuse read, or that others do."""
        return {tensor for step in self.steps if step.fused is fused for tensor in step.held}

    def meeting(self, router: int | None, experts: Collection[int], *, by_choice: bool = False) -> str | None:
        """The user's ``file:line`` where a router decides about experts, empty if nobody knows it; None where it does not.

        Args:
            router: identity of its weight.
            experts: identities of theirs.
            by_choice: a choice decides, not only a weight for each.
        """
        scores: list[bool] = []
        picked: list[bool] = []
        outputs: list[bool] = []
        first: str | None = None
        for step in self.steps:
            own = not step.held.isdisjoint(experts)
            scores.append(router in step.held or any(scores[i] for i in step.inputs))
            picked.append(any(picked[i] for i in step.inputs) or (scores[-1] and step.chosen))
            outputs.append(own or any(outputs[i] for i in step.inputs))
            deciding = picked if by_choice else scores
            # What a router's values alone are computed into further is no choice among experts: those are layers behind each other.
            decides = any(deciding[i] and not outputs[i] for i in step.inputs)
            if step.joins and decides and any((own or outputs[i]) and (picked[i] or not scores[i]) for i in step.inputs):
                return step.place
            if own and first is None:
                first = next((self._before(i) for i in step.inputs if picked[i]), None)
        return first

    def _before(self, at: int) -> str:
        """The place of the last step up to ``at``, among those it reads, that takes something from something."""
        while not self.steps[at].place and self.steps[at].inputs:
            at = self.steps[at].inputs[0]
        return self.steps[at].place


def flow_of(gm: GraphModule, example_inputs: Sequence[object] | None) -> Flow:
    """The flow of one graph, the bodies of its higher-order operators in their places."""
    inputs = gm.graph.find_nodes(op="placeholder")
    tensors = dict(zip(inputs, example_inputs, strict=True)) if example_inputs is not None and len(example_inputs) == len(inputs) else {}
    reader = _Reader()
    reader.read(gm, {node: reader.given(node, tensors.get(node)) for node in inputs})
    return Flow(tuple(reader.steps))


_Value = tuple[tuple[int, ...], frozenset[int]]
"""Of a value: the steps that made it, and the identities of the model's tensors that it was computed from where those are all."""
_NOTHING: _Value = ((), frozenset())


class _Reader:
    def __init__(self) -> None:
        self.steps: list[Step] = []

    def given(self, node: Node, value: object) -> _Value:
        """What an input of the graph is: a tensor of the model's, or some value from outside."""
        model = isinstance(value, torch.nn.Parameter) or "_parameters_" in node.name or "_buffers_" in node.name
        return ((), frozenset((id(value),))) if model and isinstance(value, torch.Tensor) else self._step(node, (), frozenset())

    def read(self, gm: GraphModule, known: dict[Node, _Value]) -> _Value:
        """Note the steps of a graph; what it returns."""
        base: dict[Node, Node] = {}
        for node in gm.graph.nodes:
            if node.op == "output":
                return self._of([known.get(n, _NOTHING) for n in node.all_input_nodes])
            if node.op == "get_attr":
                value = getattr(gm, str(node.target), None)
                known[node] = ((), frozenset((id(value),))) if isinstance(value, torch.Tensor) else _NOTHING
            if node.op not in ("call_function", "call_method"):
                continue
            body = self._body(gm, node, known)
            if body is not None:
                known[node] = body
                continue
            name = _name(node)
            inputs, held = self._of([known.get(n, _NOTHING) for n in node.all_input_nodes])
            alone = not inputs and bool(held)
            known[node] = ((), held) if alone else self._step(node, inputs, held)
            target = node.args[0] if node.args and isinstance(node.args[0], Node) else None
            if target is not None and name in _VIEWS:
                base[node] = target
            if target is not None and not alone and _writes(node):
                # Whoever reads what is written to, or what that is a view of, reads what was written.
                written: Node | None = target
                while written is not None:
                    known[written] = known[node]
                    written = base.get(written)
        return _NOTHING

    def _of(self, values: list[_Value]) -> _Value:
        inputs = tuple(dict.fromkeys(i for steps, _ in values for i in steps))
        return inputs, frozenset().union(*(held for _, held in values))

    def _step(self, node: Node, inputs: tuple[int, ...], held: frozenset[int]) -> _Value:
        name, fused = _name(node), str(node.target).startswith("moefuse.")
        joins = node.op != "placeholder" and not fused and (name in _JOINS or _unknown(node))
        chosen = node.op != "placeholder" and name not in _SIZES and _integers(node.meta.get("example_value"))
        place = sys.intern(place_in(node.meta.get("stack_trace") or "")) if joins else ""
        self.steps.append(Step(inputs, held, joins, chosen, fused, place))
        return (len(self.steps) - 1,), frozenset()

    def _body(self, gm: GraphModule, node: Node, known: dict[Node, _Value]) -> _Value | None:
        """The result of an operator that runs a body on its other operands; None for any other."""
        bodies = [a for a in node.args if isinstance(a, Node) and a.op == "get_attr"]
        graphs = [b for b in (getattr(gm, str(a.target), None) for a in bodies) if isinstance(b, GraphModule)]
        rest = [a for a in node.args if isinstance(a, Node | tuple | list) and a not in bodies]
        operands = [b for a in rest for b in (a if isinstance(a, tuple | list) else (a,))]
        if not graphs or not all(isinstance(o, Node) for o in operands):
            return None
        results = []
        for graph in graphs:
            inputs = graph.graph.find_nodes(op="placeholder")
            if len(inputs) != len(operands):
                return None
            results.append(self.read(graph, {n: known.get(o, _NOTHING) for n, o in zip(inputs, operands, strict=True)}))  # type: ignore[arg-type]
        return self._of(results)


def _name(node: Node) -> str:
    """The operation's name without overload, and without the mark of one that writes."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    name = name.partition(".")[0]
    return name.rstrip("_") if not name.startswith("__") else name


def _writes(node: Node) -> bool:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name in _WRITES or (name.partition(".")[0].endswith("_") and not name.startswith("__"))


def _unknown(node: Node) -> bool:
    """Whether it is an operator of a library's own, or one that runs a function of the user's."""
    if isinstance(node.target, _torch_private.OpOverload | _torch_private.OpOverloadPacket):
        return str(node.target).partition(".")[0] not in _KNOWN
    return isinstance(node.target, _torch_private.HigherOrderOperator)


def _integers(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return any(map(_integers, value))
    if isinstance(value, torch.Tensor):
        return not (value.dtype.is_floating_point or value.dtype.is_complex)
    return isinstance(value, torch.SymInt | torch.SymBool | torch.SymFloat) and bool(unbacked_in(value))


__all__ = ["Flow", "Step", "flow_of"]
