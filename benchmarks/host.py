"""Microseconds of the host for one known call of an op, with the driver's launch function replaced by one that returns.

    python benchmarks/host.py --out benchmarks/results/host-h200.json

What a compiled model pays for each op in default mode, beside what Inductor's code around it costs; the device does nothing. Small layers:
the host's work does not depend on sizes. A training step is the five ops of one layer as a compiled graph calls them: forward, the rows'
gradients, those of the tokens, of the first weights and of the last. Median of the turns of many calls each.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from moefuse.ops.meaning.call import ExpertsCall  # noqa: E402
from moefuse.ops.meaning.encoding import Encoding  # noqa: E402
from moefuse.ops.meaning.grad_calls import InCall, Needs, OutCall, RowsCall  # noqa: E402

T, H, INNER, E, K, RANK = 8, 256, 128, 16, 4, 16
AT_MOST = {"experts": 8, "experts, codes": 10, "experts, adapters": 10, "topk": 6, "training step": 80}
"""Microseconds that are wanted."""


def some(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").bfloat16()


def calls() -> dict[str, Callable[[], Any]]:
    from tests.cpu.coded_case import hold

    ops = torch.ops.moefuse
    x, weights, grad = some(T, H), torch.rand(T, K, device="cuda").bfloat16(), some(T, H)
    ids = torch.rand(T, E, device="cuda").topk(K).indices
    w_in, w_out = some(E, 2 * INNER, H), some(E, H, INNER)
    packed = ExpertsCall.of(x, ids, weights, [w_in], [], [w_out], [], [], []).pack()
    encoding = Encoding("e4m3", (32, 32))
    generator = torch.Generator().manual_seed(0)
    held = [hold(encoding, E, *shape, generator).lists(separate=False) for shape in ((2 * INNER, H), (H, INNER))]
    (a, a_codes), (b, b_codes) = [[[t.cuda() for t in part] for part in pair] for pair in held]
    factors = [[some(E, RANK, H)], [some(E, 2 * INNER, RANK)], [], [], [some(E, RANK, INNER)], [some(E, H, RANK)]]
    none: list[torch.Tensor] = []
    coded = (x, ids, weights, a, none, b, none, none, none, *[none] * 6, [*a_codes, *b_codes])
    adapted = (x, ids, weights, [w_in], none, [w_out], none, none, none, *factors, none)
    scores = torch.randn(T, E, device="cuda")
    need = Needs.of([True, True, True, False, True, False, False, False], False)
    call = ExpertsCall.unpack(*packed)

    def op(name: str) -> Any:
        return getattr(ops, f"{name}_compiled" if hasattr(ops, f"{name}_compiled") else name).default

    _, h, order, offsets = ops.experts_forward.default(*packed)
    rows = RowsCall(grad, weights, h, order, offsets, call.w_out, need, call.body).pack()
    d_h, a_rows, _ = ops.experts_backward_rows.default(*rows)
    both = (need.of_tokens, need.of_lists)
    first = [InCall(x, weights, d_h, order, offsets, call.w_in, call.w_up, wanted, call.body).pack() for wanted in both]
    last = OutCall(grad, weights, order, offsets, a_rows, call.w_out, need, call.body).pack()
    forward, of_rows, of_in, of_out = map(op, ("experts_forward", "experts_backward_rows", "experts_backward_in", "experts_backward_out"))

    def step() -> None:
        forward(*packed)
        of_rows(*rows)
        for given in first:
            of_in(*given)
        of_out(*last)

    def extended(data: Sequence[Any], **options: Any) -> Callable[[], Any]:
        if not hasattr(ops, "experts_extended_infer"):
            return lambda: ops.experts_extended.default(*data, **options)
        given, infer = ExpertsCall.of_extended(*data, **options).pack_extended(), ops.experts_extended_infer.default
        return lambda: infer(*given)

    return {
        "experts": lambda: ops.experts_infer.default(*packed),
        "experts, codes": extended(coded, encodings=[str(encoding), "", str(encoding)]),
        "experts, adapters": extended(adapted, scales=[1.0, 1.0, 1.0]),
        "topk": lambda: ops.topk.default(scores, K),
        "training step": step,
    }


def stubbed() -> None:
    """From now on records launch nothing; what Triton launches does run."""
    from moefuse.kernels.triton.launch import driver_launch

    nothing = ctypes.CDLL(None).pthread_equal  # of two different numbers: 0, which is success
    driver_launch.driver().launch = nothing


def microseconds(call: Callable[[], Any], many: int) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(many):
        call()
    return (time.perf_counter() - begin) / many * 1e6


def main() -> None:
    from _timing import by_line, environment

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    stubbed()
    rows = []
    with torch.no_grad():
        found = calls()
        found["experts"]()
        for thread in threading.enumerate():
            if "_start" in thread.name:
                thread.join()
        for call in found.values():
            for _ in range(5):
                call()
        turns = [{name: microseconds(call, options.calls) for name, call in found.items()} for _ in range(options.turns)]
    for name in found:
        us = sorted(turn[name] for turn in turns)
        row = {"call": name, "us": statistics.median(us), "least": us[0], "most": us[-1], "wanted": AT_MOST[name]}
        rows.append({key: round(value, 2) if isinstance(value, float) else value for key, value in row.items()})
        print(rows[-1], flush=True)
    if options.out is not None:
        options.out.write_text(by_line(environment(), "rows", rows))


if __name__ == "__main__":
    main()
