"""Classes of operations by what they do. What aliases what, and what writes, is read from torch: storage.py and writes.py."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from moefuse.passes.graph.calls import Call

RESHAPES = frozenset("view reshape flatten unflatten squeeze unsqueeze".split())
"""The same elements in another shape."""

KEEPS = frozenset(("contiguous", "to"))
"""The same elements, in another memory or dtype."""

PRODUCTS = frozenset("linear matmul mm bmm addmm baddbmm einsum".split())

ASSERTS = frozenset("_assert_scalar _assert_async sym_constrain_range sym_constrain_range_for_size _check _check_is_size".split())

MODES = frozenset("_set_grad_enabled _enter_autocast _exit_autocast _enter_inference_mode _exit_inference_mode".split())
"""They switch grad mode, autocast or inference mode for what follows."""

SIZE_QUERIES = frozenset(
    "size sym_size sym_numel sym_storage_offset numel dim _assert_scalar sym_constrain_range sym_constrain_range_for_size _check".split()
)
"""They only ask for sizes, or assert them."""

METADATA = (
    SIZE_QUERIES | ASSERTS | frozenset("is_contiguous stride getattr element_size ndimension sym_stride len is_floating_point".split())
)
"""They carry no routing information and lose none."""

RANDOM = tuple(
    "dropout alpha_dropout feature_dropout bernoulli rand_like randn_like randint_like normal uniform rrelu multinomial exponential".split()
)


def draws(call: Call) -> bool:
    """Whether an operation draws random numbers with the arguments that it has."""
    if "dropout" in call.name:
        given = dict(zip(("input", "p", "training"), call.args, strict=False)) | call.kwargs
        return given.get("p", 0.5) != 0.0 and given.get("training", given.get("train", True)) is not False
    return random(call.name)


@functools.cache
def random(name: str) -> bool:
    """Whether an operation draws random numbers."""
    if name in RANDOM or "rand" in name or name in ("dropout", "manual_seed", "seed", "set_rng_state"):
        return True
    packet = getattr(torch.ops.aten, name, None)
    overloads = packet.overloads() if isinstance(packet, torch._ops.OpOverloadPacket) else ()
    return any(torch.Tag.nondeterministic_seeded in getattr(packet, o).tags for o in overloads)
