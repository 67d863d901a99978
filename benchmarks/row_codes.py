"""Float8 experts on several GPUs: tokens that travel as codes and scales (``moefuse::row_codes``) beside tokens that the experts round.

    torchrun --nproc-per-node 2 benchmarks/row_codes.py --out benchmarks/results/row-codes-h200x2.json
    torchrun --nproc-per-node 2 benchmarks/row_codes.py --device cpu --tiny --tokens 8     # smoke test

The experts of Qwen3-30B-A3B in blocks of 128 x 128, by all-gather and by shared memory: dispatch, experts and combine as a compiled layer
has them, in CUDA graphs and launched. ``bits``: whether both give the same; of few tokens kernels may add in another order. Figures are the
slowest rank's.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import balanced  # noqa: E402
from _ranks import PER_GRAPH, head, in_turns, leave, say, start, summary  # noqa: E402
from _timing import by_line, captured  # noqa: E402

import moefuse  # noqa: E402
from moefuse.ops.meaning.encoding import Encoding, Rounding  # noqa: E402

EXPERTS, TOP, HIDDEN, INTER = 128, 8, 2048, 768
ops = torch.ops.moefuse


class Routed(nn.Module):
    """What ``parallelize`` finds: a router, and something of each expert."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, EXPERTS, bias=False)
        self.up, self.down = nn.Parameter(torch.zeros(EXPERTS, 8, 8)), nn.Parameter(torch.zeros(EXPERTS, 8, 8))


def held(count: int, out: int, inp: int, device: torch.device, block: int) -> tuple[Tensor, Tensor]:
    """Storage [count, out, inp], float8, and scales of its blocks."""
    storage = torch.randn(count, out, inp, device=device).to(torch.float8_e4m3fn)
    return storage, torch.rand(count, out // block, inp // block, device=device) * inp**-0.5


@torch.no_grad()
def measured(mesh: DeviceMesh, device: torch.device, tokens: int, transport: str, tiny: bool, rounds: int) -> list[dict[str, Any]]:
    torch._dynamo.reset()
    hidden, inter, block = (64, 32, 32) if tiny else (HIDDEN, INTER, 128)
    model = nn.Sequential(Routed().to(device))
    plan = moefuse.parallelize(model, mesh, transport=transport, max_tokens=tokens)  # type: ignore[arg-type]
    layer, place = plan.layers[0], model[0]._moefuse_place
    route = place, layer.placement.slots, layer.terms[0].text, "experts"
    rounding = Rounding("e4m3", block)
    plain = Encoding("e4m3", (block, block), activation=rounding)
    came = str(replace(plain, activation=replace(rounding, came="bfloat16")))
    how, unrounded = str(rounding), str(plain)
    (w_in, s_in), (w_out, s_out) = (held(layer.placement.slots, *size, device, block) for size in ((2 * inter, hidden), (hidden, inter)))
    generator = torch.Generator(device).manual_seed(dist.get_rank())
    x = torch.randn(tokens, hidden, device=device, generator=generator).bfloat16()
    ids = torch.rand(tokens, EXPERTS, device=device, generator=generator).topk(TOP)[1]
    weights = torch.rand(tokens, TOP, device=device, generator=generator).softmax(-1)

    def run(rounded: bool) -> Tensor:
        rows = ops.row_codes(x, how) if rounded else x
        arrived, scores, local, *handle = ops.ep_dispatch([rows, weights], ids, *route)
        encodings = [came if rounded else unrounded, "", unrounded]
        given = arrived, local, scores, [w_in], [], [w_out], [], [], [], *([[]] * 6), [s_in, s_out]
        y = ops.experts_extended(*given, activation="silu", gating="merged", encodings=encodings)
        out: Tensor = ops.ep_combine(y, handle, tokens, *route[2:])
        return out

    compiled = {rounded: torch.compile(functools.partial(run, rounded), dynamic=False, fullgraph=True) for rounded in (False, True)}
    same = torch.equal(compiled[True](), compiled[False]())
    calls: dict[str, tuple[Callable[[], Any], int]] = {}
    for rounded in (False, True):
        name = "rounded before" if rounded else "as they are"
        calls[f"{name}, launched"] = compiled[rounded], 1
        if device.type == "cuda":
            calls[f"{name}, graph"] = captured(compiled[rounded], PER_GRAPH), PER_GRAPH
    times = in_turns(calls, rounds=rounds)
    bits = "equal" if same else "differ"
    return [{"T": tokens, "transport": transport, "tokens": name, "bits": bits, **summary(found)} for name, found in times.items()]


def main() -> None:
    args = balanced.arguments(__doc__)
    _, world, device = start(args.device)
    mesh = init_device_mesh(device.type, (world,), mesh_dim_names=("ep",))["ep"]
    results = []
    for transport in ("symm", "allgather") if device.type == "cuda" else ("allgather",):
        for tokens in args.tokens:
            some = measured(mesh, device, tokens, transport, args.tiny, args.rounds)
            say(*(f"{r['transport']} {r['T']} {r['tokens']}: {r['median']:.1f} us, bits {r['bits']}\n" for r in some))
            results += some
    if args.out and dist.get_rank() == 0:
        info = head("us of a layer's call, the slowest rank's", "torchrun benchmarks/row_codes.py", args.commit)
        args.out.write_text(by_line(info, "results", results))
    leave()


if __name__ == "__main__":
    main()
