"""How quantised weights are read: each form as it must be, each near miss refused, and the proof against a reader's mistakes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, Node

from moefuse.ops.meaning.encoding import Packing, dequantise, parse
from moefuse.passes.encodings.alike import Known
from moefuse.passes.encodings.part import Coded, Part, emit, joined
from moefuse.passes.encodings.prove import drawn, holds, proved
from moefuse.passes.encodings.read import read
from moefuse.passes.encodings.table import equal
from moefuse.passes.encodings.weight import Weight
from moefuse.passes.graph.calls import call_target
from moefuse.passes.infer.state import Context, Given
from moefuse.passes.ir.facts import Lost
from tests.cpu.encoding_forms import FORMS, FP4, NEAR, E, K, N, grouped, nibbles, two


@pytest.fixture(autouse=True)
def _fresh(fresh_dynamo: None) -> None:
    torch.manual_seed(0)


class Made(nn.Module):
    """A module that computes weights from what it holds."""

    def __init__(self, weight: Callable[..., Any], parts: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.weight = weight
        self.parts = nn.ParameterList(nn.Parameter(part, requires_grad=False) for part in parts)

    def forward(self, *given: Tensor) -> Any:
        return self.weight(*self.parts, *given)


@dataclass
class Traced:
    """A graph as Dynamo makes it, what its inputs hold, and the nodes that it returns."""

    ctx: Context
    values: dict[Node, Tensor]
    returned: tuple[Node, ...]

    def value(self, node: Node) -> Tensor:
        """What an input of the graph holds, or is computed from these."""
        if node not in self.values:
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), self.value)
            self.values[node] = call_target(node, args, kwargs)
        return self.values[node]


def traced(weight: Callable[..., Any], parts: tuple[Tensor, ...], *given: Tensor, dynamic: bool = False) -> Traced:
    """``given``: what a call of the module is given behind what it holds; of any length if ``dynamic``."""
    found: list[Traced] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        values = dict(zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True))
        returned: Any = next(iter(gm.graph.find_nodes(op="output"))).args[0]
        found.append(Traced(Context(gm.graph), values, tuple(returned)))
        return gm.forward

    torch.compile(Made(weight, tuple(p.clone() for p in parts)), backend=backend, fullgraph=True, dynamic=dynamic)(*given)
    return found[0]


def shown(coded: Coded, of: Traced) -> Tensor:
    """What an encoding says of what the model holds."""
    parts = [part.show(of.value(part.node)) for part in coded.parts]
    return dequantise(coded.encoding, parts[0], parts[1], parts[2] if len(parts) > 2 else None, coded.dtype)


def put_into(graph: Graph, made: list[Node]) -> Callable[..., Node]:
    """Writes calls behind a graph's inputs."""

    def put(function: Callable[..., Any], *args: Any) -> Node:
        made.append(graph.call_function(function, args))
        return made[-1]

    return put


def aliases(part: Part, of: Traced) -> None:
    """What is written into the graph for a part is the part, in the memory of the input."""
    made: list[Node] = []
    found = emit(put_into(of.ctx.graph, made), part)
    env: dict[Node, Any] = dict(of.values)
    for node in made:
        assert callable(node.target)
        env[node] = node.target(*torch.fx.node.map_arg(node.args, env.__getitem__))
    want = part.show(of.value(part.node))
    assert equal(env[found], want)
    assert env[found].data_ptr() == want.data_ptr()
    assert env[found].untyped_storage().data_ptr() == of.value(part.node).untyped_storage().data_ptr()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", FORMS)
