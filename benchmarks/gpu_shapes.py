"""The layers and inputs of the GPU benchmarks: experts of six public models, random bfloat16 data, uniform or skewed routing."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

BF16 = torch.bfloat16
TOKENS = (1, 8, 64, 512, 4096, 16384)


@dataclass(frozen=True)
class Shape:
    """One layer: E experts, K per token, H hidden, I inner. ``oai``: biases, in-out storage, interleaved clamped swiglu."""

    experts: int
    top_k: int
    hidden: int
    inter: int
    oai: bool = False


SHAPES = {
    "mixtral": Shape(8, 2, 4096, 14336),
    "qwen3": Shape(128, 8, 2048, 768),
    "olmoe": Shape(64, 8, 2048, 1024),
    "deepseek": Shape(256, 8, 7168, 2048),
    "gptoss": Shape(32, 4, 2880, 2880, True),
    "qwen2moe": Shape(60, 4, 2048, 1408),
}


def options(s: Shape) -> dict[str, Any]:
    """Keyword arguments of ``moefuse::experts``."""
    if s.oai:
        return {"activation": "swiglu_oai", "activation_args": [1.702, 7.0], "gating": "interleaved"}
    return {"activation": "silu", "activation_args": [], "gating": "merged"}


def weights_of(s: Shape, device: str = "cuda", dtype: torch.dtype = torch.bfloat16) -> tuple[list[Tensor], ...]:
    """w_in, w_up, w_out, b_in, b_up, b_out, with the variance of a usual initialisation."""

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        t = torch.empty(shape, dtype=dtype, device=device)
        return t if device == "meta" else t.normal_(std=scale)

    e, h, i = s.experts, s.hidden, s.inter
    if not s.oai:
        return [draw(e, 2 * i, h, scale=h**-0.5)], [], [draw(e, h, i, scale=i**-0.5)], [], [], []
    w_in = draw(e, h, 2 * i, scale=h**-0.5).transpose(1, 2)
    return [w_in], [], [draw(e, i, h, scale=i**-0.5).transpose(1, 2)], [draw(e, 2 * i)], [], [draw(e, h)]


def inputs_of(
    s: Shape, tokens: int, device: str = "cuda", skew: str = "uniform", dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, ...]:
    """x [T, H], ids [T, K] int64 without repeats in a token, weights [T, K] that sum to one.

    skew "half": one expert has a slot of every second token at least; "zipf": expert e is drawn with weight 1 / (e + 1).
    """
    if device == "meta":
        empty = torch.empty(tokens, s.top_k, device=device, dtype=torch.int64)
        return torch.empty(tokens, s.hidden, dtype=dtype, device=device), empty, torch.empty(tokens, s.top_k, dtype=dtype, device=device)
    scores = logits = torch.randn(tokens, s.experts, device=device)
    noise = -torch.log(-torch.log(torch.rand(tokens, s.experts, device=device).clamp(1e-9, 1 - 1e-7)))
    if skew == "zipf":
        logits = noise - torch.log(torch.arange(1, s.experts + 1, device=device))
    elif skew == "half":
        logits = logits.clone()
        logits[:, 0] += 100.0 * (torch.rand(tokens, device=device) < 0.5 * s.top_k).float()
    ids = logits.topk(s.top_k, dim=-1).indices
    # Weights of the scores, not of what skews them: a weight of zero would tell a peer that takes scores to choose another expert.
    return torch.randn(tokens, s.hidden, device=device).to(dtype), ids, torch.softmax(scores.gather(1, ids), -1).to(dtype)


def exact(x: Tensor, ids: Tensor, weights: Tensor, lists: tuple[list[Tensor], ...], s: Shape, rows: list[int]) -> Tensor:
    """Tokens ``rows`` of the result in float32, one slot at a time."""
    w_in, _, w_out, b_in, _, b_out = lists
    out = torch.zeros(len(rows), s.hidden, device=x.device)
    chosen = ids[rows].tolist()
    for r, t in enumerate(rows):
        for k, e in enumerate(chosen[r]):
            h = w_in[0][e].float() @ x[t].float()
            if s.oai:
                h = h + b_in[0][e].float()
                gate, up = h[0::2].clamp(max=7.0), h[1::2].clamp(-7.0, 7.0)
                a = gate * torch.sigmoid(1.702 * gate) * (up + 1)
            else:
                gate, up = h.chunk(2)
                a = torch.nn.functional.silu(gate) * up
            y = w_out[0][e].float() @ a
            out[r] += weights[t, k].float() * (y + b_out[0][e].float() if s.oai else y)
    return out


def relative_error(out: Tensor, want: Tensor) -> float:
    """||out - want|| / ||want||."""
    return float((out.float() - want).norm() / want.norm())


def peers() -> dict[str, dict[str, dict[str, float]]]:
    """Stored times in microseconds: shape -> tokens -> implementation."""
    path = Path(__file__).parent / "results" / "peers-h200.json"
    return json.loads(path.read_text())["forward"]  # type: ignore[no-any-return]


def best_peer(shape: str, tokens: int) -> tuple[float, float]:
    """(best stored peer, stored ceiling) in microseconds."""
    times = peers()[shape][str(tokens)]
    ceiling = max(times.get("ub_read", 0.0), times.get("ub_dense", 0.0))
    return min(v for k, v in times.items() if not k.startswith("ub_")), ceiling
