"""``moefuse::route`` and ``options={"fuse_router": True}``: routers as models write them, and near misses that stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moefuse.ops.meaning.recipe import Recipe, route_reference
from moefuse.passes.block import router_topk
from tests.cpu.test_router import E, H, K, Layer, T, run

Routed = tuple[Tensor, Tensor]
pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU as a device that has kernels."""
    monkeypatch.setattr(router_topk, "DEVICES", {"cpu"})


def softmax_renormalised(it: Layer, x: Tensor) -> Routed:
    """Mixtral, Qwen3."""
    weights, ids = torch.topk(F.softmax(it.gate(x), dim=1, dtype=torch.float), K, dim=-1)
    weights /= weights.sum(dim=-1, keepdim=True)
    return weights.to(x.dtype), ids


def softmax_alone(it: Layer, x: Tensor) -> Routed:
    """Jamba, OLMoE: no renormalisation."""
    weights, ids = torch.topk(it.gate(x).softmax(-1, dtype=torch.float32), K, dim=-1)
    return weights.to(x.dtype), ids


def softmax_of_the_chosen(it: Layer, x: Tensor) -> Routed:
    """Granite, GPT-OSS."""
    top, ids = it.gate(x).float().topk(K, dim=1)
    return torch.softmax(top, dim=1).type_as(x), ids


def sigmoid_of_the_chosen(it: Layer, x: Tensor) -> Routed:
    """Cohere."""
    top, ids = torch.topk(it.gate(x), K, dim=-1)
    weights = top.sigmoid()
    return weights / weights.sum(-1, keepdim=True), ids


def sigmoid_with_bias(it: Layer, x: Tensor) -> Routed:
    """MiniMax-M2, Laguna."""
    scores = torch.sigmoid(it.gate(x).float())
    _, ids = torch.topk(scores + it.bias, K, dim=-1, sorted=False)
    weights = scores.gather(1, ids)
    weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights * 1.5, ids


def logits_with_bias(it: Layer, x: Tensor) -> Routed:
    """Kolibri: the choice by logits, the weights by their sigmoid."""
    logits = it.gate(x)
    _, ids = torch.topk(logits + it.bias, K, dim=-1)
    return logits.gather(-1, ids).sigmoid(), ids


def softmax_with_a_bound(it: Layer, x: Tensor) -> Routed:
    """Ernie: the sum is at least so much."""
    scores = F.softmax(it.gate(x), dim=-1)
    ids = torch.topk(scores + it.bias, K, dim=-1).indices
    weights = torch.gather(scores, dim=-1, index=ids)
    return weights / torch.clamp(weights.sum(dim=-1, keepdim=True), min=0.5), ids