def test_forms(name: str) -> None:
    """Each is read as what it is: the text, the bits of the weight, the proof on made-up numbers, and views that follow changes."""
    case = FORMS[name]
    parts = case.parts()
    of = traced(case.weight, parts)
    coded = read(of.ctx, of.returned[0], case.order)
    assert isinstance(coded, Coded), coded
    assert str(coded.encoding).startswith(case.text or "?"), str(coded.encoding)
    assert parse(str(coded.encoding)) == coded.encoding
    want = case.weight(*parts).permute(case.order)
    assert want.shape == case.sizes[-want.dim() :]
    assert equal(shown(coded, of), want)
    weight = Weight(of.returned[0], case.order)
    assert holds(of.ctx, weight, coded, of.value)
    assert holds(of.ctx, weight, coded, drawn(coded))
    for part in coded.parts:
        aliases(part, of)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", NEAR)
def test_near_misses(name: str) -> None:
    """What is almost an encoding is refused by the operation that makes the difference."""
    case = NEAR[name]
    of = traced(case.weight, case.parts())
    lost = read(of.ctx, of.returned[0], case.order)
    if case.at == "":
        assert isinstance(lost, Coded)
        return
    assert isinstance(lost, Lost), str(lost)
    call = of.ctx.calls[lost.node]
    assert lost.code == "encoding-unknown"
    assert call is not None
    assert call.name == case.at, lost.details


def by_index(part: Tensor) -> list[Tensor]:
    return [part[e] for e in range(E)]


def by_selecting(part: Tensor) -> list[Tensor]:
    return [torch.select(part, 0, e) for e in range(E)]


def by_last(part: Tensor) -> list[Tensor]:
    return [part[0], part[1], part[-1]]


def each(weight: Callable[..., Tensor], how: Callable[[Tensor], Iterable[Tensor]]) -> Callable[..., tuple[Tensor, ...]]:
    """Every expert's weight for itself, from stacks."""
    return lambda *parts: tuple(weight(*of_one) for of_one in zip(*(how(part) for part in parts), strict=True))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("how", [by_index, by_selecting, by_last, torch.unbind])
@pytest.mark.parametrize("name", ["groups zeros", "int8 channel", "signed", "mxfp4"])
def test_experts_of_a_loop_are_joined(name: str, how: Callable[[Tensor], Iterable[Tensor]]) -> None:
    """``Q[e]`` of each expert is one stack again: what the loop reads is evenly spaced in the model's own."""
    case = FORMS[name]
    parts = case.parts()
    of = traced(each(case.weight, how), parts)
    found = [read(of.ctx, node, (0, 1)) for node in of.returned]
    assert all(isinstance(f, Coded) for f in found), found
    coded = [f for f in found if isinstance(f, Coded)]
    assert {str(c.encoding) for c in coded} == {str(coded[0].encoding)}
    whole = [joined(parts) for parts in zip(*(c.parts for c in coded), strict=True)]
    assert all(part is not None and part.sizes[0] == E for part in whole)
    values = [part.show(of.value(part.node)) for part in whole if part is not None]
    got = dequantise(coded[0].encoding, values[0], values[1], values[2] if len(values) > 2 else None, coded[0].dtype)
    assert equal(got, case.weight(*parts))
    assert all(proved(of.ctx, Weight(node, (0, 1)), c, drawn(c)) for node, c in zip(of.returned, coded, strict=True))
    assert len(of.ctx.scratch(Known).found) == 1, "of experts that are computed alike one is read"
    backwards = [joined(parts) for parts in zip(*(c.parts for c in coded[::-1]), strict=True)]
    assert backwards == [None] * len(backwards), "a stack in another order is no stack"


@pytest.mark.parametrize("name", ["groups zeros", "int8 channel", "block expanded", "gptq", "mxfp4"])
def test_one_that_stands_for_all(name: str) -> None:
    """What capture traced once, for a row that stands for every expert, is read as the stack, and proved with each number."""
    case = FORMS[name]
    weight = case.weight

    def one(*parts: Tensor) -> Tensor:
        row = torch.tensor(1)
        return weight(*(part[row][None] for part in parts))[0]

    parts = case.parts()
    of = traced(one, parts)
    number = next(n for n in of.ctx.graph.nodes if n.target is torch.tensor and n.args == (1,))
    ctx = Context(of.ctx.graph, Given(rows={number: tuple(range(E))}))
    coded = read(ctx, of.returned[0], (0, 1))
    assert isinstance(coded, Coded), coded
    assert str(coded.encoding).startswith(case.text or "?")
    assert equal(shown(coded, of), weight(*parts))
    assert holds(ctx, Weight(of.returned[0], (0, 1)), coded, drawn(coded), experts=range(E))
    without = read(of.ctx, of.returned[0], (0, 1))
    assert isinstance(without, Coded)
    assert without.storage.first == coded.storage.strides[0], "a number that stands for itself is that expert's"


