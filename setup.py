"""What pyproject.toml leaves open: where the project is published, and a README whose links work on a package index."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import setup

HOME = ""
"""The repository's address, e.g. ``https://example.org/moefuse``. Fill it in here, and nowhere else, before a release."""
AUTHOR = "the moefuse developers"
HERE = Path(__file__).parent


def on_an_index(text: str, home: str, version: str) -> str:
    """A page whose relative links and images lead to the repository at this version; without an address as it is."""
    if not home:
        return text
    places = {"!": f"{home}/raw/v{version}", "": f"{home}/blob/v{version}"}
    return re.sub(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)]+)\)", lambda m: f"{m[1]}[{m[2]}]({places[m[1]]}/{m[3]})", text)


if __name__ == "__main__":
    (version,) = re.findall(r'__version__ = "(.+)"', (HERE / "moefuse" / "_version.py").read_text())
    pages = {"Documentation": "blob/{}/docs/usage.md", "Changelog": "blob/{}/CHANGELOG.md", "Issues": "issues"}
    setup(
        author=AUTHOR,
        url=HOME or None,
        project_urls={name: f"{HOME}/{path.format('v' + version)}" for name, path in pages.items()} if HOME else {},
        long_description=on_an_index((HERE / "README.md").read_text(), HOME, version),
        long_description_content_type="text/markdown",
    )
