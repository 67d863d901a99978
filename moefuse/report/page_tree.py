"""The model's modules as a list in lists, equal neighbours as one line, with what became of its mixture-of-experts layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from moefuse.program.module_tree import Tree
from moefuse.report.entries import amount
from moefuse.report.page_text import escaped, tag

Marks = Mapping[tuple[str, ...], str]
"""Path of a module -> what to write behind its name, as HTML."""


@dataclass
class _Line:
    names: list[str]
    tree: Tree
    marks: Marks


def tree(root: Tree, marks: Marks, name: str) -> str:
    """The tree as HTML."""
    return tag("ul", _item(_Line([name], root, marks)), "tree")


def _item(line: _Line) -> str:
    text = _label(line)
    if not line.tree.children:
        return tag("li", text)
    children = "".join(_item(child) for child in _lines(line.tree, line.marks))
    state = " open" if any(line.marks) and any(len(path) for path in line.marks) else ""
    return tag("li", f"<details{state}><summary>{text}</summary>{tag('ul', children)}</details>")


def _lines(parent: Tree, marks: Marks) -> list[_Line]:
    """Children, neighbours that are equal and have equal marks in one line."""
    lines: list[_Line] = []
    for name, child in parent.children:
        below = {path[1:]: mark for path, mark in marks.items() if path[:1] == (name,)}
        last = lines[-1] if lines else None
        if last is not None and last.tree is child and last.marks == below and _numbered(last.names[-1], name):
            last.names.append(name)
        else:
            lines.append(_Line([name], child, below))
    return lines


def _numbered(before: str, name: str) -> bool:
    return before.isdigit() and name.isdigit()


def _label(line: _Line) -> str:
    several = len(line.names) > 1
    name = f"{line.names[0]} … {line.names[-1]}" if several else line.names[0]
    size = amount(line.tree.size * len(line.names)) if line.tree.size else ""
    parts = [tag("b", escaped(name)), line.marks.get((), ""), tag("span", escaped(line.tree.kind), "kind")]
    parts += [tag("span", f"\N{MULTIPLICATION SIGN} {len(line.names)}", "times")] if several else []
    parts += [tag("span", size, "size")] if size else []
    return " ".join(part for part in parts if part)
