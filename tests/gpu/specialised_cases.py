"""Random calls by kernels with specialised warps, in a process of its own: a protocol that is wrong can hang.

    python -m tests.gpu.specialised_cases SEED COUNT [train]

Every case is checked against the reference, run again over memory full of NaN, and must give the same bits. ``train``: gradients instead.
"""

from __future__ import annotations

import os
import random
import sys
from dataclasses import replace
from typing import Any

import torch

from moefuse.kernels.triton.config import fit, specialised_tiles
from moefuse.kernels.triton.host import plan as plans, plan_specialised, specialised
from moefuse.ops import ACTIVATIONS
from moefuse.tuning.problem import Config
from tests.cpu.ops_case import GATED, Case
from tests.gpu.gpu_case import assert_right, on_gpu

EACH = 8
"""Sizes that are tried with what was compiled once."""
FORMS = (("shared", 128), ("pingpong", 128), ("pingpong", 64))


def random_case(draw: random.Random, size: random.Random) -> Case:
    """A call whose rows are whole 16 bytes. ``draw`` decides what is compiled, ``size`` what is not."""
    activation = draw.choice([name for name, a in ACTIVATIONS.items() if a.num_args == 0 or draw.random() < 0.5])
    gating = draw.choice(GATED if ACTIVATIONS[activation].num_args else (*GATED, "plain"))
    experts, top_k = size.choice((2, 3, 9, 40)), draw.choice((1, 2, 4, 8))
    tokens = size.choice((0, 1, 2, 63, 64, 65, 129, size.randrange(1, 3000)))
    # Numbers that are 16 times something are compiled as such.
    step = draw.choice((8, 16))
    hidden, inter, out = (step * size.choice((1, 2, 7, 8, 9, 16, 17, 33, 48, 50)) + 8 * (step == 8) for _ in range(3))
    storage: dict[str, Any] = draw.choice(({}, {"transposed": True}, {"separate": True}))
    if "transposed" in storage and draw.random() < 0.8:
        hidden, inter = (max(n // 64, 1) * 64 for n in (hidden, inter))
    return Case(
        tokens=tokens, hidden=hidden, inter=inter, hidden_out=out, experts=experts, top_k=top_k, gating=gating, activation=activation,
        up_first=gating in ("merged", "interleaved") and draw.random() < 0.3, weight_on_input=draw.random() < 0.3, bias=draw.random() < 0.5,
        dtype=draw.choice((torch.bfloat16, torch.float16)), low_id=size.choice((-1, 0)),
        high_id=size.choice((None, experts, max(experts // 3, 1))), seed=size.randrange(1 << 30), **storage,
    )  # fmt: skip


def random_config(draw: random.Random, problem: Any, shared: int) -> Config:
    """Cuts that a table or a search may have."""
    form, bm = draw.choice(FORMS)
    config = specialised_tiles(problem, bm, form)
    other = specialised_tiles(problem, bm, draw.choice([name for name, rows in FORMS if rows == bm]))
    parts = [replace(part, group=draw.choice((1, 3, 8)), stages=draw.choice((2, 3, part.stages))) for part in (config.up, other.down)]
    return fit(problem, replace(config, up=parts[0], down=parts[1], pdl=draw.random() < 0.3), shared, 2)


def infer(case: Case, draw: random.Random) -> bool:
    """Check one call; False if these kernels do not take it."""
    args = on_gpu(case.args())
    call = case.call(args)
    probe = plans.Plan(call)
    if plan_specialised.refusal(probe) is not None:
        return False
    problem = probe.problem
    config = random_config(draw, problem, probe.device.shared)
    plan = plans.Plan(call, config)
    out = plan.run(call)
    assert_right(out, args, case.options)
    poison = torch.full((plan.workspace.size // 4 + (1 << 20),), float("nan"), device="cuda")
    del poison
    for _ in range(3):
        assert torch.equal(plan.run(call), out), f"not equal from run to run: {case} {config}"
    return True


def train(case: Case, draw: random.Random) -> bool:
    """Check the gradients of one call."""
    from tests.gpu.test_training import check

    specialised.LINEAR, specialised.GRADS = draw.choice(("shared", "pingpong")), draw.choice(("shared", "pingpong"))
    specialised.LEAST_ROWS = 1
    check(case)
    return True


def main() -> None:
    seed, count = int(sys.argv[1]), int(sys.argv[2])
    taken = 0
    for i in range(count):
        draw = random.Random(f"{seed} {i // EACH}")
        case = random_case(draw, random.Random(f"{seed} {i}"))
        try:
            taken += (train if "train" in sys.argv else infer)(case, draw)
        except BaseException:
            sys.stdout.write(f"case {i}: {case}\n")
            raise
    torch.cuda.synchronize()
    sys.stdout.write(f"{taken} of {count} cases taken\n")
    assert taken >= count // 3
    sys.stdout.flush()
    # torch's engine may still be giving back the last backward pass in its own thread, and aborts if Python is ending by then.
    os._exit(0)


if __name__ == "__main__":
    main()
