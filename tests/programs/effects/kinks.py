"""Values where functions have a kink, and options that hardly anybody sets: what a rewrite says of its gradients, and of arguments.

From the second call on tokens and weights are whole numbers, so that what comes out of a projection is often exactly 0, or a limit.
"""

from __future__ import annotations

import random

A, B = "F.linear(given, self.experts[e].up.weight)", "F.linear(given, self.w_in[e])"

ACTIVATIONS = (
    "F.relu({a})", "{a}.clamp(min=0)", "torch.clamp_min({a}, 0)", "{a}.clip(0.0)", "F.relu({a}) ** 2", "{a}.clamp(min=0).square()",
    "F.relu({a}) * F.relu({a})", "F.relu({a}) * {a}.clamp(min=0)", "F.relu({a}) * {b}", "{b} * {a}.clamp(min=0)", "F.relu({a}) * {a}",
    "F.silu({a}.clamp(max=1.0)) * {b}.clamp(-1.0, 1.0)", "F.silu({a}.clamp_max(2)) * {b}.clip(-2, 2)",
    "F.silu(torch.minimum({a}, torch.ones(()))) * {b}.clamp(-1.0, 1.0)", "F.silu({a}.clamp(max=1.0)) * F.hardtanh({b})",
    "({b}.clamp(-1, 1) + 1) * ({a}.clamp(max=1) * torch.sigmoid({a}.clamp(max=1) * 1.5))", "F.relu6({a})", "F.hardtanh({a})",
    "torch.maximum({a}, torch.zeros_like({a}))", "({a} > 0) * {a}", "F.leaky_relu({a}, 0.3)", "F.threshold({a}, 1.0, 0.0)", "{a}.abs()",
    "F.hardswish({a})", "F.elu({a})", "torch.minimum({a}, {b})", "torch.maximum({a}, {b})", "{a}.sign() * {a}", "F.gelu({a})",
    "{a} * torch.sigmoid({a})", "F.silu({a}) * {b}", "F.relu({a}).clamp(max=1.0)", "F.hardsigmoid({a})", "{a}.clamp(-1.0, 2.0)",
    "F.relu({a} - 1)", "F.softplus({a}, 1, 1)", "F.relu({a}) * 0.5", "torch.tanh({a}).clamp(min=0)", "torch.sqrt({a}.square() + 1)",
)  # fmt: skip
"""Of one projection, or two."""

TOKENS = (
    "x = x - (x * (torch.arange(x.shape[0]) % 3 == 0)[:, None]).detach()",
    "x = torch.cat((x[:3], x[3:] - x[3:].detach()))",
    "x = x + (x.round() - x).detach()",
    "x = x + ((2 * x).round() - x).detach()",
)
"""Rows of zeros, and whole numbers; gradients pass through."""

WEIGHTS = (
    "w = w * (torch.arange(K) != 0)",
    "w = w * (torch.arange(w.shape[0]) % 2)[:, None]",
    "w = w.clamp(min=0.4)",
    "w = w.round()",
    "w = F.relu(w - 0.5)",
    "w = torch.where(w > 0.4, w, 0.0)",
    "w = (w - w.amax(-1, keepdim=True)).clamp(min=-0.3)",
    "w = w.detach() * 0 + 1",
)
"""Routing weights of zero, at limits and of ties, and constant ones."""

WHOLE = "for p in [*layer.experts.parameters(), layer.w_in, layer.w_out]: p.data.mul_(4).round_()"

TAKEN = (
    "F.embedding(tok, x, padding_idx=1)", "F.embedding(tok, x, padding_idx=-1)", "F.embedding(tok, x, scale_grad_by_freq=True)",
    "F.embedding(tok, x, None, None, 2.0, True)", "F.embedding(tok, x, norm_type=1.0)", "F.embedding(tok, x, sparse=False)",
    "F.embedding(tok, x, 0)", "torch.embedding(x, tok, 2)", "torch.embedding(x, tok)", "x.index_select(dim=0, index=tok)",
    "torch.gather(x, 0, tok[:, None].expand(-1, H), sparse_grad=False)", "x.gather(index=tok[:, None].expand(-1, H), dim=0)",
    "torch.take_along_dim(x, indices=tok[:, None], dim=0)",
)  # fmt: skip
"""An expert's rows."""

