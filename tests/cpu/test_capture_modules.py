"""One trace for a list of modules: only where the modules are the same but for their weights, and the body cannot tell them apart."""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moefuse.passes.graph import siblings
from moefuse.passes.graph.siblings import different, keep
from tests.cpu.capture_case import Packed, Seen, capturing, check, plain
from tests.programs.loops import H, I, K

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


E = 4


class Expert(nn.Module):
    """What an expert computes depends on attributes, children and biases."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(H, I), nn.Linear(I, H)
        self.act = nn.GELU()
        self.kind = "plain"
        self.scale = 1.0
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.up(x))
        if self.kind == "squared":
            y = y.square()
        out: Tensor = self.down(y)
        return out if self.scale == 1.0 else out * self.scale


class Loop(nn.Module):
    """transformers 4.57's loop over a ModuleList."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Expert() for _ in range(E))
        self.prepare()

    def prepare(self) -> None:
        """What subclasses do to the experts."""

    def body(self, row: Tensor, x: Tensor) -> Tensor:
        out: Tensor = self.experts[row](x)
        return out

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        weights, ids = torch.topk(logits.softmax(-1), K, dim=-1)
        out = torch.zeros_like(x)
        mask = F.one_hot(ids, num_classes=E).permute(2, 1, 0)
        for row in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
            slot, tok = torch.where(mask[row].squeeze(0))
            out.index_add_(0, tok, self.body(row, x[tok]) * weights[tok, slot, None])
        return out


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bodies each graph was written with when Dynamo was done with it; see `bodies`."""
    found: list[int] = []
    from moefuse.pipeline import rewrite

    original = rewrite.rewrite

    def counting(gm: torch.fx.GraphModule, *args: object) -> object:
        found.append(sum("where" in str(n.target) for n in gm.graph.nodes if n.op == "call_function" and n.target is not operator.getitem))
        return original(gm, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(rewrite, "rewrite", counting)
    return found


def test_two_rows_are_traced(traced: list[int]) -> None:
    seen = check(Loop)
    assert len(seen.graphs) == len(seen.report.fused) == 1, str(seen.report)
    assert traced == [2]
    assert not seen.graphs[0].graph.find_nodes(op="call_function", target=keep)


@pytest.mark.every_value
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("compile_kwargs", [{"fullgraph": True}, {"dynamic": True}], ids=str)
def test_ways_to_compile(traced: list[int], compile_kwargs: dict[str, bool], grad: bool) -> None:
    seen = check(Loop, grad=grad, tokens=(5, 7, 3), **compile_kwargs)
    assert len(seen.report.fused) == len(seen.graphs)
    if "dynamic" not in compile_kwargs:  # there a float attribute of each expert is an input of its own, and every row is traced
        assert set(traced) == {2}


# --- experts that differ ----------------------------------------------------------------------------------------------------------


def _attribute(m: nn.ModuleList) -> None:
    m[2].kind = "squared"


def _number(m: nn.ModuleList) -> None:
    m[2].scale = 0.5


def _hook(m: nn.ModuleList) -> None:
    m[2].up.register_forward_hook(lambda _m, _a, out: out * 2)


def _width(m: nn.ModuleList) -> None:
    m[2].up, m[2].down = nn.Linear(H, 2 * I), nn.Linear(2 * I, H)


def _bias(m: nn.ModuleList) -> None:
    m[2].down = nn.Linear(I, H, bias=False)


def _activation(m: nn.ModuleList) -> None:
    m[2].act = nn.GELU("tanh")


def _frozen(m: nn.ModuleList) -> None:
    m[2].up.weight.requires_grad_(False)


def _shared(m: nn.ModuleList) -> None:
    m[2].up = m[1].up


def _mode(m: nn.ModuleList) -> None:
    m[2].act.eval()


def _forward(m: nn.ModuleList) -> None:
    m[2].forward = functools.partial(torch.mul, other=3.0)


def _layout(m: nn.ModuleList) -> None:
    m[2].up.weight = nn.Parameter(m[2].up.weight.detach().t().contiguous().t())


def _order(m: nn.ModuleList) -> None:
    up = m[2]._modules.pop("up")
    m[2]._modules["up"] = up


DIFFERENT: list[Callable[[nn.ModuleList], None]] = [
    _attribute, _number, _hook, _width, _bias, _activation, _frozen, _shared, _mode, _forward, _layout, _order,
]  # fmt: skip


@pytest.mark.sampled(4)
@pytest.mark.parametrize("change", DIFFERENT, ids=lambda f: f.__name__[1:])
def test_experts_that_differ_are_traced_one_by_one(change: Callable[[nn.ModuleList], None], traced: list[int]) -> None:
    """A difference in one attribute, hook, shape, or in the order of weights: no expert speaks for another; values are eager's."""

    class Changed(Loop):
        def prepare(self) -> None:
            change(self.experts)

    assert different(list(Changed().experts)) is not None
    if change is _hook:
        as_dynamo(Changed)  # Dynamo does not guard on hooks: one compiled expert runs for all of them
    else:
        check(Changed)
    assert 2 not in traced


