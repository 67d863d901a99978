"""``moefuse.capture_routing`` and ``moefuse.replay_routing``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from moefuse.capture.dynamo import armed
from moefuse.errors import RoutingError
from moefuse.replay import blocks, calls
from moefuse.replay.blocks import Context, Routing
from moefuse.replay.words import call_it, count
from moefuse.report import history


@contextmanager
def capture_routing(model: nn.Module) -> Iterator[Routing]:
    """Note which experts a compiled model chooses, in the ``with`` block: layer -> ids [T, K] of each of its calls.

    Layers have the names of the report. The ids are copies, int64, on the device of the model, in the order in which the router gives them.
    The first block compiles the model once more; calls outside of blocks run what they ran before.

    Raises:
        RoutingError: when the block ends, if no layer has run that moefuse fused.
    """
    found: Routing = {}
    with _opened(Context(blocks.names_of(model), record=found)):
        yield found
    if not found:
        raise RoutingError(f"capture_routing: no layer has run that moefuse fused{_reasons('')}")


@contextmanager
def load_of(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Count how often a compiled model chooses each expert, in the ``with`` block; behind it: layer -> counts [calls, E] int64 on the CPU.

    Layers have the names of the report. E is the highest expert that was chosen and one. Ranks that have spread experts
    (:func:`moefuse.parallelize`) count what their own tokens choose; ``plan.balance(load)`` puts that together. The block compiles the
    model once more, as that of :func:`capture_routing` does, and the host waits once, when it ends.

    Raises:
        RoutingError: when the block ends, if no layer has run that moefuse fused.
    """
    load: dict[str, Tensor] = {}
    with capture_routing(model) as routing:
        yield load
    for layer, calls_of in routing.items():
        every = [ids.cpu().flatten() for ids in calls_of]
        most = max((int(ids.max()) + 1 for ids in every if ids.numel()), default=0)
        load[layer] = torch.stack([ids.bincount(minlength=most) for ids in every])


@contextmanager
def replay_routing(model: nn.Module, ids: Mapping[str, Tensor | Sequence[Tensor]] | Sequence[Tensor | Sequence[Tensor]]) -> Iterator[None]:
    """Have a compiled model take these experts, in the ``with`` block, as rollout routing replay does (R3: Ma et al. 2025, 2510.11370).

    Routing weights, and what else the model computes of its choice, are those of the experts that are taken, with gradients for the
    router. Where an id is -1, the router chooses (that slot alone, and perhaps an expert that another slot has: for a whole token give -1
    in every slot). The ids are copied when the block begins.

    Args:
        model: as it was given to :func:`capture_routing`, or another model with layers of these names.
        ids: layer -> ids [T, K], any integers on any device; several of them where a layer runs several times. Or the same for each
            layer in the order in which they run: ``ids.unbind(1)`` of [T, layers, K]. Layers that are not named choose by themselves.

    Activation checkpoints compute with the same experts again, inside of the block or behind it. Other threads are not in the block.

    Raises:
        RoutingError: a token has an expert twice, which no router chooses; ids do not fit (in the call), or a layer has run less often than
            there are ids for it (when the block ends).
    """
    named = isinstance(ids, Mapping)
    lists = [_listed(of) for of in (ids.values() if isinstance(ids, Mapping) else ids)]
    given = dict(zip(ids, lists, strict=True)) if isinstance(ids, Mapping) else None
    context = Context(blocks.names_of(model), given, None if named else lists, highest=_highest([t for of in lists for t in of]))
    with _opened(context):
        yield
    _all_taken(context, lists)


@contextmanager
def _opened(context: Context) -> Iterator[None]:
    armed.ask(calls.on)
    blocks.enter(context)
    try:
        yield
    finally:
        blocks.leave(context)


def _listed(ids: Tensor | Sequence[Tensor]) -> list[Tensor]:
    found = list(ids) if isinstance(ids, Iterable) and not isinstance(ids, Tensor) else [ids]
    for one in found:
        if not isinstance(one, Tensor) or one.dim() != 2 or one.is_floating_point() or one.dtype == torch.bool:
            raise RoutingError("replay_routing takes ids [T, K] of integers for each layer, or a list of them for a layer that runs often")
    return [one.clone() for one in found]


def _highest(every: Sequence[Tensor]) -> dict[int, int]:
    """The largest id of each, for which the host waits once a device."""
    found: dict[int, int] = {}
    for device in {t.device for t in every}:
        some = [t for t in every if t.device == device and t.numel()]
        if not some:
            continue
        ends = torch.stack([torch.stack([t.max().long(), t.min().long(), _repeated(t).long()]) for t in some]).tolist()
        if min(low for _, low, _ in ends) < -1:
            raise RoutingError("replay_routing: an id is below -1; -1 leaves a slot to the router")
        if any(twice for *_, twice in ends):
            # A layer may be fused because a top-k gives no expert twice: its own code could mean something else by one that is.
            raise RoutingError("replay_routing: a token has an expert twice; a router chooses different ones")
        found |= {id(t): high for t, (high, *_) in zip(some, ends, strict=True)}
    return found


def _repeated(ids: Tensor) -> Tensor:
    """Whether some token has an expert twice."""
    in_order = ids.sort(1).values
    return ((in_order[:, 1:] == in_order[:, :-1]) & (in_order[:, 1:] >= 0)).any()


def _all_taken(context: Context, lists: Sequence[Sequence[Tensor]]) -> None:
    if context.given is None:
        layers = list(context.ran)
        if len(layers) < len(lists):
            have = "has" if len(layers) == 1 else "have"
            raise RoutingError(f"replay_routing has ids of {count(len(lists), 'layer')}, and {len(layers)} {have} run{_reasons('')}")
        context.given = dict(zip(layers, map(list, lists), strict=True))
    for layer, wanted in context.given.items():
        ran = context.ran.get(layer, 0)
        if ran < len(wanted):
            has, were = f"{count(len(wanted), 'call')} of {call_it(layer)}", "was" if ran == 1 else "were"
            raise RoutingError(f"replay_routing has ids for {has}, of which {ran} {were} made{_reasons(layer)}")


def _reasons(layer: str) -> str:
    """Why, as far as that is known."""
    if layer in calls.closed:
        return f": {calls.closed[layer]}"
    report = history.last_report()
    for skipped in report.skipped if report is not None else ():
        if not layer or skipped.module == layer:
            return f": {call_it(skipped.module)} was left, {skipped.code} ({skipped.message}) at {skipped.location or 'an unknown place'}"
    return ": has the model been compiled?" if report is None else ""
