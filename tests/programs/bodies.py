"""Expert bodies: what happens to one row between the projections. They see projections and vectors through callables only."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.programs.program import Body

Project = Callable[[str, Tensor], Tensor]
"""``project("down", rows)``: apply one of the expert's projections to rows."""
Vector = Callable[[str], Tensor]
"""``vector("norm")``: a per-feature vector of the expert, broadcastable over its rows."""
Expert = Callable[[Project, Vector, Tensor], Tensor]

_silu, _gelu, _gelu_tanh, _relu = nn.SiLU(), nn.GELU(), nn.GELU(approximate="tanh"), nn.ReLU()


def _relu_squared(x: Tensor) -> Tensor:
    r = F.relu(x)
    return r * r


def _x_sigmoid(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


POINTWISE: dict[str, tuple[Callable[[Tensor], Tensor], ...]] = {
    "silu": (
        F.silu,
        _silu,
        _x_sigmoid,
        lambda x: x.sigmoid() * x,
        lambda x: torch.nn.functional.silu(input=x),
        lambda x: x.mul(x.sigmoid()),
    ),
    "gelu": (F.gelu, _gelu, lambda x: F.gelu(x, approximate="none")),
    "gelu_tanh": (lambda x: F.gelu(x, approximate="tanh"), _gelu_tanh),
    "relu": (F.relu, _relu, torch.relu, lambda x: x.relu(), lambda x: x.clamp(min=0)),
    "relu2": (lambda x: F.relu(x).square(), lambda x: torch.relu(x) ** 2, lambda x: F.relu(x).pow(2), _relu_squared),
    "softplus": (F.softplus, lambda x: torch.log1p(torch.exp(x))),
    "softmax": (lambda x: F.softmax(x, dim=-1), lambda x: x.softmax(-1)),
    "sigmoid": (torch.sigmoid, lambda x: x.sigmoid()),
    "tanh": (torch.tanh, F.tanh),
    "mish": (F.mish, nn.Mish()),
    "identity": (lambda x: x,),
    "quick_gelu": (lambda x: x * torch.sigmoid(1.702 * x),),
    "relu_of_square": (lambda x: F.relu(x.square() - 0.1),),
    "leaky_by_hand": (
        lambda x: torch.where(x > 0, x, x * 0.1),
        lambda x: x * (x > 0) + 0.1 * x * (x <= 0).to(x.dtype),
        lambda x: x.masked_fill(x < 0, 0.0) + torch.where(~(x < 0), torch.zeros_like(x), 0.1 * x),
    ),
    "tanh_mix": (lambda x: torch.tanh(x) + 0.1 * x, lambda x: x.tanh().add(x, alpha=0.1)),
}
LIMIT, ALPHA = 0.5, 1.702


def _clamps(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return gate.clamp(min=None, max=LIMIT), up.clamp(min=-LIMIT, max=LIMIT)


def _oai_infix(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = _clamps(gate, up)
    return (up + 1) * (gate * torch.sigmoid(gate * ALPHA))


def _oai_function(gate: Tensor, up: Tensor) -> Tensor:
    gate = torch.clamp(gate, max=LIMIT)
    up = torch.clamp(up, -LIMIT, LIMIT)
    return torch.sigmoid(ALPHA * gate) * gate * (1 + up)


def _silu_clamp(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = _clamps(gate, up)
    return F.silu(gate) * up


def _oai_two_limits(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.clamp(max=2 * LIMIT), up.clamp(-LIMIT, LIMIT)
    return (up + 1) * (gate * torch.sigmoid(gate * ALPHA))


def _oai_plus_two(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = _clamps(gate, up)
    return (up + 2) * (gate * torch.sigmoid(gate * ALPHA))


def _clamp_both(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate.clamp(-LIMIT, LIMIT)) * up.clamp(-LIMIT, LIMIT)


JOINS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], ...]] = {
    "swiglu_oai": (_oai_infix, _oai_function),
    "silu_clamp": (_silu_clamp, lambda gate, up: up.clamp(min=-LIMIT, max=LIMIT) * F.silu(gate.clamp(max=LIMIT))),
    "oai_two_limits": (_oai_two_limits,),
    "oai_plus_two": (_oai_plus_two,),
    "clamp_both": (_clamp_both,),
    "gate_only": (lambda gate, up: F.silu(gate) * gate, lambda gate, up: F.silu(up) * up),
    "tanh_mix": (lambda gate, up: torch.tanh(gate) * up + 0.1 * gate,),
    "identity": (lambda gate, up: gate * up, lambda gate, up: up.mul(gate)),
}
"""Ways to join gate and up that are not ``activation(gate) * up``."""
FORMS: dict[str, int] = {name: len(forms) for name, forms in JOINS.items()} | {name: len(forms) for name, forms in POINTWISE.items()}


def gate_activation(body: Body) -> Callable[[Tensor, Tensor], Tensor]:
    """The joining of gate and up."""
    if body.activation in JOINS:
        joins = JOINS[body.activation]
        return joins[body.form % len(joins)]
    act = pointwise(body)
    return (lambda gate, up: act(gate) * up) if body.form % 2 == 0 else (lambda gate, up: up * act(gate))


def pointwise(body: Body) -> Callable[[Tensor], Tensor]:
    """The activation of one tensor."""
    forms = POINTWISE[body.activation]
    return forms[body.form % len(forms)]


def halves(body: Body) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Split a merged projection into (gate, up)."""
    if body.gating == "interleaved":
        return lambda h: (h[..., 1::2], h[..., ::2]) if body.up_first else (h[..., ::2], h[..., 1::2])

    def cut(h: Tensor) -> tuple[Tensor, Tensor]:
        n = h.shape[-1] // 2
        match body.split:
            case "chunk":
                a, b = h.chunk(2, dim=-1)
            case "split":
                a, b = torch.split(h, n, dim=-1)
            case "sizes":
                a, b = h.split([n, n], -1)
            case "slice":
                a, b = h[..., :n], h[..., n:]
            case _:
                a, b = h.unflatten(-1, (2, n)).unbind(-2)
        return (b, a) if body.up_first else (a, b)

    return cut


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """RMS norm over the features of each row."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def make(body: Body) -> Expert:
    """The expert as a function of its projections."""
    cut, join, act, extra = (
        halves(body),
        gate_activation(body),
        (pointwise(body) if body.activation in POINTWISE else None),
        body.extra,
    )

    def inside(project: Project, vector: Vector, h: Tensor) -> Tensor:
        if extra in ("norm_shared", "norm_each"):
            h = rms_norm(h, vector("norm"))
        if extra == "layernorm_each":
            centred = h - h.mean(-1, keepdim=True)
            h = centred / torch.sqrt((centred * centred).mean(dim=-1, keepdim=True) + 1e-5) * vector("norm")
        if extra == "middle":
            h = torch.tanh(project("middle", h))
        y = project("down", h)
        return rms_norm(y, vector("out_norm")) if extra == "out_norm" else y

    def merged(project: Project, vector: Vector, x: Tensor) -> Tensor:
        gate, up = cut(project("gate_up", x))
        return inside(project, vector, join(gate, up))

    def split(project: Project, vector: Vector, x: Tensor) -> Tensor:
        return inside(project, vector, join(project("gate", x), project("up", x)))

    def plain(project: Project, vector: Vector, x: Tensor) -> Tensor:
        assert act is not None
        return inside(project, vector, act(project("up", x)))

    return plain if body.gating == "plain" else split if body.gating == "split" else merged


def projections(body: Body, hidden: int, inter: int) -> dict[str, tuple[int, int]]:
    """Names and (out, in) sizes of the expert's projections."""
    first = {"up": (inter, hidden)} if body.gating == "plain" else {"gate": (inter, hidden), "up": (inter, hidden)}
    if body.gating in ("merged", "interleaved"):
        first = {"gate_up": (2 * inter, hidden)}
    middle = {"middle": (inter, inter)} if body.extra == "middle" else {}
    return first | middle | {"down": (hidden, inter)}


def vectors(body: Body, hidden: int, inter: int) -> dict[str, tuple[int, bool]]:
    """Names, lengths, and whether each expert has its own, of the expert's vectors."""
    match body.extra:
        case "norm_shared":
            return {"norm": (inter, False)}
        case "norm_each" | "layernorm_each":
            return {"norm": (inter, True)}
        case "out_norm":
            return {"out_norm": (hidden, False)}
        case _:
            return {}
