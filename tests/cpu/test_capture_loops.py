"""Loops that depend on data: captured and fused where that changes nothing, otherwise exactly as without moefuse."""

from __future__ import annotations

import functools
import linecache
import re
import types
from collections.abc import Collection
from dataclasses import replace

import pytest
import torch
from torch.torch_version import TorchVersion

from tests.cpu.capture_case import Seen, call, capturing, check, plain
from tests.programs import generated, loops
from tests.programs.generated import Loop
from tests.programs.loops import KINDS, NEAR_MISS, POSITIVE, H, Layer, counters, dummies, gradients, logits_for, offsets, unique

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


NEEDS_2_12 = pytest.mark.skipif(TorchVersion(torch.__version__) < (2, 12), reason="Dynamo of torch 2.11 breaks the graph at this statement")
"""Rows assigned to a slice of unknown length."""


OLD = ("FilledByCumsum",)


def alone(base: Loop, **parts: Collection[str]) -> dict[str, Loop]:
    """A generated loop with each of the ways to say one of its parts."""
    found = {f"{field}-{name}": replace(base, **{field: name}) for field, names in parts.items() for name in names}  # type: ignore[arg-type]
    return {name: loop for name, loop in found.items() if generated.sensible(loop)}


ROWS, PIECES = Loop("range", skip="numel"), Loop(cut="list", skip="zero", add="append")
ALONE = {
    **alone(ROWS, over=generated.OVER, mask=generated.MASKS, skip=generated.SKIPS, gather=generated.GATHERS, add=generated.ADDS),
    **alone(ROWS, weigh=generated.WEIGHS, store=generated.STORES, rebind=generated.REBINDS, between=generated.BETWEEN),
    **alone(ROWS, laid=generated.LAID),
    **alone(Loop("nonzero"), hit=generated.HITS),
    **alone(Loop("range", add="index_add"), init=generated.INITS),
    **alone(PIECES, cut=generated.CUTS, counts=generated.COUNTS, rows=generated.ROWS),
    **alone(Loop(cut="list"), order=generated.ORDERS),
}
GENERATED = [pytest.param(generated.layer(loop), id=name, marks=NEEDS_2_12) for name, loop in ALONE.items()]


@pytest.mark.sampled(9)
@pytest.mark.parametrize("cls", [*(pytest.param(c, id=n, marks=NEEDS_2_12 if n in OLD else ()) for n, c in POSITIVE.items()), *GENERATED])
def test_a_loop_is_one_graph_and_fused(cls: type[Layer]) -> None:
    seen = check(cls)
    assert len(seen.graphs) == 1
    assert len(seen.report.fused) == 1, str(seen.report)
    assert (seen.report.skipped, seen.report.graph_breaks) == ([], [])


