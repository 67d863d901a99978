"""The documentation against the repository: links, paths, tables of options and codes, and the tables of measurements."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import re
import types
from pathlib import Path

import pytest

from moefuse.config import ENVIRONMENT, Options
from moefuse.ops.meaning.activations import ACTIVATIONS
from moefuse.passes.ir import facts
from moefuse.passes.rules import _FAMILIES

ROOT = Path(__file__).parent.parent.parent
FILES = sorted((*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/results/*.md")))
README = (ROOT / "README.md").read_text()
OPTIONS = (ROOT / "docs/options.md").read_text()
PATH = re.compile(r"`((?:moefuse|passes|kernels|tests|docs|benchmarks|examples|requirements)/[\w./-]+)`")


def names(files: list[Path]) -> list[str]:
    return [path.relative_to(ROOT).as_posix() for path in files]


@pytest.mark.parametrize("path", FILES, ids=names(FILES))
def test_links_lead_somewhere(path: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    links = re.findall(r"\]\(([^)#\s]+)(?:#[\w-]*)?\)", text)
    assert [link for link in links if not link.startswith("http") and not (path.parent / link).exists()] == []


@pytest.mark.parametrize("path", FILES, ids=names(FILES))
def test_named_files_exist(path: Path) -> None:
    """Code in the text (`passes/ir/axes.py`) moves; the text has to move with it."""
    made_later = {"benchmarks/results/"}
    found = [name for name in PATH.findall(path.read_text()) if name not in made_later]
    assert [name for name in found if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("path", FILES, ids=names(FILES))
def test_lines_are_not_endless(path: Path) -> None:
    """Tables and lines of a report may be wide; text may not."""
    wide = ("|", "  fused ", "  skipped ", "  note ")
    long = [line for line in path.read_text().splitlines() if len(line) > 145 and not line.startswith(wide) and "](" not in line]
    assert long == []


def excerpts(path: Path) -> list[tuple[str, str]]:
    """(file, text) of each block behind `<!-- from file -->`."""
    return re.findall(r"<!-- from (\S+) -->\n *```\w*\n(.*?)^ *```$", path.read_text(), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("path", FILES, ids=names(FILES))
def test_excerpts_are_what_the_source_says(path: Path) -> None:
    """A block behind `<!-- from file -->` stands in that file, apart from indentation."""
    for name, block in excerpts(path):
        lines = [line.strip() for line in (ROOT / name).read_text().splitlines()]
        wanted = [line.strip() for line in block.splitlines()]
        assert any(lines[i : i + len(wanted)] == wanted for i in range(len(lines))), f"{name} has changed: {wanted[0]}"


def test_every_excerpt_is_compared() -> None:
    """A comment that the test above does not find would say nothing."""
    assert sum(path.read_text().count("<!-- from ") for path in FILES) == sum(len(excerpts(path)) for path in FILES) > 0


def test_the_table_of_options() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", OPTIONS, flags=re.MULTILINE)
    documented = {name: default.replace('"', "'") for name, default in rows if name.islower()}
    assert documented == {field.name: repr(field.default) for field in dataclasses.fields(Options)}


def test_the_table_of_environment_variables() -> None:
    rows = re.findall(r"^\| `(MOEFUSE_\w+)` \| `(\w+)` \| (.*) \|$", OPTIONS, flags=re.MULTILINE)
    assert {name: option for name, option, _ in rows} == {name: option for name, (option, _) in ENVIRONMENT.items()}
    for name, _, legal in rows:
        assert set(re.findall(r"`(\w+)`", legal)) == set(ENVIRONMENT[name][1])


def test_every_activation_is_listed() -> None:
    (listed,) = re.findall(r"^- activations: (.*?);$", (ROOT / "docs/spellings.md").read_text(), flags=re.MULTILINE | re.DOTALL)
    assert set(ACTIVATIONS) <= set(re.findall(r"`(\w+)`", listed))


def test_every_family_of_rules_is_described() -> None:
    """In its docstring, which docs/design/facts.md sends its readers to."""
    assert [family for family in _FAMILIES if not importlib.import_module(f"moefuse.passes.rules.{family}").__doc__] == []


def test_every_fact_is_described() -> None:
    """As the families are; a dataclass without a docstring has its signature for one."""
    made = [kind for kind in vars(facts).values() if isinstance(kind, type) and kind.__module__ == facts.__name__]
    assert len(made) > 30
    assert [kind.__name__ for kind in made if (kind.__doc__ or "").startswith(f"{kind.__name__}(")] == []


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    text = "\n".join(path.read_text() for path in FILES)
    used = set(re.findall(r"`make ([\w-]+)`", text)) | set(re.findall(r"^make ([\w-]+)", text, flags=re.MULTILINE))
    assert {target for target in used if not re.search(rf"^{target}:", makefile, flags=re.MULTILINE)} == set()


@pytest.fixture
def tables() -> types.ModuleType:
    return program("tables")


def program(name: str, folder: str = "docs") -> types.ModuleType:
    """A program of docs/, or of another folder that is no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tables_of_measurements(tables: types.ModuleType, tmp_path: Path) -> None:
    paired = {"median": 2.0, "p25": 1.5, "p75": 2.5}
    row = {
        "shape": "a",
        "dtype": "float32",
        "tokens": 1,
        "ms": {"loop": {"median": 1.0}, "moefuse": {"median": 0.5}},
        "ratio": {"loop": paired},
    }
    (tmp_path / "layer.json").write_text(json.dumps({"cpu": "X", "threads": 2, "rows": [row]}))
    head = "| layer | dtype | tokens | loop ms | moefuse ms | loop / moefuse |\n|---|---|---|---|---|---|\n"
    body = "| a | float32 | 1 | 1 | 0.5 | 2.00 [1.50, 2.50] |\n"
    assert tables.rendered(tmp_path) == f"{tables.HEAD}**layer** (X, 2 threads)\n\n{head}{body}"


def test_the_page_shows_the_results_that_are_there(tables: types.ModuleType) -> None:
    assert tables.PAGE.read_text() == tables.rendered(tables.PAGE.parent)


def test_the_picture_shows_the_results_that_are_there() -> None:
    """And the number above it is its longest bar."""
    picture = program("picture")
    assert picture.PICTURE.read_text() == picture.drawn()
    assert f"up to {max(ratio for group in picture.groups() for _, ratio in group.bars):.1f}x" in README


def test_loss_curves_are_drawn_from_the_results_that_are_there() -> None:
    results, picture = ROOT / "benchmarks" / "results", program("_loss_picture", "benchmarks")
    for mode, result in json.loads((results / "loss-curves.json").read_text()).items():
        assert (results / f"loss-curves-{mode}.svg").read_text() == picture.drawn(mode, result)


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) < 200
