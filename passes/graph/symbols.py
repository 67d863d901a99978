"""Sizes and numbers that are symbols: which of them only the run knows, what is known of them, and what inputs are in this call."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch


def unbacked(value: Any) -> set[Any]:
    """Symbols in a size or a tensor's shape whose values only the run knows."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return set(free_unbacked_symbols(value))


def expression(number: Any) -> Any:
    """The expression of a size or a condition on sizes; ``u // 8`` is a fraction in it where the program needs a multiple of 8."""
    import sympy  # here: importing moefuse must stay cheap
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    expr = sympy.sympify(getattr(number.node, "expr", None))
    if expr is None:
        return None
    floors = [f for f in expr.atoms(sympy.Function) if type(f).__name__ == "FloorDiv" and f.args[1].is_Integer]
    environment = number.node.shape_env
    exact = [f for f in floors if statically_known_true(environment.create_symintnode(f.args[0], hint=None) % int(f.args[1]) == 0)]
    return expr.subs({f: f.args[0] / f.args[1] for f in exact})


def always(condition: Any, environment: Any) -> bool:
    """Whether a condition (an expression) holds for all sizes of the inputs that the graph is guarded to have."""
    import sympy  # here: importing moefuse must stay cheap

    if condition == sympy.true:
        return True
    # What is known of a size that only the run knows may be known from the very condition.
    if not isinstance(condition, sympy.Ge | sympy.Gt | sympy.Le | sympy.Lt) or unbacked(condition):
        return False
    bounds = environment.bound_sympy(condition.gts - condition.lts)
    return bool(bounds.lower > 0 if isinstance(condition, sympy.Gt | sympy.Lt) else bounds.lower >= 0)


def undecided(number: Any) -> bool:
    """Whether the bounds that are known of sizes leave it open if a condition on them holds."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return not isinstance(number, torch.SymBool) or not (statically_known_true(number) or statically_known_true(torch.sym_not(number)))


def hint(size: Any) -> int | None:
    """What a size of an input is in the call that is compiled; None of one that only the run knows."""
    known = None if unbacked(size) else size.node.hint
    return int(known) if isinstance(known, int) else None


def example_of(node: Any) -> Any:
    """What an input of Dynamo's graph is in this call; None where it does not say."""
    given = node.meta.get("grapharg")
    return None if given is None else given.example


def marked_dims(node: Any) -> Collection[int]:
    """Dimensions of an input of which the user says that they are dynamic; a guard for one number there is an error to Dynamo."""
    return getattr(example_of(node), "_dynamo_dynamic_indices", ())


def inputs_of(graph: Any) -> dict[int, str]:
    """The tensors that a graph is given: their identities, and their names in it, which Dynamo makes from those in the program."""
    given = {node: example_of(node) for node in graph.nodes if node.op == "placeholder"}
    return {id(example): node.target for node, example in given.items() if isinstance(example, torch.Tensor)}


def unbacked_in(value: Any) -> set[Any]:
    """Such symbols in whatever a node's value is: a tensor, a number, or a tuple of them."""
    if isinstance(value, tuple | list):
        return {symbol for item in value for symbol in unbacked_in(item)}
    return unbacked(value) if isinstance(value, torch.Tensor | torch.SymInt | torch.SymBool | torch.SymFloat) else set()


def known_tensor(value: Any) -> torch.Tensor | None:
    """The value of a one-element fake tensor that was computed from constants alone."""
    known = getattr(value, "constant", None)
    return known if isinstance(known, torch.Tensor) and known.numel() == 1 else None
