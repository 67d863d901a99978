"""Layers that do not depend on each other communicate in the order of the program, on every rank: else one rank's dispatch would meet
another layer's of a rank that has another number of tokens. One rank of two, over a fake group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

import moefuse.backend
from moefuse import Options
from moefuse.ops import parallel as ops, rounds, spread
from moefuse.runtime import groups
from moefuse.runtime.transports import beside
from tests.cpu.capture_case import Seen, capturing
from tests.dist import layers


class Mixed(layers.Transposed):
    """Rows are mixed, so it is refused; without a loop, which would break the graph where there are tokens."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        table = torch.zeros(len(x), len(self.up), dtype=x.dtype).scatter(1, ids, weights)
        h = torch.bmm(x.expand(len(self.up), -1, -1), self.up).cumsum(1)
        return (torch.bmm(h, self.down) * table.t()[:, :, None]).sum(0)


class Branches(nn.Module):
    """Three layers, of which one is refused and gathers; used in another order than they are called in, and by more or fewer operations."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = layers.Transposed(4), Mixed(4), layers.Transposed(4)
        self.before = nn.Linear(layers.H, layers.H)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first, second, third = self.a(x), self.b(x * 2), self.c(self.before(x))
        return third.sum(0, keepdim=True) * second + first.tanh(), second


class Checkpointed(nn.Module):
    """Two layers, each in a checkpoint of its own, or both in one."""

    def __init__(self, kind: type[nn.Module], apart: bool) -> None:
        super().__init__()
        self.a, self.b, self.apart = kind(2), kind(2), apart

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        def both(x: Tensor) -> Tensor:
            x = x + self.a(x)
            return x + self.b(x)  # type: ignore[no-any-return]

        if not self.apart:
            return checkpoint(both, x, use_reentrant=False), x
        for layer in (self.a, self.b):
            x = x + checkpoint(layer, x, use_reentrant=False)
        return x, x


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What communicates, as it runs: a way and a layer."""
    found: list[str] = []

    known = ops.peers

    def peers(terms: Any, layer: str, *rest: Any) -> Any:
        found.append(layer)
        return known(terms, layer, *rest)

    for module in (ops, rounds, spread):
        monkeypatch.setattr(module, "peers", peers)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield found
    dist.destroy_process_group()
    groups._groups.clear()


def order(
    called: list[str], tokens: int, backend: Any, train: bool, make: Callable[[], nn.Module] = Branches
) -> tuple[list[str], list[str]]:
    """Of a second call: (layers in forward, in backward)."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = make()
    moefuse.parallelize(model, init_device_mesh("cpu", (2,), mesh_dim_names=("ep",)))
    run = torch.compile(model, backend=backend)
    x = torch.randn(tokens, layers.H, requires_grad=train)
    with torch.set_grad_enabled(train):
        run(x)
        called.clear()
        out = run(x)
        forward = list(called)
        called.clear()
        if train:
            (out[0].sum() + out[1].sum()).backward()
    return forward, list(called)


GATHERED = ["gathering the weights of experts"] * 2
FORWARD = ["a", *GATHERED, "c"]
BACKWARD = ["c", "c", *["reducing the gradients of experts"] * 2, "a", "a"]


@pytest.mark.parametrize("train", [False, True])
def test_aot_eager(called: list[str], train: bool) -> None:
    for tokens in (0, 1, 7):
        backend = capturing(Seen(), Options(), "aot_eager")
        assert order(called, tokens, backend, train) == (FORWARD, BACKWARD if train else []), tokens


@pytest.mark.sampled(4)
@pytest.mark.parametrize("train", [False, True])
def test_inductor(called: list[str], train: bool) -> None:
    """By itself it has c's combine before a's in inference, and in training another order for 7 tokens than for 300."""
    for tokens in (0, 7, 300) if train else (7,):
        assert order(called, tokens, moefuse.backend.backend, train) == (FORWARD, BACKWARD if train else []), tokens


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("no_code")
@pytest.mark.parametrize(
    ("apart", "backward"),
    [
        (True, ["b"] * 3 + ["a"] * 3),  # each is dispatched again when its backward begins
        (False, ["a", "b", "b", "b", "a", "a"]),  # what the second layer reads is computed again, by the first one
    ],
)
def test_checkpoints(called: list[str], apart: bool, backward: list[str]) -> None:
    """By itself Inductor has a rank with one token dispatch both layers first, to compute again what is between two checkpoints."""
    for tokens in (1, 4):
        found = order(called, tokens, moefuse.backend.backend, True, lambda: Checkpointed(layers.Listed, apart))
        assert found == (["a", "b"], backward), tokens


def test_results_of_what_is_computed_again(called: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows go back only of the layer whose output is read: that of the second one is in nobody's gradient."""
    asked: list[bool] = []
    monkeypatch.setattr(beside, "forward", lambda *given: asked.append(given[-1]))
    forward, backward = order(called, 4, moefuse.backend.backend, True, lambda: Checkpointed(layers.Transposed, False))
    assert (forward, backward) == (["a", "b"], ["a", "b", "b", "b", "a", "a"])
    assert asked[-4:] == [True, True, True, False]


@pytest.mark.parametrize("train", [False, True])
def test_checkpoints_of_one_rank_keep_what_they_kept(called: list[str], train: bool) -> None:
    """Where nothing communicates, or nothing is differentiated, nothing is copied."""
    model = Checkpointed(layers.Listed, apart=True)
    model.b = nn.Linear(layers.H, layers.H)
    moefuse.parallelize(model, init_device_mesh("cpu", (2,), mesh_dim_names=("ep",)))
    torch._dynamo.reset()
    seen = Seen()
    with torch.set_grad_enabled(train):
        torch.compile(model, backend=capturing(seen, Options()))(torch.randn(4, layers.H))
    (gm,) = seen.graphs
    kept = gm.graph.find_nodes(op="call_function", target=torch.ops.moefuse.own.default)
    assert len(gm.graph.find_nodes(op="call_function", target=torch.ops.higher_order.tag_activation_checkpoint)) == 2
    assert [str(out.args[0].args[0].args[0]) for out in kept] == (["wrap_body_0"] if train else [])


def test_nothing_is_run_while_a_graph_is_compiled(called: list[str]) -> None:
    """``verify="graph"`` would run all of it, on the ranks that compile; it says so, and that regions were compared."""
    model = layers.Model(layers.Transposed, 4)
    moefuse.parallelize(model, init_device_mesh("cpu", (2,), mesh_dim_names=("ep",)))
    seen, compiling = Seen(), []
    behind = capturing(seen, Options(verify="graph"))

    def backend(gm: Any, inputs: Any) -> Any:
        before = len(called)
        compiled = behind(gm, inputs)
        compiling.append(len(called) - before)
        return compiled

    backend.__dict__.update(behind.__dict__)
    with torch.no_grad():
        torch.compile(model, backend=backend)(torch.randn(5, layers.H))
    assert compiling == [0]
    assert len(seen.report.fused) == 2
    assert [note for note in seen.report.notes if "verify" in note] == [
        'verify="graph": a graph with experts on several ranks is not run as a whole, which would wait for ranks that may not be '
        "compiling; its regions were compared one by one"
    ]
