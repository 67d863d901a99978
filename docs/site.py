"""What mkdocs does not do by itself (``make docs``): the README as the first page, the reference, and links that leave the folder."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from runpy import run_path
from typing import Any

DOCS = Path(__file__).parent
ROOT = DOCS.parent
_LINK = re.compile(r"(?P<text>!?\[[^]]*\])\((?P<target>[^)#\s]*)(?P<anchor>#[^)\s]*)?\)")


def on_config(config: Any) -> Any:
    """Where links to files of the repository lead: setup.py knows its address, or nobody does, and they are text."""
    home = run_path(str(ROOT / "setup.py"))["HOME"]
    config.extra["repository"] = f"{home}/blob/main/" if home else ""
    return config


def on_files(files: Any, config: Any) -> Any:
    """Two pages that lie nowhere."""
    from mkdocs.structure.files import File

    readme = _LINK.sub(lambda link: _moved(link, "", ROOT, config), (ROOT / "README.md").read_text())
    files.append(File.generated(config, "index.md", content=readme))
    files.append(File.generated(config, "reference.md", content=run_path(str(DOCS / "reference.py"))["page"]()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links to files of the repository lead there, or are text."""
    folder = posixpath.dirname(page.file.src_uri)
    return markdown if page.file.src_uri == "index.md" else _LINK.sub(lambda link: _moved(link, folder, DOCS, config), markdown)


def _moved(link: re.Match[str], folder: str, base: Path, config: Any) -> str:
    text, target, anchor = link["text"], link["target"], link["anchor"] or ""
    if not target or "://" in target:
        return link[0]
    file = (base / folder / target).resolve()
    if file.is_relative_to(DOCS) and file.suffix in (".md", ".svg"):
        here = DOCS / folder if base == DOCS else DOCS
        return f"{text}({posixpath.relpath(file.as_posix(), here.as_posix())}{anchor})"
    where = config.extra["repository"]
    return f"{text}({where}{file.relative_to(ROOT).as_posix()}{anchor})" if where else text.strip("!").strip("[]")


__all__ = ["on_config", "on_files", "on_page_markdown"]
