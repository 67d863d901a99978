"""Tokens that come as images, as channels before positions, or with the batch in the middle; and a body that cannot run without rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.cpu.beside_eager import H, MoE, check
from tests.cpu.capture_case import Seen, capturing

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Flattened(MoE):
    """``flat`` makes rows of tokens."""

    def __init__(self, flat: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.flat = flat

    def forward(self, x: Tensor) -> Tensor:
        rows = self.flat(x)
        weights, ids = self.route(rows)
        return self.add_experts(torch.zeros_like(rows), rows, weights, ids)


LAYOUTS: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...]]] = {
    "images": (lambda x: x.permute(0, 2, 3, 1).reshape(-1, H), (2, H, 5, 3)),
    "images, made contiguous": (lambda x: x.permute(0, 2, 3, 1).contiguous().view(-1, H), (2, H, 5, 3)),
    "images, flattened first": (lambda x: x.flatten(2).transpose(1, 2).reshape(-1, H), (2, H, 5, 3)),
    "one image, flattened first": (lambda x: x.flatten(2).transpose(1, 2).reshape(-1, H), (1, H, 5, 3)),
    "features before tokens": (lambda x: x.t(), (H, 7)),
    "batch in the middle": (lambda x: x.transpose(0, 1).reshape(-1, H), (5, 2, H)),
    "rows of a new tensor": (lambda x: (x.transpose(0, 1) * 1).reshape(-1, H), (5, 2, H)),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_that_are_read_through_another_order(name: str) -> None:
    flat, shape = LAYOUTS[name]
    torch.manual_seed(0)
    model, x, seen = Flattened(flat), torch.randn(shape), Seen()
    torch.testing.assert_close(torch.compile(model, backend=capturing(seen))(x), model(x))
    assert len(seen.report.fused) == 1, str(seen.report)


class Image(MoE):
    """An image in, an image out, and experts that are skipped where nothing chose them."""

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        rows = x.permute(0, 2, 3, 1).reshape(-1, c)
        weights, ids = self.route(rows)
        out = torch.zeros_like(rows)
        for e, expert in enumerate(self.experts):
            tok, slot = torch.where(ids == e)
            if tok.numel() == 0:
                continue
            out.index_add_(0, tok, expert(rows[tok]) * weights[tok, slot, None])
        return out.view(b, h, w, c).permute(0, 3, 1, 2)


def test_images_whose_width_changes() -> None:
    """From the second width on it is a symbol."""
    torch.manual_seed(0)
    model, seen = Image(), Seen()
    compiled = torch.compile(model, backend=capturing(seen))
    for width in (5, 6, 7):
        x = torch.randn(2, H, width, 3)
        torch.testing.assert_close(compiled(x), model(x))
    assert (len(seen.graphs), len(seen.report.fused)) == (2, 2), str(seen.report)


class Guarded(MoE):
    """``view(n, -1)`` has no meaning for no rows, and the program never runs it for none."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            tok, slot = torch.where(ids == e)
            n = tok.shape[0]
            if n == 0:
                continue
            out.index_add_(0, tok, expert(x[tok].view(n, -1)) * weights[tok, slot, None])
        return out


def test_a_body_that_cannot_run_without_rows() -> None:
    seen = check(Guarded)
    assert len(seen.report.fused) == 1, str(seen.report)
