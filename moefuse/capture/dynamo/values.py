"""What Dynamo knows about the values of the program that it traces: variables, their graph nodes, constants and symbols."""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node

from moefuse.passes.graph.symbols import unbacked
from moefuse.program.breaks import TORCH


def plain(variable: Any) -> Any:
    """A variable behind Dynamo's laziness, unless looking at it would be its first use."""
    from torch._dynamo.variables.lazy import LazyVariableTracker

    if isinstance(variable, LazyVariableTracker):
        return variable.realize() if variable.is_realized() else variable
    return variable


def _is_unseen(variable: Any) -> bool:
    from torch._dynamo.variables.lazy import LazyVariableTracker

    return isinstance(variable, LazyVariableTracker) and not variable.is_realized()


def realized(variable: Any) -> Any:
    """A variable behind Dynamo's laziness."""
    return variable.realize() if hasattr(variable, "realize") else variable


def tensor_node(variable: Any) -> Node | None:
    """The graph node of a tensor variable; None for anything else."""
    from torch._dynamo.variables.tensor import TensorVariable

    return variable.as_proxy().node if isinstance(variable, TensorVariable) else None


def symbol(variable: Any) -> Any:
    """The SymInt or SymBool of a symbolic number; None for anything else."""
    from torch._dynamo.variables.tensor import SymNodeVariable

    number = variable.sym_num if isinstance(variable, SymNodeVariable) else None
    return number if isinstance(number, torch.SymInt | torch.SymBool) else None


def number_node(variable: Any) -> Node | None:
    """The graph node of a symbolic number; None for anything else."""
    return variable.as_proxy().node if symbol(variable) is not None else None


def known(variable: Any) -> Any:
    """The graph node of a tensor or a symbolic number, or a constant integer itself; None for anything else."""
    variable = plain(variable)
    node = tensor_node(variable)
    node = number_node(variable) if node is None else node
    if node is not None:
        return node
    value = variable.as_python_constant() if is_constant(variable) else None
    return value if type(value) is int else None


def symbolic(variable: Any) -> bool:
    """Whether a variable is a number without a known value, or a list or tuple with one in it."""
    return bool(_numbers(variable))


def of_the_run(variable: Any) -> bool:
    """Whether a variable is, or has in it, a number whose value only the run knows."""
    return any(unbacked(number.sym_num) for number in _numbers(variable))


def _numbers(variable: Any) -> list[Any]:
    """The symbolic numbers that a variable is, or has in it."""
    from torch._dynamo.variables.tensor import SymNodeVariable

    variable = plain(variable)
    return [variable] if isinstance(variable, SymNodeVariable) else [n for item in items(variable) for n in _numbers(item)]


def contains(translator: Any, items: list[Any], search: Any) -> Any:
    """``search in items``, of which some are symbolic: equal to a constant among them, or to one of those, as a condition."""
    from torch._dynamo.variables.builder import SourcelessBuilder

    def call(function: Any, *arguments: Any) -> Any:
        return SourcelessBuilder.create(translator, function).call_function(translator, list(arguments), {})

    wanted = search.as_python_constant()
    if any(is_constant(plain(x)) and plain(x).as_python_constant() == wanted for x in items):
        return constant(True)
    return functools.reduce(functools.partial(call, operator.or_), [call(operator.eq, x, search) for x in items if symbolic(x)])


def negated(translator: Any, variable: Any) -> Any:
    """``not variable``."""
    from torch._dynamo.variables.builder import SourcelessBuilder

    return SourcelessBuilder.create(translator, operator.not_).call_function(translator, [variable], {})


def settled(variable: Any) -> Any:
    """A symbolic number as the constant that it is now, which is guarded; any other variable as it is."""
    from torch._dynamo.variables.tensor import SymNodeVariable

    return constant(variable.evaluate_expr()) if isinstance(plain(variable), SymNodeVariable) else variable


def number_like(variable: Any) -> bool:
    """Whether a variable is a number, known or not."""
    variable = plain(variable)
    return symbolic(variable) or (is_constant(variable) and isinstance(variable.as_python_constant(), int | float | complex))


def items(variable: Any) -> list[Any]:
    """What is in a list or tuple; nothing for anything else."""
    from torch._dynamo.variables.lists import BaseListVariable

    return list(variable.items) if isinstance(variable, BaseListVariable) else []


def members(variable: Any) -> list[Any]:
    """What ``in`` looks for a number among: the items of a list, a tuple or a view of a dictionary; nothing of a range."""
    from torch._dynamo.variables.lists import RangeVariable

    return [] if isinstance(variable, RangeVariable) else items(variable) or list(getattr(variable, "view_items_vt", ()))


def is_list_iterator(variable: Any) -> bool:
    """Whether a variable is the iterator of a list."""
    from torch._dynamo.variables.lists import ListIteratorVariable

    return isinstance(variable, ListIteratorVariable)


def is_iterator(variable: Any) -> bool:
    """Whether a variable is an iterator of any kind that Dynamo has a class for."""
    from torch._dynamo.variables.iter import IteratorVariable

    return is_list_iterator(variable) or isinstance(variable, IteratorVariable)


def iterates(variable: Any) -> bool:
    """Whether a variable is an iterator, known to Dynamo or not yet looked at; of generators only what they run counts."""
    variable = plain(variable)
    return is_iterator(variable) or (_is_unseen(variable) and isinstance(variable.original_value(), Iterator))


