"""The Triton kernels as providers of moefuse's ops on CUDA, and what they do not take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moefuse._torch_private import current_device
from moefuse.kernels.triton import chunks, grouped_mm
from moefuse.kernels.triton.launch import native
from moefuse.kernels.triton.launch.launch import INTERPRETED
from moefuse.kernels.triton.layout import DTYPES, Body, Lists
from moefuse.kernels.triton.plan import Plan
from moefuse.ops.body import decode, unpack
from moefuse.runtime import providers

NAME = "triton"
DEVICE = "cpu" if INTERPRETED else "cuda"

AnyPlan = Plan | grouped_mm.LibraryPlan | chunks.ChunkedPlan
_PLANS: dict[Any, AnyPlan] = {}
_MAX_PLANS = 4096
"""Plans kept; beyond, all are dropped and made again when needed (a compiled kernel stays with Triton)."""


def supports(x: Tensor, ids: Tensor, weights: Tensor, w_in: Sequence[Tensor], *rest: Any) -> str | None:
    """None, or why these kernels cannot run a call of ``moefuse::experts``. Looks at devices, dtypes and sizes only."""
    if x.device.type != DEVICE:
        return f"tensors on {x.device.type}, the kernels run on {DEVICE}"
    if x.dtype not in DTYPES:
        return f"no kernel for {x.dtype}"
    return None


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w_in: Sequence[Tensor],
    w_up: Sequence[Tensor],
    w_out: Sequence[Tensor],
    b_in: Sequence[Tensor],
    b_up: Sequence[Tensor],
    b_out: Sequence[Tensor],
    activation: str,
    activation_args: Sequence[float],
    gating: str,
    up_first: bool,
    weight_on_input: bool,
    out_dtype: torch.dtype | None,
) -> Tensor:
    """``moefuse::experts``, arguments in schema order."""
    lists = (w_in, w_up, w_out, b_in, b_up, b_out)
    key, body = _key(x, ids, weights, *lists, activation, activation_args, gating, up_first, weight_on_input, out_dtype)
    plan = _PLANS.get(key)
    if plan is None:
        plan = _plan(key, x, ids, weights, lists, Body(*body))
    if x.device.type == "cuda" and x.device.index != current_device():
        with torch.cuda.device(x.device):
            return plan.run(x, ids, weights, plan.uniform(lists))
    return plan.run(x, ids, weights, plan.uniform(lists))


def _key(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w_in: Sequence[Tensor],
    w_up: Sequence[Tensor],
    w_out: Sequence[Tensor],
    b_in: Sequence[Tensor],
    b_up: Sequence[Tensor],
    b_out: Sequence[Tensor],
    activation: str,
    activation_args: Sequence[float],
    gating: str,
    up_first: bool,
    weight_on_input: bool,
    out_dtype: torch.dtype | None,
) -> tuple[Any, Any]:
    """(what the plan of a call depends on, the fields of its body)."""
    arg0, arg1, *_ = (*activation_args, 0.0, 0.0)
    body = (activation, (arg0, arg1), gating, up_first, weight_on_input, out_dtype or x.dtype)
    lists = (w_in, w_up, w_out, b_in, b_up, b_out)
    tf32 = x.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32
    return (*body, tf32, *_kind(x), *_kind(ids), *_kind(weights), *map(_kinds, lists)), body


def _kind(t: Tensor) -> tuple[Any, ...]:
    """What a plan depends on of one tensor."""
    return t.shape, t.stride(), t.dtype, t.device, t.data_ptr() & 15


def _kinds(tensors: Sequence[Tensor]) -> Any:
    """What a plan depends on of one list."""
    n = len(tensors)
    if not n:
        return None
    t = tensors[0]
    if n == 1:
        return t.shape, t.stride(), t.data_ptr() & 15
    # Shapes are equal (the op checks them). One pass of each kind over the tensors is quicker than one tuple per tensor.
    strides = {t.stride() for t in tensors}
    return n, t.shape, t.stride() if len(strides) == 1 else None, any(t.data_ptr() & 15 for t in tensors)


def _plan(key: Any, x: Tensor, ids: Tensor, weights: Tensor, lists: Lists, body: Body) -> AnyPlan:
    if len(_PLANS) >= _MAX_PLANS:
        forget_plans()
    form = grouped_mm.form_for(x, ids, lists, body) if chunks.allowed() is None else None
    plan: AnyPlan = grouped_mm.LibraryPlan(x, ids, weights, lists, body, form) if form is not None else Plan(x, ids, weights, lists, body)
    if isinstance(plan, Plan):
        plan = chunks.chunked(plan, x, ids, weights, lists, body)
    _PLANS[key] = plan
    return plan


_BY_FORM: dict[Any, tuple[Plan, tuple[int, ...], bool]] = {}
"""Plans that launch directly, keyed by the arguments of the internal op: with the positions of their inputs, and whether C++ knows."""


@dataclass
class _Separate:
    """A plan of calls with these very Parameters: what ``run_at`` takes, the tables among that, and whether C++ was asked to launch it."""

    plan: Plan
    places: dict[str, int]
    tables: list[Tensor]
    told: bool = False


_BY_ADDRESS: dict[Any, _Separate] = {}
"""Keyed by the arguments of the internal op, all addresses of Parameters among them."""


def infer(tensors: Sequence[Tensor], counts: Sequence[int], body: int, arg0: float, arg1: float, out_dtype: torch.dtype) -> Tensor:
    """``moefuse::experts_infer`` on CUDA: what a compiled model calls, so the known case is decided with little Python.

    Where C++ can be compiled, ``native.py`` has taken over what comes here twice.
    """
    if providers.PROVIDERS["experts"][0].name != NAME:
        return _general(tensors, counts, body, arg0, arg1, out_dtype)
    if max(counts) > 1:
        return _infer_separate(tensors, counts, body, arg0, arg1, out_dtype)
    x = tensors[0]
    pointers = [t.data_ptr() for t in tensors]
    key = (
        body, arg0, arg1, out_dtype, tuple(counts), x.dtype, tensors[1].dtype, tensors[2].dtype, x.get_device(),
        tuple([(t.shape, t.stride(), p & 15) for t, p in zip(tensors, pointers, strict=True)]),
        x.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32,
    )  # fmt: skip
    known = _BY_FORM.get(key)
    if known is None:
        out = _general(tensors, counts, body, arg0, arg1, out_dtype)
        _remember(key, tensors, counts, body, arg0, arg1, out_dtype)
        return out
    plan, positions, told = known
    if not told and native.ready():
        _BY_FORM[key] = plan, positions, True
        native.remember(native.key_of(tensors, counts, body, arg0, arg1, out_dtype), plan, positions)
    if plan.index == current_device():
        direct = plan.run_flat([pointers[i] for i in positions])
        if direct is not None:
            return direct
    return _general(tensors, counts, body, arg0, arg1, out_dtype)


def _infer_separate(
    tensors: Sequence[Tensor], counts: Sequence[int], body: int, arg0: float, arg1: float, out_dtype: torch.dtype
) -> Tensor:
    """:func:`infer` where experts are separate Parameters."""
    x, ids, weights, *flat = tensors
    firsts, start = [], 0
    for n in counts:
        firsts += flat[start : start + min(n, 1)]
        start += n
    key = (
        body, arg0, arg1, out_dtype, tuple(counts), *map(_kind, (x, ids, weights)),
        x.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32,
        tuple([t.shape for t in firsts]),  # shapes are equal in a list
        tuple([t.data_ptr() for t in flat]), tuple([t.stride() for t in flat]),
    )  # fmt: skip
    known = _BY_ADDRESS.get(key)
    if known is None or known.plan.index != current_device():
        out = _general(tensors, counts, body, arg0, arg1, out_dtype)
        if known is None and not torch.cuda.is_current_stream_capturing():  # a table that is written there holds nothing yet
            _remember_separate(key, tensors, counts, body, arg0, arg1, out_dtype)
        return out
    if not known.told and native.ready():
        known.told = True
        tables = known.plan.tables(tuple(unpack(tensors, counts)[3:]))
        if tables is not None:
            made = native.key_of(tensors, counts, body, arg0, arg1, out_dtype)
            native.remember(made, known.plan, known.plan.positions(counts), tables)
    return known.plan.run_at(x, ids, weights, known.places)


def _general(tensors: Sequence[Tensor], counts: Sequence[int], body: int, arg0: float, arg1: float, out_dtype: torch.dtype) -> Tensor:
    out: Tensor = providers.run("experts", *unpack(tensors, counts), *decode(body, arg0, arg1).values(), out_dtype)
    return out


def _remember(
    key: Any, tensors: Sequence[Tensor], counts: Sequence[int], body: int, arg0: float, arg1: float, out_dtype: torch.dtype
) -> None:
    """Note the plan of the call that has just run, if it launches directly."""
    native.start()
    data, options = unpack(tensors, counts), decode(body, arg0, arg1)
    made, _ = _key(*data, *options.values(), out_dtype)  # type: ignore[call-arg]
    plan = _PLANS.get(made)
    if not isinstance(plan, Plan) or plan.direct is None:
        return
    if len(_BY_FORM) >= _MAX_PLANS:
        forget_plans()
    _BY_FORM[key] = plan, plan.positions(counts), False


def _remember_separate(
    key: Any, tensors: Sequence[Tensor], counts: Sequence[int], body: int, arg0: float, arg1: float, out_dtype: torch.dtype
) -> None:
    """Note the plan of the call that has just run, and where it finds the weights."""
    native.start()
    data, options = unpack(tensors, counts), decode(body, arg0, arg1)
    made, _ = _key(*data, *options.values(), out_dtype)  # type: ignore[call-arg]
    plan = _PLANS.get(made)
    if not isinstance(plan, Plan) or not plan.ready or plan.empty or any(plan.stacked):
        return
    if len(_BY_ADDRESS) >= _MAX_PLANS:
        _BY_ADDRESS.clear()
    _BY_ADDRESS[key] = _Separate(plan, *plan.places(tuple(data[3:])))


def forget_plans() -> None:
    """Make every plan anew at its next call, so that it takes a configuration that was measured since.

    CUDA graphs recorded before stay as they are: a graph holds the launches, and Triton keeps the kernels that it launches.
    """
    _PLANS.clear()
    _BY_FORM.clear()
    _BY_ADDRESS.clear()
    native.forget()
