"""The Triton providers on tensors in any order of memory: results and gradients have the strides that the fakes say."""

from __future__ import annotations

import contextlib
import importlib

import pytest

from tests.cpu.order_case import BODIES, CASES, ORDERS, compared
from tests.triton.interpreted_case import TIER, interpreted

pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),  # the interpreter, about NumPy
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy, about the NaN of these tests
]
EXTENDED = ("experts_extended", "experts_extended_forward", "experts_extended_backward")
BY = {
    "experts, in parts": {"training": ("experts_forward", *(f"experts_backward_{part}" for part in ("rows", "in", "out")))},
    "lora": {"extended": EXTENDED},
    "coded": {"extended": EXTENDED},
    "coded, rounded": {"extended": EXTENDED},
    "coded, in pairs": {"extended": EXTENDED},
    "grouped tier": {"grouped": TIER},
    "grouped, coded": {"grouped_coded": ("grouped_linear_coded", "grouped_linear_coded_backward")},
    "router": {"router": ("topk", "route"), "logits": ("router_logits",)},
}
"""Cases -> modules of ``moefuse/kernels/triton/provide`` -> what they provide."""


@pytest.mark.sampled(4)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", BY)
def test_strides_are_those_of_the_fake(name: str, order: str) -> None:
    """Weights in one tensor or in several, no token, nobody who chooses an expert: with memory that was poisoned."""
    from moefuse.runtime import native

    native.configure(False)
    with contextlib.ExitStack() as stack:
        stack.callback(native.configure, True)
        ran = []
        for module, names in BY[name].items():
            provided = importlib.import_module(f"moefuse.kernels.triton.provide.{module}")
            ran.append((stack.enter_context(interpreted(provided, names)), names))
        with compared():
            for case in (*BODIES, BODIES[0].with_(tokens=0)):
                CASES[name][1](ORDERS[order], case)
    assert all(set(seen) == set(names) for seen, names in ran)
