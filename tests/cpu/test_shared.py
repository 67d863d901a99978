"""Shared experts that start before the router and are met at the sum: which ones, where, and that the result is what was written.

On the CPU they run in order; the pass, which is for CUDA, is told here that the CPU gains too.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moefuse.backend import parse
from moefuse.config import Options
from moefuse.ops.meaning.call import Body, stacks
from moefuse.passes.block import shared_experts
from tests.programs.check import Outcome, light

E, H, N, K = 4, 16, 12, 2


class MLP(nn.Module):
    def __init__(self, width: int, bias: bool = False) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(H, width, bias), nn.Linear(H, width, bias)
        self.down = nn.Linear(width, H, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class Merged(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(H, 2 * width, False), nn.Linear(width, H, False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.first(x).chunk(2, -1)
        return self.last(F.gelu(gate) * up)  # type: ignore[no-any-return]


class Block(nn.Module):
    """Routed experts; ``join`` puts them together with everything else."""

    def __init__(self, join: Callable[[Block, Tensor, Tensor], Tensor], mlp: nn.Module | None = None) -> None:
        super().__init__()
        self.join = join
        self.router, self.expert = nn.Linear(H, E), mlp or MLP(20)
        self.token_gate = nn.Linear(H, 1, bias=False)
        self.w_in = nn.Parameter(torch.randn(E, 2 * N, H) / H**0.5)
        self.w_out = nn.Parameter(torch.randn(E, H, N) / N**0.5)

    def routed(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(K, -1)
        out = torch.zeros_like(x)
        for e in range(E):
            token, slot = torch.where(ids == e)
            gate, up = F.linear(x[token], self.w_in[e]).chunk(2, -1)
            out.index_add_(0, token, F.linear(F.silu(gate) * up, self.w_out[e]) * weights[token, slot, None])
        return out

    def forward(self, hidden: Tensor) -> Tensor:
        x = hidden.reshape(-1, H)
        return self.join(self, hidden, x)


def gated(m: Block, hidden: Tensor, x: Tensor) -> Tensor:
    return (m.routed(x) + torch.sigmoid(m.token_gate(x)) * m.expert(x)).view(hidden.shape)


def before(m: Block, hidden: Tensor, x: Tensor) -> Tensor:
    """DeepSeek: the shared expert on the unflattened tokens, added in place."""
    out = m.routed(x).view(hidden.shape)
    out = out + m.expert(hidden)
    return hidden + out


def first(m: Block, hidden: Tensor, x: Tensor) -> Tensor:
    shared_out = m.expert(x)
    return (shared_out + m.routed(x)).view(hidden.shape)


def in_place(m: Block, hidden: Tensor, x: Tensor) -> Tensor:
    out = m.routed(x)
    out += m.expert(x)
    return out.view(hidden.shape)


def other_tokens(m: Block, hidden: Tensor, x: Tensor) -> Tensor:
    """The shared expert sees something else than the routed ones."""
    return (m.routed(x) + m.expert(x * 2.0 - 1.0)).view(hidden.shape)


def scaled(m: Block, hidden: Tensor, x: Tensor) -> Tensor:
    return (m.routed(x) + 0.5 * m.expert(x)).view(hidden.shape)


def scaled_and_gated(m: Block, hidden: Tensor, x: Tensor) -> Tensor:
    return (m.routed(x) + m.expert(x) * m.token_gate(x).sigmoid() * 2.0).view(hidden.shape)


def dense_residual(m: Block, hidden: Tensor, x: Tensor) -> Tensor:
    """A dense block beside the experts, each added to the residual."""
    return hidden + m.routed(x).view(hidden.shape) + m.expert(hidden)


def residual_first(m: Block, hidden: Tensor, x: Tensor) -> Tensor:
    """The dense block is in the residual before the experts are."""
    with_dense = hidden + m.expert(hidden)
    return with_dense + m.routed(x).view(hidden.shape)


def latent(m: Block, hidden: Tensor, x: Tensor) -> Tensor:
    """Routed experts between projections of their own; the shared expert reads the tokens themselves."""
    inside = F.linear(x, m.w_in[0, :H])
    return (F.linear(m.routed(inside), m.w_in[1, :H]) + m.expert(x)).view(hidden.shape)


def run(model: nn.Module, x: Tensor, tokens: int = 256, graphs: list[torch.fx.GraphModule] | None = None) -> Outcome:
    torch._dynamo.reset()
    outcome, exact = Outcome(), copy.deepcopy(model).double()
    inner = light(outcome, Options(overlap=tokens))

    def backend(gm: torch.fx.GraphModule, example_inputs: list[Tensor]) -> Callable[..., object]:
        if graphs is not None:
            graphs.append(gm)
        return inner(gm, example_inputs)

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x).double(), exact(x.double()), rtol=1e-4, atol=1e-5)
    return outcome


@pytest.fixture(autouse=True)
def _on_this_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_experts, "DEVICES", {"cpu"})
    torch.manual_seed(0)


@pytest.mark.every_value
@pytest.mark.parametrize("tokens", [(1, 1), (2, 5), (0, 3)], ids=str)
@pytest.mark.parametrize(
    "join", [gated, before, first, in_place, other_tokens, scaled, scaled_and_gated, dense_residual, residual_first, latent]
)
def test_joined(join: Callable[[Block, Tensor, Tensor], Tensor], tokens: tuple[int, int]) -> None:
    outcome = run(Block(join), torch.randn(*tokens, H))
    assert [f.shared for f in outcome.fused] == [tokens[0] > 0], outcome
    assert "shared" in str(outcome.fused[0].to_dict())


@pytest.mark.parametrize(
    "mlp", [lambda: Merged(10), lambda: MLP(7, bias=True), lambda: nn.Sequential(nn.Linear(H, 9), nn.ReLU(), nn.Linear(9, H))]
)
def test_other_experts(mlp: Callable[[], nn.Module]) -> None:
    outcome = run(Block(gated, mlp()), torch.randn(3, 2, H))
    assert [f.shared for f in outcome.fused] == [True], outcome


def twice(m: Block, hidden: Tensor, x: Tensor) -> Tensor:
    """The shared result is read again."""
    y = m.expert(x)
    return (m.routed(x) + y).view(hidden.shape) * y.mean()


def routed_twice(m: Block, hidden: Tensor, x: Tensor) -> Tensor:
    """The routed result is read again."""
    y = m.routed(x)
    return ((y + m.expert(x)) * y).view(hidden.shape)


def residual(m: Block, hidden: Tensor, x: Tensor) -> Tensor:
    """What is added is no expert."""
    return hidden + m.routed(x).view(hidden.shape)


def written_between(m: Block, hidden: Tensor, x: Tensor) -> Tensor:
    """The tokens change after the routed experts have read them."""
    x = x + 1.0
    y = m.routed(x)
    x.mul_(2.0)
    return (y + m.expert(x)).view(hidden.shape)


def alpha(m: Block, hidden: Tensor, x: Tensor) -> Tensor:
    return torch.add(m.routed(x), m.expert(x), alpha=2).view(hidden.shape)


def size_between(m: Block, hidden: Tensor, x: Tensor) -> Tensor:
    """A size that is read from a tensor, which the sum needs: a CUDA graph ends there, and the shared expert must not start before it."""
    known = (hidden > 0).nonzero().shape[0]
    return m.routed(x * (1.0 + known * 0.0)).view(hidden.shape) + m.expert(hidden)


def size_before(m: Block, hidden: Tensor, x: Tensor) -> Tensor:
    """The same, written before what the shared expert reads: Inductor is free to compute it later."""
    known = (hidden > 0).nonzero().shape[0]
    x = hidden.reshape(-1, H) * 2.0
    return (m.routed(x * (1.0 + known * 0.0)) + m.expert(x)).view(hidden.shape)


@pytest.mark.parametrize("join", [size_between, size_before, twice, routed_twice, residual, written_between, alpha])
def test_left_alone(join: Callable[[Block, Tensor, Tensor], Tensor]) -> None:
    outcome = run(Block(join), torch.randn(2, 5, H))
    assert [f.shared for f in outcome.fused] == [False], outcome


@pytest.mark.parametrize(("activation", "gating"), [("gelu", "merged"), ("silu", "separate"), ("relu2", "plain")])
def test_library_products(activation: str, gating: str) -> None:
    """What more than a few tokens take on CUDA devices, against the definition."""
    from moefuse.ops import shared as op
    from moefuse.ops.meaning.reference import experts_reference

    x, wide = torch.randn(5, H), 2 * N if gating == "merged" else N
    first = [torch.randn(wide, H) / 4 for _ in range(2 if gating == "separate" else 1)]
    lists = [first[:1], first[1:], [torch.randn(H, N) / 4], [torch.randn(wide)], [torch.randn(wide) for _ in first[1:]], [torch.randn(H)]]
    options = {"activation": activation, "activation_args": [], "gating": gating, "up_first": False}
    wanted = experts_reference(x, torch.zeros(5, 1, dtype=torch.int64), torch.ones(5, 1), *lists, **options)  # type: ignore[arg-type]
    torch.testing.assert_close(op._dense(x, stacks(lists), Body(activation, gating=gating)), wanted)


def test_several() -> None:
    """Two shared experts, each with a start and a join of its own."""

    def both(m: Block, hidden: Tensor, x: Tensor) -> Tensor:
        return (m.routed(x) + m.expert[0](x) + m.expert[1](x)).view(hidden.shape)

    graphs: list[torch.fx.GraphModule] = []
    outcome = run(Block(both, nn.ModuleList([MLP(20), MLP(9)])), torch.randn(2, 5, H), graphs=graphs)
    assert [f.shared for f in outcome.fused] == [True], outcome
    names = [str(node.target) for node in graphs[0].graph.nodes]
    assert (names.count("moefuse.shared_start.default"), names.count("moefuse.shared_join.default")) == (2, 2)


def test_many_tokens_stay_apart() -> None:
    assert [f.shared for f in run(Block(gated), torch.randn(3, 3, H), tokens=8).fused] == [False]


def test_off_without_cuda_graphs() -> None:
    assert [f.shared for f in run(Block(gated), torch.randn(2, 3, H), tokens=parse(None, {})[0].overlap).fused] == [False]


def test_training_is_left_alone() -> None:
    outcome, model = Outcome(), Block(gated)
    torch._dynamo.reset()
    torch.compile(model, backend=light(outcome, Options(overlap=256)), fullgraph=True)(torch.randn(2, 3, H)).sum().backward()
    assert [f.shared for f in outcome.fused] == [False]


def test_a_wrong_reading_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verification stands behind the pass: with a template that takes the wrong activation nothing is joined."""
    from dataclasses import replace

    match = shared_experts.match
    monkeypatch.setattr(shared_experts, "match", lambda expr, **how: replace(match(expr, **how), activation="relu"))
    assert [f.shared for f in run(Block(gated), torch.randn(2, 3, H)).fused] == [False]


