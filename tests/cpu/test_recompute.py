"""``options={"recompute": True}``: the same bits, and less that is kept."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import moefuse
from moefuse.ops.schema import SCHEMAS
from tests.cpu.replay_case import H, I, K, Model, light
from tests.strategies import THOROUGH

__all__ = ["light"]

GATINGS = ["merged", "plain", "separate"]


def case(gating: str, tokens: int, dtype: torch.dtype, bias: bool = True) -> tuple[list[Any], dict[str, Any]]:
    """Arguments of ``moefuse::experts``: two ids are nobody's, and one expert has no tokens."""
    torch.manual_seed(0)
    experts, features = 4, 2 * I if gating == "merged" else I
    ids = torch.randint(-1, experts - 1, (tokens, K))

    def made(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype).mul_(0.3).requires_grad_()

    up, up_bias = ([made(experts, features, H)], [made(experts, features)]) if gating == "separate" else ([], [])
    lists = [[made(experts, features, H)], up, [made(experts, H, I)], [made(experts, features)], up_bias, [made(experts, H)]]
    if not bias:
        lists[3:] = [[], [], []]
    return [made(tokens, H), ids, made(tokens, K), *lists], {"gating": gating}


def gradients(op: Any, args: list[Any], options: dict[str, Any]) -> tuple[Tensor, list[Tensor], int]:
    """Output, gradients, and how many numbers are kept beside the arguments."""
    given = [t for a in args for t in (a if isinstance(a, list) else [a])]
    own = {t.untyped_storage().data_ptr() for t in given}
    kept: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        if t.is_floating_point() and t.untyped_storage().data_ptr() not in own:
            kept[t.untyped_storage().data_ptr()] = t.numel()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = op(*args, **options)
    wanted = [t for t in given if t.requires_grad]
    return out, list(torch.autograd.grad(out.square().sum(), wanted)), sum(kept.values())


@pytest.mark.parametrize("weight_on_input", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("tokens", [0, 1, 9, 300])
@pytest.mark.parametrize("gating", GATINGS)
def test_the_same_bits(gating: str, tokens: int, dtype: torch.dtype, weight_on_input: bool) -> None:
    if not THOROUGH and (tokens == 300) != (gating == "merged"):
        pytest.skip("HYPOTHESIS_PROFILE=deep runs all")
    args, options = case(gating, tokens, dtype, bias=tokens != 9)
    options |= {"weight_on_input": weight_on_input}
    out, grads, kept = gradients(torch.ops.moefuse.experts, args, options)
    again, regrads, less = gradients(torch.ops.moefuse.recomputed_experts, args, options)
    assert torch.equal(out, again)
    assert all(torch.equal(a, b) for a, b in zip(grads, regrads, strict=True))
    assert kept == tokens * K * (I if gating == "plain" else 2 * I)
    assert less == 0


def test_arguments_are_those_of_experts() -> None:
    of = {name: schema for schema in SCHEMAS for name in [schema.partition("(")[0]]}
    assert of["recomputed_experts"].removeprefix("recomputed_") == of["experts"]


@pytest.mark.usefixtures("light")
@pytest.mark.parametrize("checkpointed", [None, False])
def test_a_model(checkpointed: bool | None) -> None:
    """The option reaches layers in a checkpoint's body, too; what the model computes is the same."""
    found = []
    torch.manual_seed(0)
    model = Model(checkpointed=checkpointed)
    x = torch.randn(6, H)
    for again in (False, True):
        torch._dynamo.reset()
        one = copy.deepcopy(model)
        run = torch.compile(one, backend="moefuse", options={"recompute": again, "expect": 2})
        kept: dict[int, int] = {}

        def pack(t: Tensor, kept: dict[int, int] = kept) -> Tensor:
            kept[t.untyped_storage().data_ptr()] = t.numel() if t.shape == (6 * K, I) else 0
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            out = run(x)
        out.square().sum().backward()
        report = moefuse.last_report()
        assert report is not None
        assert len(report.fused) == 2
        found.append((out, [p.grad for p in one.parameters()], sum(kept.values())))
    (out, grads, kept), (again, regrads, less) = found
    assert torch.equal(out, again)
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(grads, regrads, strict=True))  # type: ignore[arg-type]
    assert less == 0
    assert kept == (2 * 6 * K * I if checkpointed is None else 0)
