"""PEFT's ``target_parameters`` on stacked experts: one graph, all layers fused with their terms, whatever is switched in between."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import moefuse
from tests.cpu.replay_case import light
from tests.cpu.test_lora_rows import close
from tests.cpu.test_peft_parameters import FAMILIES
from tests.zoo.tiny import build, major

__all__ = ["light"]
peft = pytest.importorskip("peft", reason="PEFT is not installed")
pytestmark = [
    pytest.mark.skipif(major() == "4", reason="transformers 4 has a module for each expert"),
    pytest.mark.usefixtures("light"),
]

PARAMETERS = ["experts.gate_up_proj", "experts.down_proj"]
HIDDEN = 16
X = torch.randn(2, 6, HIDDEN, generator=torch.Generator().manual_seed(0))


class Model(nn.Module):
    """The layers with experts of a model of transformers, and nothing else."""

    def __init__(self, family: str, layers: int, implementation: str) -> None:
        super().__init__()
        how = {"experts_implementation": implementation, "hidden_size": HIDDEN, "intermediate_size": 8, "head_dim": 4}
        self.layers = nn.ModuleList(build(family, seed=seed, **how).model.layers[0].mlp for seed in range(layers))
        self.checkpointed = False

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            found = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
            x = x + (found[0] if isinstance(found, tuple) else found)
        return x


def config(rank: int = 4, **how: Any) -> Any:
    return peft.LoraConfig(r=rank, target_parameters=PARAMETERS, target_modules=[], init_lora_weights=False, **how)


def adapted(family: str = "qwen3_moe", layers: int = 1, implementation: str = "grouped_mm", dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    return peft.get_peft_model(Model(family, layers, implementation).to(dtype), config())


def compiled(model: nn.Module) -> nn.Module:
    model.compile(backend="moefuse", fullgraph=True)
    return model


def terms() -> list[tuple[int, ...]]:
    """The ranks of all layers that were fused since this was asked last; there must have been one graph for each program."""
    report = moefuse.last_report()
    assert (report.skipped, report.graph_breaks) == ([], [])
    return [f.spec.lora for f in report.fused]


def step(model: nn.Module) -> list[Tensor]:
    """Output and gradients."""
    model.zero_grad()
    out = model(X.to(next(model.parameters()).dtype))
    out.float().square().mean().backward()
    return [out.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def leftovers(model: nn.Module) -> Any:
    """What a registration changes while it is there."""
    kinds = [type(m) for m in model.modules()]
    return kinds, sorted((n, id(p)) for n, p in model.named_parameters()), sorted(model.state_dict())


@pytest.mark.every_value
@pytest.mark.parametrize("implementation", ["grouped_mm", "eager", "moefuse"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step(family: str, implementation: str) -> None:
    """With transformers' loop over experts as well, which reads the weights of one expert after the other."""
    model = adapted(family, implementation=implementation).train()
    expected, before = step(model), leftovers(model)
    close(step(compiled(model)), expected, 4e-6)
    assert len(expected) == 1 + 4
    assert terms() == [(4,)]
    assert leftovers(model) == before


def test_more_layers_than_programs_of_one_code(light: list[int]) -> None:
    """Layers that are compiled one by one share a program: PEFT's own registration makes a class for each, and Dynamo's limit is 8."""
    model = adapted(layers=10).eval()
    with torch.no_grad():
        expected = model(X)
        for layer in model.base_model.model.layers:
            compiled(layer)
        torch.testing.assert_close(model(X), expected, rtol=1e-4, atol=1e-4)
    assert terms() == [(4,)] * 10
    assert len(light) == 1


def test_checkpointing() -> None:
    model = adapted(layers=2).train()
    model.base_model.model.checkpointed = True
    expected = step(model)
    close(step(compiled(model)), expected, 4e-6)
    assert terms() == [(4,)] * 2


def test_sixteen_bits() -> None:
    """PEFT's default: adapters in float32 beside a base in bfloat16."""
    model = adapted(dtype=torch.bfloat16).train()
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    truth = step(copy.deepcopy(model).float())
    expected = step(model)
    found = step(compiled(model))
    assert terms() == [(4,)]
    for mine, theirs, right in zip(found, expected, truth, strict=True):
        assert mine.dtype == theirs.dtype
        assert float((mine.double() - right).norm()) <= 1.5 * float((theirs.double() - right).norm())


def test_switched_and_merged() -> None:
    """Disabled, merged and unmerged; a second adapter that comes after the compilation, alone and with the first, and has another scale."""
    model = adapted().eval()

    @torch.no_grad()
    def states() -> list[Tensor]:
        torch.manual_seed(1)
        out = [model(X)]
        with model.disable_adapter():
            out.append(model(X))
        model.merge_adapter()
        out.append(model(X))
        model.unmerge_adapter()
        out.append(model(X))
        model.add_adapter("other", config(rank=2, use_rslora=True))
        out.append(model(X))
        model.set_adapter("other")
        out.append(model(X))
        model.base_model.set_adapter(["default", "other"])
        out.append(model(X))
        model.set_adapter("default")
        out.append(model(X))
        model.delete_adapter("other")
        return [*out, model(X)]

    expected, before = states(), leftovers(model)
    assert not torch.allclose(expected[0], expected[1], atol=1e-3)
    assert not torch.allclose(expected[4], expected[5], atol=1e-3)
    compiled(model)
    torch.testing.assert_close(states(), expected, rtol=1e-4, atol=1e-4)
    assert leftovers(model) == before


def test_two_adapters_at_once() -> None:
    """PEFT adds their products up, each with the experts last in B, before it adds the sum to the weight."""
    model = adapted()
    model.add_adapter("other", config(rank=2, lora_alpha=3))
    model.base_model.set_adapter(["default", "other"])
    expected = step(model)
    found = step(compiled(model))
    assert terms() == [(2, 4)]
    close(found, expected, 1e-5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("as_traced")
@pytest.mark.parametrize("hooked", [True, False])
def test_checkpoints_and_router_losses(hooked: bool) -> None:
    """PEFT has transformers hook the embeddings, at which torch breaks the graph: experts in two wrappers are told about still."""
    model = peft.get_peft_model(build("qwen3_moe", num_hidden_layers=1, output_router_logits=True), config())
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if not hooked:
        model.disable_input_require_grads()
    model.train().compile(backend="moefuse")
    ids = torch.arange(12).view(2, 6)
    model(input_ids=ids, labels=ids).loss.backward()
    report = moefuse.last_report()
    if not hooked:
        assert [f.spec.lora for f in report.fused] == [(4,)]
        return
    (skipped,) = report.skipped
    assert (skipped.code, skipped.module.rpartition(".")[2]) == ("nothing-found", "mlp")
    assert "`model.disable_input_require_grads()` of transformers takes the hook away" in skipped.message
