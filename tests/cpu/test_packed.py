"""Quantised experts: refused by the name of what cannot be read, never silently, and never fused at a loss."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from moefuse import last_report
from moefuse.capture import entry
from moefuse.config import Options
from moefuse.pipeline import rewrite
from moefuse.report.entries import Skipped
from moefuse.report.report import FusionReport
from tests.cpu.test_verify import Light
from tests.programs import packed
from tests.programs.packed import (
    SPELLINGS,
    Assigned,
    Batched,
    Between,
    Drafting,
    Each,
    Embedded,
    Gathered,
    Grouped,
    Hit,
    Loading,
    Other,
    Pruned,
    Restored,
)

FOREIGN = "multiplies them, and is an operator that moefuse cannot look into"
UNREAD = "is the first operation on them that moefuse cannot read"
AT_ONCE = "fused, all 5 would be at once; they are not multiplied as they are, for on cpu no kernel is quicker than to unpack them in turn"
ONE_BY_ONE = "the program unpacks them one by one; fused, all 5 would be for every call"


@pytest.fixture(autouse=True)
def _fresh(fresh_dynamo: None) -> None:
    torch.manual_seed(0)


def report_of(model: nn.Module, x: Tensor, *, captured: bool = False) -> FusionReport:
    """What is said of a model, whose results are as without moefuse."""
    report = FusionReport()

    def backend(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        report.extend(rewrite.rewrite(gm, example_inputs, Options(), entry.frame()))
        return gm.forward

    if captured:
        entry.enable(backend, lambda _arguments: Options(), lambda found, *_: report.extend(found))
    with torch.set_grad_enabled(x.requires_grad):
        got = torch.compile(model, fullgraph=not captured, backend=backend)(x)
        torch.testing.assert_close(got, model(x))
    return report


def refused(model: nn.Module, *, captured: bool = False) -> Skipped:
    report = report_of(model, torch.randn(5, packed.H), captured=captured)
    assert (report.fused, [s.code for s in report.skipped]) == ([], ["encoding-unknown"]), str(report)
    return report.skipped[0]


def is_fused(model: nn.Module, x: Tensor | None = None, *, captured: bool = False) -> None:
    report = report_of(model, torch.randn(5, packed.H) if x is None else x, captured=captured)
    assert (len(report.fused), report.skipped) == (1, []), str(report)


def line_of(marker: str) -> str:
    lines = Path(packed.__file__).read_text().splitlines()
    (number,) = [i for i, line in enumerate(lines, 1) if line.endswith(f"# at: {marker}")]
    return f"{packed.__file__}:{number}"


FEW_BITS = [spelling for spelling in SPELLINGS if spelling != "floats"]


@pytest.mark.parametrize("spelling", FEW_BITS)
def test_gathered_weights_are_read_and_stay_on_a_cpu(spelling: str) -> None:
    """Nothing of PyTorch's is quicker than what Inductor makes of it. (It was the product that was named, or nothing at all.)"""
    found = refused(Gathered(spelling))
    assert "on cpu no kernel is quicker than to unpack those that have tokens" in found.message
    assert (
        "return (y * weights[..., None]).sum(1)"
        in Path(packed.__file__).read_text().splitlines()[int(found.location.rpartition(":")[2]) - 1]
    )


class Rounded(Gathered):
    """One operation more than is read."""

    def weight(self, of: int | Tensor) -> Tensor:
        return super().weight(of).clamp(-0.5, 0.5)


@pytest.mark.parametrize("spelling", FEW_BITS)
def test_what_unpacks_gathered_weights_is_named(spelling: str) -> None:
    found = refused(Rounded(spelling))
    channel = spelling == "channel"  # of which any rule reads all that there is in front of it
    assert f"`{'clamp' if channel else SPELLINGS[spelling].unread}` {UNREAD}" in found.message
    assert channel or found.location == line_of(spelling)


def test_floats_that_are_scaled_in_groups_are_not_packed() -> None:
    """The product is what no rule reads, by its own name: it was called `einsum`, whatever it was."""
    report = report_of(Each("floats"), torch.randn(5, packed.H))
    assert [(s.code, "`linear`" in s.message) for s in report.skipped] == [("no-rule", True)]


class Checkpointed(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.layer, x, use_reentrant=False)  # type: ignore[no-any-return]


def test_in_the_body_of_a_checkpoint_too() -> None:
    """What a body is given has the names of the model's tensors, and is no Parameter there."""
    assert FOREIGN in refused(Checkpointed(Batched())).message


@pytest.mark.every_value
@pytest.mark.parametrize("program", [Each, Gathered])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_with_the_same_weights_unpacked_before_it_is_fused(program: type[packed.Layer], spelling: str) -> None:
    """The twins of the tests above: nothing else in these programs is in the way."""
    is_fused(program(spelling, plain=True))


def test_an_operator_that_takes_ids_is_named() -> None:
    """Nothing is sorted and no matrix is gathered: no fact says that these are experts."""
    found = refused(Batched())
    assert found.message == f"expert weights are held as int8: `kernels_0a1b2c::w8a8_block_dynamic_matmul_by_ids` {FOREIGN}"


def test_an_operator_on_sorted_rows_is_named() -> None:
    assert f"`kernels_0a1b2c::w8a8_block_dynamic_matmul_by_ends` {FOREIGN}" in refused(Grouped("channel")).message


def test_what_such_an_operator_computes_is_fused() -> None:
    """All of the stack is unpacked then, by the program itself: the op reads what came of it."""
    is_fused(Batched(plain=True), torch.randn(40, packed.H))


