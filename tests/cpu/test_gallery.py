"""The gallery: each layer of the page computes what eager does, and gets the report that stands there."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

import moefuse

_SPEC = importlib.util.spec_from_file_location("gallery", Path(__file__).parents[2] / "docs/gallery.py")
assert _SPEC is not None
assert _SPEC.loader is not None
gallery: Any = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(gallery)

ENTRIES = gallery.entries()


def test_the_page_has_layers() -> None:
    """Twenty at least, and no file that the page forgets."""
    assert sorted(entry.name for entry in ENTRIES) == sorted(path.stem for path in gallery.LAYERS.glob("*.py"))
    assert len(ENTRIES) >= 20


@pytest.mark.usefixtures("fresh_dynamo", "as_traced")
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_layer(entry: Any) -> None:
    """The page says so to people who look for code like theirs."""
    eager, inputs = gallery.made(entry)
    layer = copy.deepcopy(eager)
    expected, got = eager(*inputs), torch.compile(layer, backend="moefuse")(*inputs)
    for out in (expected, got):
        gallery.scalar(out).backward()
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    for (name, ours), theirs in zip(layer.named_parameters(), eager.parameters(), strict=True):
        wanted = torch.zeros_like(theirs) if theirs.grad is None else theirs.grad
        grad = torch.zeros_like(ours) if ours.grad is None else ours.grad
        torch.testing.assert_close(grad, wanted, rtol=1e-3, atol=1e-4 * float(wanted.abs().max().clamp_min(1e-3)), msg=name)
    assert gallery.shown(moefuse.last_report()) == entry.report
