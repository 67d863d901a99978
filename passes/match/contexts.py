"""Two parts of a region under different grad modes or autocasts: which mode differs, and the line that switches it."""

from __future__ import annotations

import ast
import re
from typing import TypeGuard

import torch
from torch.fx import Node

from moefuse.passes.graph.modes import Contexts, Mode
from moefuse.passes.graph.named import named
from moefuse.passes.infer.state import Context
from moefuse.passes.ir.facts import Lost
from moefuse.program.breaks import of_the_user, parsed


def differ(ctx: Context, node: Node, anchor: Node, *, grads: bool) -> Lost:
    """The refusal of a region of which ``node`` runs under another mode than the sum; ``grads``: it is the grad mode that differs."""
    here, there = ctx.mode[node], ctx.mode[anchor]
    # Of two modes that differ, one is switched in the graph; the other may be the caller's.
    mine = here.grad != torch.is_grad_enabled() if grads else not _begins(there.casts, here.casts)
    line = _switched_at(node if mine else anchor, ("grad", "inference_mode") if grads else ("autocast",))
    said, other = (_said(mode, mode_, grads) for mode, mode_ in ((here, there), (there, here)))
    first, second = (f" ({line})" if line and own else "" for own in (mine, not mine))
    return ctx.lost("context-differs", node, detail=f"{named(node)} is computed {said}{first}, the sum over the experts {other}{second}")


def _begins(whole: Contexts, start: Contexts) -> bool:
    return whole[: len(start)] == start


def _switched_at(node: Node, words: tuple[str, ...]) -> str:
    """``file:line`` of the innermost ``with``, or decorator, that has one of some words in it; torch records none for a switch."""
    frames = re.findall(r'File "([^"]+)", line (\d+), in', node.meta.get("stack_trace") or "")
    for path, line in reversed(frames):
        tree = parsed(path) if of_the_user(path) else None
        around = [n for n in ast.walk(tree) if _covers(n, int(line))] if tree is not None else []
        for statement in sorted(around, key=lambda n: n.lineno, reverse=True):
            given = statement.items if isinstance(statement, ast.With) else statement.decorator_list
            if any(word in ast.unparse(item) for item in given for word in words):
                return f"{path}:{statement.lineno if isinstance(statement, ast.With) else statement.decorator_list[0].lineno}"
    return ""


def _covers(node: ast.AST, line: int) -> TypeGuard[ast.With | ast.FunctionDef]:
    return isinstance(node, ast.With | ast.FunctionDef) and node.lineno <= line <= (node.end_lineno or 0)


def _said(mode: Mode, other: Mode, grads: bool) -> str:
    if grads:
        return "with gradients" if mode.grad else "without gradients"
    if _begins(other.casts, mode.casts):
        return "under no such autocast" if not mode.casts else "under the autocast around it"
    device, dtype, enabled, _ = mode.casts[-1]
    if not enabled:
        return f"with autocast off on {device}"
    return f"under autocast on {device}" + ("" if dtype is None else f" to {str(dtype).removeprefix('torch.')}")


__all__ = ["differ"]
