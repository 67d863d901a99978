"""Activation checkpoints whose body writes to a list outside of it, as models do that collect scores of routers on the way.

Eager runs a body again in backward, and its writes with it. Dynamo does not, and so it traces no such body
(``HOP: Unsafe side effect``). Where the call itself has made what is written to, and nothing of that is left when it returns, nobody can
tell: backward comes later. So these writes are traced, and when the frame's graph is complete, what was written to has to be dead.

Only with ``use_reentrant=False``. The other kind of checkpoint runs its body without gradients first, so in eager what is collected has
none; in a graph it would have.

A body that asks what is in the list, and does other things the second time, is an error of its own in eager (torch sees other saved
tensors); in the graph backward computes what forward computed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

from moefuse.capture.dynamo import points

_OPEN, _WRITTEN = "moefuse_open_checkpoints", "moefuse_written_in_checkpoints"


def begin(variable: Any, translator: Any, kwargs: dict[str, Any]) -> contextlib.AbstractContextManager[None]:
    """What to trace a call of a checkpoint in, of a frame of ours.

    Args:
        variable: Dynamo's, for the checkpoint.
        translator: of the frame that calls it.
        kwargs: of the call.
    """
    from torch._dynamo import config

    if config.skip_fwd_side_effects_in_bwd_under_checkpoint:
        return contextlib.nullcontext()
    reentrant = kwargs.get("use_reentrant")
    told = reentrant is not None and reentrant.is_python_constant() and reentrant.as_python_constant() is False
    return _tracing(variable, translator.output, told and translator.output.current_tracer.parent is None)


@contextlib.contextmanager
def _tracing(variable: Any, output: Any, may_write: bool) -> Any:
    # One variable may stand for a checkpoint and for those in its body.
    before, opened = variable.allow_side_effects, getattr(output, _OPEN, False)
    variable.allow_side_effects = may_write
    setattr(output, _OPEN, may_write)
    # Dynamo leaves this out of a body that may write to anything; ours may not.
    try:
        with output.side_effects.defer_side_effect_checks() if may_write and points.has("deferred checks") else contextlib.nullcontext():
            yield
    finally:
        variable.allow_side_effects = before
        setattr(output, _OPEN, opened)


def inside(output: Any) -> bool:
    """Whether Dynamo traces the body of such a checkpoint, and none that is nested in it."""
    tracer = output.current_tracer if getattr(output, _OPEN, False) else None
    return tracer is not None and tracer.allow_side_effects_in_hop and tracer.parent is not None and tracer.parent.parent is None


def written(output: Any, item: Any) -> bool:
    """A body is about to write to ``item``: whether that is allowed until :func:`outlives` has the last word."""
    from torch._dynamo.variables.base import AttributeMutationNew, ValueMutationNew, is_side_effect_safe

    kind = item.mutation_type
    if not inside(output) or not isinstance(kind, AttributeMutationNew | ValueMutationNew) or is_side_effect_safe(kind):
        return False
    output.side_effects._maybe_record_side_effect(item)
    vars(output).setdefault(_WRITTEN, []).append(item)
    return True


def collected(output: Any) -> bool:
    """Whether the graph is whole only because such writes were traced."""
    return bool(vars(output).get(_WRITTEN))


def outlives(side_effects: Any, translator: Any) -> bool:
    """Whether the frame leaves behind anything that the body of a checkpoint has written to.

    Args:
        side_effects: Dynamo's, of which everything dead has just been removed.
        translator: where the graph ends.
    """
    made = vars(translator.output).get(_WRITTEN, [])
    if not made:
        return False
    from torch._dynamo.variables.base import AttributeMutationNew

    roots: list[Any] = [translator.output.backward_state, side_effects.tensor_hooks, side_effects.save_for_backward]
    roots += [v for v in side_effects.id_to_variable.values() if not isinstance(v.mutation_type, AttributeMutationNew)]
    frame = translator
    while frame is not None:
        roots += [frame.stack, frame.symbolic_locals]
        roots += [frame.post_prune_cell_and_freevars] if frame.parent is not None else []
        frame = frame.parent
    reached = _reached(side_effects, roots)
    # The frame of a generator holds what no walk over attributes finds.
    return any(found in made or type(found).__name__ == "LocalGeneratorObjectVariable" for found in reached)


def _reached(side_effects: Any, roots: Iterable[Any]) -> set[Any]:
    """All variables that can be reached from some."""
    from torch._dynamo.variables.base import VariableTracker

    seen: set[Any] = set()

    def visit(variable: Any) -> None:
        if variable not in seen:
            seen.add(variable)
            if variable in side_effects.store_attr_mutations:
                VariableTracker.visit(visit, side_effects.store_attr_mutations[variable])

    VariableTracker.visit(visit, list(roots))
    return seen
