"""Tokens, ids and routing weights that come into a graph as inputs of their own, behind a break for example, with sizes of their own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from moefuse import Options
from moefuse.pipeline import rewrite
from tests.cpu.capture_case import Seen, capturing

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

H, I, E, K = 8, 6, 4, 2  # noqa: E741  (the letters of moefuse.spec)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(E, I, H)), nn.Parameter(torch.randn(E, H, I))

    def forward(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in range(E):
            rows, slot = torch.where(ids == e)
            out.index_add_(0, rows, (x[rows] @ self.up[e].t()).relu() @ self.down[e].t() * weights[rows, slot, None])
        return out


class Broken(nn.Module):
    """The graph breaks between the router and the experts: ids and weights are computed in one frame and used in the next."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(H, E), Experts()

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(K)
        torch._dynamo.graph_break()
        return self.experts(x, weights, ids)  # type: ignore[no-any-return]


def routed(tokens: int, rows: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """x [rows, H], weights and ids [tokens, K]."""
    weights, ids = torch.randn(tokens, E).softmax(-1).topk(K)
    return torch.randn(rows or tokens, H), weights, ids


@pytest.mark.parametrize("how", [{}, {"dynamic": True}, {"fullgraph": True}], ids=["plain", "dynamic", "fullgraph"])
def test_experts_of_another_number_of_tokens(how: dict[str, bool]) -> None:
    """From the second number on, sizes are symbols, each input's its own."""
    seen, model = Seen(), Experts()
    compiled = torch.compile(model, backend=capturing(seen), **how)  # type: ignore[call-overload]
    with torch.no_grad():
        for tokens in (9, 13, 7, 21):
            given = routed(tokens)
            torch.testing.assert_close(compiled(*given), model(*given))
    assert (len(seen.report.fused), seen.report.skipped) == (len(seen.graphs), []), seen.report
    assert len(seen.graphs) <= 2


def test_behind_a_break() -> None:
    seen, model = Seen(), Broken()
    compiled = torch.compile(model, backend=capturing(seen))
    for tokens in (9, 13, 7):
        x = torch.randn(tokens, H)
        torch.testing.assert_close(compiled(x), model(x))
    assert (len(seen.report.fused), seen.report.skipped) == (2, []), seen.report


class BrokenSequences(Broken):
    """As :class:`Broken`, with tokens in sequences: their number is a product, and behind the break nobody says so."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).view(-1, E).softmax(-1).topk(K)
        torch._dynamo.graph_break()
        return self.experts(x.reshape(-1, H), weights, ids).view(x.shape)  # type: ignore[no-any-return]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "shapes",
    [((13, 7), (5, 7), (9, 7)), ((3, 7), (3, 5), (3, 11)), ((13, 7), (5, 6), (9, 4))],
    ids=["sequences", "lengths", "both"],
)
def test_sequences_behind_a_break(shapes: tuple[tuple[int, int], ...]) -> None:
    """Numbers of sequences and their lengths times each other are as many as the ids; the graph is guarded to have that."""
    seen, model = Seen(), BrokenSequences()
    compiled = torch.compile(model, backend=capturing(seen))
    for shape in shapes:
        x = torch.randn(*shape, H)
        torch.testing.assert_close(compiled(x), model(x))
    assert (len(seen.report.fused), seen.report.skipped) == (2, []), seen.report


def test_products_that_differ_later_are_another_graph() -> None:
    """There are more rows than ids in the last calls; the ids are of the first of them."""
    seen, model = Seen(), Experts()

    def experts(x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        return model(x.flatten(0, 1), weights, ids)  # type: ignore[no-any-return]

    compiled = torch.compile(experts, backend=capturing(seen))
    with torch.no_grad():
        for sequences, length, tokens in ((3, 7, 21), (5, 7, 35), (4, 7, 20), (6, 5, 13)):
            _, weights, ids = routed(tokens)
            x = torch.randn(sequences, length, H)
            torch.testing.assert_close(compiled(x, weights, ids), experts(x, weights, ids))
    assert seen.report.fused, seen.report


def test_sizes_that_differ_later_are_another_graph() -> None:
    """More rows than ids: those without ids are zero. Found equal before, which the graph is guarded to have."""
    seen, model = Seen(), Experts()
    compiled = torch.compile(model, backend=capturing(seen))
    with torch.no_grad():
        for tokens, rows in ((9, 9), (13, 13), (7, 11), (5, 5), (6, 13)):
            given = routed(tokens, rows)
            torch.testing.assert_close(compiled(*given), model(*given))


def test_a_dimension_that_the_user_marked() -> None:
    """``mark_dynamic`` asks for a range of sizes; that two inputs have one size is no contradiction to it."""
    seen, model = Seen(), Experts()
    compiled = torch.compile(model, backend=capturing(seen))
    with torch.no_grad():
        for tokens in (9, 13):
            given = routed(tokens)
            for tensor in given:
                torch._dynamo.mark_dynamic(tensor, 0)
            torch.testing.assert_close(compiled(*given), model(*given))
    assert seen.report.fused, seen.report


def test_nothing_is_guarded_without_experts() -> None:
    """Two inputs that are equally long by accident stay independent: one graph for both calls, as without moefuse."""
    seen = Seen()

    def apart(x: Tensor, y: Tensor) -> Tensor:
        return x.sum(0) + y.sum(0)

    compiled = torch.compile(apart, backend=capturing(seen))
    for first, second in ((9, 9), (13, 13), (7, 11), (5, 6)):
        compiled(torch.randn(first, H), torch.randn(second, H))
    with_moefuse = len(seen.graphs)
    torch.compiler.reset()
    plain = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(apart, backend=plain)
    for first, second in ((9, 9), (13, 13), (7, 11), (5, 6)):
        compiled(torch.randn(first, H), torch.randn(second, H))
    assert with_moefuse == plain.frame_count


def test_one_number_for_each_token() -> None:
    """The result has no features, so its last size is the number of tokens: a symbol from the second number on."""

    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(H, E)
            self.experts = nn.ModuleList(nn.Sequential(nn.Linear(H, I), nn.ReLU(), nn.Linear(I, 1)) for _ in range(E))

        def forward(self, x: Tensor) -> Tensor:
            weights, ids = self.router(x).softmax(-1).topk(K)
            out = x.new_zeros(len(x))
            for e, expert in enumerate(self.experts):
                rows, slot = torch.where(ids == e)
                out[rows] += expert(x[rows]).squeeze(-1) * weights[rows, slot]
            return out

    seen, model = Seen(), Scores()
    compiled = torch.compile(model, backend=capturing(seen))
    with torch.no_grad():
        for tokens in (9, 13, 1):
            x = torch.randn(tokens, H)
            torch.testing.assert_close(compiled(x), model(x))
    assert (len(seen.report.fused), seen.report.skipped) == (len(seen.graphs), []), seen.report


@pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec:FutureWarning")  # torch's own
def test_nobody_asks_the_guards_of_an_exported_program() -> None:
    """Numbers of rows and of ids that agree in the example and are declared apart are not taken to be one."""
    model, rows, tokens = Experts(), torch.export.Dim("rows", min=2), torch.export.Dim("tokens", min=2)
    with torch.no_grad():
        gm = torch.export.export(model, routed(9), dynamic_shapes=({0: rows}, {0: tokens}, {0: tokens})).module()
        for node in gm.graph.nodes:
            node.meta.update({"example_value": node.meta["val"]} if "val" in node.meta else {})
        report = rewrite.rewrite(gm, [n.meta["val"] for n in gm.graph.find_nodes(op="placeholder")], Options())
        gm.recompile()
        given = routed(5, 11)
        torch.testing.assert_close(gm(*given), model(*given))
    assert [skipped.code for skipped in report.skipped] == ["tokens-differ"]
