"""Shared experts on a stream of their own while a CUDA graph is recorded: always the result of running them in order, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moefuse.ops.meaning.call import Body
from moefuse.runtime import overlap
from tests.cpu.test_shared import Block, E as EXPERTS, H as WIDTH, K as CHOSEN, before, first, gated

pytestmark = pytest.mark.gpu

E, K, H, N, WIDE = 16, 4, 512, 256, 1024


def weights(dtype: torch.dtype = torch.bfloat16, wide: int = WIDE) -> dict[str, Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)

    def some(*shape: int) -> Tensor:
        return (torch.randn(*shape, device="cuda", generator=generator) / shape[-1] ** 0.5).to(dtype)

    return {"w_in": some(E, 2 * N, H), "w_out": some(E, H, N), "gate": some(wide, H), "up": some(wide, H), "down": some(H, wide)}


def inputs(tokens: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(tokens, H, device="cuda", generator=generator).to(dtype)
    scores, ids = torch.rand(tokens, E, device="cuda", generator=generator).topk(K, -1)
    return x, ids, scores.to(dtype), torch.rand(tokens, 1, device="cuda", generator=generator).to(dtype)


def call(w: dict[str, Tensor], x: Tensor, ids: Tensor, scores: Tensor, gate: Tensor, tokens: int) -> Tensor:
    """Start, something that takes and frees memory on the current stream, the routed experts, join."""
    body = Body(gating="separate").encode()
    start = torch.ops.moefuse.shared_start([x, w["gate"], w["up"], w["down"]], [1, 1, 1, 0, 0, 0], *body, x.dtype, tokens)
    for size in (x.shape[0] * H, x.shape[0] * WIDE):
        torch.full((size,), float("nan"), dtype=x.dtype, device="cuda")
    options = Body().encode()
    routed = torch.ops.moefuse.experts_infer([x, ids, scores, w["w_in"], w["w_out"]], [1, 0, 1, 0, 0, 0], *options, x.dtype)
    out: Tensor = torch.ops.moefuse.shared_join(routed, start, gate, 1.0, [x], tokens)
    return out


def recorded(run: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    return graph, out


def exact(w: dict[str, Tensor], x: Tensor, ids: Tensor, scores: Tensor, gate: Tensor) -> Tensor:
    d = {name: t.double() for name, t in w.items()}
    x = x.double()
    out = gate.double() * ((torch.nn.functional.silu(x @ d["gate"].T) * (x @ d["up"].T)) @ d["down"].T)
    for k in range(K):
        a, b = torch.einsum("th,tnh->tn", x, d["w_in"][ids[:, k]]).chunk(2, -1)
        y = torch.einsum("tn,thn->th", torch.nn.functional.silu(a) * b, d["w_out"][ids[:, k]])
        out += scores[:, k, None].double() * y
    return out


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """A device for every fork."""
    found: list[torch.device] = []
    fork = overlap.fork

    def noted(device: torch.device, work: Callable[[], Tensor]) -> Tensor:
        found.append(device)
        return fork(device, work)

    monkeypatch.setattr(overlap, "fork", noted)
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 3, 8, 64, 256])
def test_values(tokens: int, dtype: torch.dtype, forks: list[torch.device]) -> None:
    w, args = weights(dtype), inputs(tokens, dtype=dtype)
    serial = call(w, *args, 256)
    assert not forks  # without a graph the host gives the pace
    graph, out = recorded(lambda: call(w, *args, 256))
    out.fill_(float("nan"))
    graph.replay()
    assert len(forks) == 1
    assert torch.equal(out, serial)
    wanted = exact(w, *args)
    assert float((out.double() - wanted).norm() / wanted.norm()) < (1e-4 if dtype == torch.float32 else 0.01)


@pytest.mark.parametrize(
    ("activation", "gating"), [("gelu", "merged"), ("silu", "interleaved"), ("relu2", "plain"), ("swiglu_oai", "merged")]
)
@pytest.mark.parametrize("tokens", [1, 70])
@pytest.mark.parametrize("bias", [False, True])
def test_every_body(activation: str, gating: str, tokens: int, bias: bool) -> None:
    """Library products and the activation between them mean what the reference says."""
    from moefuse.ops.meaning.reference import experts_reference

    args = (1.702, 7.0) if activation == "swiglu_oai" else ()
    wide = 99
    rows = wide if gating == "plain" else 2 * wide
    generator = torch.Generator("cuda").manual_seed(0)
    x, w_in, w_out, b_in, b_out = (
        torch.randn(*shape, device="cuda", generator=generator) / shape[-1] ** 0.5
        for shape in ((tokens, 50), (rows, 50), (34, wide), (rows,), (34,))
    )
    lists = [[w_in], [], [w_out], [b_in] if bias else [], [], [b_out] if bias else []]
    counts, body = [len(part) for part in lists], Body(activation, tuple(args), gating).encode()
    got = torch.ops.moefuse.shared_start([x, *(t for part in lists for t in part)], counts, *body, x.dtype, 0)
    once = x.new_zeros((tokens, 1), dtype=torch.int64), x.new_ones((tokens, 1)).double()
    options: dict[str, Any] = {"activation": activation, "activation_args": args, "gating": gating}
    wanted = experts_reference(x.double(), *once, *([t.double() for t in part] for part in lists), **options)
    torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-5)


def test_a_thousand_replays_with_buffers_coming_and_going() -> None:
    """Memory of every size is freed and filled with NaN between replays; three layers in a graph take each other's buffers."""
    w = weights()
    cases = []
    for tokens in (1, 3, 8, 33, 64, 200):
        args = inputs(tokens, tokens)

        def layers(args: tuple[Tensor, ...] = args, limit: int = 256) -> Tensor:
            x = args[0]
            for _ in range(3):
                x = call(w, torch.nn.functional.layer_norm(x, (H,)), *args[1:], limit)  # type: ignore[arg-type]
            return x

        cases.append((*recorded(layers), layers(limit=0), args))  # a graph does not keep its inputs alive
    junk: list[Tensor] = []
    generator = torch.Generator().manual_seed(0)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for i in range(1000):
        graph, out, wanted, _ = cases[i % len(cases)]
        graph.replay()
        size = int(torch.randint(1, 1 << 20, (), generator=generator))
        junk.append(torch.full((size,), float("nan"), device="cuda"))
        if len(junk) > 5:
            junk.pop(int(torch.randint(len(junk), (), generator=generator)))
        wrong += (out != wanted).any()
        out.fill_(float("nan"))
    assert int(wrong) == 0