@pytest.mark.parametrize("dynamic", [False, True])
def test_weights_that_slots_choose(dynamic: bool) -> None:
    """``Q[ids]``: read as the stack, the ids being the numbers of experts, however many tokens there are."""
    ids = torch.tensor([[0, 2], [1, 0], [2, 2]])
    parts = two()
    of = traced(lambda q, s, i: grouped(nibbles(q[i]), s[i]), parts, ids, dynamic=dynamic)
    (chosen,) = (n for n, value in of.values.items() if isinstance(value, Tensor) and value.dtype == torch.int64)
    coded = read(of.ctx, of.returned[0], (2, 3), rows=[chosen])
    assert isinstance(coded, Coded), coded
    assert equal(shown(coded, of), FORMS["groups"].weight(*parts))
    assert holds(of.ctx, Weight(of.returned[0], (2, 3), rows=frozenset([chosen])), coded, drawn(coded), experts=range(E))
    assert isinstance(read(of.ctx, of.returned[0], (2, 3)), Lost)


def test_levels_that_never_change() -> None:
    """A table that a module holds is read where the caller knows that it stays as it is."""
    parts = (*two(), torch.tensor(FP4))
    of = traced(lambda q, s, levels: grouped(levels[nibbles(q).long()], s), parts)
    (table,) = (n for n, value in of.values.items() if value.dim() == 1)
    coded = read(of.ctx, of.returned[0], (0, 1, 2), fixed=lambda n: of.value(n) if n is table else None)
    assert isinstance(coded, Coded), coded
    assert coded.encoding.name == "e2m1"
    lost = read(of.ctx, of.returned[0], (0, 1, 2))
    assert isinstance(lost, Lost)
    assert "may change" in lost.details["detail"]


def test_another_default_device() -> None:
    """What is read does not depend on where a program makes its tensors by default."""
    case = FORMS["gptq"]
    of = traced(case.weight, case.parts())
    with torch.device("meta"):
        coded = read(of.ctx, of.returned[0], case.order)
        assert isinstance(coded, Coded), coded
        assert holds(of.ctx, Weight(of.returned[0], case.order), coded, drawn(coded))


