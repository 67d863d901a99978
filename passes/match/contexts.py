"""Two parts of a region under different grad modes: which has gradients, and the line that switches them."""

from __future__ import annotations

import ast
import re
from typing import TypeGuard

import torch
from torch.fx import Node

from moefuse.passes.graph.named import named
from moefuse.passes.infer.state import Context
from moefuse.passes.ir.facts import Lost
from moefuse.program.breaks import of_the_user, parsed


def differ(ctx: Context, node: Node, anchor: Node) -> Lost:
    """The refusal of a region of which ``node`` runs under another grad mode than the sum."""
    grad = ctx.mode[node].grad
    # Of two modes that differ, one is switched in the graph; the other may be the caller's.
    mine = grad != torch.is_grad_enabled()
    line = _switched_at(node if mine else anchor)
    first, second = (f" ({line})" if line and own else "" for own in (mine, not mine))
    said, other = ("with gradients", "without gradients")[:: 1 if grad else -1]
    return ctx.lost("context-differs", node, detail=f"{named(node)} is computed {said}{first}, the sum over the experts {other}{second}")


def _switched_at(node: Node) -> str:
    """``file:line`` of the innermost ``with``, or decorator, that switches gradients; torch records none for a switch."""
    frames = re.findall(r'File "([^"]+)", line (\d+), in', node.meta.get("stack_trace") or "")
    for path, line in reversed(frames):
        tree = parsed(path) if of_the_user(path) else None
        around = [n for n in ast.walk(tree) if _covers(n, int(line))] if tree is not None else []
        for statement in sorted(around, key=lambda n: n.lineno, reverse=True):
            given = statement.items if isinstance(statement, ast.With) else statement.decorator_list
            if any(word in ast.unparse(item) for item in given for word in ("grad", "inference_mode")):
                return f"{path}:{statement.lineno if isinstance(statement, ast.With) else statement.decorator_list[0].lineno}"
    return ""


def _covers(node: ast.AST, line: int) -> TypeGuard[ast.With | ast.FunctionDef]:
    return isinstance(node, ast.With | ast.FunctionDef) and node.lineno <= line <= (node.end_lineno or 0)


__all__ = ["differ"]
