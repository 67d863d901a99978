"""The refusal says what is really in the way, at the user's own line: not what follows from it, and not the line where the graph breaks."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.cpu.capture_case import Seen, capturing

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

E, K, H, I, T = 4, 2, 8, 6, 12  # noqa: E741  (the letters of moefuse.spec)


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.scale = nn.Linear(H, I), nn.Linear(I, H), 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x))) * self.scale


class Gated(Expert):
    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return self.down(h * torch.sigmoid(h).detach())  # here


class Base(nn.Module):
    def __init__(self, expert: Callable[[], nn.Module] = Expert) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(H, E, bias=False), nn.ModuleList(expert() for _ in range(E))
        self.register_buffer("counts", torch.zeros(E))

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.router(x).softmax(-1).topk(K)


class DetachOne(Base):
    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            tok, slot = torch.where(ids == e)
            y = expert(x[tok])
            if e == 1:
                y = y.detach()  # here
            out.index_add_(0, tok, y * weights[tok, slot, None])
        return out


class DetachOneMasked(Base):
    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            y = expert(x)
            if e == 1:
                y = y.detach()  # here
            out = out + y * (weights * (ids == e)).sum(-1, keepdim=True)
        return out


class DetachInAll(Base):
    def __init__(self) -> None:
        super().__init__(Gated)

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        return sum(expert(x) * (weights * (ids == e)).sum(-1, keepdim=True) for e, expert in enumerate(self.experts))


class Assigned(Base):
    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            tok, slot = torch.where(ids == e)
            out[tok] = expert(x[tok]) * weights[tok, slot, None]  # here
        return out


class Clamped(Base):
    """The sum is changed by the user, and that is what is said."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            tok, slot = torch.where(ids == e)
            out.index_add_(0, tok, expert(x[tok]) * weights[tok, slot, None])
            if e == 1:
                out.clamp_(-1, 1)  # here
        return out


class Listed(Base):
    """A number that only Python has leaves no operation behind: the line is that of the tensor that was counted."""

    def forward(self, x: Tensor) -> tuple[Tensor, list[int]]:
        weights, ids = self.route(x)
        out, numbers = torch.zeros_like(x), []
        for e, expert in enumerate(self.experts):
            tok, slot = torch.where(ids == e)  # here
            numbers.append(len(tok))
            out.index_add_(0, tok, expert(x[tok]) * weights[tok, slot, None])
        return out, numbers


class Denominator(Base):
    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        out, total = torch.zeros_like(x), torch.zeros(len(x), 1)
        for e, expert in enumerate(self.experts):
            tok, slot = torch.where(ids == e)
            out.index_add_(0, tok, expert(x[tok]) * weights[tok, slot, None])
            total.index_add_(0, tok, weights[tok, slot, None])  # here
        return out / total


class Filtered(Base):
    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        for e in [e for e in range(E) if (ids == e).any()]:  # here
            tok, slot = torch.where(ids == e)
            out = out.index_add(0, tok, self.experts[e](x[tok]) * weights[tok, slot, None])
        return out


class Mapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(H, E, bias=False)
        self.w_in, self.w_out = nn.Parameter(torch.randn(E, H, I)), nn.Parameter(torch.randn(E, I, H))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(K)
        table = torch.zeros(len(x), E).scatter(1, ids, weights)

        def one(w_in: Tensor, w_out: Tensor, gate: Tensor) -> Tensor:
            return F.gelu(x @ w_in) @ w_out * gate[:, None]

        outputs = torch.vmap(one, in_dims=(0, 0, 1))(self.w_in, self.w_out, table)  # here
        return outputs.sum(0)


CASES = {
    DetachOne: ("no-rule", "expert rows go through `detach`: gradients end there, which no fused op does"),
    DetachOneMasked: ("no-rule", "`detach`: gradients end there"),
    DetachInAll: ("no-rule", "`detach`: gradients end there"),
    Assigned: ("not-combined", "assigned here, not added: of a token's 2 experts, only the one that is written last stays"),
    Clamped: ("sum-changed", "`clamp`"),
    Listed: ("not-captured", "the program keeps that number"),
    Denominator: ("not-captured", "`index_add` reads their rows beside the experts"),
    Filtered: ("not-captured", "it decides what a list has in it; ask in the loop over experts instead"),
    Mapped: ("transformed", "torch.func transforms the experts here (vmap)"),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("cls", CASES, ids=lambda c: c.__name__)
def test_the_statement_is_named(cls: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, seen, x = cls(), Seen(), torch.randn(T, H)
    compiled = torch.compile(model, backend=capturing(seen))
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
    code, text = CASES[cls]
    first = seen.report.skipped[0]
    assert first.code == code
    assert text in first.message
    lines, start = inspect.getsourcelines(Gated if cls is DetachInAll else cls)
    line = start + next(i for i, source in enumerate(lines) if source.rstrip().endswith("# here"))
    assert first.location == f"{__file__}:{line}"
    assert seen.report.fused == [] or cls is Filtered, "behind the list, which breaks the graph, the loop is fused"


def test_a_number_that_changed_is_no_text_of_the_implementation() -> None:
    """Dynamo makes a Python number dynamic once it has another value: then one expert has it, and the others a constant."""

    class Scaled(Base):
        def forward(self, x: Tensor) -> Tensor:
            weights, ids = self.route(x)
            return sum(expert(x) * (weights * (ids == e)).sum(-1, keepdim=True) for e, expert in enumerate(self.experts))

    model, seen, x = Scaled(), Seen(), torch.randn(T, H)
    compiled = torch.compile(model, backend=capturing(seen))
    for scale in (1.0, 2.0, 3.0):
        model.experts[1].scale = scale
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), model(x))
    messages = {skipped.message for skipped in seen.report.skipped}
    assert messages
    assert not any("SharedVector" in message for message in messages)
