"""Few tokens with weights in few bits on the device: parts of sums have the bits of the definition, and one order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moefuse.ops.meaning.call import Body, ExpertsCall
from moefuse.ops.meaning.coded_weights import Codes
from moefuse.ops.meaning.token_codes import as_rounded
from tests.cpu.coded_case import Held, coded, hold
from tests.cpu.ops_case import Case, assert_as_exact, reference, to
from tests.gpu import test_rounded, test_words
from tests.gpu.gpu_case import without
from tests.gpu.test_coded import on_gpu, run

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
KNOWN = [("e4m3", 128), ("e4m3", 0)]
ROUNDED = {
    name: e
    for name, e in test_rounded.ENCODINGS.items()
    if e.activation is not None and (e.activation.element, e.activation.group) in KNOWN
}
SMALL = Case(tokens=2, hidden=256, inter=256, hidden_out=200, experts=7, top_k=3, dtype=BF16, low_id=-1)
PARTS = [(4, 2, 2), (8, 1, 4), (2, 4, 1), (1, 2, 2), (8, 2, 1)]
"""Warps, steps at once, and how many times these are on their way: loops that run once, and that come round."""


@pytest.fixture(autouse=True)
def two_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where slots share the few experts that there are here."""
    from moefuse.kernels.triton.provide import words

    without(monkeypatch, "packed weights")
    monkeypatch.setattr(words, "few_shared", lambda call: True)


def _held(held: Held, separate: bool) -> Any:
    from moefuse.kernels.triton.host import coded as host

    storage, more = held.lists(separate)
    as_bytes = [(t.view(torch.uint8) if t.dtype not in host.ELEMENTS else t).cuda() for t in storage]
    more = [t.cuda() for t in more]
    return host.held(as_bytes, Codes(held.encoding, more[: len(storage)], more[len(storage) :]))


def _products(it: Any, x: Tensor, ids: Tensor, features: int, part: tuple[int, int, int]) -> list[Tensor]:
    """Rows of x as a first projection without an activation makes them, and as a last one, whose tokens have one slot each."""
    from moefuse.kernels.triton.host import alone

    ones, found = torch.ones_like(ids, dtype=BF16), []
    for body in (Body("identity", (), "plain"), None):
        out = torch.full((len(x), features), float("nan"), dtype=BF16, device="cuda")
        alone.product(out, x, ids, ones, 3, body, (it, it), (None, None), alone.Part(*part))
        found.append(out)
    return found


@pytest.mark.parametrize("separate", [False, True], ids=["stacked", "separate"])
@pytest.mark.parametrize("name", test_words.ENCODINGS)
def test_weights_have_the_bits_of_the_definition(name: str, separate: bool) -> None:
    """Rows of a unit matrix give the weights: whole parts and others, features that are no whole blocks."""
    encoding = test_words.ENCODINGS[name]
    features, inputs = 200, 320 if encoding.block[1] in (0, 32, 64) else 384
    held = hold(encoding, 3, features, inputs, torch.Generator().manual_seed(0))
    if held.encoding.scale:
        held.scale[0, 0, 0], held.scale[0, 1, 0] = 0, 254
    dense, it = held.dense(BF16).cuda(), _held(held, separate)
    x = torch.eye(inputs, dtype=BF16, device="cuda").repeat(3, 1)
    ids = torch.arange(3, device="cuda").repeat_interleave(inputs)[:, None]
    finite = dense.isfinite().all(2, keepdim=True)  # 0 * inf spoils a feature's other products
    assert finite.float().mean() > 0.8
    for part in PARTS:
        for out in _products(it, x, ids, features, part):
            same = out.view(3, inputs, features).transpose(1, 2)
            assert torch.equal(torch.where(finite, same, 0), torch.where(finite, dense, 0)), part


@pytest.mark.parametrize("name", ROUNDED)
def test_tokens_have_the_codes_of_the_definition(name: str) -> None:
    """A unit matrix gives what a row is rounded to: random numbers, ties, zeros, numbers at both ends, and what is not finite."""
    encoding = ROUNDED[name]
    assert encoding.activation is not None
    held = hold(encoding, 3, 384, 384, torch.Generator().manual_seed(0))
    held = Held(encoding, torch.eye(384).expand(3, -1, -1).to(held.storage.dtype).contiguous(), held.scale.clone(), None)
    held.scale.fill_(127 if encoding.scale else 1)
    it = _held(held, False)
    x = torch.randn(500, 384, dtype=BF16, device="cuda")
    x[0, :64] = torch.arange(64, device="cuda") * 7.0
    x[1, :128], x[2, 3], x[3, 200] = 0.0, float("inf"), float("nan")
    x[4], x[5] = x[4] * 1e-37, x[5] * 1e37
    wanted = as_rounded(encoding.activation, x)
    fine = wanted.isfinite().all(1)
    ids = torch.arange(500, device="cuda")[:, None] % 3
    for part in PARTS:
        for out in _products(it, x, ids, 384, part):
            assert torch.equal(out[fine], wanted.to(BF16)[fine]), part
            assert not out[2:4].isfinite().all(1).any()
            assert bool(out[1].isfinite().all()) == bool(fine[1]), part  # zeros by zero


