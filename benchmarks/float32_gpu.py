"""Products of experts in float32 on a GPU, one by one, with other tiles: what a training step of one Qwen3-30B-A3B layer is made of.

    python benchmarks/float32_gpu.py --out benchmarks/results/float32-tiles-h200.json
    python benchmarks/float32_gpu.py --device cpu          # smoke test, with TRITON_INTERPRET=1

Forward (in, out), gradients of rows (back) and of weights (grad), as training takes them: the kernels gather tokens. Each is compared with
float64 for the rows of one expert first. Milliseconds of a call, the least of three runs of calls in a row; "grouped_mm" is torch's
product of rows that are sorted already.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from _timing import by_line, environment, in_a_row  # noqa: E402

from moefuse.kernels.triton.host import linear, sorted_rows, wgrad  # noqa: E402
from moefuse.kernels.triton.host.sorted_rows import Sorted  # noqa: E402
from moefuse.runtime.providers import forget_records  # noqa: E402
from moefuse.tuning.problem import Tiles  # noqa: E402

E, K, H, I = 128, 8, 2048, 768  # noqa: E741
TINY = 6, 2, 64, 32


def choices(*rows: tuple[int, ...]) -> list[tuple[int, Tiles]]:
    """(rows of a tile, the rest of it) of: rows, features, inputs, warps, stages; for gradients of weights out, in, rows, warps, stages."""
    return [(first, Tiles(bn, bk, warps, stages, 8)) for first, bn, bk, warps, stages in rows]


LINEAR = choices(
    (64, 64, 32, 4, 3), (128, 64, 16, 4, 3), (128, 64, 16, 4, 4), (128, 64, 32, 4, 3), (128, 64, 32, 8, 3), (128, 32, 32, 4, 3),
    (64, 128, 16, 4, 4), (64, 128, 32, 4, 3), (64, 64, 64, 4, 2), (128, 128, 16, 8, 4), (128, 128, 32, 8, 3), (32, 64, 32, 4, 3),
)  # fmt: skip
GRADS = choices(
    (64, 64, 32, 4, 3), (128, 64, 16, 4, 3), (128, 64, 16, 4, 4), (128, 64, 32, 4, 2), (128, 64, 32, 4, 3), (128, 64, 32, 8, 3),
    (64, 128, 16, 4, 4), (64, 64, 16, 4, 4), (128, 32, 32, 4, 3), (128, 128, 16, 8, 3), (128, 128, 32, 8, 3), (64, 64, 64, 4, 2),
)  # fmt: skip


def milliseconds(call: Callable[[], Any], device: str) -> float:
    """Of one call, the least of three runs of calls in a row."""
    call()
    return min(in_a_row(call, 5, device) for _ in range(3)) / 1e3


def relative(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


class Layer:
    """One layer and its rows."""

    def __init__(self, device: str, tokens: int) -> None:
        e, k, h, i = TINY if device == "cpu" else (E, K, H, I)
        torch.manual_seed(0)
        self.device, self.experts, self.slots = device, e, tokens * k
        draw = functools.partial(torch.randn, device=device)
        ids = draw(tokens, e).topk(k).indices
        order, offsets = sorted_rows.sort(ids, e)
        self.it = Sorted(order, offsets, self.slots, e, k)
        self.ends = offsets[1:].to(torch.int32)
        self.x, self.d_out, self.d_h, self.a = draw(tokens, h), draw(tokens, h), draw(self.slots, 2 * i), draw(self.slots, i)
        self.w_in, self.w_out = draw(e, 2 * i, h) * h**-0.5, draw(e, h, i) * i**-0.5
        self.at = slice(*offsets[1:3].tolist())

    def products(self) -> Iterator[tuple[str, Tensor, Tensor, bool, bool]]:
        """(name, rows or tokens, weight, whether these are tokens, whether by the transpose)."""
        yield "in", self.x, self.w_in, True, False
        yield "out", self.a, self.w_out, False, False
        yield "back out", self.d_out, self.w_out, True, True
        yield "back in", self.d_h, self.w_in, False, True

    def rows(self, t: Tensor, tokens: bool) -> Tensor:
        return t[self.it.order // self.it.top_k] if tokens else t


def swept(layer: Layer) -> Iterator[dict[str, Any]]:
    """All tiles of all products."""
    timed = functools.partial(milliseconds, device=layer.device)
    for name, x, w, tokens, back in layer.products():
        matrix, rows = w if back else w.transpose(1, 2), layer.rows(x, tokens)
        exact = rows[layer.at].double() @ matrix[1].double()
        out = torch.empty(layer.slots, matrix.shape[2], device=layer.device)
        grouped = functools.partial(F.grouped_mm, rows, matrix, offs=layer.ends)
        yield {"product": name, "way": "grouped_mm", "error": relative(grouped()[layer.at], exact), "ms": timed(grouped)}
        weight = linear.weight([w]).transposed() if back else linear.weight([w])
        for bm, part in LINEAR:
            forget_records()
            sorted_rows.tile_rows = lambda *_, bm=bm: bm  # type: ignore[assignment, misc]
            linear.linear_sizes = lambda *_, part=part: part  # type: ignore[assignment, misc]
            call = functools.partial(linear.linear, out, x, weight, sorted_rows.tiled(layer.it, torch.float32), tokens=tokens)
            yield {"product": name, "way": way(bm, part), **tried(lambda call=call, out=out: call() or out[layer.at], exact, call, timed)}
    for name, g, x, w, g_tokens in (
        ("grad in", layer.d_h, layer.x, layer.w_in, False),
        ("grad out", layer.d_out, layer.a, layer.w_out, True),
    ):
        rows = layer.rows(g, g_tokens)[layer.at].double(), layer.rows(x, not g_tokens)[layer.at].double()
        exact = rows[0].t() @ rows[1]
        for bn, part in GRADS:
            forget_records()
            wgrad.grad_sizes = lambda *_, bn=bn, part=part: (bn, part)  # type: ignore[assignment, misc]
            call = functools.partial(wgrad.weight_grads, [w], g, x, layer.it, g_tokens=g_tokens, x_tokens=not g_tokens)
            yield {"product": name, "way": way(bn, part), **tried(lambda call=call: call()[0][1], exact, call, timed)}


def way(first: int, part: Tiles) -> str:
    return f"{first} x {part.bn} x {part.bk}, {part.warps} warps, {part.stages} stages"


def tried(once: Callable[[], Tensor], exact: Tensor, call: Callable[[], Any], timed: Callable[[Any], float]) -> dict[str, Any]:
    """Error and time of one way."""
    try:
        return {"error": relative(once(), exact), "ms": timed(call)}
    except Exception as error:  # too much shared memory, say
        return {"failed": str(error).splitlines()[0][:120]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, nargs="*", default=[4096, 512])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results: list[dict[str, Any]] = []
    for tokens in args.tokens:
        for found in swept(Layer(args.device, tokens)):
            results.append({"tokens": tokens, **found})
            print(*(f"{v:.3g}" if isinstance(v, float) else v for v in results[-1].values()), flush=True)
            if args.out is not None:
                args.out.write_text(by_line(environment(), "results", results))


if __name__ == "__main__":
    main()
