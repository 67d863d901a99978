"""The ``ctx`` of an ``autograd.Function``, as Dynamo traces it: what forward notes there for backward."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

_FIELDS = ("non_differentiable", "dirty_tensors")


def contexts(translator: Any, variables: Iterable[Any]) -> list[Any]:
    """Those of some variables that are the ``ctx`` of a function that the program is in the middle of, and that no object holds."""
    from torch._dynamo.variables.base import AttributeMutationNew
    from torch._dynamo.variables.misc import AutogradFunctionContextVariable

    found = [v for v in variables if isinstance(v, AutogradFunctionContextVariable) and isinstance(v.mutation_type, AttributeMutationNew)]
    if not found:
        return []
    stored = {id(value) for attributes in translator.output.side_effects.store_attr_mutations.values() for value in attributes.values()}
    return [v for v in found if id(v) not in stored]


def noted(translator: Any, context: Any) -> tuple[Any, ...]:
    """What has been noted in a ``ctx``: attributes, saved tensors, and which results have no gradients."""
    saved = getattr(context, "saved_tensors", None)
    stored = translator.output.side_effects.store_attr_mutations.get(context)
    fields = {name: getattr(context, name) for name in _FIELDS if hasattr(context, name)}
    return None if stored is None else dict(stored), None if saved is None else list(saved.tensors), fields


def put_back(translator: Any, context: Any, before: tuple[Any, ...]) -> None:
    """Let a ``ctx`` have what :func:`noted` found."""
    stored, saved, fields = before
    every = translator.output.side_effects.store_attr_mutations
    if stored is None:
        every.pop(context, None)
    else:
        every[context] = stored
    if saved is not None:
        context.saved_tensors.tensors = saved
    for name, value in fields.items():
        setattr(context, name, value)
