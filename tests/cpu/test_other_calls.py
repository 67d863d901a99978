"""What one call does to others of the same compiled layer: each size that asks for another graph, and each call that fails."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import moefuse
from moefuse.pipeline import publish
from tests.cpu.capture_case import Seen, capturing
from tests.cpu.test_input_sizes import E, Experts, H

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "as_traced")


class Hits(Experts):
    """A loop over the experts that were chosen, as transformers has it."""

    def forward(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        mask = F.one_hot(ids, E).permute(2, 1, 0)
        for hit in (mask.sum(dim=(-1, -2)) > 0).nonzero():
            e = hit[0]
            slot, rows = torch.where(mask[e])
            out.index_add_(0, rows, (x[rows] @ self.up[e].t()).relu() @ self.down[e].t() * weights[rows, slot, None])
        return out


class Gathered(Experts):
    """Weights gathered for each slot, which is one graph with any sizes."""

    def forward(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        h = torch.einsum("th,tkih->tki", x, self.up[ids]).relu()
        return (torch.einsum("tki,tkhi->tkh", h, self.down[ids]) * weights[..., None]).sum(1)


class Routed(nn.Module):
    """How many experts a token has is an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(H, E), Experts()

    def forward(self, x: Tensor, top_k: int) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(top_k)
        return self.experts(x, weights, ids)  # type: ignore[no-any-return]


def routed(top_k: int, tokens: int = 9) -> tuple[Tensor, Tensor, Tensor]:
    weights, ids = torch.randn(tokens, E).softmax(-1).topk(top_k)
    return torch.randn(tokens, H), weights, ids


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("kind", "dynamic"), [(Experts, None), (Experts, True), (Hits, None), (Gathered, None), (Routed, None)])
def test_another_number_of_experts_for_each_token(kind: type[nn.Module], dynamic: bool | None) -> None:
    """K was a symbol from its second value on, with which nothing was fused; the loop was then left for good, for K=2 as well."""
    seen, model, graphs = Seen(), kind(), []
    compiled = torch.compile(model, backend=capturing(seen), dynamic=dynamic)
    with torch.no_grad():
        for top_k in (2, 3, 2, 4, 2):
            given: tuple[Any, ...] = routed(top_k)
            given = (given[0], top_k) if kind is Routed else given
            torch.testing.assert_close(compiled(*given), model(*given))
            graphs.append(len(seen.graphs))
    assert graphs == [1, 2, 2, 3, 3]
    assert (len(seen.report.fused), seen.report.skipped, seen.report.graph_breaks) == (3, [], []), seen.report


def test_the_numbers_of_tokens_stay_symbols() -> None:
    """Where K is a number at last, tokens are not: calls with other numbers of them are no further graphs."""
    seen, model = Seen(), Experts()
    compiled = torch.compile(model, backend=capturing(seen))
    with torch.no_grad():
        for top_k, tokens in ((2, 9), (3, 9), (3, 12), (3, 3), (2, 5), (3, 7)):
            given = routed(top_k, tokens)
            torch.testing.assert_close(compiled(*given), model(*given))
    assert len(seen.report.fused) == len(seen.graphs), seen.report
    assert len(seen.graphs) <= 5


def test_numbers_in_a_table_are_no_experts() -> None:
    """Integers that are compared with a number have a last size, too: no graph for each of them where nothing comes of it."""

    def masked(tokens: Tensor, x: Tensor) -> Tensor:
        return x * (tokens == 3)

    seen = Seen()
    compiled = torch.compile(masked, backend=capturing(seen))
    for length in (4, 5, 6, 7):
        compiled(torch.arange(2 * length).view(2, length), torch.randn(2, length))
    assert len(seen.graphs) == 2


