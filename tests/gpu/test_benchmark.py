"""``moefuse.benchmark`` on a GPU: memory is measured."""

from __future__ import annotations

import pytest
import torch

import moefuse
from tests.cpu.beside_eager import H
from tests.cpu.test_benchmark import Layer, Model

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("train", [False, True])
def test_memory_and_times(train: bool) -> None:
    gains = moefuse.benchmark(Model(Layer(), Layer()).cuda(), torch.randn(64, H, device="cuda"), budget_s=0.5, progress=False, train=train)
    assert not gains.off, str(gains)
    assert gains.report.layers == (2, 2)
    assert gains.device == torch.cuda.get_device_name()
    for timed in (gains.model, *gains.layers):
        assert all(row.ms for row in timed.rows), str(gains)
        assert all(row.memory is not None and row.memory >= 64 * H * 4 for row in timed.rows), str(gains)
