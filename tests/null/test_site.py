"""What the site has beside the pages: the reference of all that is public, and links that lead somewhere."""

from __future__ import annotations

from pathlib import Path
from runpy import run_path
from types import SimpleNamespace

import pytest

import moefuse

DOCS = Path(__file__).parents[2] / "docs"


def test_the_reference_has_all_that_is_public() -> None:
    page = run_path(str(DOCS / "reference.py"))["page"]()
    titles = {line.removeprefix("### ").partition("(")[0] for line in page.splitlines() if line.startswith("### ")}
    assert titles == {*moefuse.__all__} - {"__version__"}
    assert "- `tokens`: numbers of tokens T of one forward pass" in page
    assert ":func:" not in page
    assert "``" not in page.replace("```", "")


@pytest.mark.parametrize(
    ("repository", "source", "text", "wanted"),
    [
        ("", "usage.md", "[limits](limits.md#what)", "[limits](limits.md#what)"),
        ("", "design/tour.md", "[limits](../limits.md)", "[limits](../limits.md)"),
        ("", "usage.md", "[test](../tests/cpu/test_docs.py)", "test"),
        ("https://host/tree/", "usage.md", "[test](../tests/cpu/test_docs.py)", "[test](https://host/tree/tests/cpu/test_docs.py)"),
        ("", "usage.md", "[torch](https://pytorch.org/x.html#y)", "[torch](https://pytorch.org/x.html#y)"),
        ("", "benchmarks.md", "![picture](layer-h200.svg)", "![picture](layer-h200.svg)"),
    ],
)
def test_links(repository: str, source: str, text: str, wanted: str) -> None:
    """Of pages; those of the README are counted from the root."""
    site = run_path(str(DOCS / "site.py"))
    page = SimpleNamespace(file=SimpleNamespace(src_uri=source))
    assert site["on_page_markdown"](text, page, SimpleNamespace(extra={"repository": repository}), None) == wanted


def test_links_of_the_readme() -> None:
    site = run_path(str(DOCS / "site.py"))
    config = SimpleNamespace(extra={"repository": ""})
    moved = site["_LINK"].sub(
        lambda link: site["_moved"](link, "", DOCS.parent, config), "[a](docs/usage.md) ![b](docs/speed.svg) [c](LICENSE)"
    )
    assert moved == "[a](usage.md) ![b](speed.svg) c"