def test_replays_with_other_routing() -> None:
    w, args = weights(), inputs(8)
    graph, out = recorded(lambda: call(w, *args, 256))
    for seed in range(5):
        for old, new in zip(args, inputs(8, seed), strict=True):
            old.copy_(new)
        graph.replay()
        assert torch.equal(out, call(w, *args, 0)), seed


def test_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    w, args = weights(), inputs(8)
    monkeypatch.setenv("MOEFUSE_OVERLAP", "0")
    monkeypatch.setattr(overlap, "side_of", lambda stream: pytest.fail("a side stream was used"))
    graph, out = recorded(lambda: call(w, *args, 256))
    graph.replay()
    assert torch.equal(out, call(w, *args, 0))


def test_an_error_leaves_no_stream_behind() -> None:
    """The recording can end, and the next one is right."""

    def broken() -> Tensor:
        raise ValueError("no")

    device = torch.device("cuda", torch.cuda.current_device())
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        with pytest.raises(ValueError, match="no"):
            overlap.fork(device, broken)
        overlap.meet(device)
    test_replays_with_other_routing()


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_a_compiled_model(mode: str, forks: list[torch.device]) -> None:
    """Two layers, decode and a longer call, recorded by Inductor: forks happen while it records, and results are those of eager."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(Block(gated), nn.LayerNorm(WIDTH), Block(before), Block(first)).cuda().eval()
    exact = copy.deepcopy(model).double()
    compiled = torch.compile(model, backend="moefuse", mode=mode)
    with torch.no_grad():
        for shape in ((1, 1, WIDTH), (2, 40, WIDTH), (300, 1, WIDTH)):
            for seed in range(4):
                x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).cuda()
                wanted = exact(x.double())
                torch.testing.assert_close(compiled(x).double(), wanted, rtol=2e-3, atol=2e-3)
    # The third shape has a dynamic size, whose hint is above the limit.
    assert len(forks) % 3 == 0
    assert len(forks) >= 3
    assert (EXPERTS, CHOSEN) == (4, 2)