def groups_by_two(it: Layer, x: Tensor) -> Routed:
    """DeepSeek-V3 and its many heirs."""
    scores = it.gate(x).view(-1, E).sigmoid()
    choice = scores.view(-1, E) + it.bias.unsqueeze(0)
    groups = choice.view(-1, 4, E // 4).topk(2, dim=-1)[0].sum(dim=-1)
    best = torch.topk(groups, k=2, dim=-1, sorted=False)[1]
    mask = torch.zeros_like(groups)
    mask.scatter_(1, best, 1)
    mask = mask.unsqueeze(-1).expand(-1, 4, E // 4).reshape(-1, E)
    ids = torch.topk(choice.masked_fill(~mask.bool(), float("-inf")), k=K, dim=-1, sorted=False)[1]
    weights = scores.gather(1, ids)
    denominator = weights.sum(dim=-1, keepdim=True) + 1e-20
    weights /= denominator
    return weights * 2.5, ids


def groups_by_the_best(it: Layer, x: Tensor) -> Routed:
    """DeepSeek-V2: softmax, the greatest of a group, zero for the others, no renormalisation."""
    scores = it.gate(x).softmax(dim=-1, dtype=torch.float32)
    groups = scores.view(-1, 4, E // 4).max(dim=-1).values
    best = torch.topk(groups, k=2, dim=-1, sorted=False)[1]
    mask = torch.zeros_like(groups).scatter_(1, best, 1).unsqueeze(-1).expand(-1, 4, E // 4).reshape(-1, E)
    weights, ids = torch.topk(scores.masked_fill(~mask.bool(), 0.0), k=K, dim=-1, sorted=False)
    return weights * 16.0, ids


def one_group(it: Layer, x: Tensor) -> Routed:
    """GLM-4: groups in name only."""
    scores = it.gate(x).sigmoid()
    choice = scores + it.bias
    groups = choice.view(-1, 1, E).topk(2, dim=-1)[0].sum(dim=-1)
    best = torch.topk(groups, k=1, dim=-1, sorted=False)[1]
    mask = torch.zeros_like(groups).scatter_(1, best, 1).unsqueeze(-1).expand(-1, 1, E).reshape(-1, E)
    ids = torch.topk(choice.masked_fill(~mask.bool(), 0.0), k=K, dim=-1, sorted=False)[1]
    weights = scores.gather(1, ids)
    return weights / (weights.sum(-1, keepdim=True) + 1e-20), ids


def scores_of_another_kind(it: Layer, x: Tensor) -> Routed:
    """DeepSeek-V4: what gives the scores stays, the rest is one kernel."""
    scores = F.softplus(it.gate(x)).sqrt()
    ids = torch.topk(scores + it.bias, K, dim=-1)[1]
    weights = scores.gather(1, ids)
    return weights / (weights.sum(-1, keepdim=True) + 1e-20) * 2.0, ids


def a_factor_for_each_expert(it: Layer, x: Tensor) -> Routed:
    """Gemma 4: what follows the renormalisation stays."""
    weights, ids = torch.topk(it.gate(x).softmax(-1), K, dim=-1)
    weights = weights / weights.sum(-1, keepdim=True)
    return weights * it.bias[ids], ids


FUSED: dict[Callable[..., Routed], dict[str, Any]] = {
    softmax_renormalised: {"score": "softmax", "renormalise": True},
    softmax_alone: {"score": "softmax"},
    softmax_of_the_chosen: {"weight": "softmax"},
    sigmoid_of_the_chosen: {"weight": "sigmoid", "renormalise": True},
    sigmoid_with_bias: {"score": "sigmoid", "by_choice": False, "renormalise": True, "scale": 1.5},
    logits_with_bias: {"by_choice": False, "weight": "sigmoid"},
    softmax_with_a_bound: {"score": "softmax", "by_choice": False, "renormalise": True, "least": 0.5},
    groups_by_two: {
        "score": "sigmoid", "groups": 4, "kept": 2, "best": 2, "by_choice": False, "renormalise": True, "eps": 1e-20, "scale": 2.5,
    },
    groups_by_the_best: {"score": "softmax", "groups": 4, "kept": 2, "best": 1, "lowest": False, "scale": 16.0},
    one_group: {"score": "sigmoid", "by_choice": False, "renormalise": True, "eps": 1e-20},
    scores_of_another_kind: {"by_choice": False, "renormalise": True, "eps": 1e-20, "scale": 2.0},
    a_factor_for_each_expert: {"score": "softmax", "renormalise": True},
}  # fmt: skip


def routes(model: nn.Module, x: Tensor, dynamic: bool = False) -> tuple[Tensor, list[Recipe], list[str]]:
    """(result, the recipes in the graph, notes of the report)."""
    found: list[Recipe] = []
    inner = router_topk.one_kernel

    def noted(graph: Any, options: Any) -> list[str]:
        notes = inner(graph, options)
        found.extend(Recipe(*n.args[2:-1]) for n in graph.find_nodes(op="call_function", target=torch.ops.moefuse.route.default))
        return notes

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr("moefuse.passes.driver.one_kernel", noted)
        out, report, _ = run(model, x, dynamic, fuse_router=True)
    assert len(report.fused) == 1
    return out, found, report.notes


@pytest.mark.sampled(1)
@pytest.mark.parametrize("route", FUSED)
def test_a_router_is_one_op(route: Callable[..., Routed]) -> None:
    model, x = Layer(route), torch.randn(T, H, generator=torch.Generator().manual_seed(5))
    out, found, notes = routes(model, x, dynamic=route in (groups_by_two, softmax_renormalised))
    assert found == [Recipe(K, **FUSED[route])]
    assert len(notes) == 1
    assert notes[0].startswith("the router at test_fuse_router.py:")
    torch.testing.assert_close(out, model(x))


@pytest.mark.parametrize(("route", "taken"), [(softmax_renormalised, True), (softmax_of_the_chosen, True), (logits_with_bias, False)])
def test_in_sixteen_bits(route: Callable[..., Routed], taken: bool) -> None:
    """What the program computes in float32 is taken, with bfloat16 before and behind it; a sum that it rounds to bfloat16 is not."""
    model, x = Layer(route).bfloat16(), torch.randn(T, H, generator=torch.Generator().manual_seed(5)).bfloat16()
    out, found, _ = routes(model, x)
    assert found == ([Recipe(K, **FUSED[route])] if taken else [])
    torch.testing.assert_close(out, model(x), rtol=2**-6, atol=2**-7)


def read_elsewhere(it: Layer, x: Tensor) -> Routed:
    """Scores that something else reads, as a loss would."""
    scores = it.gate(x).softmax(-1)
    weights, ids = torch.topk(scores, K, dim=-1)
    return weights / weights.sum(-1, keepdim=True) + scores.mean() * 1e-3, ids


def neighbours_of_another_shape(it: Layer, x: Tensor) -> Routed:
    """Groups of experts that are not neighbours: every operation is known, and the probe says no."""
    scores = it.gate(x).softmax(-1)
    groups = scores.view(-1, E // 4, 4).amax(dim=1)
    best = torch.topk(groups, k=2, dim=-1)[1]
    mask = torch.zeros_like(groups).scatter_(1, best, 1).unsqueeze(1).expand(-1, E // 4, 4).reshape(-1, E)
    weights, ids = torch.topk(scores.masked_fill(~mask.bool(), 0.0), k=K, dim=-1)
    return weights * 2.0, ids


def sum_over_tokens(it: Layer, x: Tensor) -> Routed:
    weights, ids = torch.topk(it.gate(x).softmax(0), K, dim=-1)
    return weights / weights.sum(0, keepdim=True), ids


def weights_of_the_biased(it: Layer, x: Tensor) -> Routed:
    """Another value is gathered than any that the op has."""
    scores = it.gate(x).sigmoid()
    ids = torch.topk(scores + it.bias, K, dim=-1)[1]
    return (scores * scores).gather(1, ids), ids


def top_k_alone(it: Layer, x: Tensor) -> Routed:
    return torch.topk(it.gate(x), K, dim=-1)  # type: ignore[return-value]


@pytest.mark.parametrize("route", [read_elsewhere, neighbours_of_another_shape, sum_over_tokens, weights_of_the_biased, top_k_alone])
def test_what_the_op_does_not_compute_stays(route: Callable[..., Routed]) -> None:
    """The top-k is one kernel all the same."""
    model, x = Layer(route), torch.randn(T, H, generator=torch.Generator().manual_seed(6))
    out, found, notes = routes(model, x)
    assert not found
    assert all("top-k" in note for note in notes)
    assert notes
    torch.testing.assert_close(out, model(x))


def test_results_of_the_graph_stay() -> None:
    """Scores and choices that a model returns, for a loss or to look at; ids and weights may be."""

    class Returning(Layer):
        def forward(self, x: Tensor) -> Any:
            scores = self.gate(x).softmax(-1)
            weights, ids = torch.topk(scores, K, dim=-1)
            out = sum(expert(x) * (weights * (ids == e)).sum(-1, keepdim=True) for e, expert in enumerate(self.experts))
            return (out, scores) if self.also else (out, ids, weights)

    x = torch.randn(T, H)
    for also in (True, False):
        torch._dynamo.reset()
        model = Returning(softmax_alone, also)
        with torch.no_grad():
            got, report, names = run(model, x, fuse_router=True)
        assert len(report.fused) == 1
        assert (names["moefuse.route"], names["moefuse.topk"]) == ((0, 1) if also else (1, 0))
        for a, b in zip(got, model(x), strict=True):
            torch.testing.assert_close(a, b)


def test_only_on_demand_and_only_for_inference() -> None:
    x = torch.randn(T, H)
    with torch.no_grad():
        _, report, names = run(Layer(softmax_renormalised), x)
    assert (names["moefuse.route"], names["moefuse.topk"]) == (0, 1)
    torch._dynamo.reset()
    _, report, names = run(Layer(softmax_renormalised), x, fuse_router=True)
    assert (names["moefuse.route"], names["moefuse.topk"]) == (0, 1)
    assert "top-k" in report.notes[0]


def test_a_wrong_reading_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe is what keeps a recipe out that the graph is not."""
    from dataclasses import replace

    from moefuse.passes.block import router_match

    read = router_match._behind
    monkeypatch.setattr(router_match, "_behind", lambda *a: (read(*a)[0], replace(read(*a)[1], eps=1e-3)))
    _, found, _ = routes(Layer(softmax_renormalised), torch.randn(T, H))
    assert not found


def test_opcheck() -> None:
    for recipe in (Recipe(2, "softmax", renormalise=True), Recipe(2, "sigmoid", 2, 1, 2, by_choice=False, scale=2.0)):
        torch.library.opcheck(torch.ops.moefuse.route.default, (torch.randn(5, 8), torch.randn(8), *recipe.arguments, torch.float32))


def test_no_gradient() -> None:
    with pytest.raises(RuntimeError, match=r"^moefuse::route has no gradient; it is for inference$"):
        torch.ops.moefuse.route(torch.randn(5, 8, requires_grad=True), None, *Recipe(2).arguments, torch.float32)


def test_the_definition_by_hand() -> None:
    """Two of three groups, each group's rank the sum of its two best, ties to the lowest."""
    logits = torch.tensor([[0.1, 0.2, 0.9, 0.0, 0.5, 0.5]])
    recipe = Recipe(3, "identity", 3, 2, 2, lowest=True, by_choice=True, renormalise=True, least=4.0, scale=2.0)
    weights, ids = route_reference(logits, torch.tensor([0.0, 0.0, 0.0, 0.2, 0.0, 0.0]), recipe, torch.float64)
    assert ids.tolist() == [[2, 4, 5]]
    torch.testing.assert_close(weights, torch.tensor([[0.45, 0.25, 0.25]], dtype=torch.float64))
