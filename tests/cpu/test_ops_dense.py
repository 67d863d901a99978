"""The fallback for CUDA without Triton, which runs anywhere: its values, and that it never waits for the device."""

from __future__ import annotations

import ast
import inspect

from moefuse.runtime import dense, providers
from tests.cpu.ops_case import Case


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