def test_another_dtype_is_a_difference() -> None:
    experts = [Expert() for _ in range(3)]
    assert different(experts) is None
    experts[2].down.to(torch.bfloat16)
    assert different(experts) is not None


@pytest.mark.parametrize(
    "value",
    [(0.0, -0.0), ([1], [2]), ({"a": 1}, {"a": 2}), (1, True), (object(), object()), (abs, len)],
    ids=lambda pair: type(pair[0]).__name__,
)
def test_attributes_of_every_kind_are_compared(value: tuple[object, object]) -> None:
    a, b = Expert(), Expert()
    a.scale, b.scale = value  # type: ignore[assignment]
    assert different([a, b]) is not None
    b.scale = copy.copy(a.scale) if isinstance(a.scale, list | dict) else a.scale
    assert different([a, b]) is None


# --- bodies that tell experts apart -----------------------------------------------------------------------------------------------


class ReadsIdentity(Loop):
    """One expert is special because of who it is."""

    def body(self, row: Tensor, x: Tensor) -> Tensor:
        expert = self.experts[row]
        y: Tensor = expert(x)
        return y * 2 if expert is self.experts[3] else y


class KeyOfADict(Loop):
    def prepare(self) -> None:
        self.factors = {expert: float(i) for i, expert in enumerate(self.experts)}

    def body(self, row: Tensor, x: Tensor) -> Tensor:
        expert = self.experts[row]
        out: Tensor = expert(x) * self.factors[expert]
        return out


class MemberOfAList(Loop):
    def body(self, row: Tensor, x: Tensor) -> Tensor:
        expert = self.experts[row]
        out: Tensor = expert(x) * (2.0 if expert in [self.experts[2], self.experts[3]] else 1.0)
        return out


class GetsByKey(KeyOfADict):
    def body(self, row: Tensor, x: Tensor) -> Tensor:
        expert = self.experts[row]
        out: Tensor = expert(x) * self.factors.get(expert, 1.0)
        return out


class UsesId(Loop):
    def prepare(self) -> None:
        self.special = id(self.experts[3])

    def body(self, row: Tensor, x: Tensor) -> Tensor:
        expert = self.experts[row]
        return expert(x) * 2 if id(expert) == self.special else expert(x)  # type: ignore[no-any-return]


class AsksForItsWeight(Loop):
    """``is`` between weights."""

    def body(self, row: Tensor, x: Tensor) -> Tensor:
        expert = self.experts[row]
        return expert(x) * 2 if expert.up.weight is self.experts[3].up.weight else expert(x)  # type: ignore[no-any-return]


class ReadsTheNumber(Loop):
    def body(self, row: Tensor, x: Tensor) -> Tensor:
        out: Tensor = self.experts[row](x)
        return out * (int(row) + 1)


class AnotherExpert(Loop):
    """Not the row, but one computed from it."""

    def body(self, row: Tensor, x: Tensor) -> Tensor:
        out: Tensor = self.experts[E - 1 - row](x)
        return out


class CountsOnTheExpert(Loop):
    def body(self, row: Tensor, x: Tensor) -> Tensor:
        expert = self.experts[row]
        expert.calls += 1
        out: Tensor = expert(x)
        return out


class FirstExpertBesides(Loop):
    """A weight that is traced as an expert's own is used by all: the first expert's bias."""

    def body(self, row: Tensor, x: Tensor) -> Tensor:
        out: Tensor = self.experts[row](x) + self.experts[0].down.bias
        return out


class SecondExpertBesides(Loop):
    def body(self, row: Tensor, x: Tensor) -> Tensor:
        out: Tensor = self.experts[row](x) + self.experts[1].down.bias
        return out


class AlwaysTheFirst(Loop):
    """The list is asked, but another expert runs."""

    def body(self, row: Tensor, x: Tensor) -> Tensor:
        first = self.experts[0]
        chosen = self.experts[row]
        out: Tensor = first.down(chosen.act(chosen.up(x)))
        return out


class KnownBefore(Loop):
    """The first expert has a second name."""

    def prepare(self) -> None:
        self.alias = self.experts[0]

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        out: Tensor = super().forward(x + self.alias.down.bias, logits)
        return out


