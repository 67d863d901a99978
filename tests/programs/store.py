"""Where experts keep their weights: stacked tensors, one flat matrix, a ParameterList, or modules of nn.Linear."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.programs import bodies
from tests.programs.program import Program

OUT_IN: tuple[Callable[[Tensor, Tensor, Tensor | None], Tensor], ...] = (
    lambda x, w, b: F.linear(x, w, b),
    lambda x, w, b: x @ w.t() if b is None else x @ w.t() + b,
    lambda x, w, b: torch.matmul(x, w.transpose(0, 1)) if b is None else torch.matmul(x, w.transpose(0, 1)) + b,
    lambda x, w, b: x.mm(w.T) if b is None else torch.addmm(b, x, w.T),
    lambda x, w, b: torch.nn.functional.linear(input=x, weight=w, bias=b),
)
IN_OUT: tuple[Callable[[Tensor, Tensor, Tensor | None], Tensor], ...] = (
    lambda x, w, b: x @ w if b is None else x @ w + b,
    lambda x, w, b: torch.matmul(x, w) if b is None else b + torch.matmul(x, w),
    lambda x, w, b: x.mm(w) if b is None else torch.addmm(b, x, w),
    lambda x, w, b: F.linear(x, w.t(), b),
    lambda x, w, b: torch.einsum("ti,io->to", x, w) if b is None else torch.einsum("ti,io->to", x, w) + b,
)
ACCESS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "index": lambda w, e: w[e],
    "select": lambda w, e: w.select(0, e),
    "unbind": lambda w, e: w.unbind(0)[e],
    "chunk": lambda w, e: w.chunk(w.shape[0], dim=0)[e].squeeze(dim=0),
    "slice": lambda w, e: w[e : e + 1].squeeze(0),
    "narrow": lambda w, e: w.narrow(0, e, 1)[0],
}


def _init(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) * (0.7 if len(shape) < 2 else 1.4 / shape[-1] ** 0.5))


class ExpertStore(nn.Module):
    """What every storage offers: :meth:`run` for one expert, :meth:`leaf` for the reference."""

    def __init__(self, p: Program) -> None:
        super().__init__()
        self.names = bodies.projections(p.body, p.hidden, p.inter)
        self.vecs = bodies.vectors(p.body, p.hidden, p.inter)
        self.count = p.experts
        self.bodies: list[bodies.Expert] = [bodies.make(p.body)] * p.experts
        self.source = {name: list(range(p.experts)) for name in self.names}
        for name, (size, each) in self.vecs.items():
            self.register_parameter(name, nn.Parameter(1 + 0.3 * torch.randn((p.experts, size) if each else (size,))))

    def layout_of(self, name: str) -> str:
        return "out-in"

    def linear(self, name: str, e: int, x: Tensor) -> Tensor:
        raise NotImplementedError

    def leaf(self, name: str, e: int) -> tuple[Tensor, Tensor | None]:
        """(weight as [out, in], bias) of one expert."""
        raise NotImplementedError

    def vector(self, name: str, e: int) -> Tensor:
        v = getattr(self, name)
        return v[e] if self.vecs[name][1] else v

    def run(self, e: int, x: Tensor) -> Tensor:
        """Expert ``e`` on rows ``x``."""
        return self.bodies[e](lambda name, rows: self.linear(name, e, rows), lambda name: self.vector(name, e), x)


class Stacked(ExpertStore):
    """One 3-D parameter per projection (or, when flat, one 2-D parameter viewed as 3-D)."""

    def __init__(self, p: Program) -> None:
        super().__init__(p)
        self.flat, (first, last) = p.store.kind == "flat", p.store.layout
        self.layouts = {name: last if name == "down" else first for name in self.names}
        self.access = ACCESS[p.store.access]
        self.form = p.store.linear
        for name, (o, i) in self.names.items():
            shape = (o, i) if self.layouts[name] == "out-in" else (i, o)
            weight = _init(p.experts * shape[0], shape[1]) if self.flat else _init(p.experts, *shape)
            self.register_parameter(f"{name}_proj", weight)
            self.register_parameter(f"{name}_proj_bias", _init(p.experts, o) if p.body.bias else None)

    def layout_of(self, name: str) -> str:
        return self.layouts[name]

    def weight(self, name: str) -> Tensor:
        """All experts' weights of one projection, [E, ...] in the stored layout."""
        w = getattr(self, f"{name}_proj")
        return w.view(self.count, -1, w.shape[-1]) if self.flat else w

    def bias(self, name: str) -> Tensor | None:
        return getattr(self, f"{name}_proj_bias")

    def linear(self, name: str, e: int, x: Tensor) -> Tensor:
        e = self.source[name][e]
        w, b = self.access(self.weight(name), e), self.bias(name)
        table = OUT_IN if self.layouts[name] == "out-in" else IN_OUT
        return table[self.form % len(table)](x, w, None if b is None else b[e])

    def leaf(self, name: str, e: int) -> tuple[Tensor, Tensor | None]:
        w, b = self.weight(name)[e], self.bias(name)
        return (w if self.layouts[name] == "out-in" else w.t()), None if b is None else b[e]