def is_generator(variable: Any) -> bool:
    """Whether a variable is a generator that nobody has listed."""
    from torch._dynamo.variables.functions import LocalGeneratorObjectVariable

    return isinstance(variable, LocalGeneratorObjectVariable)


def polyfilled(code: Any) -> bool:
    """Whether code is Dynamo's own, in place of a builtin function."""
    return "_dynamo/polyfills" in code.co_filename.replace("\\", "/")


def enumerates(code: Any) -> bool:
    """Whether code is that of ``enumerate``."""
    return code.co_name == "enumerate" and polyfilled(code)


def users(translator: Any) -> Any:
    """The translator of the user's code that runs a builtin function or one of torch's; the same one where no user's is around it."""
    found = translator
    while found.f_code.co_filename.startswith(TORCH) and getattr(found, "parent", None) is not None:
        found = found.parent
    return translator if found.f_code.co_filename.startswith(TORCH) else found


def asserted(translator: Any, variable: Any, holds: bool, text: str) -> bool:
    """Record an assertion about a tensor of one element, as Dynamo does where its message is a constant; whether it is one."""
    from torch._dynamo import config
    from torch._dynamo.variables.base import VariableTracker

    node = tensor_node(variable)
    value = node.meta.get("example_value") if node is not None else None
    if not isinstance(value, torch.Tensor) or any(type(size) is not int or size != 1 for size in value.shape):
        return False
    if not config.rewrite_assert_with_torch_assert or sys.flags.optimize or handles_errors(translator):
        return False
    checked = variable if holds else variable.call_method(translator, "logical_not", [], {})
    arguments = (checked.as_proxy(), VariableTracker.build(translator, text).as_proxy())
    translator.output.create_proxy("call_function", torch._assert_async, arguments, {})
    return True


def handles_errors(translator: Any) -> bool:
    """Whether what fails here may be caught by the program, or noted on the way (``try``, ``with``), in this frame or a caller's."""
    while translator is not None:
        instruction = translator.current_instruction
        if instruction is None or getattr(instruction, "exn_tab_entry", None) is not None:
            return True
        translator = getattr(translator, "parent", None)
    return False


def is_constant(variable: Any) -> bool:
    """Whether a variable is a plain Python constant."""
    from torch._dynamo.variables.constant import ConstantVariable

    return isinstance(variable, ConstantVariable)


def constant(value: object) -> Any:
    """A Python constant as Dynamo's variable."""
    from torch._dynamo.variables.constant import ConstantVariable

    return ConstantVariable.create(value)


def row_tensor(translator: Any, literal: object, like: torch.Tensor) -> Any:
    """``torch.tensor(literal)`` on the device of ``like``, recorded in the graph."""
    return call(translator, torch.tensor, literal, device=like.device, dtype=like.dtype)


def is_ndarray(variable: Any) -> bool:
    """Whether a variable is an array of NumPy's, which Dynamo traces as a tensor."""
    from torch._dynamo.variables.tensor import NumpyNdarrayVariable

    return isinstance(variable, NumpyNdarrayVariable)


def number_at(translator: Any, node: Node, index: int) -> Any:
    """``tensor[index].item()``, recorded in the graph."""
    return call(translator, operator.getitem, node, index).call_method(translator, "item", [], {})


def call(translator: Any, target: Any, *args: Any, **named: Any) -> Any:
    """The variable of a function of torch's, or a tensor's method (by name), of nodes and constants, recorded in the graph."""
    from torch._dynamo.variables.builder import wrap_fx_proxy

    given = [torch.fx.Proxy(a, translator.output.current_tracer) if isinstance(a, Node) else a for a in args]
    kind = "call_method" if isinstance(target, str) else "call_function"
    return wrap_fx_proxy(translator, translator.output.create_proxy(kind, target, tuple(given), named))


def with_numbers(translator: Any, variable: Any) -> Any:
    """A list or tuple in which tensors of one integer are numbers, recorded in the graph; any other variable as it is."""
    found = items(plain(variable))
    if not any(map(_one_integer, found)):
        return variable
    return new_list([plain(i).call_method(translator, "item", [], {}) if _one_integer(i) else i for i in found])


def _one_integer(variable: Any) -> bool:
    node = tensor_node(plain(variable))
    value = None if node is None else node.meta.get("example_value")
    return isinstance(value, torch.Tensor) and not value.dim() and value.dtype in (torch.int64, torch.int32)


def new_list(items: list[Any]) -> Any:
    """A new Python list."""
    from torch._dynamo.variables.base import ValueMutationNew
    from torch._dynamo.variables.lists import ListVariable

    return ListVariable(items, mutation_type=ValueMutationNew())


def new_tuple(items: list[Any]) -> Any:
    """A new Python tuple."""
    from torch._dynamo.variables.base import ValueMutationNew
    from torch._dynamo.variables.lists import TupleVariable

    return TupleVariable(items, mutation_type=ValueMutationNew())


def graph_of(translator: Any) -> torch.fx.Graph:
    """The graph that is being written: the frame's, or that of a higher-order operator's body."""
    return translator.output.current_tracer.graph  # type: ignore[no-any-return]


def whole_graph_of(translator: Any) -> torch.fx.Graph:
    """The frame's graph."""
    return translator.output.root_tracer.graph  # type: ignore[no-any-return]


def python_state(translator: Any) -> tuple[object, ...]:
    """Parts of a frame's state that are neither variables nor nodes, to compare."""
    output = translator.output
    return len(translator.block_stack), len(getattr(output, "random_calls", ())), len(translator.exn_vt_stack)