def _poison() -> None:
    """What is allocated next has NaN."""
    sizes = [n for n in (200, 400, 768, 1 << 11, 1 << 12, 1 << 13) for _ in range(4)]
    spoiled = [torch.full((n,), float("nan"), dtype=BF16, device="cuda") for n in sizes]
    del spoiled


@pytest.mark.parametrize("top_k", [1, 3, 8])
@pytest.mark.parametrize("gating", ["merged", "separate", "interleaved", "plain"])
@pytest.mark.parametrize("name", ["fp8 blocks", "nibbles", "words, zeros", "mxfp4", "int8 channels"])
def test_layers(name: str, gating: str, top_k: int) -> None:
    """Against float64 with the weights that the encoding means; biases, ids of nobody, and the same bits in every run."""
    from moefuse.kernels.triton.provide import words
    from moefuse.kernels.triton.provide.extended import as_bytes

    encoding = test_words.ENCODINGS[name]
    case = SMALL.with_(top_k=top_k, gating=gating, activation="relu2" if gating == "plain" else "silu", separate=gating == "separate")
    for tokens, seed in ((1, 0), (2, 1), (4, 2)):
        now = case.with_(tokens=tokens, seed=seed)
        args, dense, options = coded(now, encoding, encoding if gating == "separate" else None, encoding)
        args, dense = on_gpu(args), on_gpu(dense)
        call = as_bytes(ExpertsCall.of_extended(*args, **options))
        assert words.refusal(call) is None
        _poison()
        out = run(args, options)
        assert_as_exact(out, reference(dense, **now.options), reference(to(dense, torch.float64), **now.options))
        for _ in range(3):
            assert torch.equal(run(args, options), out)
        assert torch.equal(words.lone(call), out)


@pytest.mark.parametrize("gating", ["merged", "separate", "interleaved"])
@pytest.mark.parametrize("name", ROUNDED)
def test_layers_with_tokens_rounded(name: str, gating: str) -> None:
    """As the portable op computes on the same device, but for the order of sums: few codes of the second projection are neighbours."""
    from moefuse.runtime.cpu import experts_extended as portable

    encoding = ROUNDED[name]
    for top_k in (1, 3, 8):
        case = SMALL.with_(top_k=top_k, inter=384, gating=gating, separate=gating == "separate")
        args, _, options = coded(case, encoding, encoding if gating == "separate" else None, encoding)
        args = on_gpu(args)
        _poison()
        out, theirs = run(args, options), portable(ExpertsCall.of_extended(*args, **options))
        error, size = (out.float() - theirs.float()).abs(), float(theirs.float().abs().max())
        assert float(error.max()) <= 0.03 * size
        assert float(error.mean()) <= 2e-3 * size
        assert torch.equal(run(args, options), out)


@pytest.mark.parametrize("name", ["nibbles", "fp8 blocks", "int8 channels", "fp8 blocks, tokens"])
def test_a_token_is_what_it_is_beside_others(name: str) -> None:
    """And beside slots of nobody; sums have several parts (one token's have others)."""
    encoding = ROUNDED["fp8 blocks"] if name not in test_words.ENCODINGS else test_words.ENCODINGS[name]
    args, _, options = coded(SMALL.with_(tokens=8, top_k=4, hidden=2048, inter=768), encoding, None, encoding)
    given: list[Any] = on_gpu(args)
    out = run(given, options)
    for few in (slice(0, 2), slice(3, 8)):
        assert torch.equal(run([t[few].contiguous() if i < 3 else t for i, t in enumerate(given)], options), out[few])


def test_nobody() -> None:
    """A token of which every slot is nobody's has zeros."""
    encoding = test_words.ENCODINGS["mxfp4"]
    args, _, options = coded(SMALL, encoding, None, encoding)
    args[1].fill_(-1)
    args[1][1, 0] = SMALL.experts
    _poison()
    assert not run(on_gpu(args), options).any()


def test_in_a_graph() -> None:
    """Replays read tokens, ids and weights anew, and wait for what wrote them."""
    encoding = test_words.ENCODINGS["fp8 blocks"]
    args, _, options = coded(SMALL, encoding, None, encoding)
    given: list[Any] = on_gpu(args)
    others = on_gpu(SMALL.with_(seed=5).args()[:3])
    wanted = run([*others, *given[3:]], options)
    run(given, options)
    torch.cuda.synchronize()
    graph, copies = torch.cuda.CUDAGraph(), [t.clone() for t in others]
    with torch.cuda.graph(graph):
        for to_, from_ in zip(given[:3], copies, strict=True):
            to_.copy_(from_ + 0)
        out = run(given, options)
    for _ in range(3):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, wanted)
