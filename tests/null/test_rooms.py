"""The folders are the pipeline: no import circles, no import against its order, and none hidden in a function without its reason."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import moefuse

ROOT = Path(moefuse.__file__).parent
PIPELINE = ("graph", "ir", "infer", "encodings", "rules", "match", "lower", "prove", "block")
"""The rooms of passes/, from what reads the graph to what is done to the block around the experts."""
FLOORS = ("routing", "rows", "sums", "refused")
"""The rooms of passes/rules/."""

UP = {
    "passes.rules.rows.index": "sorted rows are cut into experts' segments, which sums/ puts together again",
    "passes.rules.rows.contraction": "a product over the slots of a token sums them",
}
"""Rules that need a higher floor of rules/, and why."""

LATE = {
    "__init__": "the entry for Inductor's passes is loaded by who asks for it",
    "api": "moefuse.warmup alone needs the tuner",
    "backend": "loaded with the first graph: Dynamo imports every backend that is registered",
    "cache": "the key alone needs what was measured",
    "capture.dummies": "a pass of experts without tokens alone asks the passes",
    "capture.attempt": "a branch that Dynamo stops at alone asks the passes",
    "capture.ledger": "a refusal alone asks the passes",
    "capture.scopes": "a value of a parametrisation alone asks the passes",
    "config": "options are read before torch is",
    "integrations.transformers_ep": "a model that is loaded with it alone needs torch.distributed's tensors",
    "parallel.load": "a model of transformers alone needs transformers' mapping",
    "passes.lower.workspace_size": "Triton is not there on every machine",
    "pipeline": "a broken install of the passes must not break a program",
    "settled": "a broken install of the passes must not break a program",
    "report": "a page alone needs what draws it",
    "runtime.transports.symm": "Triton is not there on every machine",
    "tuning.warmup": "Triton is not there on every machine",
    "kernels.triton.tune.worker": "the process says that it is there before it loads Triton",
    "few_bits": "a layer that was not found alone asks the passes",
    "kernels.triton.host.alone": "a Triton may be without Gluon",
    "kernels.triton.host.packed_specialised": "a Triton may be without Gluon",
    "kernels.triton.host.rounded_specialised": "a Triton may be without Gluon",
    "kernels.triton.host.words": "a Triton may be without Gluon",
    "kernels.triton.host.plan_specialised": "a Triton may be without Gluon",
    "kernels.triton.host.specialised": "a Triton may be without Gluon",
}
"""Modules that import others of moefuse in a function, and why."""


def _modules() -> dict[str, Path]:
    found = {}
    for path in sorted(ROOT.rglob("*.py")) + sorted((ROOT / "passes").rglob("*.py")) + sorted((ROOT / "kernels").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = path
    return found


MODULES = _modules()


def _imports(path: Path) -> Iterator[tuple[str, bool]]:
    """(module of moefuse, whether in a function) for each import that runs."""

    def visit(node: ast.AST, inside: bool) -> Iterator[tuple[str, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                continue
            if isinstance(child, ast.ImportFrom) and (child.module or "").split(".")[0] == "moefuse":
                where = (child.module or "").removeprefix("moefuse").removeprefix(".")
                for alias in child.names:
                    whole = f"{where}.{alias.name}".removeprefix(".")
                    yield whole if whole in MODULES else where or "__init__", inside
            yield from visit(child, inside or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef))

    yield from visit(ast.parse(path.read_text()), False)


def test_there_are_no_import_circles() -> None:
    arrows = {name: {target for target, _ in _imports(path)} & set(MODULES) for name, path in MODULES.items() if name != "__init__"}
    assert len(arrows) > 150, "the links to passes/ and kernels/ are not followed"
    left = dict(arrows)
    while leaves := [name for name, targets in left.items() if not targets & set(left)]:
        for name in leaves:
            del left[name]
    # What only leads to a circle goes, too.
    while roots := [name for name in left if not any(name in targets for targets in left.values())]:
        for name in roots:
            del left[name]
    assert not left, f"import circles among {sorted(left)}"


def test_imports_follow_the_pipeline() -> None:
    against = []
    for name, path in MODULES.items():
        parts = name.split(".")
        for target, _ in _imports(path):
            to = target.split(".")
            if parts[0] != "passes" or to[0] != "passes" or len(parts) < 3 or len(to) < 2 or to[1] not in PIPELINE:
                continue
            late = PIPELINE.index(to[1]) > PIPELINE.index(parts[1])
            up = parts[1] == to[1] == "rules" and len(parts) == len(to) == 4 and FLOORS.index(to[2]) > FLOORS.index(parts[2])
            against += [f"{name} -> {target}"] if late or (up and name not in UP) else []
    assert not against, "\n".join(against)


def test_imports_in_functions_have_a_reason() -> None:
    hidden = {name for name, path in MODULES.items() for _, inside in _imports(path) if inside}
    assert hidden == set(LATE), f"without a reason: {sorted(hidden - set(LATE))}; not there any more: {sorted(set(LATE) - hidden)}"
