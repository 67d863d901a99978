"""Whatever is raised while experts are spread, or put together again, the model is as it was: each function that is called raises once."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import moefuse
from moefuse.parallel import checks
from moefuse.runtime import groups
from tests.dist import layers

_OURS = re.compile(re.escape(str(Path(moefuse.__file__).parent)))


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Rank 1 of 2, of which the other one is not there. Nobody looks for optimizers, which takes a look at every object there is."""
    with mock.patch.object(checks, "_optimizers", list):
        yield from _mesh()


def _mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    yield init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    dist.destroy_process_group()
    groups._groups.clear()


class ThrownError(Exception):
    """What is thrown."""


def codes(call: Callable[[], object]) -> dict[CodeType, int]:
    """Every function of this project that a call calls, and how often, in the order in which they are called first."""
    found: dict[CodeType, int] = {}

    def seen(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        # A generator is called once more when it is closed, where nothing can be thrown.
        if event == "call" and _OURS.search(code.co_filename) and not code.co_flags & inspect.CO_GENERATOR:
            found[code] = found.get(code, 0) + 1

    _under(seen, call)
    return found


def raising(code: CodeType, last: bool, call: Callable[[], object]) -> bool:
    """Whether a call raised because this function did, the first time, or the second time if ``last``."""
    times = [0]

    def throw(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code is code:
            times[0] += 1
            if times[0] == 1 + last:
                raise ThrownError(code.co_qualname if hasattr(code, "co_qualname") else code.co_name)

    try:
        _under(throw, call)
    except ThrownError:
        for group in groups._groups.values():
            group.standing.left = ""  # whoever raises in the middle of a gather has left the others, who are not there
        return True
    return False


def _under(profile: Any, call: Callable[[], object]) -> None:
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)


def state(model: nn.Module) -> list[object]:
    """All that is to be as it was, by identity."""
    found: list[object] = []
    for name, module in model.named_modules():
        dicts = [(key, list(value.items())) for key, value in vars(module).items() if isinstance(value, dict)]
        found += [name, type(module), list(vars(module)), repr([(key, [(k, id(v)) for k, v in items]) for key, items in dicts])]
    for name, parameter in model.named_parameters():
        hooks = getattr(parameter, "_post_accumulate_grad_hooks", None), parameter._backward_hooks
        found += [name, type(parameter), isinstance(parameter, DTensor), parameter.requires_grad, sorted(vars(parameter)), repr(hooks)]
    return found


def swept(model: nn.Module, call: Callable[[], object], back: Callable[[], object], right: Callable[[], bool]) -> int:
    """How many functions raised; after each the model is as it was, and computes what it computed."""
    known = codes(call)
    back()
    before, count = state(model), 0
    for code, times in known.items():
        for last in (False, True)[: min(times, 2)]:
            if raising(code, last, call):
                assert state(model) == before, code.co_name
                count += 1
            else:
                back()  # it was caught, as a question that has no answer
                before = state(model)
        assert right(), code.co_name
    return count


@pytest.mark.parametrize("kind", [layers.Stacked, layers.Listed])
def test_parallelize(mesh: DeviceMesh, kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, x = layers.Model(kind, 4), torch.randn(3, layers.H)
    wanted = model(x)

    def same() -> bool:
        return torch.equal(model(x), wanted)

    def whole() -> None:
        moefuse.unparallelize(model)
        model.load_state_dict(values)

    values = {name: value.clone() for name, value in model.state_dict().items()}
    assert swept(model, lambda: moefuse.parallelize(model, mesh, placement="round_robin", debug=True), whole, same) > 100


@pytest.mark.parametrize("kind", [layers.Stacked, layers.Listed])
def test_unparallelize(mesh: DeviceMesh, kind: type[nn.Module]) -> None:
    model = layers.Model(kind, 4)
    moefuse.parallelize(model, mesh)

    def spread() -> bool:
        return any(isinstance(p, DTensor) for p in model.parameters())

    assert swept(model, lambda: moefuse.unparallelize(model), lambda: moefuse.parallelize(model, mesh), spread) > 10


@pytest.mark.usefixtures("as_traced")
def test_models_of_transformers(mesh: DeviceMesh, tmp_path: Any) -> None:
    """On a fake group as well they are spread, explained and put together; what needs the others' weights says so."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
    config = transformers.Qwen3MoeConfig(
        **sizes, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, intermediate_size=32, vocab_size=64
    )
    model = transformers.Qwen3MoeForCausalLM(config)
    before = state(model)
    plan = moefuse.parallelize(model, mesh)
    assert str(plan) == "model.layers.0.mlp: ep=2 linear, 2 of 4 experts here, allgather"
    assert len(moefuse.explain(model, torch.randint(0, 64, (2, 8))).fused) == 1
    with pytest.raises(moefuse.ParallelError, match="Qwen3MoeForCausalLM: a fake process group has no other ranks"):
        model.save_pretrained(tmp_path)
    moefuse.unparallelize(model)
    assert [part for part in before if isinstance(part, type)] == [part for part in state(model) if isinstance(part, type)]
