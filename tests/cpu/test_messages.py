"""What a refusal says is true, in the words of the program: no name of a node of a graph, no repr, and the user's line."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import moefuse
from moefuse.report.report import FusionReport

H, WIDTH, E, K, T = 16, 12, 4, 2, 9


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(H, WIDTH), nn.Linear(WIDTH, H)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))  # type: ignore[no-any-return]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(H, E), nn.ModuleList(Expert() for _ in range(E))

    def route(self, x: Tensor) -> Any:
        return self.router(x).softmax(-1).topk(K)

    def base(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)

    def between(self) -> None: ...

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        self.between()
        out = self.base(x)
        for e, expert in enumerate(self.experts):
            tok, slot = torch.where(ids == e)
            out = self.share(out, x, expert, e, tok, weights[tok, slot, None], slot)
        return out

    def share(self, out: Tensor, x: Tensor, expert: Any, e: int, tok: Tensor, w: Tensor, slot: Tensor) -> Tensor:
        out.index_add_(0, tok, expert(x[tok]) * w)
        return out


class Largest(Layer):
    def share(self, out: Tensor, x: Tensor, expert: Any, e: int, tok: Tensor, w: Tensor, slot: Tensor) -> Tensor:
        out[tok] = torch.maximum(out[tok], expert(x[tok]) * w)
        return out


class Scaled(Layer):
    def share(self, out: Tensor, x: Tensor, expert: Any, e: int, tok: Tensor, w: Tensor, slot: Tensor) -> Tensor:
        out[tok] += expert(x[tok]) * w
        return out * 0.5


class Clone(Layer):
    def base(self, x: Tensor) -> Tensor:
        return x.clone()

    def share(self, out: Tensor, x: Tensor, expert: Any, e: int, tok: Tensor, w: Tensor, slot: Tensor) -> Tensor:
        out[tok] = 0.5 * out[tok] + expert(x[tok]) * w
        return out


class Halves(Layer):
    def share(self, out: Tensor, x: Tensor, expert: Any, e: int, tok: Tensor, w: Tensor, slot: Tensor) -> Tensor:
        out[tok, :4] += (expert(x[tok]) * w)[:, :4]
        return out


class Broken(Layer):
    def between(self) -> None:
        torch._dynamo.graph_break()

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        torch._dynamo.graph_break()
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            tok, slot = torch.where(ids == e)
            out[tok] += expert(x[tok]) * weights[tok, slot, None]
        return out


class OwnInput(Layer):
    def share(self, out: Tensor, x: Tensor, expert: Any, e: int, tok: Tensor, w: Tensor, slot: Tensor) -> Tensor:
        z = x * 2
        out.index_add_(0, tok, expert((z if e else x)[tok]) * w)
        return out


class FirstSlot(Layer):
    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            tok = torch.where(ids[:, 0] == e)[0]
            out.index_add_(0, tok, expert(x[tok]) * weights[tok, 0, None])
        return out


class Stacks(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(E, WIDTH, H)), nn.Parameter(torch.randn(E + 1, H, WIDTH))

    def share(self, out: Tensor, x: Tensor, expert: Any, e: int, tok: Tensor, w: Tensor, slot: Tensor) -> Tensor:
        out.index_add_(0, tok, F.linear(F.gelu(F.linear(x[tok], self.a[e])), self.b[e]) * w)
        return out


class NoGrad(Layer):
    def share(self, out: Tensor, x: Tensor, expert: Any, e: int, tok: Tensor, w: Tensor, slot: Tensor) -> Tensor:
        with torch.no_grad():  # switched here
            y = expert(x[tok])
        out.index_add_(0, tok, y * w)
        return out


class Random(Layer):
    def share(self, out: Tensor, x: Tensor, expert: Any, e: int, tok: Tensor, w: Tensor, slot: Tensor) -> Tensor:
        out.index_add_(0, tok, expert(x[tok]) * w + torch.rand(len(tok), H))
        return out


class Behind(Layer):
    def share(self, out: Tensor, x: Tensor, expert: Any, e: int, tok: Tensor, w: Tensor, slot: Tensor) -> Tensor:
        y = expert(x)
        out.index_add_(0, tok, y[tok] * w + 0 * y.mean())
        return out


class Products(Layer):
    def share(self, out: Tensor, x: Tensor, expert: Any, e: int, tok: Tensor, w: Tensor, slot: Tensor) -> Tensor:
        y = expert(x[tok])
        out.index_add_(0, tok, (y @ y.t()) @ y * w)
        return out


class Printing(Layer):
    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).softmax(-1)
        _, ids = scores.topk(1)
        gates = scores * torch.zeros_like(scores).scatter_(1, ids, 1)
        outs = [expert(x) for expert in self.experts]
        if torch.isnan(gates).any():
            print("no number")  # noqa: T201
            gates[torch.isnan(gates)] = 0
        return (gates.unsqueeze(-2) * torch.stack(outs, -1)).sum(-1)


CASES: dict[type[Layer], tuple[str, str]] = {
    Largest: ("not-combined", "expert rows reach what the other experts computed by `maximum`, and only sums are fused"),
    Scaled: ("sum-changed", "the sum goes through `mul` before"),
    Clone: ("not-combined", "are put together with `out` here; what moefuse reads is a sum"),
    Halves: ("not-combined", "are put together with `out[tok, :4]` here"),
    Broken: ("ids-not-distinct", r"`ids` comes from before the graph break at .*test_messages.py:\d+, and this graph does not show"),
    OwnInput: ("experts-differ", "expert 1 differs from expert 0: input `z` instead of `x`"),
    FirstSlot: ("missing-experts", "only slot 0 of the 2 that a token has"),
    Stacks: ("missing-experts", "the weights are of 5 in `b`, 4 in `a`"),
    NoGrad: ("context-differs", r"`self.up\(x\)` is computed without gradients \(.*test_messages.py:\d+\), the sum over the experts with"),
    Random: ("tokens-differ", "`torch.rand(len(tok), H)` is not a value per row of the same experts"),
    Behind: ("no-rule", "an expert runs on all tokens, and its rows are taken from the result"),
    Products: ("no-rule", "expert rows go through `matmul` in a way that its rule does not read"),
    Printing: ("not-captured", 'in what `if torch.isnan(gates).any():` decides about the graph breaks, at `print("no number")`'),
}


@pytest.fixture(autouse=True)
def _fresh(fresh_dynamo: None, as_traced: None) -> None:
    torch.manual_seed(0)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", CASES, ids=lambda kind: kind.__name__)
def test_what_is_said_is_what_is_in_the_way(kind: type[Layer]) -> None:
    code, text = CASES[kind]
    report = moefuse.explain(kind().eval(), torch.randn(T, H))
    assert [s.code for s in report.skipped] == [code], str(report)
    (found,) = report.skipped
    assert text in found.message or re.search(text, found.message), found.message
    assert re.search(r"test_messages\.py:\d+$", found.location)
    assert not told_of_a_graph(report)


def told_of_a_graph(report: FusionReport) -> list[str]:
    """Messages with words of a graph, or of Python's inside."""
    inside = re.compile(r"\b(getitem|mul|add|linear|where|eq|to|index_add_?)_\d+\b|\b[lg]_\w+_\b|[LG]\['|object at 0x|slots \[|___stack")
    return [s.message for s in report.skipped if inside.search(s.message)]


