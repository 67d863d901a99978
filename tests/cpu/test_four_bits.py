"""Operators of libraries that multiply weights of four bits in one dimension: what codes stand for is read from the running operator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.cpu.test_fp8_operators import Compiled
from tests.programs import four_bits
from tests.programs.four_bits import BLOCK, Expert, H, Hit, Loop, Matrix

HELD = f"lut16, groups of {BLOCK}"
APART = {torch.bfloat16: 0.01, torch.float16: 0.002, torch.float32: 1e-5}


@pytest.fixture(autouse=True)
def _fresh(fresh_dynamo: None) -> None:
    torch.manual_seed(0)


def operators(compiled: Compiled) -> list[torch.fx.Node]:
    return [n for gm in compiled.graphs for n in gm.graph.nodes if "gemm_4bit" in str(n.target)]


def is_fused(compiled: Compiled) -> None:
    assert [f.spec.encoding for f in compiled.report.fused] == [HELD], str(compiled.report)
    assert (operators(compiled), compiled.report.skipped) == ([], [])


@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
@pytest.mark.parametrize("dtype", APART)
def test_a_list_of_experts(dtype: torch.dtype, nested: bool) -> None:
    """One op on the storage; scales that are codes are computed once per call."""
    compiled = Compiled(Loop(dtype, nested=nested), captured=True)
    compiled.check(torch.randn(11, H).to(dtype), APART[dtype])
    is_fused(compiled)
    assert len(compiled.ops) == 1


@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
def test_the_storage_is_not_copied(nested: bool) -> None:
    """Views of one dimension: the op reads the memory of the parameters."""
    model = Loop(nested=nested)
    compiled = Compiled(model, captured=True)
    compiled.check(torch.randn(5, H).bfloat16(), 0.01)
    (op,) = compiled.ops
    for part in (3, 4, 5):
        for node in op.args[part]:
            assert node.op == "placeholder" or node.target in (torch.reshape, torch.detach), str(node.target)
