"""explain says what the compiled call does: its errors, its graph breaks, what later calls fuse. And what its calls do is taken back."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import moefuse
from tests.conftest import StubDriver
from tests.programs.refused.plain import H, I, K, Layer

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "as_traced")

T, E = 10, 3


class Loop(Layer):
    """A layer that is fused; programs differ in what they do beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(H, E, bias=False)
        self.w_in, self.w_out = nn.Parameter(torch.randn(E, 2 * I, H) * H**-0.5), nn.Parameter(torch.randn(E, H, I) * I**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.route(x)
        out = torch.zeros_like(x)
        for e in range(E):
            tok, slot = torch.where(ids == e)
            out.index_add_(0, tok, self.expert(e, x[tok]) * weights[tok, slot, None])
        return self.after(out)

    def after(self, out: Tensor) -> Tensor:
        return out


class Clips(Loop):
    """Autograd has the weight as it was; Inductor's front notices."""

    def after(self, out: Tensor) -> Tensor:
        self.w_out.detach().clamp_(-1, 1)
        return out


class ClipsOut(Loop):
    def after(self, out: Tensor) -> Tensor:
        with torch.no_grad():
            torch.clamp(self.w_out, -1, 1, out=self.w_out)
        return out


class Balances(Loop):
    """Inductor cannot compile a bincount of numbers that may be anything, so Dynamo breaks there.

    With another number of tokens the second half is not fused.
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", torch.zeros(E))

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.gate(x).softmax(-1)
        ids = (scores + self.bias).topk(K, -1).indices
        counts = torch.bincount(ids.flatten() % E, minlength=E).float()
        torch.add(self.bias, (counts.mean() - counts).sign(), alpha=1e-3, out=self.bias)
        return ids, scores.gather(1, ids)


class Usage(Loop):
    """Inductor cannot compile such a bincount, and moefuse takes back what it made traceable."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("usage", torch.zeros(E, dtype=torch.long))

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        ids, weights = super().route(x)
        self.usage += torch.bincount(ids.flatten() % E, minlength=E)
        return ids, weights


class Counts(Loop):
    """A graph of its own for each value of an attribute."""

    calls = 0

    def after(self, out: Tensor) -> Tensor:
        self.calls += 1
        return out * (1 + self.calls)


class Remembers(Loop):
    """A graph of its own for each length of a list."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def after(self, out: Tensor) -> Tensor:
        self.seen.append(out.detach().mean())
        return out


class TakesTurns(Loop):
    """Few graphs in turn: the attribute moves from the class to the model, and then no call compiles anything."""

    odd = False

    def after(self, out: Tensor) -> Tensor:
        self.odd = not self.odd
        return out + 1 if self.odd else out


def in_fact(model: nn.Module, *sizes: int) -> list[tuple[int, list[str]]]:
    """What calls with so many tokens report, one after the other."""
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="moefuse")
    found = []
    for size in sizes:
        compiled(torch.randn(size, H))
        report = moefuse.last_report()
        assert report is not None
        found.append((len(report.fused), [skipped.code for skipped in report.skipped]))
    return found


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("no_code")
@pytest.mark.parametrize("program", [Clips, ClipsOut])
def test_a_parameter_that_is_written_behind_its_use(program: type[Loop]) -> None:
    """Gradients are of what the parameter holds then: refused by both, and fused by both without autograd."""
    model = program()
    before = model.w_out.detach().clone()
    report = moefuse.explain(model, torch.randn(T, H))
    assert torch.equal(model.w_out, before)
    assert not report.fused
    assert in_fact(program(), T)[0][0] == 0
    with torch.no_grad():
        assert len(moefuse.explain(model, torch.randn(T, H)).fused) == 1, "nothing is wrong with it without autograd"


@pytest.mark.usefixtures("no_code")
def test_a_break_behind_inductors_back_is_reported() -> None:
    report = moefuse.explain(Balances(), torch.randn(T, H))
    first, second = in_fact(Balances(), T, T + 1)
    assert (len(report.fused), [skipped.code for skipped in report.skipped]) == first == (1, [])
    assert any("Dynamic shape operator" in reason for reason in report.graph_breaks), report
    assert second == (1, []), "behind the break, tokens and ids come with a size of their own each"
    assert not [note for note in report.notes if note.startswith("less is fused")], report


@pytest.mark.usefixtures("no_code")
def test_a_graph_that_inductor_cannot_take_breaks_where_it_does_in_fact(caplog: pytest.LogCaptureFixture) -> None:
    """And Dynamo does not say that the backend is broken."""
    said = moefuse.explain(Usage(), torch.randn(T, H))
    assert not [r for r in caplog.records if "Backend compiler" in r.getMessage()], caplog.text
    assert in_fact(Usage(), T) == [(1, [])]
    report = moefuse.last_report()
    assert report is not None
    assert {*said.graph_breaks} == {*report.graph_breaks}
    assert len({*said.graph_breaks}) == 1, said


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("program", "guard"), [(Counts, "self.calls == "), (Remembers, "len(self.seen) == ")])
def test_a_graph_for_every_call_is_reported(program: type[Loop], guard: str) -> None:
    model = program()
    (note,) = moefuse.explain(model, torch.randn(T, H)).notes
    assert note.startswith("every call compiles another graph, "), note
    assert guard in note
    assert getattr(model, "calls", 0) == 0
    assert getattr(model, "seen", []) == []


@pytest.mark.sampled(1)
@pytest.mark.parametrize("program", [Loop, TakesTurns])
def test_later_calls_that_are_fused_make_no_note(program: type[Loop]) -> None:
    assert in_fact(program(), T, T + 1) == [(1, [])] * 2
    report = moefuse.explain(program(), torch.randn(T, H))
    assert (len(report.fused), report.skipped, report.notes) == (1, [], [])


def test_a_layer_that_does_not_see_a_size_makes_no_note() -> None:
    """Its frame is not compiled again, so its region is not in the report of the call with another size."""
    layer = Loop()

    def both(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        a = layer(x)
        torch._dynamo.graph_break()
        return a, layer(y)

    report = moefuse.explain(both, torch.randn(T, H), torch.randn(T + 3, H))
    assert (len(report.fused), report.notes) == (2, [])


class Busy(nn.Module):
    """State of every kind, changed in front of a graph break, in a frame that Dynamo gives up, and behind."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.register_buffer("usage", torch.zeros(6))
        self.losses: list[Tensor] = []
        self.stats = {"calls": 0}
        self.usage_array = np.zeros(6)
        self.last: Tensor | None = None

    def forward(self, x: Tensor, cache: dict[str, Tensor]) -> Tensor:
        self.usage.data.add_(1)
        h = F.dropout(self.norm(self.linear(x)), 0.5)
        self.losses.append(h.mean())
        torch._dynamo.graph_break()
        self.stats["calls"] += 1
        self.linear.weight.detach().mul_(0.5)
        for row in (x[:, 0] > -9).nonzero():
            self.usage[row[0].item()] += 1  # type: ignore[index]
        self.usage_array += random.random() + np.random.rand()
        self.last = h.detach()
        cache["h"] = h
        cache["x"].add_(1)
        return h


def state_of(model: Busy) -> Any:
    tensors = {name: value.tolist() for name, value in model.state_dict().items()}
    python = (model.losses, dict(model.stats), model.usage_array.tolist(), model.last)
    return tensors, python, torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())


@pytest.mark.parametrize("grad", [True, False])
def test_what_the_call_does_is_taken_back(grad: bool, stub_driver: StubDriver) -> None:
    model, cache = Busy(), {"x": torch.zeros(3)}
    before = state_of(model)
    twin = copy.deepcopy(model)
    with torch.set_grad_enabled(grad):
        report = moefuse.explain(model, torch.randn(4, 6, generator=torch.Generator().manual_seed(0)), cache)
    assert report.graph_breaks, "it ran through breaks"
    assert state_of(model) == before
    assert {name: value.tolist() for name, value in cache.items()} == {"x": [0, 0, 0]}
    with torch.set_grad_enabled(grad):
        twin(torch.randn(4, 6), {"x": torch.zeros(3)})
    assert state_of(twin) != before, "and a call does change all this"


def test_a_training_step_is_taken_back() -> None:
    model = Loop()
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)

    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert len(moefuse.explain(step, torch.randn(T, H)).fused) == 1
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not optimizer.state
