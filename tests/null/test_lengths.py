"""Lengths that stay open where ranks must trace the same program, and nowhere else (that they do: tests/dist/test_equal.py)."""

from __future__ import annotations

import torch
from torch._subclasses import fake_impls

from moefuse.capture.dynamo import lengths


def test_torch_has_what_is_wrapped() -> None:
    lengths.keep_open()
    lengths.keep_open()  # twice is once
    for name, memo in lengths._MEMOS.items():
        known = fake_impls.op_implementations_dict[getattr(torch.ops.aten, name).default]
        assert hasattr(known, "moefuse")
        assert not hasattr(known.__wrapped__, "moefuse"), "wrapped twice"  # type: ignore[attr-defined]
        assert memo in vars(torch._subclasses.FakeTensor)


def test_programs_of_other_backends_are_left_alone() -> None:
    """Of a mask without elements they know the length, and trace no body that reads it."""
    lengths.keep_open()
    seen: list[torch.fx.GraphModule] = []

    def program(x: torch.Tensor) -> torch.Tensor:
        rows = (x[:, 0] > 0).nonzero()
        distinct = torch.unique(x)
        return x + 1 if rows.numel() == 0 and distinct.numel() == 0 else x[rows[:, 0]]

    def keep(gm: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        seen.append(gm)
        return gm

    run = torch.compile(program, backend=keep)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        assert run(torch.ones(0, 3)).shape == (0, 3)
    (gm,) = seen
    assert any("add" in str(node.target) for node in gm.graph.nodes)
