"""Shared experts beside the routed ones on a stream of their own: always the result of running them in order, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moefuse.ops import shared as shared_op
from moefuse.ops.body import encode
from moefuse.runtime import overlap

pytestmark = pytest.mark.gpu

E, K, H, N, WIDE = 16, 4, 512, 256, 1024


def weights(dtype: torch.dtype = torch.bfloat16, wide: int = WIDE) -> dict[str, Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)

    def some(*shape: int) -> Tensor:
        return (torch.randn(*shape, device="cuda", generator=generator) / shape[-1] ** 0.5).to(dtype)

    return {"w_in": some(E, 2 * N, H), "w_out": some(E, H, N), "gate": some(wide, H), "up": some(wide, H), "down": some(H, wide)}


def inputs(tokens: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(tokens, H, device="cuda", generator=generator).bfloat16()
    scores, ids = torch.rand(tokens, E, device="cuda", generator=generator).topk(K, -1)
    return x, ids, scores.bfloat16(), torch.rand(tokens, 1, device="cuda", generator=generator).bfloat16()


def call(w: dict[str, Tensor], x: Tensor, ids: Tensor, scores: Tensor, gate: Tensor, overlap: int) -> Tensor:
    routed: tuple[Any, ...] = ([x, ids, scores, w["w_in"], w["w_out"]], [1, 0, 1, 0, 0, 0], *encode("silu", (), "merged", False, False))
    body = encode("silu", (), "separate", False, False)
    shared: tuple[Any, ...] = ([x, gate, w["gate"], w["up"], w["down"]], [1, 1, 1, 1, 0, 0, 0], *body)
    out: Tensor = torch.ops.moefuse.experts_and_shared(*routed, x.dtype, *shared, overlap)
    return out


@pytest.fixture
def on_two_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few tokens too, which take all their experts in the same launches otherwise."""
    monkeypatch.setattr(shared_op, "in_one", lambda *args: None)


def exact(w: dict[str, Tensor], x: Tensor, ids: Tensor, scores: Tensor, gate: Tensor) -> Tensor:
    d = {name: t.double() for name, t in w.items()}
    x = x.double()
    out = gate.double() * ((torch.nn.functional.silu(x @ d["gate"].T) * (x @ d["up"].T)) @ d["down"].T)
    for k in range(K):
        a, b = torch.einsum("th,tnh->tn", x, d["w_in"][ids[:, k]]).chunk(2, -1)
        y = torch.einsum("tn,thn->th", torch.nn.functional.silu(a) * b, d["w_out"][ids[:, k]])
        out += scores[:, k, None].double() * y
    return out


def off(out: Tensor, wanted: Tensor) -> float:
    return float((out.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("tokens", [1, 2, 8, 64, 256])
@pytest.mark.usefixtures("on_two_streams")
def test_values(tokens: int) -> None:
    w, args = weights(), inputs(tokens)
    wanted, serial, beside = exact(w, *args), call(w, *args, 0), call(w, *args, 256)
    assert torch.equal(serial, beside)
    assert off(beside, wanted) < 0.01


@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize("wide", [WIDE, N, 3 * N - 8])
def test_few_tokens_in_the_same_launches(tokens: int, wide: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounded once, so no further from the exact sum than in order; equal from call to call, and in a graph."""
    monkeypatch.setattr(overlap, "both", lambda *args: pytest.fail("it took two streams"))
    w, args = weights(wide=wide), inputs(tokens)
    wanted, serial, joined = exact(w, *args), call(w, *args, 0), call(w, *args, 256)
    assert off(joined, wanted) <= 1.02 * off(serial, wanted)
    assert torch.equal(joined, call(w, *args, 256))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(w, *args, 256)
    graph.replay()
    assert torch.equal(out, joined)


@pytest.mark.usefixtures("on_two_streams")
def test_a_thousand_calls_with_buffers_coming_and_going() -> None:
    """Memory of every size is freed and filled with NaN around the calls: a buffer that is used again too early shows."""
    w = weights()
    cases = [(inputs(t, t), t) for t in (1, 3, 8, 33, 64, 200)]
    wanted = {t: call(w, *args, 0) for args, t in cases}
    junk: list[Tensor] = []
    generator = torch.Generator().manual_seed(0)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for i in range(1000):
        args, t = cases[i % len(cases)]
        copies = tuple(a.clone() for a in args)
        out = call(w, *copies, 256)
        del copies
        size = int(torch.randint(1, 1 << 20, (), generator=generator))
        junk.append(torch.full((size,), float("nan"), device="cuda"))
        if len(junk) > 5:
            junk.pop(int(torch.randint(len(junk), (), generator=generator)))
        wrong += (out != wanted[t]).any()
    assert int(wrong) == 0


@pytest.mark.usefixtures("on_two_streams")
def test_in_a_cuda_graph_with_other_routing() -> None:
    w, args = weights(), inputs(8)
    for _ in range(3):
        call(w, *args, 256)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(w, *args, 256)
    for seed in range(5):
        for old, new in zip(args, inputs(8, seed), strict=True):
            old.copy_(new)
        graph.replay()
        assert torch.equal(out, call(w, *args, 0)), seed


@pytest.mark.usefixtures("on_two_streams")
def test_on_several_streams_at_once() -> None:
    """Each stream has a side stream and buffers of its own."""
    w = weights()
    sets = [inputs(16, seed) for seed in range(4)]
    wanted = [call(w, *args, 0) for args in sets]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in sets]
    outs: list[list[Tensor]] = [[] for _ in sets]
    for _ in range(50):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                outs[i].append(call(w, *sets[i], 256))
    torch.cuda.synchronize()
    for got, right in zip(outs, wanted, strict=True):
        assert all(torch.equal(o, right) for o in got)


def test_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    w, args = weights(), inputs(8)
    monkeypatch.setenv("MOEFUSE_OVERLAP", "0")
    monkeypatch.setattr(overlap, "side_of", lambda stream: pytest.fail("a side stream was used"))
    assert torch.equal(call(w, *args, 256), call(w, *args, 0))


def test_an_error_leaves_no_stream_behind() -> None:
    def broken() -> Tensor:
        raise ValueError("no")

    device = torch.device("cuda", torch.cuda.current_device())
    with pytest.raises(ValueError, match="no"):
        overlap.both(device, broken, lambda: torch.ones(1, device=device))
    with pytest.raises(ValueError, match="no"):
        overlap.both(device, lambda: torch.ones(1, device=device), broken)
    first, second = overlap.both(device, lambda: torch.ones(1, device=device), lambda: torch.zeros(1, device=device))
    assert (first + second).item() == 1.0
