"""Compiled inference reads plain tensors that modules keep beside Parameters of spread experts: what changes those changes these."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import moefuse
from moefuse.capture.dynamo import in_step, module_calls
from moefuse.parallel import views
from tests.dist import changed, layers
from tests.dist.workers import Workers

KINDS = [layers.Stacked, layers.Listed]


@pytest.mark.every_value
@pytest.mark.parametrize("backend", ["moefuse", "eager"])
@pytest.mark.parametrize("change", changed.CHANGES)
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_stale(two: Workers, kind: type[nn.Module], change: str, backend: str) -> None:
    """By whatever way experts come to have half of their weights between two calls. Another compiler's code reads Parameters."""
    for before, after in two.run(changed.run, kind, change, backend):
        assert before <= 1e-5
        assert after <= 1e-5


@torch.no_grad()
@pytest.mark.usefixtures("as_traced")
@pytest.mark.parametrize("kind", KINDS)
def test_guards_see_plain_tensors_alone(mesh: DeviceMesh, kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch can skip where a module has not changed: dictionaries, text and tensors, no attribute of a DTensor and no tuple."""
    names, watch = set[str](), in_step.watch

    def seen(output: Any) -> None:
        names.update(module_calls.source_name(guard.originating_source) for guard in output.guards.inner)
        watch(output)

    monkeypatch.setattr(in_step, "watch", seen)
    model = layers.Model(kind, 2)
    moefuse.parallelize(model, mesh, max_tokens=6)
    torch.compile(model, backend="moefuse", dynamic=False)(torch.randn(6, layers.H))
    kept = [name for name in names if views.PARTS in name]
    assert any(name.endswith("['part']") for name in kept)
    assert not [name for name in kept if name.endswith("[0]")]
    held = [h for m in model.modules() for h in vars(m).get(views.PARTS, {}).values() if isinstance(h, dict)]
    assert {h["part"]._dynamo_static_input_type for h in held} == {"unguarded"}  # CUDA graphs copy no weights
    assert not [name for name in names if any(part in name for part in ("_local_tensor", "_spec", views.WAYS))]


@pytest.mark.code_once
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_kept_that_no_parameter_has(mesh: DeviceMesh, kind: type[nn.Module]) -> None:
    """Memory of a Parameter goes with it, and a copy has its own."""
    model = layers.Model(kind, 2)
    moefuse.parallelize(model, mesh, max_tokens=6)
    with torch.no_grad():
        torch.compile(model, backend="moefuse", dynamic=False)(torch.randn(6, layers.H))
    holders = {m: vars(m)[views.PARTS] for m in model.modules() if views.PARTS in vars(m)}
    assert holders
    assert not any(views.PARTS in vars(m) for m in copy.deepcopy(model).modules())
    torch._dynamo.reset()
    for module, kept in holders.items():
        parts = [weakref.ref(held["part"]) for held in kept.values() if isinstance(held, dict)]
        assert parts
        for name in list(module._parameters):
            module._parameters[name] = None
        assert [part() for part in parts] == [None] * len(parts)


@torch.no_grad()
@pytest.mark.usefixtures("as_traced")
def test_training_keeps_nothing(mesh: DeviceMesh) -> None:
    """Gradients are the Parameter's, which is read then."""
    model = layers.Model(layers.Stacked, 2)
    moefuse.parallelize(model, mesh, max_tokens=6)
    with torch.enable_grad():
        torch.compile(model, backend="moefuse", dynamic=False)(torch.randn(6, layers.H))
    assert not any(vars(m).get(views.PARTS) for m in model.modules())
