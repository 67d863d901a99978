"""Programs of torch.export: graphs of ATen's operators, compiled again with moefuse."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import moefuse
from tests.cpu.exported_case import SPELLINGS, exported, tokens
from tests.zoo import tiny

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    # torch's own, of its run_decompositions().
    pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec:FutureWarning"),
]


@pytest.mark.sampled(9)
@pytest.mark.usefixtures("no_code")
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("decomposed", [False, True], ids=["default", "decomposed"])
@pytest.mark.parametrize("mix", SPELLINGS)
def test_an_exported_module_is_fused(mix: str, decomposed: bool, dynamic: bool) -> None:
    module = exported(mix, decomposed=decomposed, dynamic=dynamic).module()
    with torch.no_grad():
        compiled = torch.compile(module, backend="moefuse", options={"strict": True})
        for count in (13, 31) if dynamic else (13,):
            torch.testing.assert_close(compiled(tokens(count)), module(tokens(count)), rtol=1e-2, atol=1e-2)
    report = moefuse.last_report()
    assert [fused.tier for fused in report.fused] == ["fused"], report
    assert report.fused[0].location.rpartition("/")[2].startswith("exported_case.py:"), report


class Logits(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids, use_cache=False).logits  # type: ignore[no-any-return]


@pytest.mark.usefixtures("no_code")
@pytest.mark.sampled(6)
@pytest.mark.parametrize("decomposed", [False, True], ids=["default", "decomposed"])
@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_an_exported_model_of_transformers(name: str, implementation: str, decomposed: bool) -> None:
    """Its loops (``"eager"``) do not export: torch.export cannot run a loop over ``nonzero()``."""
    pytest.importorskip("transformers.integrations.moe")
    model, ids = Logits(tiny.build(name, experts_implementation=implementation)), tiny.tokens()
    with torch.no_grad():
        program = torch.export.export(model, (ids,))
        module = (program.run_decompositions() if decomposed else program).module()
        compiled = torch.compile(module, backend="moefuse", options={"strict": True})
        torch.testing.assert_close(compiled(ids), model(ids), rtol=1e-3, atol=1e-3)
    assert len(moefuse.last_report().fused) == tiny.FAMILIES[name].layers


LOAD = """
import sys, torch
torch._inductor.aoti_load_package(sys.argv[1])
"""


@pytest.mark.thorough
@pytest.mark.sampled(4)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("decomposed", [False, True], ids=["default", "decomposed"])
@pytest.mark.parametrize("mix", SPELLINGS)
def test_a_package_has_the_fused_op_in_it(mix: str, decomposed: bool, dynamic: bool, tmp_path: Path) -> None:
    """As aoti_compile_and_package writes it. Where moefuse is not imported, torch says which op it does not know."""
    program, path = exported(mix, decomposed=decomposed, dynamic=dynamic), str(tmp_path / "model.pt2")
    with torch.no_grad():
        settings = {"pre_grad_custom_pass": moefuse.MoEFusionPass()}
        torch._inductor.aoti_compile_and_package(program, package_path=path, inductor_configs=settings)
    report = moefuse.last_report()
    assert [fused.tier for fused in report.fused] == ["fused"], report
    package, eager = torch._inductor.aoti_load_package(path), program.module()
    for count in (13, 31) if dynamic else (13,):
        torch.testing.assert_close(package(tokens(count)), eager(tokens(count)).detach(), rtol=1e-2, atol=1e-2)
    with torch.profiler.profile() as profile:
        package(tokens())
    assert [event.count for event in profile.key_averages() if event.key == "moefuse::experts_infer"] == [1]
    without = subprocess.run([sys.executable, "-c", LOAD, path], capture_output=True, text=True, check=False)
    assert "Could not find schema for moefuse::experts_infer" in without.stderr
    subprocess.run([sys.executable, "-c", f"import moefuse\n{LOAD}", path], capture_output=True, check=True)
