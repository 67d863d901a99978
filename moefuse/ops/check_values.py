"""Checks of what is in arguments, where reading them costs nothing: on a CPU. Elsewhere nobody waits for a device."""

from __future__ import annotations

import torch
from torch import Tensor

from moefuse.ops.meaning.checks import bad_value
from moefuse.runtime.routing import FEW_SLOTS


def check_offset_values(offsets: Tensor, rows: int, op: str, like_name: str = "xs") -> None:
    """What is in ``offsets``, on a CPU.

    Raises:
        ValueError: it does not cut the rows into those of each expert.
    """
    if offsets.device.type != "cpu":
        return
    ends = offsets.tolist()
    if ends[0] == 0 and ends[-1] <= rows and sorted(ends) == ends:
        return
    wrong = next((i for i, (a, b) in enumerate(zip([0, *ends], ends, strict=False)) if b < a), None)
    legal = f"ascending from 0 to at most {rows}, the rows of `{like_name}`"
    if ends[0] != 0:
        bad_value(op, "offsets", f"starts with {ends[0]}", legal)
    if wrong is not None:
        bad_value(op, "offsets", f"has {ends[wrong]} behind {ends[wrong - 1]} at [{wrong}]", legal)
    if ends[-1] > rows:
        bad_value(op, "offsets", f"ends with {ends[-1]}", legal)


def check_order_values(order: Tensor, op: str) -> None:
    """What is in ``order``, on a CPU.

    Raises:
        ValueError: some slot is not there.
    """
    slots = order.shape[0]
    if order.device.type != "cpu" or not slots or _each_once(order, slots):
        return
    bad_value(op, "order", "names a slot twice, or one that is not there", f"each of 0 to {slots - 1} once")


def _each_once(order: Tensor, slots: int) -> bool:
    """Whether a tensor has every number below ``slots``, which are as many as it has elements."""
    if slots <= FEW_SLOTS:
        return sorted(order.tolist()) == list(range(slots))
    try:
        return bool(torch.zeros(slots, dtype=torch.bool).scatter_(0, order, True).all())
    except (RuntimeError, IndexError):  # one that is not there
        return False
