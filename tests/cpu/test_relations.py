"""Inputs that lie in one memory, in other ways in each call: a layer that writes to one of them does what eager does."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moefuse import FusionError, FusionReport, last_report
from tests.cpu.capture_case import Seen, capturing

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

T, H, I, E, K = 8, 16, 12, 3, 2  # noqa: E741  (the letters of moefuse.spec)

Pair = tuple[Tensor, Tensor]


def _numpy() -> Pair:
    memory = numpy.random.default_rng(0).standard_normal((T, H), dtype=numpy.float32)
    return torch.from_numpy(memory), torch.from_numpy(memory[:4])


def _views(total: int, x: slice, v: slice) -> Pair:
    base = torch.randn(total, H)
    return base[x], base[v]


def _data() -> Pair:
    x, v = torch.randn(T, H), torch.zeros(4, H)
    v.data = x[4:]
    return x, v


RELATIONS: dict[str, Callable[[], Pair]] = {
    "apart": lambda: (torch.randn(T, H), torch.randn(4, H)),
    "first rows": lambda: _views(T, slice(0, T), slice(0, 4)),
    "last rows": lambda: _views(T, slice(0, T), slice(4, 8)),
    "rows in the middle": lambda: _views(T, slice(0, T), slice(2, 6)),
    "one storage, apart": lambda: _views(T + 4, slice(0, T), slice(T, T + 4)),
    "partly": lambda: _views(T + 2, slice(0, T), slice(T - 2, T + 2)),
    "NumPy's": _numpy,
    "data": _data,
}
"""Tokens, and what is written to: always of the same size and layout."""

WRITES: dict[str, Callable[[Tensor], object]] = {
    "mul_": lambda v: v.mul_(0.5),
    "assignment": lambda v: v.__setitem__(1, 0.25),
    "data": lambda v: v.data.add_(1),
    "out": lambda v: torch.mul(v, 0.5, out=v),
    "view": lambda v: v.view(-1)[5:20].neg_(),
}

ORDERS = [
    ("apart", "first rows", "last rows", "apart"),
    ("first rows", "apart", "rows in the middle", "one storage, apart"),
    ("one storage, apart", "partly", "apart", "data"),
    ("apart", "NumPy's", "apart", "first rows"),
    ("NumPy's", "apart", "data", "last rows"),
]


class Layer(nn.Module):
    """``reach``: where it has from what it writes to, ``place``: where it does."""

    def __init__(self, write: Callable[[Tensor], object], place: str = "inside", reach: str = "argument") -> None:
        super().__init__()
        self.w_in, self.w_out = nn.Parameter(torch.randn(E, I, H) * 0.3), nn.Parameter(torch.randn(E, H, I) * 0.3)
        self.register_buffer("buffer", torch.zeros(4, H))
        self.items: list[Tensor] = [torch.zeros(4, H)]
        self.write, self.place, self.reach = write, place, reach

    def _at(self, place: str, v: Tensor) -> None:
        if place == self.place:
            self.write({"argument": v, "buffer": self.buffer, "list": self.items[0], "global": SIDE[0]}[self.reach])

    def expert(self, e: int, x: Tensor) -> Tensor:
        return F.linear(F.silu(F.linear(x, self.w_in[e])), self.w_out[e])

    def forward(self, x: Tensor, v: Tensor, ids: Tensor, w: Tensor) -> Tensor:
        self._at("before", v)
        out = torch.zeros_like(x)
        for e in range(E):
            tok, slot = torch.where(ids == e)
            out.index_add_(0, tok, self.expert(e, x[tok]) * w[tok, slot, None])
            if e == 1:
                self._at("inside", v)
        self._at("behind", v)
        return out


class Masked(Layer):
    """No size depends on data: one graph without capture, too."""

    def forward(self, x: Tensor, v: Tensor, ids: Tensor, w: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in range(E):
            out = out + self.expert(e, x) * (w * (ids == e)).sum(-1, keepdim=True)
            if e == 1:
                self._at("inside", v)
        return out


SIDE = [torch.zeros(4, H)]


def call(run: Callable[..., Tensor], layer: Layer, relation: str, number: int, grad: bool) -> list[Tensor]:
    """What a call leaves."""
    torch.manual_seed(number)
    x, v = RELATIONS[relation]()
    ids, w = torch.stack([torch.randperm(E)[:K] for _ in range(T)]), torch.rand(T, K)
    layer.buffer, layer.items[0], SIDE[0] = v, v, v
    layer.zero_grad(set_to_none=True)
    with torch.set_grad_enabled(grad):
        out = run(x, v if layer.reach == "argument" else torch.zeros(1), ids, w)
    left = [out.detach().clone(), x.clone(), v.clone()]
    if grad:
        out.square().sum().backward()
        left += [p.grad.clone() for p in layer.parameters() if p.grad is not None]
    return left


def check(make: Callable[[], Layer], order: Sequence[str], *, grad: bool = False, behind: str = "aot_eager", **how: Any) -> list[int]:
    """Compare calls with eager; how many layers were fused in all behind each call."""
    torch.manual_seed(0)
    eager = make()
    torch.manual_seed(0)
    layer, seen, fused = make(), Seen(), []
    compiled = torch.compile(layer, backend=capturing(seen, behind=behind), **how)
    for number, relation in enumerate(order):
        wanted = call(eager, eager, relation, number, grad)
        got = call(compiled, layer, relation, number, grad)
        for a, b in zip(got, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4, msg=lambda m, at=f"call {number}, {relation}: ": at + m)  # type: ignore[misc]
        fused.append(len(seen.report.fused))
    return fused


@pytest.mark.sampled(1)
@pytest.mark.parametrize("order", ORDERS, ids=" then ".join)
@pytest.mark.parametrize("grad", [False, True])
def test_any_order_of_calls(order: Sequence[str], grad: bool) -> None:
    fused = check(lambda: Layer(WRITES["mul_"]), order, grad=grad)
    assert fused[-1] or order[0] != "apart"


@pytest.mark.parametrize("write", WRITES)
def test_any_write(write: str) -> None:
    assert check(lambda: Layer(WRITES[write]), ("apart", "first rows", "apart"))[0]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("reach", ["argument", "buffer", "list", "global"])
@pytest.mark.parametrize("place", ["before", "inside", "behind"])
def test_wherever_it_comes_from(reach: str, place: str) -> None:
    assert check(lambda: Layer(WRITES["mul_"], place, reach), ("apart", "last rows", "one storage, apart"))[0]


def test_sizes_that_are_symbols() -> None:
    assert check(lambda: Layer(WRITES["mul_"]), ("apart", "first rows", "apart", "last rows"), dynamic=True)[0]


@pytest.mark.parametrize("order", [("apart", "first rows", "apart"), ("first rows", "apart", "last rows")], ids=" then ".join)
def test_one_graph_without_capture(order: Sequence[str]) -> None:
    """What is fused as one op is asked for, too; each way to overlap has code of its own, and what is apart is fused again."""
    assert check(lambda: Masked(WRITES["mul_"]), order)[-1] == 1


def test_calls_that_lie_alike_are_compiled_once() -> None:
    torch.manual_seed(0)
    layer, seen = Layer(WRITES["mul_"]), Seen()
    compiled = torch.compile(layer, backend=capturing(seen))
    for number in range(4):
        call(compiled, layer, "apart", number, False)
    assert len(seen.graphs) == 1


class Inner(Layer):
    """Dynamo runs a function that breaks in a loop in eager for good; what calls it, it compiles in parts."""

    def forward(self, x: Tensor, v: Tensor, ids: Tensor, w: Tensor) -> Tensor:
        return super().forward(x, v, ids, w) * 2


@pytest.mark.parametrize(
    ("kind", "order"),
    [(Layer, ("apart", "first rows")), (Inner, ("apart", "first rows")), (Inner, ("first rows", "apart"))],
    ids=["fused first", "inner, fused first", "inner, fused last"],
)
def test_each_call_runs_its_own_code(kind: type[Layer], order: Sequence[str]) -> None:
    """A call that overlaps leaves the fused code to those that do not; however many ways there are to overlap, they run one code."""
    torch.manual_seed(0)
    layer, seen = kind(WRITES["mul_"]), Seen()
    compiled = torch.compile(layer, backend=capturing(seen))
    for number, relation in enumerate(order):
        call(compiled, layer, relation, number, False)
    assert len(seen.report.fused) == 1
    count = len(seen.graphs)
    for number, relation in enumerate(("apart", "last rows", "apart", "rows in the middle", "first rows", "one storage, apart")):
        call(compiled, layer, relation, number, False)
    assert len(seen.graphs) == count


def test_weights_that_lie_in_what_is_written() -> None:
    """A Parameter whose memory is an argument's."""

    def weights(overlap: bool) -> tuple[Layer, list[Tensor]]:
        torch.manual_seed(1)
        layer, found = Layer(WRITES["mul_"]), []
        run = torch.compile(layer, backend=capturing(Seen(), behind="aot_eager")) if overlap else layer
        for number in range(3):
            v = torch.randn(4, H)
            if number == 1:
                layer.w_in.data[2, :4] = v
                v = layer.w_in.data[2, :4]
            torch.manual_seed(number)
            ids, w = torch.stack([torch.randperm(E)[:K] for _ in range(T)]), torch.rand(T, K)
            with torch.no_grad():
                found += [run(torch.randn(T, H), v, ids, w), v.clone(), layer.w_in.detach().clone()]
        return layer, found

    torch.testing.assert_close(weights(True)[1], weights(False)[1], rtol=1e-4, atol=1e-4)


