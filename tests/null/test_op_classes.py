"""The classes of operations hold what their docstrings say, by torch itself, and rules read them from the table."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch

import moefuse
from moefuse.passes.graph.op_classes import COPIES, NEVER_NEGATIVE, RESHAPES, SHAPED, VALUES_AND_INDICES
from moefuse.passes.rules import RULES

X = torch.arange(-12.0, 12.0).reshape(1, 4, 6)

ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "view": (2, 12), "reshape": (2, 12), "_unsafe_view": ((2, 12),), "unflatten": (1, (2, 2)), "unsqueeze": (0,), "squeeze": (0,),
    "view_as": (X.flatten(),), "reshape_as": (X.flatten(),), "softmax": (-1,),
    **dict.fromkeys(("new_zeros", "zeros", "ones"), (X.shape,)),
}  # fmt: skip


def run(name: str) -> torch.Tensor:
    packet = getattr(torch.ops.aten, name)
    function = getattr(torch.Tensor, name, None) or getattr(torch.nn.functional, name, None) or getattr(torch, name, None) or packet
    args = ARGUMENTS.get(name, ())
    return function(*args) if name in ("zeros", "ones") else function(X, *args)  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", sorted(RESHAPES))
def test_a_reshape_keeps_the_elements_in_their_order(name: str) -> None:
    assert run(name).flatten().equal(X.flatten())
    assert name in RULES


@pytest.mark.parametrize("name", sorted(COPIES))
def test_a_copy_is_what_it_copies(name: str) -> None:
    assert run(name).equal(X)


@pytest.mark.parametrize("name", sorted(NEVER_NEGATIVE))
def test_what_is_never_negative(name: str) -> None:
    assert run(name).ge(0).all()


@pytest.mark.parametrize("name", sorted(VALUES_AND_INDICES))
def test_values_come_before_indices(name: str) -> None:
    found = X.topk(2) if name == "topk" else getattr(X, name)(-1)
    assert [f.is_floating_point() for f in found] == [True, False]


def test_nobody_lists_the_reshapes_again() -> None:
    root = Path(moefuse.__file__).parent / "passes"
    again = []
    for path in (p for p in root.rglob("*.py") if p.name != "op_classes.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            words = {w for part in ast.walk(node) if isinstance(part, ast.Constant) for w in str(part.value).split()}
            if isinstance(node, ast.Tuple | ast.Set | ast.Call | ast.List) and len(words & SHAPED) > 2 and len(words) < 40:
                again.append(f"{path.name}:{node.lineno}")
    assert not again