class Listed(ExpertStore):
    """One ParameterList per projection."""

    def __init__(self, p: Program) -> None:
        super().__init__(p)
        first, last = p.store.layout
        self.layouts = {name: last if name == "down" else first for name in self.names}
        self.form, self.has_bias = p.store.linear, p.body.bias
        self.weights, self.biases = nn.ModuleDict(), nn.ModuleDict()
        for name, (o, i) in self.names.items():
            shape = (o, i) if self.layouts[name] == "out-in" else (i, o)
            self.weights[name] = nn.ParameterList([_init(*shape) for _ in range(p.experts)])
            if p.body.bias:
                self.biases[name] = nn.ParameterList([_init(o) for _ in range(p.experts)])

    def layout_of(self, name: str) -> str:
        return self.layouts[name]

    def linear(self, name: str, e: int, x: Tensor) -> Tensor:
        e = self.source[name][e]
        table = OUT_IN if self.layouts[name] == "out-in" else IN_OUT
        return table[self.form % len(table)](x, self.weights[name][e], self.biases[name][e] if self.has_bias else None)

    def leaf(self, name: str, e: int) -> tuple[Tensor, Tensor | None]:
        w = self.weights[name][e]
        return (w if self.layouts[name] == "out-in" else w.t()), self.biases[name][e] if self.has_bias else None


class ExpertMLP(nn.Module):
    """An expert as a module of nn.Linear."""

    def __init__(self, p: Program, e: int, owner: ExpertStore) -> None:
        super().__init__()
        for name, (o, i) in owner.names.items():
            self.add_module(f"{name}_proj", nn.Linear(i, o, bias=p.body.bias))
        self.body = owner.bodies[e]
        for name, (_, each) in owner.vecs.items():
            v = owner.get_parameter(name)
            self.register_parameter(name, nn.Parameter(v.detach()[e].clone()) if each else v)

    def project(self, name: str, x: Tensor) -> Tensor:
        return getattr(self, f"{name}_proj")(x)

    def vector(self, name: str) -> Tensor:
        return getattr(self, name)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.project, self.vector, x)


class Modules(ExpertStore):
    """A ModuleList or ModuleDict of experts."""

    def __init__(self, p: Program) -> None:
        super().__init__(p)
        mlps = [ExpertMLP(p, e, self) for e in range(p.experts)]
        for name in self.vecs:
            del self._parameters[name]
        self.keyed = p.store.kind == "module_dict"
        self.mlps = nn.ModuleDict({f"expert_{e}": m for e, m in enumerate(mlps)}) if self.keyed else nn.ModuleList(mlps)

    def module(self, e: int) -> nn.Module:
        return self.mlps[f"expert_{e}"] if self.keyed else self.mlps[e]

    def run(self, e: int, x: Tensor) -> Tensor:
        return self.mlps[f"expert_{e}"](x) if self.keyed else self.mlps[e](x)

    def leaf(self, name: str, e: int) -> tuple[Tensor, Tensor | None]:
        linear = getattr(self.module(e), f"{name}_proj")
        return linear.weight, linear.bias

    def vector(self, name: str, e: int) -> Tensor:
        return getattr(self.module(e), name)


class Act(nn.Module):
    """An activation function as a module, for nn.Sequential."""

    def __init__(self, fn: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(x)


class Sequentials(ExpertStore):
    """A ModuleList of nn.Sequential(Linear, activation, Linear)."""

    def __init__(self, p: Program) -> None:
        super().__init__(p)
        modules: dict[str, Callable[[], nn.Module]] = {
            "silu": nn.SiLU,
            "gelu": nn.GELU,
            "gelu_tanh": lambda: nn.GELU("tanh"),
            "relu": nn.ReLU,
            "softplus": nn.Softplus,
        }
        act = modules.get(p.body.activation, lambda: Act(bodies.pointwise(p.body)))
        (o, i), bias = self.names["up"], p.body.bias

        def one() -> nn.Sequential:
            middle = [nn.Linear(o, o, bias=bias), nn.Tanh()] if "middle" in self.names else []
            return nn.Sequential(nn.Linear(i, o, bias=bias), act(), *middle, nn.Linear(o, i, bias=bias))

        self.mlps = nn.ModuleList([one() for _ in range(p.experts)])

    def run(self, e: int, x: Tensor) -> Tensor:
        return self.mlps[e](x)

    def leaf(self, name: str, e: int) -> tuple[Tensor, Tensor | None]:
        linear = self.mlps[e][{"up": 0, "middle": 2, "down": -1}[name]]
        return linear.weight, linear.bias


KINDS: dict[str, type[ExpertStore]] = {
    "stacked": Stacked,
    "flat": Stacked,
    "parameter_list": Listed,
    "module_list": Modules,
    "module_dict": Modules,
    "sequential": Sequentials,
}


def make(p: Program) -> ExpertStore:
    """The storage of a program."""
    return KINDS[p.store.kind](p)
