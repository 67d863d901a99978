"""Calls of a layer with spread experts as a program is written, without a graph: all ranks make the same collectives in them.

What such a loop reads depends on its tokens: one that passes over experts without tokens reads no weight on a rank that has none, and
others would wait for it, in the call and in its backward pass. So each weight is gathered when the call begins, whatever the loop then
reads; and what comes out of a rank that read none has all of them behind it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from moefuse import _torch_private
from moefuse._torch_private import tree_flatten, tree_unflatten
from moefuse.parallel import hooked, views
from moefuse.parallel.shard import holders_of
from moefuse.runtime import pieces


def gathering_once(module: nn.Module) -> None:
    """Let every call of a module gather each weight once."""
    hooked.watch()
    kind = type(module)

    def as_written(self: Any, *args: Any, **kwargs: Any) -> Any:
        compiles = _torch_private.compiles_callees()
        if hooked.note(self, as_written) and compiles:  # what a frame was traced for may have gone
            return getattr(self, hooked.RUNS)(self, *args, **kwargs)
        with views.call(functools.partial(_gathered, self)) as reads, pieces.call() as made:
            if not compiles:
                reads.begin()
            return _ended(reads, made, kind.forward(self, *args, **kwargs))

    def whole(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Dynamo calls this where its graph breaks in the layer.
        return (kind.forward if torch.compiler.is_compiling() else as_written)(self, *args, **kwargs)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() and getattr(self, hooked.WHY):
            return getattr(self, hooked.RUNS)(self, *args, **kwargs)
        return whole(self, *args, **kwargs)

    for function in (as_written, whole):
        _torch_private.inlined_only(function)
    module.__class__ = views.subclass(kind, {"forward": forward, views.ONCE: staticmethod(as_written), hooked.WHY: ""}, "a layer")
    object.__setattr__(module, hooked.WHY, "")


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _ended(reads: views.Reads, made: list[str], out: Any) -> Any:
    """What a call gives: the weights are behind it, unless its tokens have travelled. Where nothing did, other ranks gather."""
    return _behind(out, reads.begin()) if reads.weights is not None or not made else out


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _gathered(layer: nn.Module) -> list[Tensor]:
    """All weights that the layer's experts have on other ranks, in the same order on each."""
    return [views.full(holder, own) for holder, held in holders_of(layer).items() for own in held.names.values()]


class _Behind(torch.autograd.Function):
    """A result as it is; gradients of these weights are asked for when its own is."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, *weights: Tensor) -> Tensor:
        ctx.count = len(weights)
        return out.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, *[None] * ctx.count


def _behind(out: Any, weights: list[Tensor]) -> Any:
    """What a call gives, with the weights behind it whose gradients it would not ask for."""
    wanted = {node: w for w in weights if (node := w.grad_fn) is not None} if torch.is_grad_enabled() else {}
    if not wanted:
        return out
    leaves, spec = tree_flatten(out)
    places = [at for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())]
    recorded = [at for at in places if leaves[at].requires_grad]
    changed = False
    for at in recorded or places[:1]:
        read = set(_read(leaves[at], wanted))
        unread = [weight for node, weight in wanted.items() if node not in read]
        if unread:
            leaves[at], changed = _Behind.apply(leaves[at], *unread), True  # type: ignore[no-untyped-call]
    return tree_unflatten(leaves, spec) if changed else out


def _read(out: Tensor, wanted: dict[Any, Tensor]) -> Iterator[Any]:
    """Those nodes that a result's gradient comes to; what was recorded before them is not looked at."""
    first = min(node._sequence_nr() for node in wanted)
    ahead, seen, left = [out.grad_fn], set(), len(wanted)
    while ahead and left:
        node = ahead.pop()
        if node is None or node in seen or (node not in wanted and node._sequence_nr() < first):
            continue
        seen.add(node)
        if node in wanted:
            left -= 1
            yield node
        else:
            ahead.extend(after for after, _ in node.next_functions)
