"""Dropout inside of experts in training: drawn over the rows that experts have; eager's distribution, other numbers.

What a proof compares is without draws. So these tests look at what is drawn: each element is there, times 1 / (1 - p), or is zero; masks
differ from row to row; and outputs and gradients are of one draw.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from moefuse import Options
from tests.cpu.dropout_case import KINDS, E, H, Layer, Loop, Masked, P, Stacked, Weightless, compiled, drawn_at


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", [*KINDS, Stacked])
def test_each_element_is_drawn(kind: type[Layer]) -> None:
    """One expert a token: out is zero, or twice what it is without dropout."""
    torch.manual_seed(0)
    layer = kind().double()
    run, seen = compiled(layer)
    x = torch.randn(200, H, dtype=torch.float64)
    with torch.no_grad():
        out, again, whole = run(x), run(x), layer.eval()(x)
    assert len(seen.report.fused) == 1, seen.report
    kept = out != 0
    torch.testing.assert_close(out[kept], whole[kept] / (1 - P))
    assert abs(kept.double().mean() - (1 - P)) < 0.03  # 4800 draws: four times their deviation
    assert not kept.equal(again != 0)
    assert len(kept.unique(dim=0)) == len(kept)


@pytest.mark.every_value
@pytest.mark.parametrize("where", ["last", "first"])
@pytest.mark.parametrize("kind", KINDS)
def test_slots_of_a_token_draw_for_themselves(kind: type[Layer], where: str) -> None:
    """Two equal experts for each token, which give it back: half of all elements are kept in one of them and not in the other."""
    torch.manual_seed(0)
    layer = kind(where, top_k=2).double()
    with torch.no_grad():
        layer.router.weight.zero_()
        for expert in layer.experts:
            torch.nn.init.eye_(expert.up.weight)  # type: ignore[union-attr,arg-type]
            torch.nn.init.eye_(expert.down.weight)  # type: ignore[union-attr,arg-type]
    run, seen = compiled(layer)
    x = torch.rand(200, H, dtype=torch.float64)
    with torch.no_grad():
        out = run(x)
    assert seen.report.fused
    times = out / x * E * (1 - P)
    torch.testing.assert_close(times, times.round())
    shares = times.round().long().flatten().bincount(minlength=3) / times.numel()
    torch.testing.assert_close(shares, torch.tensor([0.25, 0.5, 0.25]), rtol=0, atol=0.03)


@pytest.mark.every_value
@pytest.mark.parametrize("where", ["first", "gated", "between", "last"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_of_the_draw(kind: type[Layer], where: str) -> None:
    """From the same state of the generator on: a step along the gradient changes the output as it says."""
    torch.manual_seed(1)
    layer = kind(where, top_k=2).double()
    run, seen = compiled(layer)
    x, direction = torch.randn(2, 40, H, dtype=torch.float64)
    drawn = drawn_at(run, x.requires_grad_())
    drawn.sum().backward()
    assert x.grad is not None
    step = 1e-6
    with torch.no_grad():
        for p in (x, *layer.parameters()):
            along = direction if p is x else torch.randn_like(p)
            if p.grad is None:
                continue
            values = []
            for sign in (1, -1):
                p.add_(along, alpha=sign * step)
                values.append(drawn_at(run, x).sum())
                p.sub_(along, alpha=sign * step)
            torch.testing.assert_close((values[0] - values[1]) / (2 * step), (p.grad * along).sum(), rtol=1e-4, atol=1e-4)
    assert seen.report.fused
    assert not seen.report.skipped


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", KINDS)
def test_one_dropout_is_one_draw(kind: type[Layer]) -> None:
    """Gate and up projection of equal weights read the same row: ``silu(u) * u`` is nowhere negative, as it would be of two draws."""
    torch.manual_seed(0)
    layer = kind("gated", top_k=2).double()
    with torch.no_grad():
        for expert in layer.experts:
            expert.gate.weight.copy_(expert.up.weight)  # type: ignore[union-attr,operator,arg-type]
            torch.nn.init.eye_(expert.down.weight)  # type: ignore[union-attr,arg-type]
    run, seen = compiled(layer)
    out = run(torch.randn(50, H, dtype=torch.float64))
    assert seen.report.fused
    assert out.min() >= 0


def test_a_checkpoint_draws_the_same_again() -> None:
    torch.manual_seed(0)
    layer = Loop(top_k=2).double()

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.layer, x, use_reentrant=False)  # type: ignore[no-any-return]

    found = []
    for module in (layer, Around()):
        run, seen = compiled(module)
        x = torch.randn(30, H, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
        out = drawn_at(run, x)
        out.square().sum().backward()
        found.append((out.detach(), x.grad))
        assert seen.report.fused
    torch.testing.assert_close(*found)


def test_without_draws_it_is_not_there() -> None:
    """In eval, and with p = 0, the op is the one without dropout."""
    for layer in (Loop().eval(), Loop(p=0.0)):
        run, seen = compiled(layer)
        x = torch.randn(20, H)
        torch.testing.assert_close(run(x), layer(x))
        assert [f.spec.activation for f in seen.report.fused] == ["relu"]


def test_the_whole_graph_is_compared_without_draws() -> None:
    run, seen = compiled(Loop(top_k=2), Options(verify="graph"))
    run(torch.randn(20, H))
    assert seen.report.fused
    assert not seen.report.skipped


@pytest.mark.parametrize("which", ["other p", "in place", "alpha"])
def test_what_is_left(which: str) -> None:
    """Experts with other probabilities, writes, and what draws otherwise."""
    layer = Masked(inplace=which == "in place")
    if which == "other p":
        layer.experts[1].drop.p = 0.2  # type: ignore[union-attr]
    if which == "alpha":
        for expert in layer.experts:
            expert.drop = nn.AlphaDropout(P)
    run, seen = compiled(layer)
    run(torch.randn(20, H))
    assert not seen.report.fused
    assert {skipped.code for skipped in seen.report.skipped} <= {"random", "experts-differ", "no-rule"}
    assert seen.report.skipped


def test_experts_without_weights_draw_for_each_slot() -> None:
    """What they add is computed once for a token: one that chose both of them would have one draw, where eager has two."""
    for last, fused in ((nn.Identity, 1), (nn.Dropout, 0)):
        run, seen = compiled(Weightless(last))
        run(torch.randn(40, H))
        assert len(seen.report.fused) == fused, seen.report
        assert seen.codes == (set() if fused else {"random"})


class Repeating(Masked):
    """Ids that may be twice in a token: its expert runs, and draws, once for both."""

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x, x[:, :2].softmax(-1), (x[:, :2] * E).long().clamp(0, E - 1))


def test_an_expert_twice_in_a_token_draws_once() -> None:
    """By slot it would draw twice. Without draws both are one sum."""
    for p, codes in ((0.0, set()), (P, {"ids-not-distinct"})):
        run, seen = compiled(Repeating(top_k=2, p=p))
        run(torch.randn(40, H))
        assert (len(seen.report.fused), seen.codes) == (1 - len(codes), codes), seen.report


class Vectors(Layer):
    """Drops out numbers that all rows of an expert have in common: its own, one for all experts, or a single one."""

    def __init__(self, which: str) -> None:
        super().__init__()
        self.which, self.shared = which, nn.Parameter(torch.ones(H))
        self.own = nn.ParameterList(torch.ones(H) for _ in range(E))

    def scale(self, e: int) -> Tensor:
        scales: dict[str, Tensor] = {"own": self.own[e], "shared": self.shared, "single": self.shared.sum()}
        return scales[self.which]

    def run(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            y = expert.down(F.relu(expert.up(x))) * F.dropout(self.scale(e), P)  # type: ignore[operator]
            out = out + y * (weights * (ids == e)).sum(-1, keepdim=True)
        return out


@pytest.mark.parametrize("which", ["own", "shared", "single"])
def test_what_rows_have_in_common_is_drawn_once_for_an_expert(which: str) -> None:
    """Not for each row, and not for all experts together."""
    torch.manual_seed(0)
    layer = Vectors(which)
    run, seen = compiled(layer)
    x, patterns = torch.randn(60, H), set()
    with torch.no_grad():
        ids = layer.router(x).argmax(-1)
        for _ in range(8):
            kept = run(x) != 0
            rows = [kept[ids == e].unique(dim=0) for e in range(E)]
            assert [len(of_expert) for of_expert in rows] == [1] * E
            patterns.add(len(torch.cat(rows).unique(dim=0)))
    assert patterns == {E} if which != "single" else 2 in patterns
    assert seen.report.fused


def test_eagers_stream_is_kept_where_it_is_asked_for() -> None:
    with torch._inductor.config.patch(fallback_random=True):
        run, seen = compiled(Loop())
        run(torch.randn(20, H))
    assert [skipped.code for skipped in seen.report.skipped][:1] == ["random"]