class TwoLists(Loop):
    def prepare(self) -> None:
        self.more = nn.ModuleList(nn.Linear(H, H) for _ in range(E))

    def body(self, row: Tensor, x: Tensor) -> Tensor:
        out: Tensor = self.more[row](self.experts[row](x))
        return out


BODIES = [
    ReadsIdentity, KeyOfADict, MemberOfAList, GetsByKey, UsesId, AsksForItsWeight, ReadsTheNumber, AnotherExpert, CountsOnTheExpert,
    FirstExpertBesides, SecondExpertBesides, AlwaysTheFirst, KnownBefore, TwoLists,
]  # fmt: skip


WRONG_IN_DYNAMO = (ReadsIdentity, KeyOfADict, MemberOfAList, GetsByKey, UsesId, AsksForItsWeight)
"""Behind the graph break Dynamo compiles the body once and runs it for every expert: there is no right result to compare with."""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("cls", [cls for cls in BODIES if cls not in WRONG_IN_DYNAMO])
def test_values_are_eagers(cls: type[Loop]) -> None:
    check(cls)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("cls", WRONG_IN_DYNAMO)
def test_a_body_that_tells_experts_apart_runs_as_without_moefuse(cls: type[Loop], traced: list[int]) -> None:
    as_dynamo(cls)
    assert 2 not in traced


def as_dynamo(cls: type[Loop]) -> None:
    """Outputs equal those of the same program with moefuse switched off."""
    outs = []
    for options in (plain(), plain(enabled=False)):
        torch._dynamo.reset()
        torch.manual_seed(0)
        compiled = torch.compile(Packed(cls()), backend=capturing(Seen(), options))
        outs.append([compiled(torch.randn(12, H + 4)) for _ in range(2)])
    torch.testing.assert_close(*outs, rtol=1e-5, atol=1e-5)


def test_two_lists_are_two_rows_too(traced: list[int]) -> None:
    seen = check(TwoLists)
    assert traced == [2]
    assert len(seen.report.fused) == 1


# --- later ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "change", [*DIFFERENT[:2], DIFFERENT[9], lambda m: m.__setitem__(2, nn.Identity())], ids=["attribute", "number", "forward", "replaced"]
)
def test_a_sibling_that_changes_later_is_noticed(change: Callable[[nn.ModuleList], None]) -> None:
    """The guards on the traced expert are on all."""
    torch.manual_seed(0)
    model = Loop().eval()
    seen = Seen()
    compiled = torch.compile(Packed(model), backend=capturing(seen))
    both = torch.randn(64, H + 4)
    with torch.no_grad():
        torch.testing.assert_close(compiled(both), Packed(model)(both), rtol=1e-5, atol=1e-5)
        assert len(seen.report.fused) == 1
        change(model.experts)
        torch.testing.assert_close(compiled(both), Packed(model)(both), rtol=1e-5, atol=1e-5)


def test_a_hook_that_comes_later_is_noticed_where_dynamo_notices_hooks() -> None:
    """By default Dynamo looks at the hooks of no module again; a user who switches that on gets it for the siblings too."""
    from torch._dynamo import config

    torch.manual_seed(0)
    model = Loop().eval()
    seen = Seen()
    both = torch.randn(64, H + 4)
    with config.patch(skip_nnmodule_hook_guards=False), torch.no_grad():
        compiled = torch.compile(Packed(model), backend=capturing(seen))
        compiled(both)
        assert len(seen.report.fused) == 1
        _hook(model.experts)
        torch.testing.assert_close(compiled(both), Packed(model)(both), rtol=1e-5, atol=1e-5)


def test_new_weights_of_a_sibling_are_used() -> None:
    torch.manual_seed(0)
    model = Loop()
    seen = Seen()
    compiled = torch.compile(Packed(model), backend=capturing(seen))
    both = torch.randn(64, H + 4)
    compiled(both)
    for expert in model.experts:
        expert.up.weight = nn.Parameter(torch.randn_like(expert.up.weight))
        expert.down.weight.data = torch.randn_like(expert.down.weight)
    torch.testing.assert_close(compiled(both), Packed(model)(both), rtol=1e-5, atol=1e-5)


def test_the_proof_is_what_decides(monkeypatch: pytest.MonkeyPatch, traced: list[int]) -> None:
    """Without a proof every row is traced: the proof is not decoration."""
    monkeypatch.setattr(siblings, "different", lambda _: "no reason")
    seen = check(Loop)
    assert traced == [E]
    assert len(seen.report.fused) == 1
