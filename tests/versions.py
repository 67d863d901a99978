"""Quick tests with other releases of torch, transformers and Python, each in an environment of its own: ``make versions``.

    python tests/versions.py --torch 2.11.0 newest --python python3.11 python3.13

torch comes from where pip takes it. PyPI's wheels for Linux are CUDA builds of several gigabytes: on a machine without a GPU point pip at
an index with builds for the CPU (``PIP_INDEX_URL``, ``PIP_FIND_LINKS``) first.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / ".versions"
OTHERS = ["accelerate", "hypothesis", "numpy", "pytest", "pytest-xdist", "setuptools", "tqdm"]
TESTS = [
    "tests/null",
    "tests/cpu/test_entry_point.py",
    "tests/cpu/test_backend.py",
    "tests/cpu/test_exported.py",
    "tests/cpu/test_programs.py::test_catalogue",
    "tests/cpu/test_capture_loops.py",
    "tests/cpu/test_kinks.py",
    "tests/cpu/test_parametrized.py",
    "tests/cpu/test_lora_sums.py",
]


def requirement(name: str, version: str) -> str:
    return name if version == "newest" else f"{name}=={version}"


def run(*command: str, log: Path) -> bool:
    with log.open("a") as out:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.run(command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT, check=False).returncode == 0


def tried(python: str, torch: str, transformers: str) -> str:
    """What became of one combination, in a few words; the rest is in its log."""
    if shutil.which(python) is None:
        return "no such Python here"
    folder = FOLDER / f"{Path(python).name}-torch-{torch}-transformers-{transformers}"
    log, bin_ = folder.with_suffix(".log"), folder / "bin"
    log.write_text("")
    if not run(python, "-m", "venv", "--clear", str(folder), log=log):
        return f"no such Python here: {log}"
    pip = (str(bin_ / "pip"), "install", "--quiet")
    # torch comes first and alone, as in `make venv`.
    installed = (
        run(*pip, requirement("torch", torch), log=log)
        and run(*pip, *OTHERS, requirement("transformers", transformers), log=log)
        and run(*pip, "--no-deps", "--no-build-isolation", "--editable", ".", log=log)
    )
    if not installed:
        return f"not installed: {log}"
    passed = run(str(bin_ / "python"), "-m", "pytest", *TESTS, "-q", "-n", "auto", "--dist", "worksteal", log=log)
    return log.read_text().rstrip().splitlines()[-1].strip("= ") if passed else f"FAILED: {log}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", nargs="+", default=["2.11.0", "newest"])
    parser.add_argument("--transformers", nargs="+", default=["newest"])
    parser.add_argument("--python", nargs="+", default=["python3.11", "python3.12", "python3.13"])
    chosen = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    failed = ran = 0
    for python, torch, transformers in itertools.product(chosen.python, chosen.torch, chosen.transformers):
        outcome = tried(python, torch, transformers)
        failed += outcome.startswith(("FAILED", "not installed"))
        ran += not outcome.startswith("no such")
        sys.stdout.write(f"{python:12} torch {torch:10} transformers {transformers:10} {outcome}\n")
        sys.stdout.flush()
    return 1 if failed or not ran else 0


if __name__ == "__main__":
    sys.exit(main())