def test_sizes_that_change() -> None:
    torch._dynamo.reset()
    outcome, model = Outcome(), Block(before)
    compiled = torch.compile(model, backend=light(outcome, Options(overlap=256)), fullgraph=True, dynamic=True)
    with torch.no_grad():
        for sizes in ((2, 5), (3, 7)):
            x = torch.randn(*sizes, H)
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
    assert (outcome.graphs, [f.shared for f in outcome.fused]) == (1, [True]), outcome


def test_nothing_is_computed_twice_and_layers_follow_each_other() -> None:
    """The second layer reads the sum of the first, without anything between."""
    torch._dynamo.reset()
    graphs, outcome = [], Outcome()
    inner = light(outcome, Options(overlap=16))

    def backend(gm: torch.fx.GraphModule, example_inputs: list[Tensor]) -> Callable[..., object]:
        graphs.append(gm)
        return inner(gm, example_inputs)

    model = nn.Sequential(Block(gated), Block(before), Block(first))
    x = torch.randn(2, 3, H)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend=backend, fullgraph=True)(x), model(x), rtol=1e-4, atol=1e-5)
    names = [str(node.target) for node in graphs[0].graph.nodes]
    assert [f.shared for f in outcome.fused] == [True] * 3, outcome
    ours = [name.split(".")[1] for name in names if name.startswith("moefuse.")]
    assert ours == ["shared_start", "experts", "shared_join"] * 3
    assert names.index("moefuse.shared_start.default") < min(i for i, name in enumerate(names) if "linear" in name)


