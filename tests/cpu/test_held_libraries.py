"""Real libraries of quantised weights, where they are installed: what ``tests/programs/held.py`` stands for, and that it still does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import moefuse
from moefuse.passes.match import encodings
from moefuse.report.report import FusionReport
from tests.cpu.test_held_weights import Near
from tests.programs.held import K

H, M, E = 256, 128, 8


class Expert(nn.Module):
    """What libraries look for are modules that are ``nn.Linear``."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(H, M, bias=False, dtype=dtype) for _ in range(2))
        self.down = nn.Linear(M, H, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class Loop(nn.Module):
    """``dense``: every expert has every token."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16, *, dense: bool = False) -> None:
        super().__init__()
        self.dense, self.router = dense, nn.Linear(H, E, bias=False, dtype=dtype)
        self.experts = nn.ModuleList(Expert(dtype) for _ in range(E))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = torch.topk(self.router(x).softmax(-1), K, dim=-1)
        out = torch.zeros_like(x)
        for e in range(E):
            if self.dense:
                out = out + self.experts[e](x) * (weights * (ids == e)).sum(-1, keepdim=True)
                continue
            tok, slot = torch.where(ids == e)
            out.index_add_(0, tok, self.experts[e](x[tok]) * weights[tok, slot, None])
        return out


class Stacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(H, E, bias=False, dtype=torch.bfloat16)
        self.gate_up, self.down = (nn.Parameter(torch.randn(s, dtype=torch.bfloat16) / 16) for s in ((E, 2 * M, H), (E, H, M)))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = torch.topk(self.router(x).softmax(-1), K, dim=-1)
        ordered, order = ids.flatten().sort()
        ends = torch.histc(ordered.float(), bins=E, min=0, max=E - 1).cumsum(0).int()
        gate, up = F.grouped_mm(x[order // K], self.gate_up.transpose(-1, -2), offs=ends).chunk(2, -1)
        y = F.grouped_mm(F.silu(gate) * up, self.down.transpose(-1, -2), offs=ends)
        return torch.zeros_like(x).index_add(0, order // K, y * weights.flatten()[order, None])


@pytest.fixture(autouse=True)
def _fresh(fresh_dynamo: None) -> None:
    torch.manual_seed(0)


def _report(model: nn.Module) -> FusionReport:
    compiled = Near(model)
    compiled.check(torch.randn(3, H).to(model.router.weight.dtype))  # type: ignore[union-attr, arg-type]
    return compiled.report


TORCHAO = {
    "Float8WeightOnlyConfig": "e4m3, a scale for each channel",
    "Int8WeightOnlyConfig": "s8, a scale for each channel",
    "Int8DynamicActivationInt8WeightConfig": "",
}


@pytest.mark.parametrize("config", TORCHAO)
def test_torchao(config: str) -> None:
    """Weights alone are fused; with the last one rows are rounded inside of the product, which the program does not show."""
    library: Any = pytest.importorskip("torchao.quantization")
    model = Loop(dense="Dynamic" in config)  # it asks how many rows there are
    library.quantize_(model.experts, getattr(library, config)())
    _told(_report(model), TORCHAO[config])


def test_torchao_stacks() -> None:
    library: Any = pytest.importorskip("torchao.quantization")
    model, config = Stacked(), library.Float8WeightOnlyConfig()
    library.quantize_(model, library.FqnToConfig({"gate_up": config, "down": config}), filter_fn=None)
    _told(_report(model), TORCHAO["Float8WeightOnlyConfig"])


@pytest.mark.parametrize("implementation", ["grouped_mm", "eager"])
def test_torchao_in_transformers(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts of transformers 5 by their names; the eager ones, which loop over experts with tokens, where a kernel is there for that."""
    library: Any = pytest.importorskip("torchao.quantization")
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(encodings, "OF_HIT_EXPERTS", ("cpu",))
    sizes = {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 64, "vocab_size": 64, "head_dim": 32}
    config = transformers.Qwen3MoeConfig(
        **sizes, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, num_experts=E, num_experts_per_tok=K
    )
    model = transformers.Qwen3MoeForCausalLM(config).to(torch.bfloat16).eval()
    model.set_experts_implementation(implementation)
    how = library.Float8WeightOnlyConfig()
    library.quantize_(model, library.FqnToConfig({rf"re:.*experts\.{name}_proj": how for name in ("gate_up", "down")}), filter_fn=None)
    ids = torch.randint(64, (1, 5))
    with torch.no_grad():
        got, want = torch.compile(model, backend="moefuse")(ids).logits, model(ids).logits
    torch.testing.assert_close(got, want, rtol=0.03, atol=0.03 * float(want.abs().max()))
    report = moefuse.last_report()
    assert report is not None
    _told(report, TORCHAO["Float8WeightOnlyConfig"])


QUANTO: dict[str, str] = {
    "qint8": "s8, a scale for each channel",
    "qfloat8": "e4m3, a scale for each channel",
    "qint4": "u4, a scale for each channel with zeros; u4, groups of 128 with zeros",
    "qint2": "",
}


@pytest.mark.parametrize("kind", QUANTO)
def test_quanto(kind: str) -> None:
    """Four codes in a byte are none that there is a word for."""
    quanto: Any = pytest.importorskip("optimum.quanto")
    model = Loop(torch.float32 if kind == "qint4" else torch.bfloat16)  # in 16 bits that is laid out for one kernel
    quanto.quantize(model.experts, weights=getattr(quanto, kind))
    quanto.freeze(model.experts)
    with torch.no_grad():
        _told(_report(model), QUANTO[kind])


def _told(report: FusionReport, encoding: str) -> None:
    """Fused with the encoding, or refused with no word for it."""
    if encoding:
        assert [f.spec.encoding for f in report.fused] == [encoding], str(report)
    else:
        assert [s.code for s in report.skipped] == ["quantised"], str(report)
