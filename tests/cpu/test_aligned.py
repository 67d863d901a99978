"""Results of every operation lie as their fakes say, for odd numbers of tokens: compiled code reads them as aligned ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from moefuse.ops.meaning.call import ExpertsCall
from moefuse.ops.schema import SCHEMAS, SPREAD
from tests.cpu import lora_case, ops_case
from tests.cpu.aligned_case import Aligned
from tests.cpu.coded_case import ENCODINGS, coded
from tests.cpu.ops_case import Case

ops = torch.ops.moefuse
TOKENS = (1021, 7, 1, 0)


def _trained(out: Tensor, *tensors: Tensor) -> None:
    torch.autograd.grad(out.sum(), tensors, allow_unused=True)


def _experts(tokens: int) -> None:
    for case in (Case(tokens, dtype=torch.float32), Case(tokens, dtype=torch.float32, separate=True, gating="separate", transposed=True)):
        for name in ("experts", "recomputed_experts"):
            args = case.args(requires_grad=True)
            _trained(getattr(ops, name)(*args, **case.options), *ops_case.leaves(args))
        with torch.no_grad():
            ops.experts(*args, **case.options)


def _lora(tokens: int) -> None:
    args = lora_case.arguments("merged", torch.float32, torch.float32, sizes=lora_case.Sizes(tokens=tokens))
    for recompute in (False, True):
        _trained(ops.experts_extended(*args, scales=lora_case.SCALES, recompute=recompute), *lora_case.tensors(args))
    with torch.no_grad():
        ops.experts_extended(*args, scales=lora_case.SCALES)


def _coded(tokens: int) -> None:
    encoding = ENCODINGS["fp8 blocks"]
    args, _, options = coded(Case(tokens, 32, 32, 5, 2, 32, dtype=torch.bfloat16), encoding, encoding, encoding)
    args[0].requires_grad_()
    _trained(ops.experts_extended(*args, **options), args[0])
    xs, offsets = (
        torch.randn(tokens, 32, dtype=torch.bfloat16, requires_grad=True),
        torch.tensor([0, 0, tokens // 2, tokens, tokens, tokens]),
    )
    codes = args[-1][: len(args[-1]) // 2]
    name = options["encodings"][0]
    _trained(ops.grouped_linear_coded(xs, offsets, args[3], codes, [], name), xs)
    ops.unpacked(args[3][0], codes, name, torch.bfloat16)
    ops.row_codes(args[0].detach(), "e4m3/16/number/1e-12")


def _grouped(tokens: int) -> None:
    x, weights = torch.randn(tokens, 5, requires_grad=True), torch.rand(tokens, 2, requires_grad=True)
    w, v = torch.randn(3, 7, 5, requires_grad=True), torch.randn(3, 7, requires_grad=True)
    ids = torch.randint(-1, 4, (tokens, 2))
    xs, order, offsets = ops.permute(x, ids, 3)
    h = ops.grouped_linear(xs, offsets, [w], [v]) * ops.expert_rows([v], offsets, len(xs))
    _trained(ops.combine(h, weights, order, offsets, 2, None), x, weights, w, v)
    ops.own(x)


def _router(tokens: int) -> None:
    scores = torch.randn(tokens, 8)
    ops.topk(scores, 3)
    ops.router_logits(torch.randn(tokens, 5), torch.randn(8, 5), None, torch.float32)
    ops.route(scores, None, 2, "softmax", 1, 1, 1, True, False, "identity", True, 0.0, 0.0, 1.0, torch.float32)


def _hidden(tokens: int) -> None:
    case = Case(tokens, dtype=torch.float32)
    options = {"activation": "silu", "activation_args": [], "gating": "merged", "up_first": False, "weight_on_input": False}
    tensors, counts, *body, dtype = ExpertsCall.of(*case.args(), **options).pack()
    _, h, order, offsets = ops.experts_forward(tensors, counts, *body, dtype)
    ops.experts_hidden(tensors, counts, *body, order, offsets)
    ops.restore_rows(h[: len(h) // 2].clone(), order)


CALLS: tuple[Callable[[int], Any], ...] = (_experts, _lora, _coded, _grouped, _router, _hidden)

ELSEWHERE = {
    "shared_start": "on streams of a GPU",
    "shared_join": "on streams of a GPU",
    "experts_backward_rows": "on GPUs alone",
    "experts_backward_in": "on GPUs alone",
    "experts_backward_out": "on GPUs alone",
}
"""Operations that are called nowhere here nor in tests/dist/aligned.py, and why."""

OVER_RANKS = {
    "ep_experts_infer",
    "gathered",
    "gathered_backward",
    "gathered_slices",
    "gathered_slices_backward",
    "on_one_rank",
    "on_one_rank_backward",
    "own_experts",
    "own_numbers",
    "own_experts_backward",
    "ep_local_ids",
    "ep_dispatch",
    "ep_combine",
    "ep_send",
    "ep_give_back",
    *SPREAD,
    "room",
    "keep_rows",
    "restore_rows",
}
"""Those of tests/dist/aligned.py, which says so of itself."""


@pytest.mark.parametrize("tokens", TOKENS)
def test_aligned(tokens: int) -> None:
    seen: set[str] = set()
    for call in CALLS:
        with Aligned() as found:
            call(tokens)
        assert found.wrong == [], call.__name__
        seen |= found.seen
    every = {schema.partition("(")[0] for schema in SCHEMAS}
    # What is below autograd is seen as it runs, and what only calls others is not.
    assert every - seen - OVER_RANKS - ELSEWHERE.keys() == NO_KERNEL


NO_KERNEL = {"experts", "experts_extended", "recomputed_experts", "bounded_experts", "ep_experts"}
"""Operations whose entry calls the internal ones."""


def test_what_is_found() -> None:
    """A result that begins in the middle of its memory, and one with other strides than its fake."""
    with torch.library._scoped_library("moefuse", "FRAGMENT") as library:
        library.define("of_this_test(Tensor x) -> Tensor[]")
        library.impl("of_this_test", lambda x: [x.repeat(2)[len(x) :], x.repeat(2)[::2]], "CompositeExplicitAutograd")
        torch.library.register_fake("moefuse::of_this_test", lambda x: [torch.empty_like(x), torch.empty_like(x)], lib=library)
        with Aligned() as found:
            ops.of_this_test(torch.ones(1021))
    assert found.wrong == [
        "of_this_test[0]: begins at 1021, its fake at 0",
        "of_this_test[0]: its address is no multiple of 16",
        "of_this_test[1]: has strides (2,), its fake (1,)",
    ]
