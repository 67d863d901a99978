"""``moefuse::grouped_linear_coded`` on the CPU: it is ``moefuse::grouped_linear`` with the weights that the encoding means."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moefuse.ops.meaning.encoding import Rounding
from tests.cpu.coded_case import ENCODINGS, Held, hold

E, OUT, INP = 4, 32, 16
ops = torch.ops.moefuse


def made(name: str, offsets: list[int], dtype: torch.dtype, *, separate: bool = False) -> tuple[Held, Tensor, Tensor, Tensor]:
    """Weights, rows, offsets and biases."""
    g = torch.Generator().manual_seed(0)
    held = hold(ENCODINGS[name], E, OUT, INP, g)
    xs, b = torch.randn(9, INP, generator=g).to(dtype), torch.randn(E, OUT, generator=g).to(dtype)
    return held, xs, torch.tensor(offsets), b


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


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([2, 3, 3, 5, 9], "starts with 2"),
        ([-5, 3, 3, 5, 9], "starts with -5"),
        ([0, 5, 3, 5, 9], r"has 3 behind 5 at \[2\]"),
        ([0, 3, 3, 5, 50], "ends with 50"),
    ],
)
def test_offsets_that_cut_no_rows(given: list[int], said: str) -> None:
    """An error names the op and the argument: rows of no expert were memory that nobody had written. With plain weights, too."""
    held, xs, offsets, b = made("int8 channels", given, torch.float32)
    storage, codes = held.lists(separate=False)
    dense, grad, text = [held.dense(torch.float32)], torch.ones(9, OUT), str(held.encoding)
    calls = {
        "grouped_linear_coded": lambda: ops.grouped_linear_coded(xs, offsets, storage, codes, [b], text),
        "grouped_linear_coded_backward": lambda: ops.grouped_linear_coded_backward(
            grad, offsets, storage, codes, [b], text, [True, True]),
        "grouped_linear": lambda: ops.grouped_linear(xs, offsets, dense, [b]),
        "grouped_linear_backward": lambda: ops.grouped_linear_backward(grad, xs, offsets, dense, [b], [True, True, True]),
        "expert_rows": lambda: ops.expert_rows([b], offsets, 9),
        "expert_rows_backward": lambda: ops.expert_rows_backward(grad, [b], offsets),
    }  # fmt: skip
    for name, call in calls.items():
        with pytest.raises(
            ValueError, match=f"^moefuse::{name}: argument `offsets` {said}; legal: ascending from 0 to at most 9, the rows of"
        ):
            call()


@pytest.mark.parametrize("order", [[0, 1, 1, 3], [0, 1, 2, 4], [-1, 1, 2, 3]])
def test_an_order_that_is_none(order: list[int]) -> None:
    """A slot that no row is of would read memory that nobody had written."""
    with pytest.raises(
        ValueError, match=r"^moefuse::combine: argument `order` names a slot twice, or one that is not there; legal: each of 0 to 3"
    ):
        ops.combine(torch.ones(4, 2), None, torch.tensor(order), torch.tensor([0, 4]), 2, None)


def test_rows_of_no_expert() -> None:
    """Behind the last offset results and gradients are zeros, where memory was not."""
    held, xs, offsets, b = made("int8 channels", [0, 3, 3, 4, 6], torch.float32)
    storage, codes = held.lists(separate=False)
    xs.requires_grad_()
    dirt = [torch.full((9, OUT), 12345.0) for _ in range(20)]
    del dirt
    for out in (
        ops.grouped_linear_coded(xs, offsets, storage, codes, [b], str(held.encoding)),
        ops.grouped_linear(xs, offsets, [held.dense(torch.float32)], [b]),
    ):
        assert not out[6:].any()
        (grad,) = torch.autograd.grad(out, xs, torch.ones_like(out))
        assert not grad[6:].any()
        assert grad[:6].any(1).all()


def test_scales_that_are_no_bytes() -> None:
    """An encoding whose scales are powers of two takes bytes; the error says it, and names dtypes once."""
    held, xs, offsets, _ = made("powers", [0, 3, 3, 5, 9], torch.float32)
    storage, codes = held.lists(separate=False)
    message = r"argument `codes \(scale of w\)` has dtype float32; legal: uint8 or float8_e8m0fnu, for scales are '2\^n'$"
    with pytest.raises(TypeError, match=message):
        ops.grouped_linear_coded(xs, offsets, storage, [codes[0].float()], [], str(held.encoding))
    held, xs, offsets, _ = made("uint8 zeros", [0, 3, 3, 5, 9], torch.float32)
    storage, codes = held.lists(separate=False)
    with pytest.raises(TypeError, match=r"`w` has dtype float32; legal: uint8, which holds u8$"):
        ops.grouped_linear_coded(xs, offsets, [storage[0].float()], codes, [], str(held.encoding))