class Relations(nn.Module):
    def __init__(self, write: int) -> None:
        super().__init__()
        self.relations, self.write = nn.ModuleList(nn.Linear(H, H) for _ in range(E)), write

    def forward(self, x: Tensor, edges: Tensor, kind: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for r, linear in enumerate(self.relations):
            if self.write == 0:
                (edge,) = torch.where(kind == r)
                out.index_add_(0, edges[1][edge], linear(x[edges[0][edge]]))
            elif self.write == 1:
                mask = kind == r
                out[edges[1, mask]] += linear(x[edges[0, mask]]) * 0.5
            else:
                mask = kind == r
                out = out + linear(torch.zeros_like(x).index_add_(0, edges[1, mask], x[edges[0, mask]]))
        return out


@pytest.mark.parametrize("write", range(3))
def test_relations_of_a_graph_are_no_experts(write: int) -> None:
    report = moefuse.explain(Relations(write), torch.randn(T, H), torch.randint(T, (2, 30)), torch.randint(E, (30,)))
    assert report.skipped == []


class Checkpointed(Layer):
    def __init__(self, write: str) -> None:
        super().__init__()
        self.write, self.stats, self.losses = write, dict[str, Tensor](), list[Tensor]()

    def inner(self, x: Tensor) -> Tensor:
        loss = self.router(x).mean()
        if self.write == "attribute":
            self.aux = loss
        elif self.write == "dict":
            self.stats["aux"] = loss
        else:
            self.losses.append(loss)
        return super().forward(x)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("write", "said"),
    [("attribute", "sets an attribute of a module"), ("dict", "writes to a dict outside of it"), ("list", "adds to a list outside of it")],
)
def test_what_a_checkpoint_changes(write: str, said: str) -> None:
    report = moefuse.explain(Checkpointed(write).train(), torch.randn(T, H))
    (found,) = report.skipped
    assert f"the body of a checkpoint {said}" in found.message
    assert ("adds to a list" in found.message) == (write == "list")


def test_what_explain_found_stays_with_what_the_call_raises() -> None:
    class Raising(Behind):
        def forward(self, x: Tensor) -> Tensor:
            super().forward(x)
            torch._dynamo.graph_break()
            raise ValueError("the user's own")

    with pytest.raises(ValueError, match="the user's own") as caught:
        moefuse.explain(Raising().eval(), torch.randn(T, H))
    assert any("an expert runs on all tokens" in note for note in caught.value.__notes__)


def test_dynamos_own_names_are_not_repeated() -> None:
    from moefuse._torch_private.errors import in_words

    assert in_words("Missing tp_iternext\n  Explanation: ..") == "Dynamo does not iterate over this object"
    assert in_words("Failed (Missing tp_iternext)") == "Dynamo does not iterate over this object"
    assert in_words("Could not guard on data-dependent expression u1 >= -4") == "A number decides here that depends on data"
    assert in_words("Dynamic shape operator") == "Dynamic shape operator"


def test_an_error_is_part_of_something() -> None:
    report = moefuse.explain(Layer().eval(), torch.randn(T, H))
    assert re.search(r"error 0\.\d+ of what rounding may make\]", str(report))


def test_a_float_that_changes_is_a_number_of_the_graph() -> None:
    class Limited(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.config = SimpleNamespace(limit=1.0)

        def share(self, out: Tensor, x: Tensor, expert: Any, e: int, tok: Tensor, w: Tensor, slot: Tensor) -> Tensor:
            out.index_add_(0, tok, expert.down(F.gelu(expert.up(x[tok])).clamp(max=self.config.limit)) * w)
            return out

    from moefuse import Options
    from moefuse.pipeline import rewrite

    found = []

    def backend(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        found.append(rewrite.rewrite(gm, example_inputs, Options()))
        return gm.forward

    model, x = Limited().eval(), torch.randn(T, H)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True), torch.no_grad():
        compiled = torch.compile(model, backend=backend)
        for limit in (1.0, 0.7, 0.1):
            model.config.limit = limit
            torch.testing.assert_close(compiled(x), model(x))
    assert [(len(report.fused), report.skipped) for report in found] == [(1, []), (1, [])]
