"""``moefuse::grouped_linear_coded`` on the CPU: it is ``moefuse::grouped_linear`` with the weights that the encoding means."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moefuse.ops.encoding import Rounding
from moefuse.runtime import grouped
from tests.cpu.coded_case import ENCODINGS, Held, hold

E, OUT, INP = 4, 32, 16
ops = torch.ops.moefuse


def made(name: str, offsets: list[int], dtype: torch.dtype, *, separate: bool = False) -> tuple[Held, Tensor, Tensor, Tensor]:
    """Weights, rows, offsets and biases."""
    g = torch.Generator().manual_seed(0)
    held = hold(ENCODINGS[name], E, OUT, INP, g)
    xs, b = torch.randn(9, INP, generator=g).to(dtype), torch.randn(E, OUT, generator=g).to(dtype)
    return held, xs, torch.tensor(offsets), b


@pytest.mark.parametrize("separate", [False, True], ids=["stacked", "separate"])
@pytest.mark.parametrize("name", ENCODINGS)
def test_every_encoding(name: str, separate: bool) -> None:
    """Bit for bit the portable product and its gradients with unpacked weights; an expert without rows, and rows behind the last expert."""
    held, xs, offsets, b = made(name, [0, 3, 3, 5, 8], torch.bfloat16)
    storage, codes = held.lists(separate)
    xs.requires_grad_()
    b.requires_grad_()
    out = ops.grouped_linear_coded(xs, offsets, storage, codes, [b], str(held.encoding))
    dense = list(held.dense(torch.bfloat16)) if separate else [held.dense(torch.bfloat16)]
    assert torch.equal(out, grouped.grouped_linear(xs.detach(), offsets, dense, [b.detach()]))
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    found = torch.autograd.grad(out, (xs, b), grad)
    wanted = grouped.grouped_linear_backward(grad, xs.detach(), offsets, dense, [b.detach()], [True, False, True])
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, wanted, strict=True))
    assert not found[0][8].any()


@pytest.mark.parametrize("rows", [0, 1])
def test_few_rows(rows: int) -> None:
    held, xs, _, _ = made("nibbles", [], torch.float32)
    storage, codes = held.lists(separate=False)
    xs = xs[:rows].requires_grad_()
    out = ops.grouped_linear_coded(xs, torch.tensor([0, 0, rows, rows, rows]), storage, codes, [], str(held.encoding))
    torch.testing.assert_close(out, xs @ held.dense(torch.float32)[1].t())
    (d_xs,) = torch.autograd.grad(out.sum(), xs)
    assert d_xs.shape == (rows, INP)


def test_the_op_as_torch_checks_it() -> None:
    """Schema, fake and gradients agree."""
    held, xs, offsets, b = made("nibbles, zeros", [0, 3, 3, 5, 8], torch.float64)
    storage, codes = held.lists(separate=False)
    args = (xs.requires_grad_(), offsets, storage, codes, [b.requires_grad_()], str(held.encoding))
    torch.library.opcheck(ops.grouped_linear_coded.default, args)
    assert torch.autograd.gradcheck(lambda xs, b: ops.grouped_linear_coded(xs, offsets, storage, codes, [b], str(held.encoding)), (xs, b))


def test_what_is_not_taken() -> None:
    """Rounded activations, sizes that do not fit, and gradients that nobody has."""
    held, xs, offsets, _ = made("fp8 blocks", [0, 3, 3, 5, 8], torch.float32)
    storage, codes = held.lists(separate=False)
    with pytest.raises(ValueError, match="rounds activations"):
        ops.grouped_linear_coded(xs, offsets, storage, codes, [], str(held.encoding.__class__(
            "e4m3", (4, 8), activation=Rounding("e4m3", 8))))  # fmt: skip
    with pytest.raises(ValueError, match="input features"):
        ops.grouped_linear_coded(xs[:, :8], offsets, storage, codes, [], str(held.encoding))
    with pytest.raises(ValueError, match=r"grouped_linear_coded: argument `codes \(scale of w\)`"):
        ops.grouped_linear_coded(xs, offsets, storage, [codes[0][:, :2]], [], str(held.encoding))
    with pytest.raises(RuntimeError, match="none of what weights are held in"):
        ops.grouped_linear_coded(xs, offsets, storage, [codes[0].clone().requires_grad_()], [], str(held.encoding))