@pytest.mark.sampled(8)
@pytest.mark.parametrize("cls", [pytest.param(c, id=n, marks=NEEDS_2_12 if n in OLD else ()) for n, c in POSITIVE.items()])
def test_a_loop_with_one_expert_for_each_token_is_fused(cls: type[Layer], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where K is 1, dimensions of one entry are nobody's: an adversary found rules that took them for others."""
    for module in (loops, *vars(loops).values()):
        if isinstance(module, types.ModuleType) and hasattr(module, "K"):
            monkeypatch.setattr(module, "K", 1)
    seen = check(cls)
    assert (len(seen.graphs), len(seen.report.fused), seen.report.skipped) == (1, 1, []), str(seen.report)


@pytest.mark.parametrize("cls", [gradients.TwoLayers, gradients.TwoRoutings])
def test_two_layers_whose_sum_is_taken_stay_two(cls: type[Layer]) -> None:
    seen = check(cls)
    assert len(seen.graphs) == 1
    assert len(seen.report.fused) == 2, str(seen.report)


@pytest.mark.sampled(20)
@pytest.mark.parametrize("cls", NEAR_MISS.values(), ids=NEAR_MISS)
def test_what_only_looks_like_one_runs_as_without_moefuse(cls: type[Layer], capsys: pytest.CaptureFixture[str]) -> None:
    """Values, gradients and Python's state equal eager's; nothing is fused; Dynamo breaks the graph where it always did."""
    seen = check(cls)
    assert seen.report.fused == []
    if cls is not NEAR_MISS["Prints"]:  # int(row) is one more break where Dynamo may read numbers out of tensors
        _breaks_as_ever(cls, seen)


TWISTED = [
    *(Loop(over, skip="numel", twist=name) for name in generated.twists(cut=False) for over in ("range", "nonzero")),
    *(
        Loop(cut=cut, skip="zero", add=add, twist=n)
        for n in generated.twists(cut=True)
        for cut, add in (("list", "append"), ("numpy", "iadd"))
    ),
]


@pytest.mark.sampled(28)
@pytest.mark.parametrize("loop", [loop for loop in TWISTED if generated.sensible(loop)], ids=lambda p: f"{p.over or p.cut}-{p.twist}")
def test_every_twist_computes_what_it_says(loop: Loop) -> None:
    """Some are fused all the same (another routing, a sum that a number scales); all others break the graph where they always did."""
    layer = generated.layer(loop)
    try:
        for kind in KINDS:
            model = layer()
            call(model, model, torch.randn(5, H), logits_for(kind, 5))
    except Exception:  # a twist that is no program at all for some routing, or has no gradients
        pytest.skip("eager raises")
    seen = check(layer)
    if not seen.report.fused:
        _breaks_as_ever(layer, seen)


def _breaks_as_ever(cls: type[Layer], seen: Seen) -> None:
    without = check(cls, options=plain(capture=False))
    if _break_at_bincount(without):
        assert len(seen.graphs) <= len(without.graphs)
        return
    assert (len(seen.graphs), seen.report.graph_breaks) == (len(without.graphs), without.report.graph_breaks)


def _break_at_bincount(seen: Seen) -> bool:
    """Whether the graph breaks at ``bincount``: capture traces it, so that it breaks elsewhere."""
    places = [re.findall(r"(\S+\.py|<loop \d+>):(\d+)", text)[-1] for text in seen.report.graph_breaks]
    return any("bincount(" in linecache.getline(file, int(line)) for file, line in places)


@pytest.mark.parametrize("cls", [offsets.RaisedByNumber, offsets.RaisedByRows, counters.AddsNumbers, unique.UniqueIds])
def test_one_token_has_most_experts_idle(cls: type[Layer]) -> None:
    """Whoever runs the program again for the check jumps over them, and finds the numbers that they would have left."""
    seen = check(cls, tokens=(1, 1, 1))
    assert (len(seen.graphs), len(seen.report.fused), seen.report.skipped) == (1, 1, [])


_DUMMIES = {n: c for n, c in POSITIVE.items() if c.__module__ == dummies.__name__}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("cls", _DUMMIES.values(), ids=_DUMMIES)
def test_a_pass_for_nobody_is_nothing(cls: type[Layer]) -> None:
    """Gradients of zeros are what such a pass is for: they are there without it, and nobody has to be told of them."""
    seen = check(cls)
    assert (len(seen.graphs), len(seen.report.fused), seen.report.notes) == (1, 1, [])
    model = cls()
    compiled, logits = torch.compile(model, backend=capturing(Seen())), torch.tensor([[9.0, 9.0, 0.0, 0.0]] * 5)
    compiled(torch.randn(5, H), logits).sum().backward()
    assert all(p.grad is not None for p in model.experts.parameters())
    none = torch.zeros(0, H)
    try:
        expected = model(none, logits[:0])
    except (IndexError, RuntimeError) as error:  # there is no first row
        with pytest.raises(type(error)):
            compiled(none, logits[:0])
    else:
        assert compiled(none, logits[:0]).requires_grad == expected.requires_grad


@pytest.mark.every_value(2)
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("compile_kwargs", [{"fullgraph": True}, {"dynamic": True}, {"dynamic": False}], ids=str)
@pytest.mark.parametrize("name", ["RowsOfNonzero", "ContinueWhenEmpty"])
def test_ways_to_compile(name: str, compile_kwargs: dict[str, bool], grad: bool) -> None:
    seen = check(POSITIVE[name], grad=grad, tokens=(5, 7, 3), **compile_kwargs)
    assert len(seen.graphs) == (3 if compile_kwargs == {"dynamic": False} else len(seen.graphs)) <= 3
    assert len(seen.report.fused) == len(seen.graphs)


@pytest.mark.parametrize("tokens", [0, 1])
def test_few_tokens(tokens: int) -> None:
    seen = check(POSITIVE["ModuleListByRow"], tokens=(tokens, 5, 5))
    assert len(seen.report.fused) == len(seen.graphs) >= 1


@functools.cache
def _without_capture() -> int:
    seen = check(POSITIVE["RowsOfNonzero"], grad=False, options=plain(capture=False))
    assert "not-captured" not in seen.codes
    return len(seen.graphs)


@pytest.mark.parametrize(
    "options", [plain(exclude=""), plain(max_rewrites=0), plain(enabled=False)], ids=["exclude", "max_rewrites", "enabled"]
)
def test_a_region_that_an_option_leaves_alone_is_not_captured(options: object) -> None:
    """No option leaves a loop unrolled and unfused: the graphs are those without capture."""
    seen = check(POSITIVE["RowsOfNonzero"], grad=False, options=options)  # type: ignore[arg-type]
    assert len(seen.graphs) == _without_capture() > 1
    assert "not-captured" not in seen.codes


@pytest.mark.parametrize(
    ("name", "grad", "told"), [("ModuleListByRow", True, 1), ("ModuleListByRow", False, 0), ("RowsOfNonzero", True, 0)]
)
def test_gradients_that_eager_leaves_none_are_told(name: str, grad: bool, told: int) -> None:
    """Where experts have Parameters of their own and are trained: an optimizer with weight decay moves what has a gradient of zeros."""
    seen = check(POSITIVE[name], grad=grad)
    assert len(seen.report.fused) == 1
    assert [note.split(" at ")[0] for note in seen.report.notes] == ["experts that no token chose get gradients of zeros"] * told


@pytest.mark.parametrize("name", ["RowsOfNonzero", "ModuleListByRow", "UniqueIds", "RunningSlicesSkipped", "NotAny"])
def test_no_token_at_all_is_no_gradient(name: str) -> None:
    """The loop runs for nobody: what comes out does not require a gradient in eager, so neither here."""
    model, seen = POSITIVE[name](), Seen()
    x, logits = torch.zeros(0, H, requires_grad=True), torch.zeros(0, 4)
    compiled = torch.compile(model, backend=capturing(seen))
    assert compiled(x, logits).requires_grad == model(x, logits).requires_grad
    assert compiled(x, logits).shape == x.shape
