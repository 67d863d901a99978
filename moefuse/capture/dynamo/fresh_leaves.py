"""Tensors that a call makes with ``requires_grad=True``, as dispatchers make their zeros: leaves whose gradients nobody can read.

Dynamo breaks the graph there. A program cannot tell such a leaf from a tensor without gradients if it is gone when the graph ends, and all
that leaves the graph has gradients for other reasons. So it is traced as the leaf that it is (questions, and writes that eager forbids,
are answered as in eager), and the graph makes it without ``requires_grad``. When the graph is complete, what leaves it is followed back
through autograd's own record of the traced values.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from moefuse import _torch_private

_MADE = "moefuse_fresh_leaves"
_FLAG = "requires_grad"


def asked(called: object, kwargs: Mapping[str, Any]) -> bool:
    """Whether a function or method of torch's is told to make a leaf, outside of transforms, which count their own gradients."""
    torchs = isinstance(called, types.BuiltinFunctionType) or (isinstance(called, str) and called.startswith("new_"))
    return torchs and _FLAG in kwargs and told((), kwargs)


def told(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether ``requires_grad_(*args, **kwargs)`` makes a leaf, and outside of transforms, which count their own gradients."""
    flags = [*args, *(kwargs[name] for name in kwargs if name == _FLAG)]
    told = all(flag.is_python_constant() and flag.as_python_constant() is True for flag in flags)
    return told and len(flags) < 2 and not _torch_private.transform()


def make(output: Any, call: Callable[[dict[str, Any]], Any], kwargs: dict[str, Any], given: Iterable[Any]) -> Any:
    """The variable of a leaf.

    Args:
        output: Dynamo's record of the graph.
        call: traces the call with other keyword arguments.
        kwargs: those of the program.
        given: the variables that the call is given.
    """
    made = call({name: value for name, value in kwargs.items() if name != _FLAG})
    others = {_storage(value) for value in map(_traced, (*given, *kwargs.values())) if value is not None}
    # A result that is not new (``asarray``), or whose elements have no gradient, is left to torch.
    return made if turn(output, made, others) else call(kwargs)


def turn(output: Any, variable: Any, others: Iterable[Any] = ()) -> bool:
    """Make a leaf of a tensor that was made in the graph, and whose memory is nobody else's (``others``); whether it is one now."""
    value = None if getattr(variable, "source", None) is not None else _traced(variable)
    if value is None or value.requires_grad or value._is_view() or not (value.is_floating_point() or value.is_complex()):
        return False
    if _storage(value) in others:
        return False
    value.requires_grad_()
    variable.requires_grad = True
    vars(output).setdefault(_MADE, []).append(value)
    return True


def made(output: Any) -> bool:
    """Whether the graph makes such leaves."""
    return bool(vars(output).get(_MADE))


def missed(output: Any) -> bool:
    """Whether the program could tell that the graph's leaves have no gradients: what leaves it has some only because of them."""
    if not made(output):
        return False
    if output.side_effects.tensor_hooks or output.backward_state:
        return True
    nodes = list(output.graph.nodes)
    if any(_differentiates(node) for node in nodes):
        return True
    ours: list[Any] = vars(output)[_MADE]
    inputs = [value for node in nodes if node.op == "placeholder" and (value := _value(node)) is not None and value.requires_grad]
    results = [value for node in nodes[-1].all_input_nodes if (value := _value(node)) is not None and value.requires_grad]
    ends = {value.grad_fn for value in inputs if value.grad_fn is not None}
    written = any(_reaches(value, lambda _, leaf: _among(leaf, ours)) for value in inputs)
    return written or not all(_reaches(value, lambda step, leaf: step in ends or _among(leaf, inputs)) for value in results)


def _differentiates(node: Node) -> bool:
    """Whether a node asks for gradients in the graph."""
    return node.target in (torch.autograd.grad, torch.autograd.backward, "backward", "retain_grad") or "hook" in str(node.target)


def _reaches(value: Any, end: Callable[[Any, Any], bool]) -> bool:
    """Whether what a value is differentiated by has some end; that is asked of each step, and of the leaf behind it, if any."""
    if value.grad_fn is None:
        return end(None, value)
    steps, seen = [value.grad_fn], set()
    while steps:
        step = steps.pop()
        if step is None or step in seen:
            continue
        if end(step, getattr(step, "variable", None)):
            return True
        seen.add(step)
        steps += [following for following, _ in step.next_functions]
    return False


def _among(leaf: Any, values: list[Any]) -> bool:
    return leaf is not None and any(leaf is value for value in values)


def _value(node: Node) -> Any:
    value = node.meta.get("example_value")
    return value if isinstance(value, torch.Tensor) else None


def _traced(variable: Any) -> Any:
    """The value of a variable that is a tensor of the graph; None of any other."""
    from torch._dynamo.variables.tensor import TensorVariable

    known = getattr(variable, "realize", lambda: variable)()
    return _value(known.as_proxy().node) if isinstance(known, TensorVariable) else None


def _storage(value: Any) -> Any:
    return value.untyped_storage()._cdata
