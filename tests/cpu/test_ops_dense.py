"""The fallback for CUDA without Triton, which runs anywhere: its values, and that it never waits for the device."""

from __future__ import annotations

import ast
import inspect

import pytest
import torch

from moefuse.runtime import dense, providers
from tests.cpu.ops_case import Case, every_body, reference


@pytest.mark.parametrize("case", every_body(), ids=lambda c: f"{c.activation}-{c.gating}-{c.up_first}")
def test_every_body(case: Case) -> None:
    for more in ({}, {"separate": True, "bias": False}, {"transposed": True, "weight_on_input": True}):
        c = case.with_(**more)
        torch.testing.assert_close(dense.experts(c.call()), reference(c.args(), **c.options), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("sizes", [{"tokens": 0}, {"tokens": 1}, {"low_id": -3, "high_id": 0}, {"out_dtype": torch.float32}, {"top_k": 1}])
def test_edges(sizes: dict[str, object]) -> None:
    c = Case(**sizes)  # type: ignore[arg-type]
    out, want = dense.experts(c.call()), reference(c.args(), **c.options)
    torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-6 if want.dtype == torch.float32 else 1e-12)


def test_nan_stays_in_its_token_and_its_expert() -> None:
    """Every expert sees every token, so this is where a mask by multiplication would fail."""
    c = Case(tokens=9, experts=5, low_id=0, high_id=4)
    args = c.args()
    args[0][3] = float("nan")
    for w in (args[3][0], args[5][0], args[6][0], args[8][0]):
        w[4] = float("nan")
    out, want = dense.experts(c.call(args)), reference(args, **c.options)
    torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-12, equal_nan=True)
    assert out.isnan().any(1).nonzero().flatten().tolist() == [3]


def test_it_runs_on_fake_tensors() -> None:
    """A fake tensor has no data: reading the routing on the host would raise."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    c = Case()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        args = [[mode.from_tensor(t) for t in a] if isinstance(a, list) else mode.from_tensor(a) for a in c.args()]
        assert dense.experts(c.call(args)).shape == (c.tokens, c.hidden_out)


def test_calls_on_the_cpu_do_not_import_triton() -> None:
    """The GPU kernels are imported by a call with CUDA tensors and by nothing else."""
    tree = ast.parse(inspect.getsource(providers))
    imported = {n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert not [name for name in imported if "triton" in name or "kernels" in name]
    c = Case()
    before = providers.triton_module.cache_info().misses
    assert providers.select("experts", c.call()).name == "portable"
    assert providers.triton_module.cache_info().misses == before
