"""``moefuse::experts_extended`` against the experts whose weights have the terms added."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from tests.cpu.lora_case import SCALES, SMALL, arguments, ours, results

T, E, K, H, INNER = SMALL


def test_under_autocast() -> None:
    """It computes in the dtypes of what it is given: outside of compiled code autocast would round the terms alone."""
    args = arguments("separate", torch.float32, torch.float32)
    expected = results(args, ours, gating="separate")
    with torch.autocast("cpu", torch.bfloat16):
        found = results(args, ours, gating="separate")
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def _narrow(at: int) -> Any:
    return lambda args: [*args[:at], [args[at][0][:, :, :-1]], *args[at + 1 :]]


@pytest.mark.parametrize(
    ("change", "given", "legal"),
    [
        (_narrow(9), "`a_in` holds 5 experts of shape [3, 11]", "5 experts of shape [r, 12]"),
        (_narrow(10), "`l_in` holds 5 experts of shape [20, 2]", "5 experts of shape [20, 3]"),
        (lambda a: [*a[:11], a[9], a[10], *a[13:]], "`a_up` holds 1 tensors", "an empty list, for there is no such projection"),
    ],
)
def test_errors_name_the_argument(change: Any, given: str, legal: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"argument {given}; legal: {legal}")):
        torch.ops.moefuse.experts_extended(*change(arguments("merged", torch.float32, torch.float32)), scales=SCALES)
