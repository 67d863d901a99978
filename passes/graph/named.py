"""What a value of a graph is in the user's own words: a variable, an expression, a parameter. Names of nodes mean nothing to a reader."""

from __future__ import annotations

import ast
import operator
import re

import torch
from torch.fx import Node

from moefuse import _torch_private
from moefuse.passes.graph.calls import location, raw_name
from moefuse.passes.graph.values import fake
from moefuse.program.breaks import of_the_user

_LONGEST = 60
"""Longer expressions say less than the name of what they compute."""
_PARTS = frozenset(("_modules", "_parameters", "_buffers", "_fn", "__dict__", "__self__", "_orig_mod", "__wrapped__"))
_KINDS: dict[str, tuple[type[ast.expr], ...]] = {"getitem": (ast.Subscript, ast.Call)}
_SIGNS = frozenset(name for name in dir(operator) if not name.startswith("_"))
_FRAME = re.compile(r'File "([^"]+)", line \d+, in [^\n]*\n([^\n]*)(?:\n([ \t]*[~^]+[ \t]*)(?=\n|$))?')


def named(node: Node) -> str:
    """A value as the user knows it, in backticks where that is code: the variable it is assigned to, or the expression it comes from."""
    if node.op in ("placeholder", "get_attr"):
        return _given(node)
    frames = _frames(node)
    if frames:
        line, start = frames[0]
        names = (node.name, re.sub(r"_\d+$", "", node.name))
        variable = next((name for own, _ in frames for name in names if _assigns(own, name)), None)
        text = variable or _expression(line[start:], raw_name(node))
        if text and len(text) <= _LONGEST and "`" not in text:
            return f"`{text}`"
    return f"what `{raw_name(node)}` computes"


def wrote(node: Node) -> str:
    """What a node has written to memory, as the user knows it."""
    text = named(node)
    return f"{text.removesuffix(' computes')} wrote" if text.startswith("what ") else f"what {text} wrote"


def placed(node: Node, beside: Node) -> str:
    """A value as the user knows it, with its line where that is not the one of the message."""
    where = location(node)
    return named(node) if not where or where == location(beside) else f"{named(node)} ({where})"


def counted(size: object) -> str:
    """A size for a reader: one that differs between calls has no number."""
    return str(size) if isinstance(size, int) else "a varying number of"


def operation(node: Node) -> str:
    """What a node does: the name of the operation, also of one whose result it takes apart; a function of the user's as he calls it."""
    while node.target is operator.getitem and isinstance(node.args[0], Node) and isinstance(fake(node.args[0]), tuple | list):
        node = node.args[0]
    if node.op not in ("call_function", "call_method"):
        return "its input"
    if not isinstance(node.target, _torch_private.HigherOrderOperator):
        return raw_name(node)
    called = next((_expression(line[start:], "") for line, start in _frames(node)), "")
    return called if called and len(called) <= _LONGEST and "`" not in called else raw_name(node)


def _frames(node: Node) -> list[tuple[str, int]]:
    """(a line of the user's that made a node, where its expression begins), the innermost first, as torch recorded them."""
    frames = [found for found in _FRAME.findall(node.meta.get("stack_trace") or "") if of_the_user(found[0])]
    shown = [(line, marks or line) for _, line, marks in reversed(frames)]
    return [(line, len(marks) - len(marks.lstrip())) for line, marks in shown]


def _expression(text: str, name: str) -> str:
    """The expression of an operation that a text begins with; empty where it is not all in one line."""
    tree = next((tree for end in range(len(text), 0, -1) if (tree := _parsed(text[:end])) is not None), None)
    kinds = _KINDS.get(name, (ast.Call,) if name not in _SIGNS else (ast.BinOp, ast.Compare, ast.UnaryOp, ast.Call))
    while tree is not None and not isinstance(tree, kinds):
        tree = next((part for field in ("left", "func", "value") if (part := getattr(tree, field, None)) is not None), None)
    return "" if tree is None else ast.get_source_segment(text, tree) or ""


def _parsed(text: str) -> ast.expr | None:
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError):
        return None


def _assigns(line: str, name: str) -> bool:
    """Whether a line assigns a variable."""
    return re.search(rf"^[^=()\[\]]*(?<![\w.]){re.escape(name)}\b[^=()\[\]]*(?::=|=)(?!=)", line) is not None


def _given(node: Node) -> str:
    """A tensor that a graph is given."""
    source = _torch_private.source_name(node)
    root = re.match(r"[LG]\['(\w+)'\]", source)
    if root is None or root[1].startswith("__"):
        text = re.fullmatch(r"l_([a-zA-Z]\w*?)_", node.name)
        known = text is not None and re.search(rf"\b{text[1]}\b", node.meta.get("stack_trace") or "")
        return f"`{text[1]}`" if text is not None and known else _kind(node)
    rest = re.sub(r"\['?([\w.]+)'?\]", r".\1", source[root.end() :])
    path = [part for part in rest.split(".") if part and part not in _PARTS]
    whole = ".".join(path if root[1] == "self" and path else (root[1], *path))
    return f"`{whole}`" if re.fullmatch(r"[A-Za-z_][\w.]*", whole) and len(whole) <= 2 * _LONGEST else _kind(node)


def _kind(node: Node) -> str:
    value = fake(node)
    if not isinstance(value, torch.Tensor):
        return "a number"
    return "a weight" if isinstance(value, torch.nn.Parameter) else "a tensor"


__all__ = ["counted", "named", "operation", "placed"]
