"""``verify="graph"``: the whole graph before and after the rewrite, run on the same inputs, and all compared that its user may see.

Both run without compilation, on copies: inputs, parameters and buffers as they are but for a little noise, so that none is neutral.
Behind each fused result the rewritten graph goes on with the original's value (``forced.py``); then outputs, inputs, attributes and the
random state have to be the same bits, and gradients of a random linear functional are compared up to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from moefuse import _torch_private
from moefuse.errors import first_line
from moefuse.passes.graph.assumptions import Assumption
from moefuse.passes.graph.calls import call_of
from moefuse.passes.ir.regions import Region
from moefuse.passes.prove.copies import Copies, Drawn, inputs
from moefuse.passes.prove.forced import Forced
from moefuse.passes.prove.outcome import Outcome, differences, lowest_of, refusal, shared
from moefuse.passes.prove.runnable import ModuleState, Runnable, translated
from moefuse.report.entries import Skipped

if TYPE_CHECKING:
    from moefuse.passes.graph.snapshot import Saved


@dataclass(frozen=True)
class Verdict:
    """What came out: the first difference as a refusal, or a note why nothing was compared; nothing of both if the graphs agree."""

    difference: Skipped | None = None
    note: str = ""


def validate(
    saved: Sequence[Saved],
    gm: GraphModule,
    given: Sequence[object] | None,
    replaced: Sequence[tuple[Region, Node]],
    assumptions: Sequence[Assumption] = (),
) -> Verdict:
    """Compare a graph before and after.

    Args:
        saved: what the module of the graph, and those of the bodies inside it, were.
        gm: the module, rewritten.
        given: the example inputs; None if unknown.
        replaced: the fused regions, and the nodes that hold their results.
        assumptions: what capture assumed while it traced the graph.
    """
    copied = {old: new for s in saved for old, new in zip(s.nodes, s.graph.nodes, strict=True)}
    before = {s.module: ModuleState(s.graph, {**vars(s.module), **s.modules, **s.parameters, **s.buffers}) for s in saved}
    after = {m: ModuleState(m.graph, {**vars(m), **m._modules, **m._parameters, **m._buffers}) for m in before}
    about = [translated(a, copied) for a in assumptions]
    placeholders = gm.graph.find_nodes(op="placeholder")
    problem = ""
    for perturb in (True, False):
        forced, copies = Forced(), Copies(drawn := Drawn(perturb))
        old = Runnable(before, copies.of, about)
        try:
            module = old.make(gm)
            for number, (region, _) in enumerate(replaced):
                forced.record(number, _value(old.nodes[copied[region.anchor]]))
            want = _run(module, placeholders, given, copies, old)
            break
        except Exception as error:  # what the user's program raises on values that are not the user's, or outside of Dynamo
            problem = problem or f"{type(error).__name__}: {first_line(error)}"
    else:
        return Verdict(note=f'verify="graph": the graph does not run by itself, so only its regions were compared ({problem})')
    copies = Copies(drawn)
    new = Runnable(after, copies.of)
    module = new.make(gm)
    exact = True
    for number, (region, result) in enumerate(replaced):
        if result not in new.nodes:  # joined with something else since then
            exact = False
            continue
        forced.compare(number, new.nodes[result], lowest_of(region))
    try:
        got = _run(module, placeholders, given, copies, new)
    except Exception as error:
        return Verdict(refusal("it", f"it now raises {type(error).__name__}: {first_line(error)}"))
    for name, real in old.reals.items():
        got.states.setdefault(name, Copies(drawn).of(real, name))  # what is not read any more is as it was
    if forced.found is not None:
        number, detail = forced.found
        return Verdict(refusal("the result of the experts", detail, replaced[number][0].anchor))
    first = next(differences(want, got, before[gm].graph, [r for r, _ in replaced], exact), None)
    return Verdict(first, f'verify="graph": gradients were not compared ({want.failed})' if want.failed and first is None else "")


def _value(anchor: Node) -> Node:
    """The node whose value is complete behind the anchor."""
    call = call_of(anchor)
    return _behind(anchor, anchor.args[0]) if call is not None and call.name == "setitem" else anchor  # type: ignore[arg-type]


def _behind(node: Node, value: Node) -> Node:
    """A node for a value that is read only after ``node`` has run."""
    with node.graph.inserting_after(node):
        return node.graph.call_function(_same, (value,))


def _same(value: Tensor) -> Tensor:
    return value


def _run(module: GraphModule, placeholders: Sequence[Node], given: Sequence[object] | None, copies: Copies, made: Runnable) -> Outcome:
    """Run a copy of a graph once, and its gradient; nothing of the caller's random state or modes changes."""
    for inside in (m for m in module.modules() if isinstance(m, GraphModule)):
        inside.recompile()
    values = inputs(placeholders, given, copies)
    tensors = {_torch_private.source_name(n): v for n, v in values.items() if isinstance(v, Tensor)} | made.tensors
    devices = sorted({t.get_device() for t in tensors.values() if t.device.type == "cuda"})
    with torch.random.fork_rng(devices), torch.set_grad_enabled(torch.is_grad_enabled()):
        torch.manual_seed(0)
        result = module.forward(*values.values())
        random = [torch.get_rng_state(), *(torch.cuda.get_rng_state(d) for d in devices)]
    outputs = _torch_private.tree_leaves(result)
    together = shared([*tensors.values()], outputs)
    with torch.random.fork_rng(devices):
        gradients, failed = _gradients([*outputs, *tensors.values()], copies)
    outputs = [o.detach().requires_grad_(o.requires_grad) if isinstance(o, Tensor) and o.is_floating_point() else o for o in outputs]
    return Outcome(outputs, together, {n: t.detach() for n, t in tensors.items()}, random, gradients, failed)


def _gradients(values: Sequence[Any], copies: Copies) -> tuple[dict[str, Tensor | None], str]:
    """The gradient of a random linear functional of all values with respect to every tensor that has one."""
    ends = [v for v in values if isinstance(v, Tensor) and v.requires_grad and v.grad_fn is not None and v.dtype.is_floating_point]
    if not ends or not copies.leaves:
        return {}, ""
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(e.shape, generator=generator).to(e) for e in ends]
    try:
        found = torch.autograd.grad(ends, list(copies.leaves.values()), weights, allow_unused=True)
    except RuntimeError as error:
        return {}, first_line(error)
    return dict(zip(copies.leaves, found, strict=True)), ""
