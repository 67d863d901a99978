"""Argument checks shared by the kernels and the fakes. Texts name the argument, what was given and what is legal.

Row counts may be symbolic; equalities between them go through :func:`_same`, which turns into a runtime assertion instead of a guard
where a value is not known yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NoReturn

import torch
from torch import Tensor

from moefuse.ops.meaning.activations import ACTIVATIONS
from moefuse.ops.meaning.call import Body, ExpertsCall, Stack, Term, cut
from moefuse.ops.meaning.coded_weights import Codes
from moefuse.ops.meaning.encoding import NAMED, Encoding
from moefuse.ops.meaning.held import holds
from moefuse.ops.meaning.recipe import SCORES, Recipe
from moefuse.ops.meaning.reference import GATINGS
from moefuse.ops.meaning.token_codes import ALIGN

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def _shape(t: Tensor) -> str:
    return "[" + ", ".join(str(s) for s in t.shape) + "]"


def bad_value(op: str, arg: str, given: str, legal: str) -> NoReturn:
    """Raise a ValueError that names an argument, what it is and what would be legal."""
    raise ValueError(f"moefuse::{op}: argument `{arg}` {given}; legal: {legal}")


def _bad_type(op: str, arg: str, given: str, legal: str) -> NoReturn:
    raise TypeError(f"moefuse::{op}: argument `{arg}` {given}; legal: {legal}")


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(str(d).removeprefix("torch.") for d in dtypes)


def _equal(a: Any, b: Any) -> bool:
    """Known to be equal. Asked before :func:`_same`, so that a call without errors builds no text."""
    return type(a) is int and type(b) is int and a == b


def _same(a: Any, b: Any, op: str, arg: str, given: Any, legal: str) -> None:
    """Require a == b for ints or SymInts, without making a guard out of it. ``given`` is a tensor (its shape is named) or a text."""
    if type(a) is int and type(b) is int:
        if a != b:
            bad_value(op, arg, f"has shape {_shape(given)}" if isinstance(given, Tensor) else given, legal)
        return
    torch._check(a == b, lambda: f"moefuse::{op}: argument `{arg}` has size {a}; legal: {legal}")


def _check_dim(t: Tensor, dim: int, op: str, arg: str, legal: str) -> None:
    if t.dim() != dim:
        bad_value(op, arg, f"has shape {_shape(t)}", legal)


def _check_ints(t: Tensor, op: str, arg: str, dtypes: Sequence[torch.dtype] = _INTS) -> None:
    if t.dtype not in dtypes:
        _bad_type(op, arg, f"has dtype {_names([t.dtype])}", _names(dtypes))


def _check_floats(t: Tensor, op: str, arg: str) -> None:
    if t.dtype not in _FLOATS:
        _bad_type(op, arg, f"has dtype {_names([t.dtype])}", _names(_FLOATS))


def _check_like(t: Tensor, like: Tensor, op: str, arg: str, like_name: str) -> None:
    """Same dtype and device as another argument."""
    if t.dtype != like.dtype:
        _bad_type(op, arg, f"has dtype {_names([t.dtype])}", f"{_names([like.dtype])}, the dtype of `{like_name}`")
    _check_device(t, like, op, arg, like_name)


def _check_held(w: Sequence[Tensor], x: Tensor, op: str, arg: str, like_name: str) -> tuple[Tensor, str]:
    """Weights are in the dtype that is computed in, that of ``x``, or in float32 where that has 16 bits.

    Returns what the other weights are like, and its name.
    """
    if not w or not holds(w[0].dtype, x.dtype):
        return x, like_name
    _check_device(w[0], x, op, arg, like_name)
    return w[0], arg


def _check_device(t: Tensor, like: Tensor, op: str, arg: str, like_name: str) -> None:
    if t.device != like.device:
        bad_value(op, arg, f"is on {t.device}", f"{like.device}, the device of `{like_name}`")


def _check_out_dtype(out_dtype: torch.dtype | None, op: str) -> None:
    if out_dtype is not None and out_dtype not in _FLOATS:
        _bad_type(op, "out_dtype", f"is {_names([out_dtype])}", f"None, {_names(_FLOATS)}")


def _check_list(w: Sequence[Tensor], dim: int, like: tuple[Tensor, str], op: str, arg: str) -> tuple[Any, ...]:
    """Check one weight list (dim 2) or vector list (dim 1) and return (E, *shape of one expert). ``like``: a tensor, and its name."""
    letters = "out, in" if dim == 2 else "out"
    legal = f"one stacked tensor [E, {letters}], or one tensor [{letters}] per expert"
    if not w:
        bad_value(op, arg, "is empty", legal)
    first = w[0]
    if len(w) == 1 and first.dim() == dim + 1:
        _check_like(first, like[0], op, arg, like[1])
        return tuple(first.shape)
    for i, t in enumerate(w):
        if t.dim() != dim:
            bad_value(op, f"{arg}[{i}]", f"has shape {_shape(t)} in a list of {len(w)}", legal)
        _check_like(t, like[0], op, f"{arg}[{i}]", like[1])
        for d in range(dim):
            if not _equal(t.shape[d], first.shape[d]):
                _same(t.shape[d], first.shape[d], op, f"{arg}[{i}]", t, f"{_shape(first)}, the shape of `{arg}[0]`")
    return (len(w), *first.shape)


def _check_weight(
    w: Sequence[Tensor], experts: Any, out: Any, inp: Any, like: tuple[Tensor, str], op: str, arg: str
) -> tuple[Any, Any, Any]:
    """Check a weight list against known sizes (None: any) and return (E, out, in)."""
    e, o, i = _check_list(w, 2, like, op, arg)
    if (experts is None or _equal(e, experts)) and (out is None or _equal(o, out)) and (inp is None or _equal(i, inp)):
        return e, o, i
    given = f"holds {e} experts of shape [{o}, {i}]"
    if experts is not None and not _equal(e, experts):
        _same(e, experts, op, arg, given, f"{experts} experts, as in `w_in`")
    if out is not None and not _equal(o, out):
        _same(o, out, op, arg, given, f"{out} output features")
    if inp is not None and not _equal(i, inp):
        _same(i, inp, op, arg, given, f"{inp} input features")
    return e, o, i


def _check_vector(v: Sequence[Tensor], experts: Any, size: Any, like: tuple[Tensor, str], op: str, arg: str) -> None:
    if not v:
        return
    e, n = _check_list(v, 1, like, op, arg)
    if _equal(e, experts) and _equal(n, size):
        return
    given = f"holds {e} vectors of size {n}"
    if not _equal(e, experts):
        _same(e, experts, op, arg, given, f"{experts} vectors, one per expert")
    if not _equal(n, size):
        _same(n, size, op, arg, given, f"size {size}, the output features of its projection")


_SHAPE, _DTYPE, _DEVICE = map(attrgetter, ("shape", "dtype", "device"))
_PLAIN = {Tensor, torch.nn.Parameter}
"""Types of tensors whose sizes are numbers."""
_legal: dict[Any, tuple[Any, Any, Any]] = {}
_MAX_LEGAL = 1 << 12


def check_experts(call: ExpertsCall, op: str = "experts") -> tuple[Any, Any, Any]:
    """Check the arguments of ``moefuse::experts``, which ``op`` has too, and return (E, width of the pre-activation, Hout).

    What is legal follows from sizes, dtypes, devices and options; finding these among those of earlier calls is quicker than checking them.

    Raises:
        TypeError: a dtype is not legal.
        ValueError: a shape, list length, device, or option is not legal.
    """
    tensors, counts = call.joined
    if not _PLAIN.issuperset(map(type, tensors)):
        return _check_experts(call, op)
    separate = cut(tensors, counts, 3) if max(counts) > 1 else []
    alone = tensors[:3] if separate else tensors
    kind = call.body, call.out_dtype, *counts, *[(t.shape, t.dtype, t.device) for t in alone], *map(_kinds, separate)
    sizes = _legal.get(kind)
    if sizes is None:
        if len(_legal) >= _MAX_LEGAL:
            _legal.clear()
        sizes = _legal[kind] = _check_experts(call, op)
    return sizes


def check_call(call: ExpertsCall, op: str) -> tuple[Any, Any, Any]:
    """The same of a call whose projections may have codes and low-rank terms.

    Raises:
        TypeError, ValueError: as :func:`check_experts`.
    """
    plain = []
    if call.came:
        call = _unrounded(call, op)
    for name, stack in zip(("w_in", "w_up", "w_out"), call.stacks, strict=True):
        plain.append(Stack(stack.weight if stack.codes is None else shown(stack.weight, stack.codes, call.x), stack.bias))
        if stack.codes is not None:
            check_codes(name, stack.weight, *stack.codes, call.x, op=op)
    w_in, w_up, w_out = plain
    sizes = check_experts(call.with_stacks((w_in, w_up, w_out)), op)
    for name, stack in zip(("in", "up", "out"), call.stacks, strict=True):
        if stack.term is not None:
            _check_term(name, stack, stack.term, call.x, op)
    return sizes


def _unrounded(call: ExpertsCall, op: str) -> ExpertsCall:
    """The call with tokens as they were before they were rounded, without memory of their own.

    Raises:
        TypeError, ValueError: its projections do not take rounded ones alike, or these are no such bytes.
    """
    x, firsts = call.x, [stack for stack in (call.w_in, call.w_up) if stack.weight]
    rounding = call.w_in.rounding
    if rounding is None or any(s.rounding != rounding for s in firsts) or (call.w_out.rounding is not None and call.w_out.rounding.came):
        bad_value(op, "encodings", "say that some projections get rounded tokens", "that w_in and w_up do, rounded alike")
    if call.body.on_input or any(stack.term is not None for stack in firsts):
        bad_value(op, "encodings", "say that tokens come rounded", "tokens that are not, where weights or low-rank terms multiply them")
    _check_dim(x, 2, op, "x", "[T, bytes]")
    if x.dtype != torch.uint8:
        _bad_type(op, "x", f"has dtype {_names([x.dtype])}", "uint8, for `encodings` say that tokens come rounded")
    inputs = call.w_in.inputs
    if not rounding.packs(inputs):
        bad_value(op, "encodings", f"say that {inputs} inputs come rounded by {rounding.group}", f"multiples of {ALIGN}")
    if not _equal(x.shape[1], rounding.width(inputs)):
        _same(x.shape[1], rounding.width(inputs), op, "x", x, f"[T, {rounding.width(inputs)}], codes and scales of {inputs} inputs")
    return call._replace(x=x.new_empty((), dtype=call.dtype).expand(x.shape[0], inputs))


def shown(storage: Sequence[Tensor], codes: Codes, x: Tensor) -> list[Tensor]:
    """Tensors of the shapes and the dtype of the weights, without memory of their own."""
    return [x.new_empty(()).expand(codes.encoding.logical(tuple(t.shape))) for t in storage]


def _kinds(tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    """All shapes, dtypes and devices in a list; those of a legal one are equal. Three passes without Python between two tensors."""
    return *{*map(_SHAPE, tensors)}, *{*map(_DTYPE, tensors)}, *{*map(_DEVICE, tensors)}


def _check_experts(call: ExpertsCall, op: str) -> tuple[Any, Any, Any]:
    x, ids, weights, (w_in, b_in, *_), (w_up, b_up, *_), (w_out, b_out, *_), body, out_dtype = call
    _check_dim(x, 2, op, "x", "[T, H]")
    _check_floats(x, op, "x")
    _check_dim(ids, 2, op, "ids", "[T, K]")
    _check_ints(ids, op, "ids")
    _check_dim(weights, 2, op, "weights", "[T, K], the shape of `ids`")
    _check_floats(weights, op, "weights")
    if not _equal(ids.shape[0], x.shape[0]):
        _same(ids.shape[0], x.shape[0], op, "ids", ids, f"[T, K] with T={x.shape[0]}, the rows of `x`")
    if not _equal(weights.shape[0], ids.shape[0]):
        _same(weights.shape[0], ids.shape[0], op, "weights", weights, f"{_shape(ids)}, the shape of `ids`")
    if not _equal(weights.shape[1], ids.shape[1]):
        _same(weights.shape[1], ids.shape[1], op, "weights", weights, f"{_shape(ids)}, the shape of `ids`")
    _check_device(ids, x, op, "ids", "x")
    _check_device(weights, x, op, "weights", "x")
    _check_body(op, body)
    _check_out_dtype(out_dtype, op)
    gating = body.gating
    gated = gating in ("merged", "interleaved")
    held = _check_held(w_in, x, op, "w_in", "x")
    experts, out, _ = _check_weight(w_in, None, None, x.shape[1], held, op, "w_in")
    if gated and out % 2:
        bad_value(op, "w_in", f"has {out} output features", f"an even number for gating {gating!r} (gate and up)")
    inner = out // 2 if gated else out
    if body.split:
        _check_weight(w_up, experts, out, x.shape[1], held, op, "w_up")
        _check_vector(b_up, experts, out, held, op, "b_up")
    elif w_up or b_up:
        arg = "w_up" if w_up else "b_up"
        bad_value(op, arg, f"holds {len(w_up or b_up)} tensors", f"an empty list for gating {gating!r}; only 'separate' has it")
    _, hidden, _ = _check_weight(w_out, experts, None, inner, held, op, "w_out")
    _check_vector(b_in, experts, out, held, op, "b_in")
    _check_vector(b_out, experts, hidden, held, op, "b_out")
    return experts, 2 * out if body.split else out, hidden


def _check_term(name: str, stack: Stack, term: Term, x: Tensor, op: str) -> None:
    """The low-rank term of one projection: A [E, r, in] and B [E, out, r], in dtypes of their own."""
    (a, b, _), arg_a, arg_b = term, f"a_{name}", f"l_{name}"
    if not stack.weight:
        bad_value(op, arg_a, f"holds {len(a)} tensors", "an empty list, for there is no such projection")
    for arg, part in ((arg_a, a), (arg_b, b)):
        if part:
            _check_floats(part[0], op, arg)
            _check_device(part[0], x, op, arg, "x")
    experts, rank, inputs = _check_list(a, 2, (a[0] if a else x, arg_a), op, arg_a)
    others, outputs, columns = _check_list(b, 2, (b[0] if b else x, arg_b), op, arg_b)
    wanted = (stack.experts, stack.inputs)
    if (experts, inputs) != wanted:
        bad_value(op, arg_a, f"holds {experts} experts of shape [{rank}, {inputs}]", f"{wanted[0]} experts of shape [r, {wanted[1]}]")
    if (others, outputs, columns) != (stack.experts, stack.features, rank):
        legal = f"{stack.experts} experts of shape [{stack.features}, {rank}]"
        bad_value(op, arg_b, f"holds {others} experts of shape [{outputs}, {columns}]", legal)


def _check_body(op: str, body: Body) -> None:
    activation, activation_args, gating = body.activation, body.args, body.gating
    if gating not in GATINGS:
        bad_value(op, "gating", f"is {gating!r}", ", ".join(map(repr, GATINGS)))
    act = ACTIVATIONS.get(activation)
    if act is None:
        bad_value(op, "activation", f"is {activation!r}", ", ".join(map(repr, ACTIVATIONS)))
    if len(activation_args) != act.num_args:
        names = f" ({', '.join(act.arg_names)})" if act.arg_names else ""
        bad_value(op, "activation_args", f"has {len(activation_args)} values", f"{act.num_args}{names} for activation {activation!r}")
    if act.needs_gate and gating == "plain":
        bad_value(op, "gating", "is 'plain'", f"a gated form, because activation {activation!r} mixes gate and up")
    if body.up_first and gating not in ("merged", "interleaved"):
        bad_value(op, "up_first", "is True", f"False for gating {gating!r}; only 'merged' and 'interleaved' have an order")


def check_permute(x: Tensor, ids: Tensor, num_experts: int) -> None:
    """Arguments of ``moefuse::permute``: x [T, H], ids [T, K]."""
    op = "permute"
    _check_dim(x, 2, op, "x", "[T, H]")
    _check_dim(ids, 2, op, "ids", "[T, K]")
    _check_ints(ids, op, "ids")
    if not _equal(ids.shape[0], x.shape[0]):
        _same(ids.shape[0], x.shape[0], op, "ids", ids, f"[T, K] with T={x.shape[0]}, the rows of `x`")
    _check_device(ids, x, op, "ids", "x")
    if num_experts < 1:
        bad_value(op, "num_experts", f"is {num_experts}", "1 or more")


def _check_offsets(offsets: Tensor, op: str, experts: Any = None) -> None:
    _check_dim(offsets, 1, op, "offsets", "[E + 1]")
    _check_ints(offsets, op, "offsets", (torch.int64,))
    if experts is not None:
        if not _equal(offsets.shape[0], experts + 1):
            _same(offsets.shape[0], experts + 1, op, "offsets", offsets, f"[E + 1] = [{experts + 1}] for {experts} experts")
    elif type(offsets.shape[0]) is int and offsets.shape[0] < 2:
        bad_value(op, "offsets", f"has shape {_shape(offsets)}", "[E + 1] with E >= 1")


def check_grouped_linear(xs: Tensor, offsets: Tensor, w: Sequence[Tensor], b: Sequence[Tensor], op: str = "grouped_linear") -> Any:
    """Arguments of ``moefuse::grouped_linear``, which ``op`` has too: xs [S, in], offsets [E + 1]. Returns the output features."""
    _check_dim(xs, 2, op, "xs", "[S, in]")
    _check_floats(xs, op, "xs")
    held = _check_held(w, xs, op, "w", "xs")
    experts, out, inp = _check_list(w, 2, held, op, "w")
    if not _equal(inp, xs.shape[1]):
        _same(inp, xs.shape[1], op, "w", f"has {inp} input features", f"{xs.shape[1]}, the columns of `xs`")
    _check_vector(b, experts, out, held, op, "b")
    _check_offsets(offsets, op, experts)
    _check_device(offsets, xs, op, "offsets", "xs")
    return out


def check_expert_rows(v: Sequence[Tensor], offsets: Tensor, num_rows: Any) -> Any:
    """Arguments of ``moefuse::expert_rows``: vectors v [n] or [E, n], offsets [E + 1]. Returns n."""
    op = "expert_rows"
    if not v:
        bad_value(op, "v", "is empty", "one stacked tensor [E, n], or one tensor [n] per expert")
    experts, size = _check_list(v, 1, (v[0], "v[0]"), op, "v")
    _check_offsets(offsets, op, experts)
    _check_device(offsets, v[0], op, "offsets", "v")
    if type(num_rows) is int and num_rows < 0:
        bad_value(op, "num_rows", f"is {num_rows}", "0 or more")
    return size


def check_combine(ys: Tensor, weights: Tensor | None, order: Tensor, offsets: Tensor, top_k: Any, out_dtype: torch.dtype | None) -> Any:
    """Arguments of ``moefuse::combine``: ys [S, H], weights [T, K], order [S], offsets [E + 1]. Returns T."""
    op = "combine"
    _check_dim(ys, 2, op, "ys", "[S, H]")
    _check_floats(ys, op, "ys")
    _check_dim(order, 1, op, "order", "[S]")
    _check_ints(order, op, "order", (torch.int64,))
    if not _equal(order.shape[0], ys.shape[0]):
        _same(order.shape[0], ys.shape[0], op, "order", order, f"[S] = [{ys.shape[0]}], the rows of `ys`")
    _check_offsets(offsets, op)
    _check_device(order, ys, op, "order", "ys")
    _check_device(offsets, ys, op, "offsets", "ys")
    _check_out_dtype(out_dtype, op)
    if type(top_k) is int and top_k < 1:
        bad_value(op, "top_k", f"is {top_k}", "1 or more")
    rows = ys.shape[0]
    if weights is None:
        if type(rows) is int and type(top_k) is int and rows % top_k:
            bad_value(op, "top_k", f"is {top_k}", f"a divisor of S={rows}, the rows of `ys`")
        return rows // top_k
    _check_dim(weights, 2, op, "weights", "[T, K]")
    _check_floats(weights, op, "weights")
    _check_device(weights, ys, op, "weights", "ys")
    if not _equal(weights.shape[1], top_k):
        _same(weights.shape[1], top_k, op, "weights", weights, f"[T, K] with K={top_k}, the value of `top_k`")
    if not _equal(weights.shape[0] * top_k, rows):
        _same(weights.shape[0] * top_k, rows, op, "weights", weights, f"[T, K] with T*K={rows}, the rows of `ys`")
    return weights.shape[0]


def check_topk(scores: Tensor, k: int, op: str = "topk", arg: str = "scores") -> None:
    """Arguments of ``moefuse::topk``: scores [..., E]."""
    if scores.dim() < 1:
        bad_value(op, arg, f"has shape {_shape(scores)}", "[..., E]")
    if scores.dtype not in _FLOATS:
        _bad_type(op, arg, f"has dtype {_names([scores.dtype])}", _names(_FLOATS))
    if not 0 <= k <= scores.shape[-1]:
        bad_value(op, "k", f"is {k}", f"0 to the number of experts, {scores.shape[-1]}")


def check_router_logits(x: Tensor, w: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> None:
    """Arguments of ``moefuse::router_logits``: x [..., H], w [E, H], bias [E]."""
    op = "router_logits"
    if x.dim() < 1:
        bad_value(op, "x", f"has shape {_shape(x)}", "[..., H]")
    _check_dim(w, 2, op, "w", "[E, H]")
    if not _equal(w.shape[1], x.shape[-1]):
        _same(w.shape[1], x.shape[-1], op, "w", w, f"[E, H] with H={x.shape[-1]}, the last dimension of `x`")
    for arg, t in (("x", x), ("w", w)):
        _check_floats(t, op, arg)
    _check_device(w, x, op, "w", "x")
    if bias is not None:
        _check_floats(bias, op, "bias")
        _check_device(bias, x, op, "bias", "x")
        if bias.dim() != 1 or bias.shape[0] != w.shape[0]:
            bad_value(op, "bias", f"has shape {_shape(bias)}", f"[E] with E={w.shape[0]}, the first dimension of `w`")
    if out_dtype not in _FLOATS:
        _bad_type(op, "out_dtype", f"is {_names([out_dtype])}", _names(_FLOATS))


def check_route(logits: Tensor, bias: Tensor | None, recipe: Recipe, out_dtype: torch.dtype) -> None:
    """Arguments of ``moefuse::route``: logits [..., E], bias [E]."""
    check_topk(logits, recipe.k, "route", "logits")
    experts = logits.shape[-1]
    if bias is not None and (bias.dim() != 1 or bias.shape[0] != experts):
        bad_value("route", "bias", f"has shape {_shape(bias)}", f"[E] with E={experts}, the last dimension of `logits`")
    for name in ("score", "weight"):
        if getattr(recipe, name) not in SCORES:
            bad_value("route", name, f"is {getattr(recipe, name)!r}", ", ".join(map(repr, SCORES)))
    if out_dtype not in _FLOATS:
        _bad_type("route", "out_dtype", f"is {_names([out_dtype])}", _names(_FLOATS))
    if not recipe.groups:
        return
    if recipe.groups < 0 or experts % recipe.groups:
        bad_value("route", "groups", f"is {recipe.groups}", f"0, or a divisor of the number of experts, {experts}")
    if not 0 <= recipe.kept <= recipe.groups:
        bad_value("route", "kept", f"is {recipe.kept}", f"0 to the number of groups, {recipe.groups}")
    if not 0 <= recipe.best <= experts // recipe.groups:
        bad_value("route", "best", f"is {recipe.best}", f"0 to the experts of a group, {experts // recipe.groups}")


def check_codes(
    name: str,
    storage: Sequence[Tensor],
    encoding: Encoding,
    scale: Sequence[Tensor],
    zero: Sequence[Tensor],
    x: Tensor,
    *,
    op: str = "experts_extended",
) -> None:
    """Arguments of an op that belong to one projection.

    Raises:
        ValueError, TypeError: they do not fit each other.
    """
    legal = tuple(dict.fromkeys(_storage_dtypes(encoding)))
    for t in storage:
        if t.dtype not in legal:
            holds = "hold" if len(legal) > 1 else "holds"
            _bad_type(op, name, f"has dtype {_names([t.dtype])}", f"{_names(legal)}, which {holds} {encoding.name}")
        _check_device(t, x, op, name, "x")
    shape = tuple(storage[0].shape)
    group, inputs = 0 if encoding.activation is None else encoding.activation.group, encoding.logical(shape)[-1]
    if group and inputs % group:
        bad_value(op, name, f"has {inputs} input features", f"a multiple of {group}, the inputs that share a scale of activations")
    scales = (*shape[:-2], *encoding.scales(*encoding.logical(shape)[-2:]))
    zeros = scales if encoding.zeros is None else encoding.zeros.words(scales)
    for part, tensors, expected in (("scale", scale, scales), ("zero", zero, zeros)):
        if len(tensors) != (len(storage) if part in encoding.parts else 0):
            bad_value(op, "codes", f"has {len(tensors)} tensors as {part} of `{name}`", f"{len(storage)}, as many as `{name}`")
        for t in tensors:
            _check_code_dtype(t, part, encoding, op, f"codes ({part} of {name})")
            _check_device(t, x, op, f"codes ({part} of {name})", "x")
            _check_dim(t, len(expected), op, f"codes ({part} of {name})", f"{len(expected)} dimensions, as `{name}` has")
            for size, wanted in zip(t.shape, expected, strict=True):
                if not _equal(size, wanted):
                    _same(size, wanted, op, f"codes ({part} of {name})", t, f"[{', '.join(map(str, expected))}]")


def _storage_dtypes(encoding: Encoding) -> tuple[torch.dtype, ...]:
    if encoding.packing is None:
        assert isinstance(encoding.table, str)
        return NAMED[encoding.table], torch.uint8
    return tuple(t for t in _INTS if t.itemsize * 8 > max(encoding.packing.shifts))


def _check_code_dtype(t: Tensor, part: str, encoding: Encoding, op: str, arg: str) -> None:
    """Scales that are powers of two are bytes, and packed zeros integers; other numbers have any dtype."""
    if part == "scale" and encoding.scale and t.dtype.itemsize != 1:
        _bad_type(op, arg, f"has dtype {_names([t.dtype])}", f"uint8 or float8_e8m0fnu, for scales are {encoding.scale!r}")
    if part == "zero" and encoding.zeros is not None and t.dtype not in _INTS:
        _bad_type(op, arg, f"has dtype {_names([t.dtype])}", f"{_names(_INTS)}, for zeros are packed")
