"""In both directions: who has experts hears of those that are not fused, and ``strict`` raises; who has none hears nothing."""

from __future__ import annotations

import inspect
import logging

import pytest
import torch
from torch import nn

import moefuse
from tests.cpu.suspect_programs import HAVE, HAVE_NOT, H, Make, T

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "no_code")


@pytest.fixture(autouse=True)
def _not_told_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moefuse.pipeline, "_warned", set())


def run(make: Make, **options: object) -> nn.Module:
    torch.manual_seed(0)
    model, x = make().eval(), torch.randn(T, H)
    expected = model(x)
    model.compile(backend="moefuse", options=options)
    torch.testing.assert_close(model(x), expected, equal_nan=True)
    return model


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name.startswith("moefuse") and r.levelno >= logging.WARNING]


@torch.no_grad()
@pytest.mark.parametrize("make", HAVE)
def test_experts_that_are_lost_are_told_about(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """Once, at a line of the program's own."""
    run(make)
    texts = messages(caplog)
    assert texts, str(moefuse.last_report())
    assert len(texts) == 1, texts
    assert "suspect_programs.py" in texts[0], texts
    assert not any(f"suspect_programs.py:{line} " in texts[0] for line in _EXPERT), texts


def _lines(kind: type) -> range:
    lines, start = inspect.getsourcelines(kind)
    return range(start, start + len(lines))


_EXPERT = _lines(__import__("tests.cpu.suspect_programs", fromlist=["Expert"]).Expert)


@torch.no_grad()
@pytest.mark.parametrize("make", HAVE)
def test_strict_raises_where_experts_are_lost(make: Make) -> None:
    with pytest.raises(moefuse.FusionError):
        run(make, strict=True)


@torch.no_grad()
@pytest.mark.parametrize("make", HAVE_NOT)
def test_what_has_no_experts_hears_nothing(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    run(make, strict=True)
    assert messages(caplog) == []
