"""``moefuse::experts_extended`` on the CPU: it is ``moefuse::experts`` with the weights that the encodings mean."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from moefuse.ops.meaning.call import ExpertsCall
from moefuse.ops.meaning.encoding import Encoding
from moefuse.runtime import cpu
from tests.cpu.coded_case import ENCODINGS, coded
from tests.cpu.ops_case import Case, assert_as_exact, reference, run, to
from tests.cpu.peak_memory import peak

BF16 = torch.bfloat16
SMALL = Case(tokens=9, hidden=32, inter=32, hidden_out=32, experts=5, top_k=2, dtype=BF16, low_id=-1)


def run_coded(args: list[Any], options: dict[str, Any]) -> Tensor:
    out: Tensor = torch.ops.moefuse.experts_extended(*args, **options)
    return out


@pytest.mark.parametrize("separate", [False, True], ids=["stacked", "separate"])
@pytest.mark.parametrize("name", ENCODINGS)
def test_every_encoding(name: str, separate: bool) -> None:
    """Bit for bit what the portable experts make of the unpacked weights, with ids of nobody and experts without tokens."""
    encoding = ENCODINGS[name]
    args, dense, options = coded(SMALL.with_(separate=separate), encoding, encoding, encoding)
    out = run_coded(args, options)
    assert torch.equal(out, cpu.experts(ExpertsCall.of(*dense, **SMALL.options)))
    assert_as_exact(out, reference(dense, **SMALL.options), reference(to(dense, torch.float64), **SMALL.options))


@pytest.mark.parametrize("gating", ["separate", "interleaved", "plain"])
def test_every_gating(gating: str) -> None:
    """Codes of the up projection stand between the others'; one projection may be in floating point."""
    case = SMALL.with_(gating=gating, activation="relu2" if gating == "plain" else "silu")
    for encodings in ((ENCODINGS["fp8 blocks"], ENCODINGS["nibbles, zeros"], None), (None, None, ENCODINGS["int8 channels"])):
        args, dense, options = coded(case, *encodings)
        assert torch.equal(run_coded(args, options), cpu.experts(ExpertsCall.of(*dense, **case.options)))


@pytest.mark.parametrize("tokens", [0, 1, 300])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_sizes_and_dtypes(tokens: int, dtype: torch.dtype) -> None:
    """No token; one; more than are sorted in Python. Storage that is held in-out is read where it lies."""
    case = SMALL.with_(tokens=tokens, dtype=dtype)
    encoding = ENCODINGS["fp8 blocks"]
    args, dense, options = coded(case, encoding, encoding, encoding, in_out=True)
    assert not args[3][0].is_contiguous()
    assert torch.equal(run_coded(args, options), cpu.experts(ExpertsCall.of(*dense, **case.options)))


@pytest.mark.parametrize("name", ["fp8 blocks", "halves", "mxfp4"])
@pytest.mark.parametrize("on_input", [False, True])
def test_gradients(name: str, on_input: bool) -> None:
    """Of tokens, routing weights and biases: bit for bit those of the portable experts; storage and scales have none."""
    case = SMALL.with_(weight_on_input=on_input, dtype=torch.float32)
    encoding = ENCODINGS[name]
    args, dense, options = coded(case, encoding, encoding, encoding)
    wanted = [0, 2, *range(6, 9)]
    found = []
    for given, call in ((args, lambda a: run_coded(a, options)), (dense, lambda a: run(a, **case.options))):
        inputs = [t.detach().clone().requires_grad_() for i in wanted for t in (given[i] if isinstance(given[i], list) else [given[i]])]
        source = iter(inputs)
        own = [([next(source) for _ in a] if isinstance(a, list) else next(source)) if i in wanted else a for i, a in enumerate(given)]
        out = call(own)
        found.append((out, torch.autograd.grad(out.square().sum(), inputs)))
    for ours, theirs in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5)


def test_no_gradient_of_what_weights_are_held_in() -> None:
    """A scale that is trained would be lost without a word."""
    args, _, options = coded(SMALL, ENCODINGS["fp8 blocks"], None, ENCODINGS["fp8 blocks"])
    args[-1][0].requires_grad_()
    with pytest.raises(RuntimeError, match="no gradients of what weights in few bits are held in: storage, scales, zeros"):
        run_coded(args, options)


def test_storage_is_live() -> None:
    """Requantised weights are followed: nothing is kept from call to call."""
    encoding = ENCODINGS["nibbles"]
    args, _, options = coded(SMALL, encoding, encoding, encoding)
    before = run_coded(args, options)
    args[3][0].add_(1)
    args[-1][1].mul_(2)
    fresh = [[t.clone() for t in a] if isinstance(a, list) else a.clone() for a in args]
    after = run_coded(args, options)
    assert not torch.equal(before, after)
    assert torch.equal(after, run_coded(fresh, options))


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


def test_opcheck_and_compile() -> None:
    """Schema, fake and autograd agree, and Inductor takes the op as it is, with tokens whose number varies."""
    encoding: Encoding = ENCODINGS["nibbles, zeros"]  # opcheck cannot compare float8
    args, _, options = coded(SMALL, encoding, None, encoding)
    torch.library.opcheck(torch.ops.moefuse.experts_extended.default, tuple(args), options)
    compiled = torch.compile(lambda x, ids, weights: run_coded([x, ids, weights, *args[3:]], options), dynamic=True, fullgraph=True)
    for tokens in (9, 4):
        x, ids, weights = (t[:tokens].clone() for t in args[:3])
        assert torch.equal(compiled(x, ids, weights), run_coded([x, ids, weights, *args[3:]], options))


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
