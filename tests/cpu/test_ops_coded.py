"""``moefuse::experts_extended`` on the CPU: it is ``moefuse::experts`` with the weights that the encodings mean."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cpu.coded_case import ENCODINGS, coded
from tests.cpu.ops_case import Case
from tests.cpu.peak_memory import peak

BF16 = torch.bfloat16
SMALL = Case(tokens=9, hidden=32, inter=32, hidden_out=32, experts=5, top_k=2, dtype=BF16, low_id=-1)


def run_coded(args: list[Any], options: dict[str, Any]) -> Tensor:
    out: Tensor = torch.ops.moefuse.experts_extended(*args, **options)
    return out


def test_no_gradient_of_what_weights_are_held_in() -> None:
    """A scale that is trained would be lost without a word."""
    args, _, options = coded(SMALL, ENCODINGS["fp8 blocks"], None, ENCODINGS["fp8 blocks"])
    args[-1][0].requires_grad_()
    with pytest.raises(RuntimeError, match="no gradients of what weights in few bits are held in: storage, scales, zeros"):
        run_coded(args, options)


@pytest.mark.parametrize("name", ["fp8 blocks", "nibbles, zeros", "mxfp4"])
def test_never_more_than_one_expert_unpacked(name: str) -> None:
    """Forward and backward: with 64 experts of which all are hit, what is alive is far less than the unpacked stack."""
    case = Case(tokens=64, hidden=64, inter=64, hidden_out=64, experts=64, top_k=2, dtype=torch.float32, bias=False, low_id=0, high_id=64)
    encoding = ENCODINGS[name]
    args, _, options = coded(case, encoding, None, encoding)
    args[0].requires_grad_()
    stack = 64 * 128 * 64 * 4
    assert 0 < peak(lambda: run_coded(args, options).sum().backward()) < stack // 4
    assert args[0].grad is not None


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda a, o: o.update(encodings=["e9m9;1x0;f32;number;;", "", ""]), ValueError, "no encoding"),
        (lambda a, o: a.__setitem__(3, [a[3][0].to(torch.int16)]), TypeError, r"argument `w_in` has dtype int16; legal: .*hold e4m3"),
        (lambda a, o: a.__setitem__(-1, [a[-1][0][:, 1:], *a[-1][1:]]), ValueError, r"scale of w_in\)` has shape .*; legal: \[5, 16, 4\]"),
        (lambda a, o: a.__setitem__(-1, a[-1][:1]), ValueError, "has 0 tensors as scale of `w_out`; legal: 1"),
        (lambda a, o: a.__setitem__(5, [a[5][0][:, :, :24]]), ValueError, "w_out"),
    ],
    ids=["encoding", "dtype", "scale", "missing", "inputs"],
)
def test_errors(change: Any, error: type[Exception], text: str) -> None:
    """What does not fit is named, with what would."""
    encoding = ENCODINGS["fp8 blocks"]
    args, _, options = coded(SMALL, encoding, None, encoding)
    change(args, options)
    with pytest.raises(error, match=text):
        run_coded(args, options)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"encodings": []}, "argument `encodings` has 0 texts; legal: three"),
        ({"encodings": ["s8;1x0;f32;number;;"] * 2}, "argument `encodings` has 2 texts; legal: three"),
        ({"encodings": ["s8;1x0;f32;number;;"] * 3}, "argument `w_up` is empty; legal: a storage, which `encodings` says"),
        ({"w_in": []}, "argument `w_in` is empty; legal: a storage"),
        ({"more": True}, "argument `codes` has 3 tensors; legal: 2, the scales and zeros"),
        ({"encodings": ["s8;1x0;f32;number;x;", "", "s8;1x0;f32;number;;"]}, "no encoding: 's8;1x0;f32;number;x;'"),
    ],
)
def test_what_is_given_in_the_wrong_number(change: dict[str, Any], text: str) -> None:
    """Each is said by its name, with what is legal."""
    how = "s8;1x0;f32;number;;"
    storage = [torch.zeros(3, n, k, dtype=torch.int8) for n, k in ((16, 8), (8, 8))]
    scales = [torch.ones(3, n, 1) for n in (16, 8)]
    x, ids, weights = torch.zeros(4, 8), torch.zeros(4, 2, dtype=torch.int64), torch.zeros(4, 2)
    w_in, codes = change.get("w_in", storage[:1]), [*scales, *scales[:1]] if "more" in change else scales
    with pytest.raises(ValueError, match=re.escape(text)):
        torch.ops.moefuse.experts_extended(
            x,
            ids,
            weights,
            w_in,
            [],
            storage[1:],
            [],
            [],
            [],
            *([] for _ in range(6)),
            codes,
            encodings=change.get("encodings", [how, "", how]),
        )
