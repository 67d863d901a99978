"""Elements of weights, of sorted rows and of gradients whose numbers do not fit 32 bits, by whichever kernels a call of that size takes.

Sums are compared for some tokens only: a reference of the whole would be larger than the device.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cpu.ops_case import run
from tests.gpu.gpu_case import assert_right

pytestmark = pytest.mark.gpu

OPTIONS: dict[str, Any] = {
    "activation": "silu", "activation_args": [], "gating": "merged", "up_first": False, "weight_on_input": False, "out_dtype": None,
}  # fmt: skip
LIMIT = 1 << 31
SAMPLE = 4


def needs(gib: float) -> None:
    if torch.cuda.mem_get_info()[0] < gib * 2**30:
        pytest.skip(f"needs {gib} GiB of free device memory")


def weight(experts: int, out: int, inp: int) -> Tensor:
    w = torch.empty(experts, out, inp, device="cuda", dtype=torch.bfloat16)
    for e in w:
        e.normal_(std=inp**-0.5)
    return w


def call(tokens: int, hidden: int, inter: int, experts: int, top_k: int) -> list[Any]:
    torch.manual_seed(0)
    x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
    ids = torch.rand(tokens, experts, device="cuda").topk(top_k).indices
    ids[-1, 0] = experts - 1
    weights = torch.rand(tokens, top_k, device="cuda", dtype=torch.bfloat16)
    return [x, ids, weights, [weight(experts, 2 * inter, hidden)], [], [weight(experts, hidden, inter)], [], [], []]


def assert_last_tokens_right(out: Tensor, args: list[Any]) -> None:
    """The last tokens, one expert of which is the last one, against a call of them alone."""
    x, ids, weights, w_in, _, w_out, *_ = args
    own = ids[-SAMPLE:].unique()
    local = torch.searchsorted(own, ids[-SAMPLE:])
    part = [x[-SAMPLE:], local, weights[-SAMPLE:], [w_in[0][own]], [], [w_out[0][own]], [], [], []]
    assert_right(out[-SAMPLE:], part, OPTIONS)


def test_weights() -> None:
    """Both projections have more elements than that; 129 rows of an expert and more."""
    needs(24)
    args = call(tokens=2400, hidden=8192, inter=4096, experts=66, top_k=4)
    assert args[5][0].numel() > LIMIT
    assert_last_tokens_right(run(args, **OPTIONS), args)


def test_rows() -> None:
    """Sorted rows and the rows that are summed."""
    needs(24)
    args = call(tokens=LIMIT // 2048 // 8 + 500, hidden=2048, inter=128, experts=8, top_k=8)
    assert args[1].numel() * 2048 > LIMIT
    assert_last_tokens_right(run(args, **OPTIONS), args)


def test_gradients() -> None:
    """Rows of that many elements where they are summed to a weight's gradient, and where they are made; the last rows decide.

    All output gradients but the last tokens' are zero, so that theirs is the whole gradient.
    """
    needs(48)
    args = call(tokens=LIMIT // 2048 // 8 + 500, hidden=2048, inter=128, experts=8, top_k=8)
    leaves = [args[0], args[2], args[3][0], args[5][0]]
    for t in leaves:
        t.requires_grad_()
    out = run(args, **OPTIONS)
    dout = torch.zeros_like(out)
    dout[-SAMPLE:] = torch.randn(SAMPLE, 2048, device="cuda", dtype=torch.bfloat16)
    grads = torch.autograd.grad(out, leaves, dout)
    few = [args[0][-SAMPLE:].detach().double(), args[2][-SAMPLE:].detach().double(), *(w.detach().double() for w in leaves[2:])]
    for t in few:
        t.requires_grad_()
    exact = run([few[0], args[1][-SAMPLE:], few[1], [few[2]], [], [few[3]], [], [], []], **OPTIONS)
    for ours, theirs in zip(grads, torch.autograd.grad(exact, few, dout[-SAMPLE:].double()), strict=True):
        ours = ours[-SAMPLE:] if ours.shape != theirs.shape else ours
        error = (ours.double() - theirs).abs().max() / theirs.abs().max()
        assert error < 2**-6, f"{tuple(theirs.shape)}: {float(error):.3g}"