def test_the_same_tensor_twice_and_one_without_elements() -> None:
    def run(x: Tensor, v: Tensor, w_in: Tensor, w_out: Tensor, ids: Tensor, w: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in range(E):
            tok, slot = torch.where(ids == e)
            out.index_add_(0, tok, F.linear(F.silu(F.linear(x[tok], w_in[e])), w_out[e]) * w[tok, slot, None])
            if e == 1:
                v.mul_(0.5)
        return out

    torch.manual_seed(0)
    w_in, w_out = torch.randn(E, I, H) * 0.3, torch.randn(E, H, I) * 0.3
    ids, w = torch.stack([torch.randperm(E)[:K] for _ in range(T)]), torch.rand(T, K)
    compiled = torch.compile(run, backend=capturing(Seen(), behind="aot_eager"))
    for make in (lambda x: torch.ones(T, H), lambda x: x, lambda x: x[:0], lambda x: torch.ones(T, H), lambda x: x):
        x = torch.randn(T, H)
        twin = x.clone()
        wanted = run(twin, make(twin), w_in, w_out, ids, w)
        torch.testing.assert_close(compiled(x, make(x), w_in, w_out, ids, w), wanted, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(x, twin)


def test_several_layers() -> None:
    class Two(Layer):
        def forward(self, x: Tensor, v: Tensor, ids: Tensor, w: Tensor) -> Tensor:
            return super().forward(super().forward(x, v, ids, w), v, ids, w) + x

    # The second one's tokens are the first one's sum, whatever lies in the first one's.
    assert check(lambda: Two(WRITES["mul_"]), ("apart", "first rows", "apart", "last rows")) == [2, 3, 3, 4]


def test_through_inductor_and_the_report() -> None:
    layer = Layer(WRITES["mul_"])
    compiled = torch.compile(layer, backend="moefuse")
    call(compiled, layer, "apart", 0, False)
    assert len(_report().fused) == 1
    wanted = call(layer, layer, "first rows", 1, False)
    for a, b in zip(call(compiled, layer, "first rows", 1, False), wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    (told,) = _report().skipped
    assert (told.code, told.message) == ("mutation", "`x` is changed in place while the experts use it")


def test_strict_raises_for_the_call_that_overlaps() -> None:
    layer = Layer(WRITES["mul_"])
    compiled = torch.compile(layer, backend="moefuse", options={"strict": True})
    call(compiled, layer, "apart", 0, False)
    with pytest.raises(FusionError, match="mutation"):
        call(compiled, layer, "first rows", 1, False)


def _report() -> FusionReport:
    report = last_report()
    assert report is not None
    return report


@pytest.mark.parametrize("broken", ["no expression", "other values"])
def test_where_no_guard_can_be_had(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The region is refused, by name, and the graph breaks as it would without moefuse."""
    from moefuse.capture.dynamo import relations

    def reader(names: Sequence[str]) -> Any:
        if broken == "no expression":
            raise SyntaxError("<made for this test>")
        return lambda L, G: None

    monkeypatch.setattr(relations, "reader", reader)
    torch.manual_seed(0)
    layer, seen = Layer(WRITES["mul_"]), Seen()
    compiled = torch.compile(layer, backend=capturing(seen, behind="aot_eager"))
    for number, relation in enumerate(("apart", "first rows")):
        wanted = call(layer, layer, relation, number, False)
        torch.testing.assert_close(call(compiled, layer, relation, number, False), wanted, rtol=1e-4, atol=1e-4)
    told = next(s for s in seen.report.skipped if s.code == "overlap")
    why = "SyntaxError: <made for this test>" if broken == "no expression" else "what they come from cannot be looked at"
    name, reader_of = "buffer", "may be memory of what the experts read"
    assert told.message == f"`{name}` is written to here, and {reader_of}: no guard can tell that in each call ({why})"
    assert told.location.startswith(__file__)


def test_spans_that_meet() -> None:
    from moefuse.capture.dynamo.relations import apart, meetings

    spans = [(0, 10), (10, 20), (5, 12), (30, 30), (8, 9), (40, 50)]
    wanted = [(i, j) for i, j in itertools.combinations(range(6), 2) if max(spans[i][0], spans[j][0]) < min(spans[i][1], spans[j][1])]
    assert meetings(spans, [True] * 6) == wanted
    assert meetings(spans, [False, True, False, False, False, False]) == [(1, 2)]
    assert meetings(spans, [False] * 6) == []
    assert apart([0, 10, 15, 30], [10, 5, 0, 2])
    assert not apart([0, 10, 14], [10, 5, 2])
    assert not apart([0, 0], [10, 10])


def test_expressions_are_looked_up_once() -> None:
    from moefuse.capture.dynamo.relations import reader

    class Counted(dict[str, Any]):
        asked = 0

        def __getitem__(self, key: str) -> Any:
            Counted.asked += 1
            return super().__getitem__(key)

    read = reader(["L['self'].a['x']", "L['self'].a['y'][0]", "G['z']", "___from_numpy(L['self'].b)"])

    class Self:
        a = Counted(x=torch.ones(1), y=[torch.zeros(2)])
        b = numpy.ones(3)

    values = read(Counted(self=Self()), {"z": torch.ones(4)})
    assert [v.numel() for v in values] == [1, 2, 4, 3]
    assert Counted.asked <= 4


class Balanced(Layer):
    """A bias moves by a rate that is a number of the program: torch makes a tensor of it once it has changed."""

    rate = 0.1

    def forward(self, x: Tensor, v: Tensor, ids: Tensor, w: Tensor) -> Tensor:
        out = super().forward(x, v, ids, w)
        with torch.no_grad():
            self.buffer += self.rate * self.buffer.sign()
        return out


def test_a_rate_that_changes() -> None:
    """The number lies nowhere, so that nothing that is written to can be its memory."""
    torch.manual_seed(0)
    layer, seen = Balanced(lambda v: None), Seen()
    compiled = torch.compile(layer, backend=capturing(seen))
    ids, w = torch.stack([torch.randperm(E)[:K] for _ in range(T)]), torch.rand(T, K)
    for rate in (0.1, 0.7, 0.4):
        layer.rate = rate
        layer.buffer.fill_(1)
        x, fused = torch.randn(T, H), len(seen.report.fused)
        torch.testing.assert_close(compiled(x, x.clone(), ids, w), layer(x, x.clone(), ids, w))
        torch.testing.assert_close(layer.buffer, torch.full((4, H), 1 + 2 * rate))
    assert (fused, seen.report.skipped) == (2, []), seen.report
