"""Assertions of the program about how many tokens an expert has: they raise as in eager. Those that Dynamo makes go with the loop."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.cpu.capture_case import Seen, at_most_three, capturing, equal

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

H, I, E, T = 8, 6, 4, 9  # noqa: E741  (the letters of moefuse.spec)


class Asks(nn.Module):
    """Whatever is asked of the number of an expert's rows is asked in front of its product."""

    def __init__(self, ask: Callable[[Tensor], None]) -> None:
        super().__init__()
        self.ask = ask
        self.up, self.down = nn.Parameter(torch.randn(E, I, H)), nn.Parameter(torch.randn(E, H, I))

    def forward(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in range(E):
            rows, slot = torch.where(ids == e)
            self.ask(rows)
            out.index_add_(0, rows, (x[rows] @ self.up[e].t()).relu() @ self.down[e].t() * weights[rows, slot, None])
        return out


def below(rows: Tensor) -> None:
    assert rows.numel() < 4


def checked(rows: Tensor) -> None:
    torch._check(rows.shape[0] < 4)


def some(rows: Tensor) -> None:
    torch._check(rows.shape[0] > 0)


def even(rows: Tensor) -> None:
    torch._check(rows.shape[0] % 2 == 0)


def three(rows: Tensor) -> None:
    torch._check(rows.shape[0] != 3)


def any_number(rows: Tensor) -> None:
    torch._check(rows.shape[0] <= 2 * T)


def routed(*loads: int) -> tuple[Tensor, Tensor, Tensor]:
    """x, weights [T, 1], ids [T, 1] with so many tokens for each expert."""
    ids = torch.cat([torch.full((n,), e) for e, n in enumerate(loads)]).unsqueeze(1)
    return torch.randn(len(ids), H), torch.rand(len(ids), 1), ids


@pytest.mark.parametrize(
    ("ask", "good", "bad"),
    [
        pytest.param(below, (3, 3, 3, 0), (4, 3, 2, 0), id="assert"),
        pytest.param(checked, (3, 3, 3, 0), (0, 0, 0, 9), id="check"),
        pytest.param(some, (3, 3, 2, 1), (3, 3, 3, 0), id="not empty"),
        pytest.param(even, (4, 2, 2, 0), (3, 1, 2, 2), id="even"),
        pytest.param(three, (4, 5, 0, 0), (4, 2, 3, 0), id="any other number"),
    ],
)
def test_what_a_program_asserts_is_asserted(ask: Callable[[Tensor], None], good: tuple[int, ...], bad: tuple[int, ...]) -> None:
    """First with numbers that hold, so that the compiled program is there."""
    model = Asks(ask)
    compiled = torch.compile(model, backend=capturing(Seen()))
    given = routed(*good)
    torch.testing.assert_close(compiled(*given), model(*given))
    given = routed(*bad)
    for run in (model, compiled):
        with pytest.raises((AssertionError, RuntimeError)):
            run(*given)


def test_what_holds_for_any_routing_is_no_reason_to_wait() -> None:
    """An assertion that every mask fulfils goes with the loop, like those that Dynamo makes."""
    seen = Seen()
    model = Asks(any_number)
    given = routed(3, 3, 2, 1)
    torch.testing.assert_close(torch.compile(model, backend=capturing(seen))(*given), model(*given))
    assert (len(seen.report.fused), len(seen.graphs)) == (1, 1), seen.report
    assert not {"nonzero", "where"} & {n.name.partition("_")[0] for n in seen.graphs[0].graph.nodes}


class AsksPieces(Asks):
    """Of counts taken apart, and of where the pieces end."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = x[:, :E].softmax(-1).topk(1, -1)
        order = ids.flatten().argsort(stable=True)
        tokens, weights = order // 1, weights.flatten()[order]
        sorted_x, out, start = x[tokens], torch.zeros_like(x), 0
        for e, n in enumerate(torch.bincount(ids.flatten(), minlength=E).tolist()):
            end = start + n
            rows = tokens[start:end]
            self.ask(rows, n, end)
            y = (sorted_x[start:end] @ self.up[e].t()).relu() @ self.down[e].t()
            out.index_add_(0, rows, y * weights[start:end, None])
            start = end
        return out


def sent(*loads: int) -> Tensor:
    """x [T, H], of which so many tokens go to each expert."""
    x, _, ids = routed(*loads)
    return torch.cat([nn.functional.one_hot(ids[:, 0], E) + x[:, :E] / 100, x[:, E:]], -1)


PROMISED: dict[str, Callable[[Tensor, int, int], None]] = {
    "a count": lambda rows, n, end: torch._check(n != 4),
    "a bound": lambda rows, n, end: torch._check(n < 4),
    "of another kind": lambda rows, n, end: torch._check_value(n <= 3),
    "the rows": lambda rows, n, end: torch._check(rows.shape[0] < 4),
    "a remainder": lambda rows, n, end: torch._check(n % 5 != 4),
    "an end's remainder": lambda rows, n, end: torch._check(end % 9 != 8),
    "an end": lambda rows, n, end: torch._check(end != 4),
    "an end's bound": lambda rows, n, end: torch._check(2 * end <= 2 * T - 3 or end == T),
}


@pytest.mark.parametrize("name", PROMISED)
def test_what_a_program_asserts_of_pieces_is_asserted(name: str) -> None:
    model = AsksPieces(PROMISED[name])  # type: ignore[arg-type]
    compiled = torch.compile(model, backend=capturing(Seen()))
    x = sent(3, 3, 3, 0)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
        x = sent(4, 4, 1, 0)
        for run in (model, compiled):
            with pytest.raises((RuntimeError, ValueError)):
                run(x)


def test_pieces_of_any_routing_are_fused() -> None:
    seen = Seen()
    model = AsksPieces(lambda rows, n, end: torch._check(end <= T))  # type: ignore[arg-type]
    x = sent(3, 3, 2, 1)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend=capturing(seen))(x), model(x))
    assert len(seen.report.fused) == 1, seen.report


class Totals(nn.Module):
    """Tokens are counted over the loop, and what came of it is asked once, at its end."""

    def __init__(self, ask: Callable[[int, int], None], experts: int = E) -> None:
        super().__init__()
        self.ask, self.experts = ask, experts
        self.up, self.down = nn.Parameter(torch.randn(experts, I, H)), nn.Parameter(torch.randn(experts, H, I))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = x[:, :E].softmax(-1).topk(1, -1)
        out, total = torch.zeros_like(x), 0
        for e in range(self.experts):
            rows, slot = torch.where(ids == e)
            total += rows.numel()
            out.index_add_(0, rows, (x[rows] @ self.up[e].t()).relu() @ self.down[e].t() * weights[rows, slot, None])
        self.ask(total, ids.numel())
        return out


TOTALS: dict[str, Callable[[int, int], None]] = {
    "assert": equal,
    "check": lambda total, slots: torch._check(total == slots),
    "at least": lambda total, slots: torch._check(total >= slots),
    "unequal": lambda total, slots: torch._check(total != slots - 2),
    "a multiple": lambda total, slots: torch._check(2 * total >= 2 * slots),
}


@pytest.mark.parametrize("name", TOTALS)
def test_tokens_that_got_lost_stop_the_program(name: str) -> None:
    """Experts that the loop leaves out: with the first tokens none is lost, with the second two are."""
    model = Totals(TOTALS[name], experts=E - 1)
    compiled = torch.compile(model, backend=capturing(Seen()))
    with torch.no_grad():
        x = sent(3, 3, 3, 0)
        torch.testing.assert_close(compiled(x), model(x))
        x = sent(3, 3, 1, 2)
        for run in (model, compiled):
            with pytest.raises((AssertionError, RuntimeError)):
                run(x)


@pytest.mark.parametrize("name", TOTALS)
def test_a_total_that_is_right_for_any_routing_is_fused(name: str) -> None:
    """All experts' tokens are all tokens: nothing is left to ask at run time, and nothing to warn about."""
    seen = Seen()
    model = Totals(TOTALS[name])
    x = sent(3, 3, 2, 1)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend=capturing(seen))(x), model(x))
    assert (len(seen.report.fused), seen.report.skipped) == (1, []), seen.report


class AsksOfFloats(Asks):
    """As :class:`Asks`, of a load that is read as a float."""

    def forward(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in range(E):
            rows, slot = torch.where(ids == e)
            self.ask((ids == e).float().sum().item())  # type: ignore[arg-type]
            out.index_add_(0, rows, (x[rows] @ self.up[e].t()).relu() @ self.down[e].t() * weights[rows, slot, None])
        return out


@pytest.mark.parametrize(
    "ask", [at_most_three, lambda n: torch._check(n <= 3), lambda n: torch._check(n < 4)], ids=["assert", "check", "less"]
)
def test_what_is_asserted_of_a_float_is_asserted(ask: Callable[[Tensor], None]) -> None:
    """Of some bounds on a float that is read out of a tensor, torch writes nothing into the graph."""
    model = AsksOfFloats(ask)
    compiled = torch.compile(model, backend=capturing(Seen()))
    with torch.no_grad():
        given = routed(3, 3, 3, 0)
        torch.testing.assert_close(compiled(*given), model(*given))
        given = routed(4, 3, 2, 0)
        for run in (model, compiled):
            with pytest.raises((AssertionError, RuntimeError)):
                run(*given)