INSIDE = (
    "h.log_softmax(-1, dtype=torch.float64)", "h.softmax(-1, torch.float64)", "F.softmax(h, -1, 3, torch.float32).double()",
    "F.layer_norm(h, (I,), eps=0.5)", "F.layer_norm(h, (I,), None, None, 0.5)", "h / h.std(-1, False, keepdim=True)",
    "h / (h.var(-1, keepdim=True, correction=0) + 1)", "h - h.mean(-1, True, dtype=torch.float64)", "torch.add(h, h, alpha=3)",
    "torch.sub(h, 1, alpha=2)", "torch.rsub(h, 1, alpha=2)", "F.leaky_relu(h, 0.3)", "F.leaky_relu(h, negative_slope=-0.5)",
    "F.elu(h, 0.5)", "F.softplus(h, 2, 1)", "F.softplus(h, beta=2, threshold=0.1)", "F.gelu(h, approximate='tanh')",
    "F.threshold(h, 0.1, 0.3)", "F.hardtanh(h, -0.1, 0.2)", "torch.div(h, 2, rounding_mode=None)", "h + h.sum(-1, True)",
    "h + h.sum(-1, keepdim=True, dtype=torch.float64)", "h - h.amax(-1, keepdim=True)", "h - h.logsumexp(-1, True)",
    "torch.addcmul(h, h, h, value=0.5)", "torch.addcdiv(h, h, h.exp(), value=2)", "torch.lerp(h, h.exp(), weight=0.25)",
    "torch.nan_to_num(h, nan=1.0)", "F.celu(h, 0.5)", "torch.logit(h.sigmoid(), eps=0.2)", "F.rms_norm(h, (I,), eps=0.5)",
)  # fmt: skip
"""Of the rows between the projections."""

ROUTED = (
    "w, ids = scores.softmax(-1).topk(K, largest=False)", "w, ids = scores.softmax(-1).topk(K, -1, True, sorted=False)",
    "w, ids = torch.topk(scores.softmax(-1, dtype=torch.float64), K, dim=1)", "w = F.softmax(w, 1, dtype=torch.float64)",
    "w = scores.softmax(-1).gather(1, ids, sparse_grad=False)", "w = w / w.sum(-1, True, dtype=torch.float64)",
    "w = torch.gather(input=scores.sigmoid(), dim=-1, index=ids)", "w = torch.div(w, 0.3, rounding_mode='floor') + w",
)  # fmt: skip
"""Of scores, weights and ids."""

TABLES = (
    "weights = torch.zeros(x.shape[0], E).scatter(1, ids, w, reduce='multiply')",
    "weights = torch.ones(x.shape[0], E).scatter(1, ids, w, reduce='add')",
    "weights = torch.zeros(x.shape[0], E).scatter_reduce(1, ids, w, 'sum', include_self=False)",
    "weights = torch.zeros(x.shape[0], E).scatter_reduce(1, ids, w, reduce='amax')",
    "weights = torch.ones(x.shape[0], E).scatter_reduce(1, ids, w, 'prod', include_self=False) - 1",
    "weights = torch.zeros(x.shape[0], E).index_put((torch.arange(x.shape[0])[:, None], ids), w, accumulate=True)",
)
"""A table [tokens, E]."""

Statements = tuple[tuple[str, str], ...]


def at_kinks(rng: random.Random, places: list[str], meanwhile: str) -> Statements:
    """An activation, tokens and routing weights; whole numbers from the second call on."""
    activation = rng.choice(ACTIVATIONS).replace("{a}", A).replace("{b}", B)
    found = [("entry", rng.choice(TOKENS)), (meanwhile, WHOLE)]
    found += [("hidden", f"h = {activation}")] if "hidden" in places and rng.random() < 0.9 else []
    found += [("routed", rng.choice(WEIGHTS))] if rng.random() < 0.4 else []
    return tuple(found)


def with_options(rng: random.Random, places: list[str], takes: bool) -> Statements:
    """One of a body's operations with an option, or two. ``takes``: it has the numbers of an expert's rows."""
    kinds: list[tuple[str, str]] = [("routed", rng.choice(ROUTED))]
    kinds += [("hidden", f"h = {rng.choice(INSIDE)}")] if "hidden" in places else []
    kinds += [("tabled", rng.choice(TABLES))] * 2 if "tabled" in places else []
    kinds += [("given", f"given = {rng.choice(TAKEN)}")] * 3 if takes and "given" in places else []
    return tuple(dict(rng.sample(kinds, min(len(kinds), rng.choice((1, 1, 2))))).items())
