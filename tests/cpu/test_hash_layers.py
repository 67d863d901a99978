"""Hash layers: the expert of a token comes out of a table of token ids (Roller et al. 2021). Nothing scores, and nothing weighs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import moefuse

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "as_traced")

V, H, I, E = 50, 12, 20, 4  # noqa: E741  (the letters of moefuse.spec)
Run = Callable[[nn.ModuleList, Tensor, Tensor], Tensor]


def _added(experts: nn.ModuleList, x: Tensor, ids: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e, expert in enumerate(experts):
        tok = torch.where(ids == e)[0]
        out.index_add_(0, tok, expert(x[tok]))
    return out


def _masked(experts: nn.ModuleList, x: Tensor, ids: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e, expert in enumerate(experts):
        mask = ids == e
        out[mask] = expert(x[mask])
    return out


def _skipped(experts: nn.ModuleList, x: Tensor, ids: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e, expert in enumerate(experts):
        mask = ids == e
        if mask.any():
            out[mask] = expert(x[mask])
    return out


def _copied(experts: nn.ModuleList, x: Tensor, ids: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e, expert in enumerate(experts):
        tok = (ids == e).nonzero().flatten()
        out = out.index_copy(0, tok, expert(x.index_select(0, tok)))
    return out


def _selected(experts: nn.ModuleList, x: Tensor, ids: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e, expert in enumerate(experts):
        out = torch.where((ids == e)[:, None], expert(x), out)
    return out


def _dense(experts: nn.ModuleList, x: Tensor, ids: Tensor) -> Tensor:
    return torch.einsum("te,teh->th", F.one_hot(ids, E).float(), torch.stack([expert(x) for expert in experts], 1))


def _sorted(experts: nn.ModuleList, x: Tensor, ids: Tensor) -> Tensor:
    order = torch.argsort(ids, stable=True)
    sizes = torch.bincount(ids, minlength=E).tolist()
    done = torch.cat([expert(piece) for expert, piece in zip(experts, x[order].split(sizes), strict=True)])
    return torch.zeros_like(x).index_copy(0, order, done)


RUNS: tuple[Run, ...] = (_added, _masked, _skipped, _copied, _selected, _dense)


class Hash(nn.Module):
    """``embeds``: the tokens are embedded here; else in front of the layer."""

    def __init__(self, run: Run, embeds: bool = True) -> None:
        super().__init__()
        self.run, self.embeds, self.embed = run, embeds, nn.Embedding(V, H)
        self.register_buffer("table", torch.randint(0, E, (V,)))
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(H, I), nn.ReLU(), nn.Linear(I, H)) for _ in range(E))

    def forward(self, numbers: Tensor, given: Tensor) -> Tensor:
        x = self.embed(numbers).flatten(0, 1) if self.embeds else given
        return x + self.run(self.experts, x, self.table[numbers.flatten()])  # type: ignore[index]


def _report(run: Run, embeds: bool) -> moefuse.FusionReport:
    """Output and gradients are eager's; what was found."""
    torch.manual_seed(0)
    model, inputs = Hash(run, embeds), (torch.randint(0, V, (3, 7)), torch.randn(21, H))
    found = []
    for call in (model, torch.compile(model, backend="moefuse")):
        model.zero_grad()
        out = call(*inputs)
        out.square().sum().backward()
        found.append([out.detach(), *(torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters())])
    torch.testing.assert_close(found[1], found[0])
    report = moefuse.last_report()
    assert report is not None
    return report


@pytest.mark.parametrize("embeds", [True, False])
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.every_value
def test_experts_out_of_a_table(run: Run, embeds: bool) -> None:
    """Rows of embeddings are tokens like others, though a table of rows that ids index might hold experts' weights, too."""
    report = _report(run, embeds)
    assert (len(report.fused), report.skipped, report.graph_breaks) == (1, [], [])


def test_sorted_and_cut_by_a_list_of_sizes() -> None:
    """Ids beyond the experts would make that list longer, and no score says that there are none."""
    (skipped,) = _report(_sorted, True).skipped
    assert skipped.code == "not-captured"
    assert "the experts come out of a table" in skipped.message
    assert skipped.location == f"{__file__}:{_sorted.__code__.co_firstlineno + 2}"


class Relations(nn.Module):
    """The near miss: a kind for each edge, from outside, sorted and cut the same way, is no routing of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.relations = nn.ModuleList(nn.Linear(H, H) for _ in range(E))

    def forward(self, x: Tensor, edges: Tensor, kind: Tensor) -> Tensor:
        order = torch.argsort(kind)
        sizes = torch.bincount(kind, minlength=E).tolist()
        pieces = x[edges[0][order]].split(sizes)
        done = torch.cat([linear(piece) for linear, piece in zip(self.relations, pieces, strict=True)])
        return torch.zeros_like(x).index_add(0, edges[1][order], done)


def test_relations_of_a_graph_are_not_told() -> None:
    torch.manual_seed(0)
    model, inputs = Relations(), (torch.randn(9, H), torch.randint(9, (2, 30)), torch.randint(E, (30,)))
    torch.testing.assert_close(torch.compile(model, backend="moefuse")(*inputs), model(*inputs))
    report = moefuse.last_report()
    assert report is not None
    assert report.skipped == []
