"""``python -m moefuse explain`` and ``warmup`` with models, and all of it as a program of its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from torch._inductor.exc import InductorError

from moefuse.cli.main import main
from tests.forked import forked

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "as_traced")

MODELS = """
import torch
from torch import nn
from torch.nn import functional as F


class MoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(16, 4), nn.Parameter(torch.randn(4, 16, 8)), nn.Parameter(torch.randn(4, 8, 16))

    def forward(self, x):
        weights, ids = self.gate(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for e in range(4):
            h = self.noise(F.silu(x @ self.up[e]))
            out = out + h @ self.down[e] * (weights * (ids == e)).sum(-1, keepdim=True)
        return out

    def noise(self, h):
        return h


class Noisy(MoE):
    def noise(self, h):
        return F.alpha_dropout(h, 0.5, self.training)


class Rows(MoE):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(16, 8), nn.SiLU(), nn.Linear(8, 16)) for _ in range(4))

    def forward(self, x):
        weights, ids = self.gate(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for e in range(4):
            rows, slot = torch.where(ids == e)
            if rows.numel() > 0:
                out.index_add_(0, rows, self.experts[e](x[rows]) * weights[rows, slot, None])
        return out


def two():
    return nn.Sequential(Rows(), Rows()), torch.randn(6, 16)


def function():
    moe = MoE()
    return lambda x: MoE.forward(moe, x), torch.randn(6, 16)


def model():
    return nn.Sequential(MoE(), nn.LayerNorm(16), MoE()), torch.randn(6, 16)


def dense():
    return nn.Linear(16, 16), (torch.randn(2, 16),)


def words():
    return nn.Embedding(9, 16)
"""
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 12,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 50000,
}


@pytest.fixture(autouse=True)
def _models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_moe.py").write_text(MODELS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_moe", raising=False)


def output(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = main(argv)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_factory_with_inputs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    code, out, err = output(capsys, "explain", "my_moe:model", "--strict", "--html", str(page))
    assert (code, err) == (0, "")
    assert out.startswith("moefuse: fused 2 of 2 MoE layers, 1 graph, 0 graph breaks")
    assert "Fused 2 of 2 MoE layers" in page.read_text(encoding="utf-8")


def test_training_is_another_question(capsys: pytest.CaptureFixture[str]) -> None:
    assert output(capsys, "explain", "my_moe:Noisy", "--inputs", "6x16", "--strict")[0] == 0
    code, out, err = output(capsys, "explain", "my_moe:Noisy", "--inputs", "6x16", "--strict", "--train", "--json")
    assert (code, err) == (1, ""), "what is refused is in the report, and not logged as well"
    assert "random" in [skipped["code"] for skipped in json.loads(out)["skipped"]]


def test_a_layer_that_is_the_model_has_the_name_of_its_class(capsys: pytest.CaptureFixture[str]) -> None:
    assert "  fused   (MoE)  my_moe.py:17" in output(capsys, "explain", "my_moe:MoE", "--inputs", "6x16")[1]
    assert "  fused   (no module)  my_moe.py:17" in output(capsys, "explain", "my_moe:function")[1], "a function is none"


def test_a_note_of_several_layers_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    out = output(capsys, "explain", "my_moe:two", "--train")[1]
    assert out.startswith("moefuse: fused 2 of 2 MoE layers")
    assert out.count("  note    experts that no token chose get gradients of zeros") == 1


def test_strict_is_about_models_without_experts_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert output(capsys, "explain", "my_moe:dense")[0] == 0
    code, out, _ = output(capsys, "explain", "my_moe:dense", "--strict")
    assert code == 1
    assert "no mixture-of-experts code found" in out


def test_inputs_that_do_not_fit_are_the_users_to_change(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, err = output(capsys, "explain", "my_moe:MoE", "--inputs", "6x5")
    assert (code, out) == (2, "")
    assert (
        "the model cannot be called with float32[6, 5]: RuntimeError: a and b must have same reduction dim, but got [6, 5] X [16, 4]" in err
    )
    code, _, err = output(capsys, "explain", "my_moe:words", "--inputs", "2x16")
    assert code == 2
    assert err.rstrip().endswith("(ids: --inputs int64:SHAPE:BELOW)")
    for word in ("int64:2x8:0", "int64:2x8:99999999999999999999999", "99999999999x99999999999"):
        code, _, err = output(capsys, "explain", "my_moe:MoE", "--inputs", word)
        assert code == 2
        assert f"--inputs {word} cannot be made: " in err
    code, _, err = output(capsys, "explain", "my_moe:MoE", "--inputs", "2x16:9")
    assert code == 2
    assert "--inputs 2x16:9: a limit is for integers, and float32 is none" in err
    code, _, err = output(capsys, "warmup", "my_moe:MoE", "--inputs", "6x5", "--tokens", "1")
    assert code == 2
    assert "the compiled model fails on these inputs: RuntimeError: a and b must have same reduction dim" in err


def test_a_page_that_cannot_be_written_is_said_first(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moefuse.cli.explain.explain", lambda *args: pytest.fail("this takes its time"))
    code, _, err = output(capsys, "explain", "my_moe:model", "--html", str(tmp_path / "no" / "page.html"))
    assert code == 2
    assert "cannot be written: No such file or directory" in err


def test_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, err = output(capsys, "explain", f"{tmp_path}/my_moe.py:model", "--strict")
    assert (code, err) == (0, "")
    assert out.startswith("moefuse: fused 2 of 2 MoE layers")
    assert "my_moe.py:17" in out


def test_torch_compiles_no_cpp_where_the_path_has_a_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What doctor says; when a release of torch does, doctor has to ask for the release."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", f"{tmp_path}/a b")
    with pytest.raises(InductorError, match=r"^CppCompileError: C\+\+ compile error\n"):
        torch.compile(lambda x: x.sin() + x.cos())(torch.ones(64))


def test_a_transformers_config(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    code, out, err = output(capsys, "explain", "--hf", str(tmp_path), "--layers", "1", "--strict")
    assert (code, err) == (0, "")
    assert "fused 1 of 1 MoE layer, " in out
    assert "model.layers.0.mlp" in out
    assert "note    a model of its config: random weights, 1 of 12 layers, 1024 words" in out


def test_a_file_that_is_no_config(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text("{}")
    code, _, err = output(capsys, "explain", "--hf", str(tmp_path / "config.json"))
    assert code == 2
    assert f"transformers cannot read {tmp_path / 'config.json'}: " in err


def test_warmup_of_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = output(capsys, "warmup", "my_moe:model", "--tokens", "1,8")
    assert (code, err) == (0, "")
    assert out.startswith("moefuse: measured 0 of 0")


def test_as_a_program(tmp_path: Path) -> None:
    """Where it is started counts as the place of the user's modules, and nothing is written to stderr that is no terminal."""
    failures = {"nothing:here": "no module 'nothing'", "my_moe:MoE --inputs 6x5": "the model cannot be called with"}
    started = "import runpy, sys; sys.argv[1:] = {}; runpy.run_module('moefuse', run_name='__main__')"
    programs = [started.format(["explain", *words.split()]) for words in ("my_moe:MoE --inputs 6x16", *failures)]
    done, *others = forked("import torch._dynamo, moefuse", programs, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("moefuse: fused 1 of 1 MoE layer")
    assert done.stderr == ""
    for wrong, said in zip(others, failures.values(), strict=True):
        assert wrong.returncode == 2
        assert wrong.stderr.startswith(f"python -m moefuse explain: {said}")
        assert wrong.stderr.count("\n") == 1, "torch logs a traceback of its own"
