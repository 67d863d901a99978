"""One set of refusal codes: in the package, in the negative tests, and in the user's table."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from moefuse.errors import CODES
from moefuse.pipeline.publish import USER_DECIDED

ROOT = Path(__file__).parent.parent.parent
SOURCES = sorted(
    path for folder in ("passes", "moefuse") for path in (ROOT / folder).rglob("*.py") if "kernels" not in path.relative_to(ROOT).parts
)


def codes_in_tests() -> set[str]:
    """Keys of CASES in the negative tests, without importing (and so compiling) anything."""
    tree = ast.parse((ROOT / "tests/cpu/test_refusals.py").read_text())
    (cases,) = [n.value for n in tree.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name) and n.target.id == "CASES"]
    assert isinstance(cases, ast.Dict)
    return {key.value for key in cases.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}


def codes_in_docs() -> list[str]:
    """Codes of the table rows in docs/refusals.md, in order."""
    return re.findall(r"^\| `([a-z-]+)` \|", (ROOT / "docs/refusals.md").read_text(), flags=re.MULTILINE)


def codes_in_sources() -> set[str]:
    """Codes that some line of the package refuses with."""
    text = "\n".join(path.read_text() for path in SOURCES if path.name != "errors.py")
    return {code for code in CODES if f'"{code}"' in text}


def test_every_code_has_a_negative_test() -> None:
    assert codes_in_tests() == set(CODES)


def test_every_code_has_one_line_in_the_documentation() -> None:
    assert codes_in_docs() == list(CODES)


def test_every_code_is_used() -> None:
    """A code that nothing refuses with is a promise to the user that nobody keeps."""
    assert codes_in_sources() == set(CODES)


def test_codes_that_an_option_decides_exist() -> None:
    assert set(CODES) >= USER_DECIDED


@pytest.mark.parametrize("code", CODES)
def test_messages_are_sentences_without_an_end(code: str) -> None:
    """The report puts the code before and the logger a full stop behind."""
    text = CODES[code]
    assert not text.endswith((".", " "))
    assert re.fullmatch(r"[a-z]+(-[a-z]+)*", code)
