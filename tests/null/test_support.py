"""The README's table of what moefuse works with: every cell that claims something is a test that says so."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
COLUMNS = ("inference, CPU", "training, CPU", "inference, CUDA", "training, CUDA")
NOT_TRIED, NONSENSE = "-", ""

# Row: the tests behind its cells, column by column; None is a cell that claims nothing.
Cells = tuple[str | None, str | None, str | None, str | None]
TESTS: dict[str, Cells] = {
    "your own model": ("test_programs::test_catalogue", "test_generated_loops::*", "test_backend::*", "test_training::*"),
    "transformers 5": (
        "test_transformers_models::test_inference",
        "test_transformers_models::test_training",
        "test_backend::test_every_layer_is_fused_and_right",
        "test_libraries::test_transformers",
    ),
    "transformers 4.57": ("test_transformers_loops::test_inference", "test_transformers_loops::test_training", None, None),
    "`generate`, static cache": (
        "test_generate::test_with_the_switch_the_decode_step_is_fused",
        None,
        "test_backend::test_generate_with_a_static_cache",
        None,
    ),
    "Trainer": (None, "test_accelerate_integration::test_trainer", None, None),
    "accelerate": ("test_accelerate_integration::test_accelerator", "test_accelerate_integration::test_trainer", None, None),
    "TRL's defaults (checkpoints with router losses)": (None, "test_checkpoint_writes::test_one_graph", None, None),
    "PEFT: LoRA around or inside experts": (
        "test_peft::test_adapters_that_are_switched_and_merged",
        "test_peft::test_gradients_of_adapters",
        "test_libraries::test_peft",
        "test_libraries::test_peft",
    ),
    "activation checkpointing": (
        None,
        "test_ambient::test_gradient_checkpointing_of_transformers",
        None,
        "test_libraries::test_checkpoints",
    ),
    "autocast around float32 experts": (
        "test_autocast::test_mixed",
        "test_autocast::test_transformers",
        "test_libraries::test_autocast",
        "test_libraries::test_autocast",
    ),
    "DDP": (None, "test_ddp::test_gradients_of_two_processes_are_those_of_one", None, None),
    "FSDP2": (None, "test_fsdp::test_steps_of_two_processes_are_those_of_one", None, None),
    "DeepSpeed ZeRO-3": (None, "test_deepspeed::test_steps_of_two_processes_are_those_of_one", None, None),
    "tensor parallelism of experts": ("test_tensor_parallel::test_sharded_experts_are_refused_as_such", None, None, None),
    "experts on several ranks: `moefuse.parallelize`": (
        "dist/test_equal::test_as_on_one_process",
        "dist/test_scenes::test_the_example",
        "test_parallel::test_a_graph_that_is_replayed",
        "test_parallel::test_training",
    ),
    "spread experts with DDP, FSDP2, HSDP around": (None, "dist/test_replicas::test_as_on_one_process", None, None),
    "spread experts: PEFT, autocast, float8": (
        "dist/test_adapters::test_float8",
        "dist/test_adapters::test_peft",
        None,
        "test_parallel::test_what_every_rank_has_whole",
    ),
    "spread experts from the meta device, `moefuse.load`": (
        "dist/test_wholes::test_from_the_meta_device",
        "dist/test_replicas::test_from_the_meta_device",
        None,
        None,
    ),
    'transformers\' `DistributedConfig(ep_implementation="moefuse")`': (
        "dist/test_pretrained::test_distributed_config",
        "dist/test_pretrained::test_distributed_config",
        None,
        None,
    ),
    "expert parallelism of others": ("test_refusals::*", None, None, None),
    "[quantised experts](docs/quantised.md)": (
        "test_packed_fused::test_what_is_stored_is_multiplied",
        "test_packed_fused::test_gradients_of_tokens",
        "test_packed::test_a_layer",
        "test_packed::test_a_layer",
    ),
    "transformers' `FP8Experts`": ("test_transformers_fp8::test_compiled", "test_transformers_fp8::test_gradients", None, None),
    "QLoRA: adapters on packed experts": (
        "test_packed_adapters::*",
        "test_packed_adapters::*",
        "test_packed::test_adapters",
        "test_packed::test_adapters",
    ),
    "torch.export, AOTInductor": ("test_exported::test_a_package_has_the_fused_op_in_it", None, None, None),
}


def table() -> dict[str, list[str]]:
    _, _, rest = (ROOT / "README.md").read_text().partition("<!-- support: begin -->\n")
    head, _, *rows = rest.partition("<!-- support: end -->")[0].strip().splitlines()
    assert [cell.strip() for cell in head.strip("|").split("|")] == ["", *COLUMNS]
    split = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return {name: cells for name, *cells in split}


def test_every_claim_is_a_test() -> None:
    claimed = table()
    assert list(claimed) == list(TESTS)
    for row, tests in TESTS.items():
        for column, cell, test in zip(COLUMNS, claimed[row], tests, strict=True):
            assert (cell in (NOT_TRIED, NONSENSE)) == (test is None), (row, column)
            if test is None:
                continue
            file, _, name = test.partition("::")
            folder = "" if "/" in file else "gpu/" if "CUDA" in column else "cpu/"
            path = f"tests/{folder}{file}.py"
            assert re.fullmatch(rf"\[(fused|told)\]\({path}\)", cell), (row, column, cell)
            found = {node.name for node in ast.parse((ROOT / path).read_text()).body if isinstance(node, ast.FunctionDef)}
            assert name == "*" or name in found, test


def test_the_list_of_acceptance_names_tests_that_exist() -> None:
    page = (ROOT / "docs/design/acceptance.md").read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", page)
    assert len(named) > 25
    for path, name in named:
        assert not name or f"def {name}(" in (ROOT / path).read_text(), (path, name)
    assert re.findall(r"^\| (A\d+) \|", page, flags=re.MULTILINE) == [f"A{n}" for n in range(1, 15)]
