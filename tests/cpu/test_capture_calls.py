"""What an instruction calls, and with what, as it lies on Dynamo's stack: Python moves it with each release."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moefuse.capture.dynamo import hooks, lists, values
from tests.cpu.capture_case import Seen, capturing

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def _program(x: Tensor, row: tuple[Tensor, ...], named: dict[str, int]) -> Tensor:
    y = torch.sum(x, 0)
    y = y + torch.sum(x, dim=0)
    y = y + torch.sum(*row, **named)
    y = y + torch.sum(*row, 0)
    return y.mul(x)


def _name(callee: Any) -> str:
    method = getattr(callee, "method_name", getattr(callee, "name", ""))
    return str(getattr(getattr(callee, "value", None), "__name__", method))


def test_what_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """With places, with names, with both of these spread, and a method, whose object is given to it."""
    found: list[tuple[Any, int]] = []

    def before(observer: Any, translator: Any) -> None:
        inst = translator.instructions[translator.instruction_pointer]
        if inst.opname in lists.CALLS and translator.f_code is _program.__code__:
            callee, given = lists.call(translator, inst)
            found.append((_name(values.realized(callee)), sum(values.tensor_node(values.realized(v)) is not None for v in given)))

    monkeypatch.setattr(hooks.parametrized_hooks, "before", before)
    x = torch.ones(2, 2)
    torch.compile(_program, backend=capturing(Seen()))(x, (x,), {"dim": 0})
    assert found == [("sum", 1), ("sum", 1), ("sum", 1), ("sum", 1), ("mul", 2)]
