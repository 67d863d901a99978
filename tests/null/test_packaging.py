"""The wheel: the top-level names, the linked folders as real files, the entry points."""

from __future__ import annotations

import configparser
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from runpy import run_path

import pytest

import moefuse

ROOT = Path(__file__).parent.parent.parent
NOT_SHIPPED = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "tests", "docs", "benchmarks")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built from a copy: setuptools writes into the folder that it builds from."""
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT, folder / "source", symlinks=True, ignore=NOT_SHIPPED)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--wheel-dir",
        str(folder),
    ]
    subprocess.run([*command, str(folder / "source")], check=True)
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


def test_the_top_level_names_are_the_package_and_its_command(wheel: zipfile.ZipFile) -> None:
    top = {name.split("/")[0] for name in wheel.namelist()}
    assert {name for name in top if not name.endswith(".dist-info")} == {"moefuse", "moefuse_command.py"}


@pytest.mark.parametrize("folder", ["passes", "kernels"])
def test_linked_folders_are_real_files_in_the_wheel(wheel: zipfile.ZipFile, folder: str) -> None:
    expected = {f"moefuse/{path.relative_to(ROOT)}" for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".h", ".cpp")}
    assert expected <= set(wheel.namelist())
    for name in expected:
        assert wheel.read(name) == (ROOT / name.removeprefix("moefuse/")).read_bytes()


def test_every_source_file_is_in_the_wheel(wheel: zipfile.ZipFile) -> None:
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "moefuse").rglob("*.py")}
    assert sources <= set(wheel.namelist())
    assert {"moefuse/py.typed"} <= set(wheel.namelist())


def test_the_entry_points_are_in_the_wheel(wheel: zipfile.ZipFile) -> None:
    (path,) = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    parser = configparser.ConfigParser()
    parser.read_string(wheel.read(path).decode())
    assert dict(parser["torch_dynamo_backends"]) == {"moefuse": "moefuse.backend:backend"}
    assert dict(parser["console_scripts"]) == {"moefuse": "moefuse_command:main"}


def test_the_readme_is_the_page_of_an_index(wheel: zipfile.ZipFile) -> None:
    (path,) = [name for name in wheel.namelist() if name.endswith("/METADATA")]
    head, _, page = wheel.read(path).decode().partition("\n\n")
    assert page.strip() == (ROOT / "README.md").read_text().strip()
    assert "Description-Content-Type: text/markdown" in head
    assert "Author: the moefuse developers" in head


def test_links_lead_away_from_an_index() -> None:
    """To the version's files, pictures to their bytes; what is an address already, or a place of the page, stays."""
    moved = run_path(str(ROOT / "setup.py"))["on_an_index"]
    text = "![a picture](docs/speed.svg) [usage](docs/usage.md#what) [torch](https://pytorch.org) [below](#install)"
    assert moved(text, "", "1.2") == text
    assert moved(text, "https://host/moefuse", "1.2") == (
        "![a picture](https://host/moefuse/raw/v1.2/docs/speed.svg) [usage](https://host/moefuse/blob/v1.2/docs/usage.md#what) "
        "[torch](https://pytorch.org) [below](#install)"
    )


def test_the_license_is_in_the_wheel(wheel: zipfile.ZipFile) -> None:
    assert any(name.endswith("/LICENSE") for name in wheel.namelist())


def test_the_installed_entry_point_is_the_backend() -> None:
    from moefuse.backend import backend

    (entry,) = entry_points(group="torch_dynamo_backends", name="moefuse")
    assert entry.load() is backend


def test_the_links_are_relative() -> None:
    for name in ("passes", "kernels"):
        link = ROOT / "moefuse" / name
        assert link.is_symlink()
        assert str(link.readlink()) == f"../{name}"
        assert not (ROOT / name / "__init__.py").exists()


def test_our_kernels_folder_cannot_stand_in_for_the_package_of_that_name() -> None:
    spec = find_spec("kernels")
    assert spec is None or spec.origin is None or not spec.origin.startswith(str(ROOT))


def test_version_and_requirements_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert moefuse.__version__ == "0.2.0"
    assert project["requires-python"] == ">=3.11"
    assert project["dependencies"] == ["torch>=2.11"]


@pytest.mark.parametrize("path", sorted((ROOT / "requirements").glob("*.txt")), ids=lambda path: path.name)
def test_requirements_are_pinned(path: Path) -> None:
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    assert lines
    for line in lines:
        name, version = line.split("==")
        assert name
        assert version[0].isdigit()


def test_everything_public_is_in_dir() -> None:
    """In a process of its own: MoEFusionPass is imported when it is asked for, and another test may have."""
    code = "import moefuse; print(*sorted(set(moefuse.__all__) - set(dir(moefuse))))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
