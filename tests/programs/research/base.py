"""What every spelling starts from: sizes, a router, the experts people write, and the lists of programs with what is expected of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moefuse.errors import CODES

E, K, H, I = 4, 2, 8, 6  # noqa: E741  (the letters of moefuse.spec)


@dataclass(frozen=True)
class Expected:
    """What moefuse says about a program.

    Attributes:
        tier: ``"fused"`` or ``"grouped"``; None where nothing is replaced.
        domain: the rows the experts run on, for what is fused.
        code, message: the refusal, for what is not; both empty where there is nothing to say. Its line is the one with the comment
            ``# at: <class>``.
        after: the code of what the frame behind the break is refused for, on top of that; empty where it says nothing.
        whole: one graph; otherwise Dynamo breaks it, as without moefuse.
        train: whether the module is in training mode.
        grad: whether it is differentiated.
        several: whether one token alone is left as it is.
    """

    tier: str | None = None
    domain: str = ""
    code: str = ""
    message: str = ""
    after: str = ""
    whole: bool = True
    train: bool = True
    grad: bool = True
    several: bool = False


class Layer(nn.Module):
    """A router; subclasses have experts and write the forward of the layer. Inputs are ``[tokens, H]``."""

    expected: Expected

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(H, E, bias=False)

    def scores(self, x: Tensor) -> Tensor:
        """Probabilities [tokens, E] in float32 or wider, whatever the model computes in."""
        wide = torch.promote_types(x.dtype, torch.float32)
        return F.linear(x.to(wide), self.gate.weight.to(wide)).softmax(-1)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(weights [tokens, K] in x's dtype, ids [tokens, K])."""
        weights, ids = torch.topk(self.scores(x), K, dim=-1)
        return (weights / weights.sum(-1, keepdim=True)).to(x.dtype), ids


class Gated(nn.Module):
    """``down(silu(gate(x)) * up(x))``."""

    def __init__(self, hidden: int = H, inter: int = I) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(hidden, inter, bias=False), nn.Linear(hidden, inter, bias=False)
        self.down_proj = nn.Linear(inter, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


def mlp(hidden: int = H, inter: int = I) -> nn.Sequential:
    """The expert of tutorials."""
    return nn.Sequential(nn.Linear(hidden, inter), nn.ReLU(), nn.Linear(inter, hidden))


class Listed(Layer):
    """Gated experts in a ModuleList."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Gated() for _ in range(E))


class Stacked(Layer):
    """Weights of all experts in one tensor each, (out, in)."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Parameter(torch.randn(E, I, H) / 3), nn.Parameter(torch.randn(E, I, H) / 3)
        self.w2 = nn.Parameter(torch.randn(E, H, I) / 3)


SPELLINGS: dict[str, type[Layer]] = {}
"""What people write, by class name."""
TWINS: dict[str, type[Layer]] = {}
"""What looks like one of them and is not: never the same op."""

Decorator = Callable[[type[Layer]], type[Layer]]


def _listed(expected: Expected) -> Decorator:
    def add(cls: type[Layer]) -> type[Layer]:
        assert cls.__name__ not in SPELLINGS, cls.__name__
        cls.expected = expected
        SPELLINGS[cls.__name__] = cls
        return cls

    return add


def fused(domain: str, tier: str = "fused", *, train: bool = True, grad: bool = True, several: bool = False) -> Decorator:
    """One region of that domain and tier, in one graph."""
    return _listed(Expected(tier, domain, train=train, grad=grad, several=several))


def refused(code: str, message: str, *, after: str = "", whole: bool = True) -> Decorator:
    """Left as it is, with that text at the line marked ``# at: <class>``."""
    return _listed(Expected(code=code, message=message, after=after, whole=whole))


def unknown(count: int, op: str) -> Decorator:
    """Built like experts, in a form that no rule reads; the operation at which moefuse loses track is marked ``# at: <class>``."""
    return refused("not-recognised", CODES["not-recognised"].format(count=count, op=op))


def unseen(*, whole: bool = True, grad: bool = True) -> Decorator:
    """No projection of chosen rows is in a graph: nothing fused, nothing said."""
    return _listed(Expected(whole=whole, grad=grad))


def twin(cls: type[Layer]) -> type[Layer]:
    """A program whose result must be that of eager, and which is not fused."""
    assert cls.__name__ not in TWINS, cls.__name__
    TWINS[cls.__name__] = cls
    return cls
