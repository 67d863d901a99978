"""``experts`` with the products left to ``torch.nn.functional.grouped_mm``, which is quicker for large experts with many rows each.

Around it are our own kernels: the sort, the gather, the activation, the weighted sum. In the form "down" the first projection with its
activation is ``gemm.up_tiles`` and only the second one is the library's. What is quicker is measured: an entry of a table of ``config.py``
may say so (:func:`preferred`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from moefuse.kernels.triton import config
from moefuse.kernels.triton.host import pointwise, sorted_rows
from moefuse.kernels.triton.host.layout import device_of
from moefuse.kernels.triton.host.plan import Plan
from moefuse.kernels.triton.host.pointwise import Activation
from moefuse.kernels.triton.host.sorted_rows import Lists, Sorted
from moefuse.kernels.triton.launch.recorded import recorded
from moefuse.ops.meaning.call import ExpertsCall
from moefuse.tuning import store
from moefuse.tuning.problem import Problem, problem_of

NAME = "grouped_mm"
FORMS = ("all", "down")
UP_KERNELS = ("up_tiles", "product_tiles")
"""Kernels that make h, the first of a plan."""
DTYPES: tuple[torch.dtype, ...] = (torch.bfloat16,)
"""The dtypes that the library takes on CUDA without waiting for the host."""
DEVICES = ("cuda",)
MAX_EXPERTS = 1024


def _fast(device: torch.device) -> bool:
    """Whether the library has kernels for the device: elsewhere it loops over experts on the host."""
    return device.type != "cuda" or (torch.version.hip is None and torch.cuda.get_device_capability(device)[0] in (9, 10))


def _strided(t: Tensor) -> bool:
    """Whether the library takes a matrix, or a stack of them: one dimension without gaps, the other in steps of whole 16 bytes."""
    n, k = t.stride()[-2:]
    rows, columns = t.shape[-2:]
    item = t.element_size()
    along, step = (n, k) if n == 1 and k >= max(rows, 1) else (k, n) if k == 1 and n >= max(columns, 1) else (0, 0)
    apart = t.stride(0) * item % 16 == 0 if t.dim() == 3 else True
    return along == 1 and step * item % 16 == 0 and apart and t.data_ptr() % 16 == 0


def refusal(x: Tensor, gating: str, biases: Sequence[Lists], *lists: Lists) -> str | None:
    """Why the library cannot compute the products of a call; None if it can. Looks at devices, dtypes, sizes and strides only."""
    if x.device.type not in DEVICES or x.dtype not in DTYPES:
        return f"{x.dtype} on {x.device.type}"
    if any(w[0].dtype != x.dtype for w in lists):
        return "weights that are rounded as they are read"
    if gating == "separate" or any(len(w) != 1 or w[0].dim() != 3 for w in lists):
        return "weights in several tensors"
    if any(biases):
        return "biases, which would be added to a rounded product"
    if lists[0][0].shape[0] > MAX_EXPERTS or not x.numel() or not _fast(x.device):
        return "too many experts, no tokens, or a device without kernels for it"
    sizes = [n for (w,) in lists for n in w.shape[1:]]
    fit = all(n > 0 and n * x.element_size() % 16 == 0 for n in sizes) and all(_strided(w) for (w,) in lists)
    return None if fit else "rows that are not whole 16 bytes"


def supports(call: ExpertsCall) -> str | None:
    """:func:`refusal` for a call. Of fake tensors only device and dtype are known to the end."""
    return refusal_of(call) or (None if call.ids.numel() else "no slots")


def refusal_of(call: ExpertsCall) -> str | None:
    """:func:`refusal` for the products of a call."""
    return refusal(call.x, call.body.gating, call.lists[3:], call.w_in.weight, call.w_out.weight)


def product(rows: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """rows [S, K] times w[e] [K, N] of each row's expert; dead rows are not written."""
    return torch.nn.functional.grouped_mm(rows, w, offs=ends)


