"""What a run of a whole graph leaves behind, and how the outcomes of two runs differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from moefuse import _torch_private
from moefuse.errors import CODES
from moefuse.passes.graph.calls import call_of, location, module_path, tensor
from moefuse.passes.ir.regions import Region
from moefuse.passes.prove.forced import close, tolerance
from moefuse.passes.prove.surroundings import lowest, rms, same_bits
from moefuse.report.entries import Skipped


@dataclass(eq=False)
class Outcome:
    """What a run left.

    Attributes:
        outputs: in order; anything but a tensor as it is.
        shared: for each output the first of the inputs and outputs that has its storage.
        states: inputs and attributes as they are afterwards, by name.
        random: the states of the random number generators.
        gradients: by name; None where there is none. ``failed``: why there are no gradients at all.
    """

    outputs: list[Any]
    shared: list[int | None]
    states: dict[str, Tensor]
    random: list[Tensor]
    gradients: dict[str, Tensor | None]
    failed: str = ""


def shared(inputs: Sequence[Tensor], outputs: Sequence[Any]) -> list[int | None]:
    first: dict[int, int] = {}
    every = [*inputs, *outputs]
    for number, value in enumerate(every):
        if isinstance(value, Tensor) and (address := value.untyped_storage().data_ptr()):
            first.setdefault(address, number)
    return [first.get(o.untyped_storage().data_ptr()) if isinstance(o, Tensor) else None for o in outputs]


def differences(want: Outcome, got: Outcome, graph: Graph, regions: Sequence[Region], exact: bool) -> Iterator[Skipped]:
    """What differs, in the order in which a user would look for it."""
    (end,) = graph.find_nodes(op="output")
    nodes = _torch_private.tree_leaves(end.args[0])
    if len(want.outputs) != len(got.outputs):
        yield refusal("the number of outputs", f"{len(want.outputs)} became {len(got.outputs)}")
    for number, (a, b, node) in enumerate(zip(want.outputs, got.outputs, nodes, strict=False)):
        detail = _unequal(a, b, exact)
        if not detail and want.shared[number] != got.shared[number]:
            detail = "it shares memory with another tensor"
        if detail:
            yield refusal(f"output {number}", detail, node if isinstance(node, Node) else None)
    for name, state in want.states.items():
        detail = _unequal(state, got.states[name], exact) if name in got.states else ""
        if detail:
            yield refusal(f"`{name}` afterwards", detail, _writer(graph, name))
    if len(want.random) != len(got.random) or not all(map(torch.equal, want.random, got.random)):
        yield refusal("the state of the random number generator afterwards", "other numbers were drawn")
    for name, detail in _gradient_differences(want, got, regions):
        yield refusal(name, detail, regions[0].anchor if len(regions) == 1 else None)


def _unequal(a: Any, b: Any, exact: bool) -> str:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return "" if type(a) is type(b) and (a is b or a == b or a != a) else f"{a} became {b}"
    if a.requires_grad != b.requires_grad:
        return "it has a gradient" if b.requires_grad else "it has no gradient"
    if not exact or a.device.type != "cpu" or a.shape != b.shape or a.dtype != b.dtype:
        return close(a, b, a.dtype)  # a device may sum in any order
    return "" if same_bits(a.detach(), b.detach()) else close(a, b, a.dtype) or "its last bits differ"


def _gradient_differences(want: Outcome, got: Outcome, regions: Sequence[Region]) -> Iterator[tuple[str, str]]:
    """(Which gradient, how it differs.)"""
    if want.failed:
        return
    if got.failed:
        yield "the gradient", f"it now raises {got.failed}"
        return
    lows = [low for each in regions if (low := lowest_of(each)) is not None]
    largest = max((rms(g.double()) for g in want.gradients.values() if g is not None), default=0.0)
    for name, old in want.gradients.items():
        new = got.gradients.get(name)
        if old is None and new is None:
            continue
        old, new = (torch.zeros_like(other) if g is None else g for g, other in ((old, new), (new, old)))  # type: ignore[arg-type]
        dtype = max((old.dtype, *lows), key=lambda d: torch.finfo(d).eps)
        distance, size = rms((old - new).double()), rms(old.double())
        # What cancels (a router's bias in front of a softmax) has nothing but rounding left.
        if not distance <= tolerance(dtype, old.device.type) * size + 4 * torch.finfo(dtype).eps * largest or (
            got.gradients.get(name) is None and size > 0
        ):
            detail = "it is gone" if got.gradients.get(name) is None else f"it differs by {distance / (size + 1e-30):.2e} of its size"
            yield f"the gradient of `{name}`", detail


def _writer(graph: Graph, name: str) -> Node | None:
    """The first operation that writes to an input or an attribute, or to a view of it."""
    named = (n for n in graph.nodes if n.op in ("placeholder", "get_attr") and name in (_torch_private.source_name(n), str(n.target)))
    value = next((v for n in named if (v := tensor(n)) is not None), None)
    node: Node
    for node in graph.nodes if value is not None else ():
        call = call_of(node)
        for target in call.targets if call is not None else ():
            written = tensor(target)
            if written is not None and value is not None and _torch_private.same_storage(written, value):
                return node
    return None


def refusal(name: str, detail: str, at: Node | None = None) -> Skipped:
    place = (module_path(at), location(at)) if at is not None else ("", "")
    return Skipped("graph-differs", CODES["graph-differs"].format(name=name, detail=detail), *place)


def lowest_of(region: Region) -> torch.dtype | None:
    """The coarsest dtype that a region computes in; None for a result that is no float."""
    value = tensor(region.value)
    return lowest(region, value.dtype) if value is not None and value.dtype.is_floating_point else None
