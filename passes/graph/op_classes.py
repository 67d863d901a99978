"""Classes of operations by what they do, under their canonical names: the one table that rules and matchers read.

What aliases what, and what writes, is read from torch: storage.py and writes.py. No class here decides about memory.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from moefuse import _torch_private

if TYPE_CHECKING:
    from moefuse.passes.graph.calls import Call

SHAPED = frozenset("view reshape flatten unflatten view_as reshape_as ravel _unsafe_view".split())
"""The first argument's elements, in their order, in a shape that one rule reads off the result."""

RESHAPES = SHAPED | {"squeeze", "unsqueeze"}
"""The first argument's elements, in their order, in another shape."""

TURNS = frozenset(("transpose", "permute"))
"""The same elements in another order of dimensions: behind one, an equal shape does not mean equal places."""

BROADCASTS = frozenset(("expand", "expand_as"))
"""The same elements, some of them several times."""

COPIES = frozenset("clone detach contiguous alias".split())
"""The same elements in the same shape and dtype, perhaps in another memory, perhaps without gradients."""

KEEPS = frozenset(("contiguous", "to"))
"""The same elements, in another memory or dtype, with their gradients. Not ``clone``: who writes one wants memory of his own."""

CASTS = frozenset(("to", "type_as", "contiguous", "clone"))
"""The same elements with their gradients in the dtype of the result; the same dtype is no cast."""

SAME_NUMBER = RESHAPES | KEEPS | COPIES | {"getitem"}
"""Of a tensor of one element: the same number."""

UNARY = (
    "silu gelu relu relu6 elu selu celu leaky_relu mish softplus softsign hardswish hardsigmoid hardtanh tanh sigmoid logsigmoid exp exp2 "
    "expm1 log log1p sqrt rsqrt reciprocal abs neg sign square sin cos erf clamp clamp_min clamp_max threshold tanhshrink nan_to_num "
    "round floor"
).split()
"""Pointwise functions of one tensor."""

BINARY = "add sub mul div pow maximum minimum remainder fmod atan2 rsub".split()
"""Pointwise functions of two tensors."""

TERNARY = "addcmul addcdiv lerp".split()
"""Pointwise functions of three tensors."""

JOINTS = frozenset("bitwise_and bitwise_or bitwise_not".split())
"""Of booleans, one condition out of several; of anything else, something else."""

CONDITIONS = JOINTS | frozenset("eq ne gt ge lt le isnan isinf isfinite".split())
"""Booleans of numbers where they stand: who computes one again has the same."""

PICKS = frozenset(("where", "masked_fill"))
"""Of two values the one that a condition says, element by element."""

SCORES = frozenset("softmax sigmoid log_softmax tanh to".split())
"""What stands between a router's projection and its choice, and leaves every score where it is."""

SAME_PLACES = SCORES | frozenset("type_as contiguous div mul add".split())
"""As ``SCORES``, with arithmetic: enough to say which dimension counts experts, not that ids are of a projection's rows."""

NEVER_NEGATIVE = frozenset("softmax sigmoid relu exp abs square zeros zeros_like new_zeros ones ones_like softplus".split())
"""Results that are not below zero, whatever the arguments are."""

KEEPS_SIGN = dict.fromkeys(("add", "mul", "div", "maximum"), 2) | dict.fromkeys(
    RESHAPES | CASTS | frozenset("topk sort getitem sum mean amax amin max".split()), 1
)
"""Results that are not below zero if that many of the first arguments are not."""

INDICES_ALONG: dict[str, tuple[int, int | None]] = {
    "topk": (2, -1), "sort": (1, -1), "argsort": (1, -1), "max": (1, None), "min": (1, None), "argmax": (1, None), "argmin": (1, None),
}  # fmt: skip
"""Operations that give indices along a dimension: where that stands among the arguments, and its default."""

VALUES_AND_INDICES = frozenset(("topk", "sort", "max", "min"))
"""Operations among these that give values first."""

