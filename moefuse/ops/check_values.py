"""Checks of what is in arguments, where reading them costs nothing: on a CPU. Elsewhere nobody waits for a device."""

from __future__ import annotations

import torch
from torch import Tensor

from moefuse.ops.checks import bad_value


def check_offset_values(offsets: Tensor, rows: int, op: str, like_name: str = "xs") -> None:
    """What is in ``offsets``, on a CPU.

    Raises:
        ValueError: it does not cut the rows into those of each expert.
    """
    if offsets.device.type != "cpu":
        return
    ends = offsets.tolist()
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
    if order.device.type != "cpu" or not order.shape[0]:
        return
    slots = order.shape[0]
    inside = bool((order >= 0).all()) and bool((order < slots).all())
    if not inside or int(torch.bincount(order, minlength=slots).max()) > 1:
        bad_value(op, "order", "names a slot twice, or one that is not there", f"each of 0 to {slots - 1} once")