def test_each_layer_is_told_beside_others() -> None:
    """One layer that is fused in the same graph silenced those of which no rule had anything to say."""
    report = report_of(nn.Sequential(Batched(), Each("channel", plain=True), Batched()), torch.randn(5, packed.H))
    assert [f.module for f in report.fused] == ["1"]
    assert [(s.module, s.code) for s in report.skipped] == [("0", "encoding-unknown"), ("2", "encoding-unknown")]


def test_weights_that_are_assigned_are_unpacked_too() -> None:
    """A write is no argument: the weight seemed to come from nowhere, and all five were unpacked for the four slots of two tokens."""
    assert ONE_BY_ONE in refused(Assigned(tokens=2)).message
    assert AT_ONCE in refused(Assigned(tokens=3)).message


def test_a_loop_over_hit_experts_unpacks_those_alone() -> None:
    """With ten slots for five experts one may still have all of them. A loop over all experts unpacks them in turn: one is in memory."""
    report = report_of(Hit("channel"), torch.randn(5, packed.H), captured=True)
    assert report.fused == []
    assert {s.code for s in report.skipped} == {"encoding-unknown"}
    assert ONE_BY_ONE in report.skipped[0].message
    assert AT_ONCE in refused(Each("channel")).message


def test_a_loop_whose_backward_wants_every_weight_anyway_is_fused() -> None:
    """Gradients of the rows take all that was unpacked; so nothing is in memory that is not there without moefuse."""
    is_fused(Each("channel"), torch.randn(5, packed.H, requires_grad=True))


@pytest.mark.code_once
@pytest.mark.parametrize("tokens", [2, 3])
def test_codes_that_a_caller_gives(tokens: int) -> None:
    """Quantised weights are not only the model's own tensors: all experts were unpacked at once for a single token, in silence."""

    def loop(x: Tensor, router: Tensor, q: Tensor, s: Tensor) -> Tensor:
        weights, ids = (x @ router.t()).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for e in range(packed.E):
            token, slot = torch.where(ids == e)
            out = out.index_add(0, token, F.linear(x[token], q[e].float() * s[e]) * weights[token, slot, None])
        return out

    x, router = torch.randn(tokens, packed.H), torch.randn(packed.E, packed.H)
    q, s = torch.randint(-127, 128, (packed.E, packed.H, packed.H), dtype=torch.int8), torch.rand(packed.E, packed.H, 1)
    with torch.no_grad():
        compiled = torch.compile(loop, backend="moefuse", dynamic=False)
        torch.testing.assert_close(compiled(x, router, q, s), loop(x, router, q, s))
    report = last_report()
    if 2 * tokens < packed.E:
        assert [f.spec.encoding for f in report.fused] == ["s8, a scale for each channel"], str(report)
    else:
        assert AT_ONCE in report.skipped[0].message


def test_a_loop_over_hit_experts_with_plain_weights_is_fused() -> None:
    is_fused(Hit("channel", plain=True), captured=True)


@pytest.mark.parametrize("write", ["set", "change"])
def test_writes_to_storage_that_was_read_are_kept(write: Literal["set", "change"]) -> None:
    """The unpacked weights are those from before the write, and the storage is what the program leaves: int8 of bitsandbytes does this."""
    model = Restored(write)
    eager, light, x = deepcopy(model), Light(), torch.randn(5, packed.H)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend=light, fullgraph=True)(x), eager(x))
    assert len(light.fused) == 1
    torch.testing.assert_close(model.state_dict(), eager.state_dict(), rtol=0, atol=0)


def test_a_kernel_is_loaded_as_often_as_the_program_says() -> None:
    """Its node gives nothing that anybody reads; the layer that stays as it is needs it."""
    packed.LOADED.clear()
    light = Light()
    compiled = torch.compile(Loading(), backend=light, fullgraph=True)
    with torch.no_grad():
        compiled(torch.randn(5, packed.H))
        packed.LOADED.clear()
        compiled(torch.randn(5, packed.H))
    assert (len(light.fused), [s.code for s in light.skipped]) == (1, ["encoding-unknown"])
    assert packed.LOADED == ["kernel", "kernel"]


@pytest.mark.parametrize("program", [Pruned, Between])
def test_bytes_beside_experts_are_no_packed_experts(program: Callable[[], nn.Module]) -> None:
    """A mask is smaller than what it prunes; one projection after another is no choice of experts."""
    is_fused(program())


def test_an_embedding_of_few_bits_is_no_expert() -> None:
    is_fused(Embedded(), torch.randint(99, (5,)))


def test_projections_behind_a_choice_of_words_are_no_experts() -> None:
    """They depend on what was chosen, and there are three of them, not as many as scores."""
    report = report_of(Drafting(), torch.randn(5, packed.H))
    assert (report.fused, report.skipped) == ([], [])


def test_another_reason_stays_the_reason() -> None:
    """Weights that are unpacked and read are not why the rows were lost behind them."""
    report = report_of(Other("channel"), torch.randn(5, packed.H))
    assert [(s.code, "`digamma`" in s.message) for s in report.skipped] == [("no-rule", True)]


def test_stacks_that_are_taken_by_a_buffer() -> None:
    """Nobody chooses in the graph, but whole numbers take matrices out of a packed stack: that is told."""

    class Hashed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("codes", torch.randint(-9, 9, (8, 16, 16), dtype=torch.int8))
            self.register_buffer("scale", torch.rand(8, 16, 1))
            self.register_buffer("ids", torch.randint(8, (5,)))

        def forward(self, x: Tensor) -> Tensor:
            return torch.bmm(self.codes[self.ids].float() * self.scale[self.ids], x[..., None]).squeeze(-1)

    report = report_of(Hashed(), torch.randn(5, 16))
    assert ([s.code for s in report.skipped], report.fused) == (["encoding-unknown"], [])