def weight_grad(w: Tensor, g: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """Gradient of w [E, N, K], stored as it is, from sorted rows of its outputs g [S, N] and its inputs x [S, K]."""
    if w.stride(1) == 1 and w.stride(2) != 1:
        return torch.nn.functional.grouped_mm(x.t(), g, offs=ends).transpose(1, 2)
    return torch.nn.functional.grouped_mm(g.t(), x, offs=ends)


def gathered(x: Tensor, it: Sorted, scale: Tensor | None = None) -> Tensor:
    """Rows [S, N] of the tokens x [T, N], times their routing weight where ``scale`` is given; what dead rows are is nobody's."""
    out = torch.empty((it.slots, x.shape[1]), dtype=x.dtype, device=x.device)
    if scale is None:
        sorted_rows.gather(out, x, it, live=True)
    else:
        pointwise.pair(it, x, out, scale, out=out, d_weights=None)
    return out


@recorded
def experts(call: ExpertsCall) -> Tensor:
    """``moefuse::experts``, both products by the library."""
    x, ids, body = call.x, call.ids, call.body
    (w_in,), (w_out,) = call.w_in.weight, call.w_out.weight
    order, offsets = sorted_rows.sort(ids, w_in.shape[0])
    it = Sorted(order, offsets, ids.numel(), w_in.shape[0], call.top_k)
    ends = offsets[1:].to(torch.int32)
    rows = gathered(x, it, call.weights if body.on_input else None)
    h = product(rows, w_in.transpose(1, 2), ends)
    del rows
    a = torch.empty((it.slots, w_out.shape[2]), dtype=x.dtype, device=x.device)
    pointwise.activate(a, h, it, Activation(body, a.shape[1]))
    del h
    return _summed(product(a, w_out.transpose(1, 2), ends), it, None if body.on_input else call.weights, call.out_dtype)


def _summed(y: Tensor, it: Sorted, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
    out = torch.empty((it.slots // it.top_k, y.shape[1]), dtype=dtype, device=y.device)
    sorted_rows.sum_slots(out, y, it, weights)
    return out


class LibraryPlan:
    """In the place of a :class:`~moefuse.kernels.triton.host.plan.Plan`: calls of one kind with products by the library."""

    def __init__(self, call: ExpertsCall, form: str) -> None:
        self.up = Plan(call) if form == "down" else None
        # The launches until the activation; what they leave in the workspace is all that the rest needs.
        names = [step.kernel.__name__ for step in self.up.steps] if self.up is not None else []
        at = next((i for i, name in enumerate(names) if name in UP_KERNELS), None)
        self.steps = self.up.steps[: at + 1] if self.up is not None and at is not None else []

    def run(self, call: ExpertsCall) -> Tensor:
        """The output [T, N]."""
        if self.up is None:
            out: Tensor = experts(call)
            return out
        views = self.up.start(call, self.steps, {})
        it = Sorted(views["order"], views["offsets"], call.ids.numel(), call.w_in.experts, call.top_k)
        y = product(views["h"], call.w_out.weight[0].transpose(1, 2), views["offsets"][1:])
        return _summed(y, it, None if call.body.on_input else call.weights, call.out_dtype)


def form_for(call: ExpertsCall) -> str | None:
    """The form of the library's that is quicker than our kernels for a call by a measurement; None if none is known to be."""
    if supports(call) is not None:
        return None
    problem = problem_of(call.x, call.ids, call.w_in.weight, call.w_out.weight, call.body.gating)
    return preferred(problem, device_of(call.device).name)


def preferred(problem: Problem, device: str) -> str | None:
    """The form whose time is the least where ``moefuse.warmup`` measured the problem, else at the nearest entry of the table; None: our own
    kernels."""
    mine = store.find(device, problem)
    if mine is not None:
        return mine.form if mine.form in FORMS else None
    near = [(problem.distance(entry), i) for i, (entry, _) in enumerate(_measured(device)) if entry.form == problem.form]
    if not near or min(near)[0] >= config.FAR:
        return None
    times = _measured(device)[min(near)[1]][1]
    best = min(times, key=times.__getitem__)
    return None if best == "us" else best


@functools.cache
def _measured(device: str) -> tuple[tuple[Problem, dict[str, float]], ...]:
    """(problem, microseconds: "us" of our own kernels, others by form) of the device's table; entries without the others stand for ours.

    The times of the library are in an entry's ``grouped_mm``: {"all": 17100.0, "down": 17300.0}.
    """
    entries = [e for e in config.table_entries(device) if "us" in e]
    return tuple((Problem(**e["problem"]), {"us": e["us"], **e.get("grouped_mm", {})}) for e in entries)
