"""The two kernels for routed experts and a shared one compile for every target, without spills."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.triton.test_compiled import SHARED, source, spills
from tests.triton.test_interpreted_joined import arguments


@pytest.mark.parametrize("arch", SHARED)
@pytest.mark.parametrize("shape", ["qwen2moe", "deepseek", "odd"])
def test_compiles(shape: str, arch: int | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import triton
    from triton.backends.compiler import GPUTarget

    from moefuse.kernels.triton import joined_plan, layout

    sizes = {
        "qwen2moe": {"top_k": 4, "experts": 60, "hidden": 2048, "inter": 1408, "wide": 5632},
        "deepseek": {"top_k": 8, "experts": 256, "hidden": 7168, "inter": 2048, "wide": 2048, "gated": False},
        "odd": {"top_k": 3, "experts": 7, "hidden": 99, "inter": 77, "wide": 100},
    }[shape]
    device = layout.Device("", 132, SHARED[arch], arch == 90)
    monkeypatch.setattr(joined_plan, "device_of", lambda d: device)
    args = arguments(1, dtype=torch.bfloat16, device="meta", **sizes)
    made: list[Any] = []
    launch = joined_plan.Launch

    class Noted(launch):  # type: ignore[misc, valid-type]
        def first(self, pointers: Any) -> None:
            made.append((self, pointers))

    monkeypatch.setattr(joined_plan, "Launch", Noted)
    joined_plan.forget()
    assert joined_plan.run(*args) is not None
    target = GPUTarget("hip", arch, 64) if isinstance(arch, str) else GPUTarget("cuda", arch, 32)
    for one, pointers in made:
        names = [f"p{i}" for i in range(len(pointers))]
        step = SimpleNamespace(launch=SimpleNamespace(kernel=one.kernel, rest=one.rest, options=one.options), names=names, descs=())
        compiled = triton.compile(source(step, dict(zip(names, pointers, strict=True))), target=target, options=one.options)
        assert compiled.metadata.shared <= SHARED[arch]
        assert spills(compiled, arch, tmp_path) == 0, one.kernel.__name__
    assert len(made) == 2
