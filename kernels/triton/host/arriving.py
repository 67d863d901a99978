"""A plan whose tokens come and leave in parts: ids and routing weights of all of them are there, rows of some are under way.

Own rows are copied into sorted order while those of others travel, and own slots are added up while the sums of others travel back. Each
launch with a row of programs for each token (``Planned.by_token``) is made for some tokens at a time, with the tiles and the order of the
whole call: results are the same bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from moefuse.kernels.triton.host.plan import Plan, launch_all
from moefuse.kernels.triton.host.plan_tiles import sent_sum
from moefuse.kernels.triton.launch.beside import Beside
from moefuse.kernels.triton.launch.launch import Launch
from moefuse.ops.meaning.call import ExpertsCall


class Part(NamedTuple):
    """Some tokens of a call.

    Attributes:
        tokens: from where and up to where.
        x: [n, H], their rows, with the strides of those of the call.
        out: [n, N], contiguous; None: they are not added up by themselves.
    """

    tokens: slice
    x: Tensor
    out: Tensor | None = None


def takes(plan: Plan) -> bool:
    """Whether a plan can be run so: it copies rows into sorted order, token by token."""
    return not plan.empty and "spread" in plan.by_token


def run(
    plan: Plan, call: ExpertsCall, own: Part, come: Iterable[Part], leave: Sequence[Part], beside: Beside,
    back: Callable[[], None], programs: int,
) -> None:  # fmt: skip
    """Sums of ``own`` and of ``leave``.

    Args:
        call: of all tokens; its x is not read.
        come: the tokens of others, each part as its rows have come.
        leave: the tokens whose sums are others'; nothing is written for those without an expert.
        back: launched behind the sums that leave.
        programs: of the kernel that sends sums, about.
    """
    call = plan.uniform(call)
    tensors = plan.tensors(call, {"out": call.x})
    first, last = (plan.steps.index(plan.by_token[name]) for name in ("spread", "sum"))
    launch_all(plan.steps[:first], tensors)
    _some(plan, plan.by_token["spread"], tensors, own)
    for part in come:
        _some(plan, plan.by_token["spread"], tensors, part)
    launch_all(plan.steps[first + 1 : last], tensors)
    # What leaves is launched first, and where the products were: a second stream would begin some microseconds later.
    beside.fork()
    for part in leave:
        _launch(plan, sent_sum(plan, part.tokens.stop - part.tokens.start, programs), tensors, part)
    back()
    with beside:
        _some(plan, plan.by_token["sum"], tensors, own)
    beside.meet()


def _some(plan: Plan, it: Launch, tensors: Mapping[str, Tensor], part: Part) -> None:
    """A launch for the tokens of a part, if there are any."""
    tokens = part.tokens.stop - part.tokens.start
    if tokens:
        _launch(plan, it.over(tokens), tensors, part)


def _launch(plan: Plan, it: Launch, tensors: Mapping[str, Tensor], part: Part) -> None:
    (start, stop), k = (part.tokens.start, part.tokens.stop), plan.top_k
    given = {**tensors, "x": part.x, "out": part.x if part.out is None else part.out}
    given |= {name: tensors[name][start:stop] for name in ("ids", "weights")}
    given["position"] = tensors["position"][start * k : stop * k]
    launch_all([it], given)
