"""What a break of a graph and a refusal say as values, so that nobody has to read it out of their texts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import moefuse
from moefuse import _torch_private
from moefuse.passes.ir.facts import Lost
from moefuse.passes.replacement import skipped
from moefuse.pipeline import settled
from moefuse.report.report import FusionReport

KINDS = {
    "Skip inlining `torch.compiler.disable()`d function": "skipped",
    "Dynamic shape operator": "size",
    "Data dependent operator": "number",
    "Data-dependent branching": "number",
    "Unsupported Tensor.item() call with capture_scalar_outputs=False": "number",
    "graph break in loop": "loop",
    "HOP: Unsafe side effect": "write",
    "source-less requires_grad_() intermediate leaked as output": "requires-grad",
    "Module-level backwards hooks require compiled autograd.": "hooks",
    "Call to `torch._dynamo.graph_break()`": "",
}


@pytest.mark.parametrize(("text", "kind"), KINDS.items())
def test_the_kind_of_a_stop(text: str, kind: str) -> None:
    stop = _torch_private.tracing_stop(RuntimeError(f"{text}\n  Explanation: Skip, a graph break in loop"))
    assert (stop.kind, stop.text, stop.reason, stop.place) == (kind, text, text, "")


def test_a_check_that_lacked_a_number_is_made_behind_the_break(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its refusal is not kept for the next attempt; others are."""
    monkeypatch.setattr(settled, "_left", lambda gm: "a size is left")
    node, kept = torch.fx.Graph().placeholder("x"), []
    report = FusionReport(skipped=[skipped(Lost("verification-error", node, {"detail": "?", **why})) for why in ({}, {"why": "uncounted"})])
    frame = SimpleNamespace(flags=False, assumptions=[], traces_data=True, settled=set(), retreat=lambda *a, **_: kept.extend(a[1]))
    settled.settle(cast(Any, frame), torch.fx.GraphModule({}, torch.fx.Graph()), report, [], moefuse.Options())
    assert [s.cause for s in kept] == [""]
