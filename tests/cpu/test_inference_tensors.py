"""Quantised experts whose storage, scales or zeros were made in inference mode: they are frozen, and trained through."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import moefuse
from tests.cpu.coded_case import ENCODINGS, coded, hold
from tests.cpu.ops_case import Case
from tests.programs.packed import Gated, H

ops = torch.ops.moefuse
ENCODING = ENCODINGS["uint8 zeros"]


def made_there(value: Any) -> Any:
    with torch.inference_mode():
        return tree_map_only(Tensor, torch.clone, value)


def op_and_inputs(name: str) -> tuple[Callable[..., Tensor], list[Any], list[Tensor]]:
    """A call of what goes beside the tokens, that, and what has gradients."""
    if name == "experts_extended":
        args, _, options = coded(Case(dtype=torch.float32, hidden=16, inter=8), ENCODING, None, ENCODING)
        x, ids, weights, w_in, _, w_out, b_in, _, b_out, *factors, codes = args
        leaves = [t.requires_grad_() for t in (x, weights, *b_in, *b_out)]
        return lambda w_in, w_out, codes: ops.experts_extended(
            x, ids, weights, w_in, [], w_out, b_in, [], b_out, *factors, codes, **options), [w_in, w_out, codes], leaves  # fmt: skip
    g = torch.Generator().manual_seed(0)
    held, xs, offsets = hold(ENCODING, 3, 16, 8, g), torch.randn(6, 8, generator=g).requires_grad_(), torch.tensor([0, 2, 2, 6])
    return lambda w, codes: ops.grouped_linear_coded(xs, offsets, w, codes, [], str(ENCODING)), [*held.lists(False)], [xs]


@pytest.mark.parametrize("name", ["experts_extended", "grouped_linear_coded"])
def test_the_op(name: str) -> None:
    """Whichever of them is one: results and gradients are the same bits, and autograd still sees who is written to."""
    run, beside, leaves = op_and_inputs(name)
    wanted = run(*beside)
    pull = torch.randn_like(wanted)
    expected = torch.autograd.grad(wanted, leaves, pull)
    for frozen in itertools.product([False, True], repeat=len(beside)):
        out = run(*(made_there(part) if inside else part for part, inside in zip(beside, frozen, strict=True)))
        assert torch.equal(out, wanted)
        assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(out, leaves, pull), expected, strict=True))
    *others, codes = beside
    out = run(*(made_there(part) for part in others), codes)
    codes[0].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out, leaves, pull)


def gradients(run: Any, model: nn.Module) -> list[Tensor]:
    x = torch.randn(2, H, generator=torch.Generator().manual_seed(1)).requires_grad_()
    out = run(x)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), [x, model.router.weight])]


@pytest.mark.usefixtures("fresh_dynamo", "no_code")
def test_compiled() -> None:
    """As a library leaves a layer that it quantised (HQQ its zeros): eager trains through it, and so does the op, in the same memory."""
    torch.manual_seed(0)
    model = Gated("nibbles")
    for part in (model.gate, model.up, model.down):
        with torch.inference_mode():
            part.parts = nn.ParameterList(nn.Parameter(p.clone(), requires_grad=False) for p in part.parts)
        assert all(p.is_inference() for p in part.parts)
    compiled = torch.compile(model, backend="moefuse", dynamic=False)
    for _ in range(2):
        for ours, theirs in zip(gradients(compiled, model), gradients(model, model), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * float(theirs.abs().max()))
        with torch.inference_mode():
            model.up.parts[2].mul_(0.5)  # the library's own change is seen
    (fused,) = moefuse.last_report().fused  # type: ignore[union-attr]
    assert fused.spec.encoding
    with torch.no_grad():
        torch.testing.assert_close(compiled(torch.ones(2, H)), model(torch.ones(2, H)), rtol=1e-4, atol=1e-4)
