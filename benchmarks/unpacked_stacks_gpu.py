"""A layer whose program unpacks whole stacks in few bits, on a GPU: with what it unpacks, and with stacks read as they are held.

    python benchmarks/unpacked_stacks_gpu.py [--tokens 1024,4096] [--out DIR]

Sorted rows and torch's grouped products, at the size of Qwen3-30B-A3B, in bfloat16 without gradients. Microseconds of a call, the median of
twelve, and the most memory that it holds beside the model's and its inputs'. The two are compared first.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path[:0] = [str(Path(__file__).parent.parent)]

import moefuse  # noqa: E402
from moefuse.passes.match import whole_stacks  # noqa: E402

E, H, I, K = 128, 2048, 768, 8  # noqa: E741  (the letters of moefuse.spec)
BLOCK, BOUND = 128, 2e-2
FORMS = ("u4 groups of 128", "e4m3 blocks")


class Layer(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.four = form.startswith("u4")
        self.router = nn.Linear(H, E, bias=False, device="cuda", dtype=torch.bfloat16)
        for name, (n, k) in {"first": (2 * I, H), "last": (H, I)}.items():
            if self.four:
                codes = torch.randint(0, 256, (E, n, k // 2), dtype=torch.uint8, device="cuda")
                scales = torch.rand(E, n, k // BLOCK, device="cuda", dtype=torch.bfloat16) * 0.02
            else:
                codes = torch.randn(E, n, k, device="cuda", dtype=torch.bfloat16).to(torch.float8_e4m3fn)
                scales = torch.rand(E, n // BLOCK, k // BLOCK, device="cuda") * 0.05
            self.register_buffer(name, codes)
            self.register_buffer(f"{name}_scales", scales)

    def unpacked(self, codes: Tensor, scales: Tensor) -> Tensor:
        if self.four:
            value = torch.stack([codes & 15, codes >> 4], -1).flatten(-2).to(torch.bfloat16) - 8
            return (value.unflatten(-1, (-1, BLOCK)) * scales[..., None]).flatten(-2)
        value = codes.float().reshape(E, scales.shape[1], BLOCK, scales.shape[2], BLOCK)
        return (value * scales[:, :, None, :, None]).reshape(codes.shape).to(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).float().softmax(-1).topk(K)
        order = ids.flatten().argsort(stable=True)
        ends = torch.bincount(ids.flatten(), minlength=E).cumsum(0).to(torch.int32)
        first, last = self.unpacked(self.first, self.first_scales), self.unpacked(self.last, self.last_scales)
        gate, up = torch._grouped_mm(x[order // K], first.transpose(1, 2), offs=ends).chunk(2, -1)
        y = torch._grouped_mm(nn.functional.silu(gate) * up, last.transpose(1, 2), offs=ends)
        return torch.zeros_like(x).index_add_(0, order // K, y * weights.to(x.dtype).flatten()[order, None])


def measured(layer: Layer, x: Tensor, most: float) -> tuple[float, float, Tensor]:
    """(us, MiB, the result) with stacks read up to so many slots for each expert."""
    whole_stacks.READ.update({name: most for name in whole_stacks.READ if name.startswith("cuda")})
    torch._dynamo.reset()
    run = torch.compile(layer, backend="moefuse", dynamic=False)
    for _ in range(4):
        out = run(x)
    torch.cuda.synchronize()
    before, times = torch.cuda.memory_allocated(), []
    torch.cuda.reset_peak_memory_stats()
    for _ in range(12):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run(x)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    report = moefuse.last_report()
    assert report is not None
    assert (report.fused[0].spec.encoding != "") == (most > 0), str(report)
    return statistics.median(times), (torch.cuda.max_memory_allocated() - before) / 2**20, out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="1024,2048,4096,8192,16384")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    args = parser.parse_args()
    rows = list[dict[str, Any]]()
    with torch.inference_mode():
        for form in FORMS:
            layer = Layer(form)
            for tokens in map(int, args.tokens.split(",")):
                x = torch.randn(tokens, H, device="cuda", dtype=torch.bfloat16)
                (us, mib, theirs), (held_us, held_mib, ours) = (measured(layer, x, most) for most in (0.0, float("inf")))
                error = float((ours.float() - theirs.float()).abs().max() / theirs.float().abs().max())
                assert error < BOUND, error
                row = {"unpacked_us": us, "unpacked_mib": mib, "held_us": held_us, "held_mib": held_mib}
                rows.append({"form": form, "T": tokens, **{k: round(v, 1) for k, v in row.items()}, "error": error})
                print(
                    f"{form} {tokens}: unpacked {us:.0f} us, {mib:.0f} MiB; held {held_us:.0f} us, {held_mib:.0f} MiB: {us / held_us:.2f}x"
                )
    head = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "unit": "microseconds per call, MiB"}
    (args.out / "unpacked_stacks.json").write_text(json.dumps({**head, "results": rows}, indent=0))


if __name__ == "__main__":
    main()