def test_the_whole_way() -> None:
    """Through the backend and Inductor, whose order by who reads what is undone: starts come before the routers. The report says it."""
    from torch._inductor.utils import run_and_get_code

    import moefuse

    torch._dynamo.reset()
    model = nn.Sequential(Block(gated, MLP(20)), nn.LayerNorm(H), Block(before)).eval()
    compiled = torch.compile(model, backend="moefuse", mode="reduce-overhead")
    x = torch.randn(2, 3, H)
    with torch.no_grad():
        out, (code, *_) = run_and_get_code(compiled, x)
        torch.testing.assert_close(out, model(x), rtol=1e-4, atol=1e-5)
    report = moefuse.last_report()
    assert ([f.shared for f in report.fused], "and a shared expert" in str(report)) == ([True, True], True)
    calls = re.findall(r"moefuse\.(\w+)\.default\(|extern_kernels\.(?:add)?(mm)\(", code)
    order = [name for name, _ in itertools.groupby(a or b for a, b in calls)]
    assert order[:3] == ["shared_start", "mm", "experts_infer"]
    assert order[order.index("shared_join") + 1 :] == ["shared_start", "mm", "experts_infer", "shared_join"]


@pytest.mark.parametrize("family", ["qwen2_moe", "llama4"])
def test_a_sum_that_is_rounded_before_it_is_added(family: str) -> None:
    """transformers weighs in float32 and rounds the sum: the op rounds to the narrow dtype at once."""
    from tests.zoo import tiny
    from tests.zoo.budget import assert_within_budget, cast

    torch._dynamo.reset()
    outcome = Outcome()
    model = cast(tiny.build(family).eval(), torch.bfloat16)
    inputs = tiny.inputs(family)
    with torch.no_grad():
        wanted = tiny.hidden(model, **inputs)
        wide = cast(copy.deepcopy(model), torch.float64)
        wide.set_experts_implementation("eager")
        exact = tiny.hidden(wide, **inputs)
        got = tiny.hidden(torch.compile(model, backend=light(outcome, Options(overlap=256))), **inputs)
    assert [f.shared for f in outcome.fused] == [True, True], outcome
    assert_within_budget(got, wanted, exact)
