"""Frames of ours: who observes one, and the classes that its graph and its side effects have in place of Dynamo's.

No other frame's have them, so nothing is asked there. ``SideEffects`` copies itself by its own class, and keeps it.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, Protocol

from torch import nn
from torch.fx import Node

from moefuse.capture.dynamo import armed, checkpoints, ddp, fresh_leaves, in_step, module_calls, parametrized, relations, told_apart

_KEPT = "moefuse_capture"
_SETTINGS = "moefuse_settings"


class Observer(Protocol):
    """What a traced frame is told; see moefuse/capture/frame.py."""

    registering: bool
    fused: bool
    related: Sequence[relations.Input]
    crossed: bool
    insists: bool

    def before(self, translator: Any) -> Any: ...
    def mutated(self, variable: Any) -> None: ...
    def compiling(self, environment: Any) -> None: ...
    def compiled(self, output: Any = None) -> None: ...
    def failed(self, error: Exception, translator: Any, again: bool = False) -> None: ...
    def rows(self, translator: Any, variable: Any) -> Any: ...
    def counted(self, translator: Any, ids: Any, args: Sequence[Any], named: Mapping[str, Any]) -> Any: ...
    def read(self, translator: Any, variable: Any) -> Any: ...
    def numbers(self, translator: Any, variable: Any) -> Any: ...
    def joins(self, environment: Any) -> bool: ...
    def outlived(self) -> None: ...
    def leaves_missed(self) -> None: ...
    def refused_before(self, found: Collection[Any]) -> None: ...
    def computed(self, translator: Any, nodes: Collection[Node]) -> bool: ...
    def registers(self, translator: Any, why: str) -> None: ...
    def unrelated(self, why: str) -> None: ...

    @property
    def cut(self) -> bool: ...
    @property
    def met(self) -> Sequence[relations.Input]: ...
    @property
    def traced(self) -> Collection[types.CodeType]: ...
    @property
    def scalars(self) -> bool: ...
    @property
    def numbers_traced(self) -> bool: ...
    @property
    def collects(self) -> bool: ...
    @property
    def makes_leaves(self) -> bool: ...
    @property
    def parametrizes(self) -> bool: ...
    @property
    def gave_up(self) -> bool: ...
    @property
    def erred(self) -> bool: ...
    @property
    def seen(self) -> set[str]: ...
    @property
    def apart(self) -> Callable[[nn.Module], Hashable] | None: ...


def of(home: Any) -> Observer | None:
    """The observer of a frame, from its OutputGraph or its TracingContext; None if it is not ours."""
    found: Observer | None = getattr(home, _KEPT, None)
    return found


def begin(output: Any, observer: Observer) -> None:
    """From here on ``observer`` is told of a frame."""
    setattr(output, _KEPT, observer)
    setattr(output.tracing_context, _KEPT, observer)
    output.__class__, output.side_effects.__class__ = classes()
    if observer.scalars:
        environment = output.shape_env
        setattr(output, _SETTINGS, environment.settings)
        environment.settings = dataclasses.replace(environment.settings, allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True)


@functools.cache
def classes() -> tuple[type, type]:
    """What the graph and the side effects of a frame of ours are."""
    from torch._dynamo.output_graph import OutputGraph
    from torch._dynamo.side_effects import SideEffects

    class ObservedGraph(OutputGraph):
        def compile_subgraph(self, *args: Any, **kwargs: Any) -> Any:
            if parametrized.active(self) or parametrized.keeps(self):
                _observer(self).registers(self.current_tx, "it is still there where the graph ends")
            return super().compile_subgraph(*args, **kwargs)

        def call_user_compiler(self, *args: Any, **kwargs: Any) -> Any:
            return _compile(self, _observer(self), lambda: super(ObservedGraph, self).call_user_compiler(*args, **kwargs))

    class ObservedEffects(SideEffects):
        def mutation(self, variable: Any) -> Any:
            _changes(self, variable)
            return super().mutation(variable)

        def store_attr(self, item: Any, name: str, *args: Any, **kwargs: Any) -> Any:
            _changes(self, item)
            output = self.output_graph_weakref()
            if parametrized.active(output):
                with parametrized.left(_observer(output), output):
                    parametrized.stored(output, item, name)
            return super().store_attr(item, name, *args, **kwargs)

        def should_allow_side_effects_in_hop(self) -> bool:
            return super().should_allow_side_effects_in_hop() and not checkpoints.inside(self.output_graph_weakref())

        def check_allowed_side_effect(self, variable: Any) -> Any:
            return checkpoints.written(self.output_graph_weakref(), variable) or super().check_allowed_side_effect(variable)

        def prune_dead_object_new(self, translator: Any) -> None:
            super().prune_dead_object_new(translator)
            if checkpoints.outlives(self, translator):
                _observer(translator.output).outlived()

    return ObservedGraph, ObservedEffects


def _observer(output: Any) -> Observer:
    found: Observer = getattr(output, _KEPT)
    return found


def _changes(effects: Any, variable: Any) -> None:
    output = effects.output_graph_weakref()
    if not parametrized.answering(output):
        _observer(output).mutated(variable)


def _compile(output: Any, observer: Observer, compile: Callable[[], Any]) -> Any:
    # The compiler shares the environment: with the flags, it would read numbers out of index tensors that it leaves alone without them.
    output.shape_env.settings = getattr(output, _SETTINGS, output.shape_env.settings)
    if fresh_leaves.missed(output):
        observer.leaves_missed()
    observer.compiling(output.shape_env)
    with ddp.split_last(output):
        compiled = compile()
    observer.compiled()
    if observer.related and (observer.crossed or observer.joins(output.shape_env)):
        why = relations.watch(output, observer.related)
        if why is not None:
            observer.unrelated(why)
    if observer.fused or observer.joins(output.shape_env) or checkpoints.collected(output) or observer.registering:
        module_calls.watch(output, observer.traced)
    if observer.apart is not None:
        told_apart.watch(output, observer.apart)
    armed.watch(output)
    in_step.watch(output)
    return compiled
