"""Tensors in any order of memory: results and gradients have the strides that each op's fake says, for a compiler believes them.

A gradient of tokens that came transposed had other strides than was said: Inductor raises, or without its check reads other numbers.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moefuse.ops.schema import SCHEMAS, SPREAD
from moefuse.runtime import native
from tests.cpu.coded_case import ENCODINGS, coded
from tests.cpu.ops_case import Case
from tests.cpu.order_case import BODIES, CASES, ORDERS, compared

ACROSS_RANKS = {
    *(f"{name}{end}" for name in ("gathered", "gathered_slices", "on_one_rank", "own_experts") for end in ("", "_backward")),
    "own_numbers",
    "ep_dispatch", "ep_combine", "ep_experts", "ep_experts_infer", "ep_send", "ep_give_back", *SPREAD,
}  # fmt: skip
IN_CPP = ("experts", "recomputed", "bounded")
UNASKED = {
    **dict.fromkeys(ACROSS_RANKS, "needs ranks that answer: rows arrive in buffers of its own, and their gradients are made contiguous"),
    "room": "of one dimension",
    **dict.fromkeys(("experts", "experts_extended", "recomputed_experts", "bounded_experts"), "runs as the ops below it"),
}


@pytest.mark.every_value
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", CASES)
def test_strides_are_those_of_the_fake(name: str, order: str) -> None:
    """Weights in one tensor or in several; several tokens, one, none; the C++ kernels, and what runs without them."""
    expected, run = CASES[name]
    with compared() as mode:
        for case in BODIES:
            run(ORDERS[order], case)
        for tokens in (1, 0):
            run(ORDERS[order], BODIES[0].with_(tokens=tokens))
        if name in IN_CPP and native.ready() and native.ready("train"):
            native.configure(False)
            try:
                run(ORDERS[order], BODIES[0])
            finally:
                native.configure(True)
    assert mode.seen == expected


def test_every_op_is_asked() -> None:
    """A new op needs a case, or a reason."""
    asked = {name.removesuffix("_general") for names, _ in CASES.values() for name in names}
    assert {schema.partition("(")[0] for schema in SCHEMAS} == asked | set(UNASKED)
    assert not asked & set(UNASKED)


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled() -> None:
    """Gradients of tokens that come transposed have eager's values where Inductor reads them, and its check of strides passes."""
    encoding = ENCODINGS["int8 channels"]
    args, _, options = coded(Case(hidden=16, inter=16, dtype=torch.float32), encoding, None, encoding)
    x = args[0].t().contiguous()

    def loss(x: Tensor) -> Tensor:
        out: Tensor = torch.ops.moefuse.experts_extended((2 * x).t(), *args[1:], **options)
        return out.square().sum()

    wanted, found = (torch.autograd.grad(run(given), given)[0] for run in (loss, torch.compile(loss)) for given in [x.requires_grad_()])
    torch.testing.assert_close(found, wanted)


def test_the_comparison_can_fail() -> None:
    """An op whose fake keeps the order of memory that the op does not keep."""
    with torch.library._scoped_library("moefuse", "FRAGMENT") as library:
        library.define("tried(Tensor x) -> Tensor")
        library.impl("tried", lambda x: x.contiguous().clone(), "CompositeExplicitAutograd")
        torch.library.register_fake("moefuse::tried", torch.empty_like, lib=library)
        with pytest.raises(AssertionError, match=r"tried, result 0: .*\[6, 1\].* its fake says .*\[1, 5\]"), compared():
            torch.ops.moefuse.tried(torch.zeros(6, 5).t())