def test_a_weight_that_is_written_later() -> None:
    """A reader finds what was written before it, and nothing that comes behind."""

    def weight(q: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.empty(E, N, K)
        out.copy_(grouped(nibbles(q), s))
        first = out.sum()
        out[1] = 0
        return out, first

    of = traced(weight, two())
    out = next(n for n in of.ctx.graph.nodes if n.name.startswith("out") or n.target is torch.empty)
    total = next(n for n in of.ctx.graph.nodes if n.target == "sum")
    assert isinstance(read(of.ctx, out, (0, 1, 2)), Coded), "the first reader is the sum"
    assert isinstance(read(of.ctx, out, (0, 1, 2), reader=total), Coded)
    last = next(iter(of.ctx.graph.find_nodes(op="output")))
    assert isinstance(read(of.ctx, out, (0, 1, 2), reader=last), Lost)


def test_weights_that_are_computed_almost_alike() -> None:
    """Experts that differ in one thing are not taken for each other: another order of nibbles, another's scale, another zero."""

    def weight(q: Tensor, s: Tensor) -> tuple[Tensor, ...]:
        plain = grouped(nibbles(q[0]), s[0])
        turned = grouped(nibbles(q[1], low_first=False), s[1])
        other = grouped(nibbles(q[2]), s[0])
        less = grouped(nibbles(q[1]).to(torch.int8) - 8, s[1])
        both = grouped(nibbles(q[0]), s[0] + s[1])
        return plain, turned, other, less, both

    parts = two()
    of = traced(weight, parts)
    found = [read(of.ctx, node, (0, 1)) for node in of.returned]
    both = found.pop()
    assert isinstance(both, Coded)
    assert both.scale.node.name == "add", "a sum of two is what the program makes of them"
    for coded, want in zip(found, weight(*parts), strict=False):
        assert isinstance(coded, Coded)
        assert equal(shown(coded, of), want)


def test_what_was_proved_of_another_weight_proves_nothing_else() -> None:
    """A wrong reading of an expert is refuted, though another expert's, computed alike, was proved; a row of the stack counts too."""
    parts = two()
    of = traced(each(FORMS["groups"].weight, by_index), parts)
    first, second = (read(of.ctx, node, (0, 1)) for node in of.returned[:2])
    assert isinstance(first, Coded)
    assert isinstance(second, Coded)
    assert proved(of.ctx, Weight(of.returned[0], (0, 1)), first, of.value)
    assert proved(of.ctx, Weight(of.returned[1], (0, 1)), second, of.value)
    assert not proved(of.ctx, Weight(of.returned[1], (0, 1)), first, of.value)
    wrong = dataclasses.replace(second, scale=dataclasses.replace(second.scale, first=second.scale.first + 1))
    assert not proved(of.ctx, Weight(of.returned[1], (0, 1)), wrong, of.value)


def _mistakes(coded: Coded) -> dict[str, Coded]:
    """Readings that are wrong in one thing."""
    e = coded.encoding
    assert e.packing is not None
    table = tuple(map(float, e.table))

    def other(**changes: Any) -> Coded:
        return dataclasses.replace(coded, encoding=dataclasses.replace(e, **changes))

    def moved(part: str, **changes: Any) -> Coded:
        return dataclasses.replace(coded, **{part: dataclasses.replace(getattr(coded, part), **changes)})

    scale, storage = coded.scale, coded.storage
    return {
        "nibbles swapped": other(packing=Packing(1, e.packing.shifts[::-1])),
        "halves": other(packing=Packing(1, e.packing.shifts, halves=True)),
        "another table": other(table=(*table[:3], table[3] + 1, *table[4:])),
        "one code off": other(table=(*table[1:], table[0])),
        "other arithmetic": other(arithmetic="bf16"),
        "a group further": moved("scale", first=scale.first + 1, strides=(scale.strides[0], scale.strides[1], 0)),
        "groups of experts": moved("scale", strides=(0, *scale.strides[1:])),
        "another scale": dataclasses.replace(coded, scale=coded.zero or scale),
        "one expert for all": moved("storage", strides=(0, *storage.strides[1:])),
        "rows in another order": moved("storage", strides=(storage.strides[0], 1, storage.sizes[1])),
        "zeros as scales": dataclasses.replace(coded, scale=coded.zero or scale, zero=scale),
    }


@pytest.mark.parametrize("name", ["groups", "groups zeros"])
def test_the_proof_finds_mistakes(name: str) -> None:
    """A reading that is wrong in any one thing is refuted by made-up numbers, whether experts are run or computed element by element."""
    case = FORMS[name]
    of = traced(case.weight, case.parts())
    coded = read(of.ctx, of.returned[0], case.order)
    assert isinstance(coded, Coded)
    weight = Weight(of.returned[0], case.order)
    for small in (True, False):
        assert holds(of.ctx, weight, coded, drawn(coded), small=small)
        for mistake, wrong in _mistakes(coded).items():
            if (name == "groups" and "zero" in mistake) or wrong == coded:
                continue
            assert not holds(of.ctx, weight, wrong, drawn(coded), small=small), mistake