COUNTED = frozenset("nonzero argwhere where masked_select getitem index".split())
"""Results with as many rows as a mask has true elements."""

PRODUCTS = frozenset("linear matmul mm bmm addmm baddbmm einsum".split())
"""Products that can apply a matrix of weights. Those of rows and one matrix are taken apart in matmuls.py."""

PLAIN_PRODUCTS = frozenset(("linear", "matmul", "mm"))
"""Products whose last dimension counts the outputs of a projection, whatever the arguments are."""

ASSERTS = frozenset(
    "_assert_scalar _assert_async _assert_tensor_metadata sym_constrain_range sym_constrain_range_for_size _check _check_is_size".split()
)

MODES = frozenset("_set_grad_enabled _enter_autocast _exit_autocast _enter_inference_mode _exit_inference_mode".split())
"""They switch grad mode, autocast or inference mode for what follows."""

SIZE_QUERIES = ASSERTS - {"_assert_async", "_check_is_size"} | frozenset("size sym_size sym_numel sym_storage_offset numel dim".split())
"""They only ask for sizes, or assert them. (``_assert_async`` asserts values.)"""

METADATA = (
    SIZE_QUERIES | ASSERTS | frozenset("is_contiguous stride getattr element_size ndimension sym_stride len is_floating_point".split())
)
"""They carry no routing information and lose none."""

LOOKS_AT: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("type_as", "view_as", "reshape_as", "expand_as"), (1,)),
    **dict.fromkeys(("zeros_like", "ones_like", "empty_like", "full_like", "new_zeros", "new_ones", "new_empty", "new_full"), (0,)),
    **dict.fromkeys(("size", "sym_size", "numel", "dim"), (0,)),
}
"""They take only the shape, dtype or device of some of their arguments."""

FILLS = frozenset("zeros zeros_like new_zeros ones ones_like new_ones full full_like new_full empty empty_like new_empty".split())
"""They make a tensor of one constant, or of memory that nothing initialised."""

RANDOM = tuple(
    "dropout alpha_dropout feature_dropout bernoulli rand_like randn_like randint_like normal uniform rrelu multinomial exponential".split()
)
"""They draw random numbers; torch's tag knows more of them (``random``)."""


def draws(call: Call) -> bool:
    """Whether an operation draws random numbers with the arguments that it has."""
    if "dropout" in call.name:
        given = _of_dropout(call)
        return given["p"] != 0.0 and given["training"] is not False
    return random(call.name)


def drop_probability(call: Call | None) -> float | None:
    """The probability of a dropout that may be drawn on other rows, 0 where it does nothing; None for any other operation.

    What is drawn changes with the rows that experts are given: only its distribution is kept. Inductor keeps no more, unless
    ``fallback_random`` asks for eager's stream.
    """
    if call is None or "dropout" not in call.name:
        return None
    if not draws(call):
        return 0.0
    if call.name != "dropout":
        return None
    given = _of_dropout(call)
    plain = given["training"] is True and isinstance(given["p"], float) and not call.inplace and not given.get("inplace", False)
    return given["p"] if plain and not _torch_private.keeps_random_stream() else None


def _of_dropout(call: Call) -> dict[str, Any]:
    given = dict(zip(("input", "p", "training", "inplace"), call.args, strict=False)) | call.kwargs
    return {"p": 0.5, "training": given.get("train", True), **given}


@functools.cache
def random(name: str) -> bool:
    """Whether an operation draws random numbers."""
    if name in RANDOM or "rand" in name or name in ("dropout", "manual_seed", "seed", "set_rng_state"):
        return True
    packet = getattr(torch.ops.aten, name, None)
    overloads = packet.overloads() if isinstance(packet, _torch_private.OpOverloadPacket) else ()
    return any(torch.Tag.nondeterministic_seeded in getattr(packet, o).tags for o in overloads)