@pytest.mark.parametrize("order", ["before", "between"])
def test_a_wrong_call_takes_no_other_with_it(order: str) -> None:
    """Features are missing: that call raises. Dynamo then left the code, of this layer and of all others of its class."""
    layer, other = Experts(), Experts()
    compiled, more = (torch.compile(m, backend="moefuse", options={"expect": 1, "strict": True}) for m in (layer, other))
    x, weights, ids = routed(2)
    with torch.no_grad():
        if order == "between":
            compiled(x, weights, ids)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="mat1 and mat2"):
                compiled(x[:, :-1], weights, ids)
        with torch.compiler.set_stance("fail_on_recompile" if order == "between" else "default"):
            torch.testing.assert_close(compiled(x, weights, ids), layer(x, weights, ids))
        report = moefuse.last_report()
        assert report is not None
        assert report.layers == (1, 1), report
        torch.testing.assert_close(more(x, weights, ids), other(x, weights, ids))


def lost(top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """A call in which K has to stay a symbol, so that its experts are not recognised."""
    x, weights, ids = routed(top_k)
    for tensor in (weights, ids):
        torch._dynamo.mark_dynamic(tensor, 1)
    return x, weights, ids


@pytest.mark.parametrize(("kind", "options"), [(Experts, {"expect": 1}), (Gathered, {"strict": True})])
def test_losing_experts_that_were_fused_is_an_error(kind: type[Experts], options: dict[str, Any]) -> None:
    """Nothing was raised, and the report went on to say that the layer is fused; what is fused for other calls stays."""
    layer = kind()
    compiled = torch.compile(layer, backend="moefuse", options=options)
    given = routed(2)
    with torch.no_grad():
        compiled(*given)
        with pytest.raises(moefuse.FusionError, match=r"fused in another call|0 layers were fused"):
            compiled(*lost(3))
        with torch.compiler.set_stance("fail_on_recompile"):
            torch.testing.assert_close(compiled(*given), layer(*given))


def test_an_error_for_each_call() -> None:
    """Dynamo remembers a frame that it left; who wants an error wants it again."""
    compiled = torch.compile(Experts(), backend="moefuse", options={"strict": True})
    with torch.no_grad():
        compiled(*routed(2))
        for top_k in (3, 3, 4):
            with pytest.raises(moefuse.FusionError, match="fused in another call"):
                compiled(*lost(top_k))


def test_losing_experts_that_were_fused_is_told_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish, "_warned", set())
    layer, other = Experts(), Experts()
    compiled = torch.compile(layer, backend="moefuse")
    with torch.no_grad(), caplog.at_level(logging.WARNING, "moefuse.backend"):
        compiled(*routed(2))
        for top_k in (3, 4, 3):
            given = lost(top_k)
            torch.testing.assert_close(compiled(*given), layer(*given))
        report = moefuse.last_report()
        assert report is not None
        assert report.layers == (0, 1), report
        assert [s.code for s in report.skipped] == ["nothing-found"]
        given = routed(3)
        torch.testing.assert_close(torch.compile(other, backend="moefuse", options={"expect": 1})(*given), other(*given))
    assert len([r for r in caplog.records if "fused in another call" in r.getMessage()]) == 1


def test_the_limit_of_graphs_is_an_error() -> None:
    """Each K is a graph of its own, and torch compiles so many of one code: from then on calls with other numbers run in eager."""
    layer = Experts()
    compiled = torch.compile(layer, backend="moefuse", options={"expect": 1})
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=1):
        given = routed(2)
        compiled(*given)
        for top_k in (3, 4):
            with pytest.raises(moefuse.FusionError, match="recompile_limit"):
                compiled(*routed(top_k))
        torch.testing.assert_close(compiled(*given), layer(*given))


def test_another_compiled_layer_in_between() -> None:
    """The report is that of the call of torch.compile that compiled something last; what an earlier one had fused is known all the same."""
    compiled, other = (torch.compile(Experts(), backend="moefuse", options={"strict": True}) for _ in range(2))
    with torch.no_grad():
        compiled(*routed(2))
        other(*routed(2))
        with pytest.raises(moefuse.FusionError, match="fused in another call"):
            compiled(*lost(3))
