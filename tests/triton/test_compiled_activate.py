"""The activation kernel compiles for every target, without spills."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from moefuse.ops.meaning.call import Body
from tests.triton.test_compiled import SHARED, compile_launch, spills


@pytest.mark.parametrize("arch", SHARED)
@pytest.mark.parametrize(("activation", "gated"), [("swiglu_oai", True), ("tanh", False)])
def test_compiles(activation: str, gated: bool, arch: int | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from moefuse.kernels.triton.launch import calls
    from moefuse.kernels.triton.provide import activate

    made: list[Any] = []
    monkeypatch.setattr(calls, "as_launch", lambda it, tensors, *_: made.append((it, dict(zip(it.names, tensors, strict=True)))))
    h = torch.empty(64, 2 * 5632, dtype=torch.bfloat16, device="meta")
    gate, up = h.chunk(2, -1)
    activate.activate(gate, up if gated else None, Body(activation, (1.7, 7.0)))
    [(launch, tensors)] = made
    compiled = compile_launch(launch, tensors, arch, {"num_warps": 4})
    assert spills(compiled, arch, tmp_path) == 0
