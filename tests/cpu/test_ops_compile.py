"""``moefuse::experts`` under the machinery of torch: opcheck, torch.compile forward and backward, dynamic T, ids of any kind."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.fx.experimental.proxy_tensor import make_fx

from moefuse.ops.meaning.call import ExpertsCall
from tests.cpu.ops_case import Case, assert_as_exact, leaves, reference, run, to

CHECKED = [
    pytest.param(Case(), id="stacked"),
    pytest.param(Case(separate=True, gating="separate"), id="a-parameter-per-expert"),
    pytest.param(Case(transposed=True, gating="interleaved", weight_on_input=True), id="in-out-storage-weight-on-input"),
    pytest.param(Case(bias=False, gating="plain", activation="relu2", dtype=torch.bfloat16, out_dtype=torch.float32), id="plain-bfloat16"),
    pytest.param(Case(tokens=0), id="no-tokens"),
    pytest.param(Case(experts=1, separate=True, top_k=1), id="list-of-one"),
]


@pytest.mark.parametrize("requires_grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("case", CHECKED)
def test_opcheck(case: Case, requires_grad: bool) -> None:
    torch.library.opcheck(torch.ops.moefuse.experts.default, tuple(case.args(requires_grad)), case.options)


@pytest.mark.parametrize("case", CHECKED[:3])
def test_opcheck_of_the_internal_ops(case: Case) -> None:
    data = tuple(case.args())
    options = {"activation": "silu", "activation_args": [], "gating": "merged", "up_first": False, "weight_on_input": False}
    tensors, counts, *body, dtype = ExpertsCall.of(*data, **options | {k: v for k, v in case.options.items() if k in options}).pack()
    torch.library.opcheck(torch.ops.moefuse.experts_forward.default, (tensors, counts, *body, dtype))
    out, h, order, offsets = torch.ops.moefuse.experts_forward(tensors, counts, *body, dtype)
    x, _, weights, *flat = tensors
    for needs in (0b11111111, 0b00100101):
        call = ([torch.ones_like(out), x, weights, h, order, offsets, *flat], counts, needs, *body)
        torch.library.opcheck(torch.ops.moefuse.experts_backward.default, call)


COMPILED = [
    pytest.param(Case(transposed=True), torch.float32, id="in-out-storage"),
    pytest.param(Case(separate=True, gating="separate", activation="silu_clamp"), torch.float32, id="a-parameter-per-expert"),
    pytest.param(Case(activation="swiglu_oai", weight_on_input=True), torch.bfloat16, id="bfloat16-with-constants"),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("case", "dtype"), COMPILED)
@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_forward_and_backward_with_any_number_of_tokens(case: Case, dtype: torch.dtype) -> None:
    """One compilation serves every T; Inductor hands weights to the op with the strides they have."""
    c = case.with_(dtype=dtype)
    counter = CompileCounterWithBackend("inductor")

    def f(args: list[Any]) -> Tensor:
        return run([args[0].sin(), *args[1:]], **c.options).float().cos()

    def exactly(args: list[Any]) -> Tensor:
        return reference([args[0].sin(), *args[1:]], **c.options).cos()

    compiled = torch.compile(f, backend=counter, fullgraph=True)
    for tokens in (6, 9, 3, 17):
        args = c.with_(tokens=tokens).args(requires_grad=True)
        for t in args[:3]:
            torch._dynamo.mark_dynamic(t, 0)
        calls = ((compiled, args), (f, args), (exactly, to(args, torch.float64)))
        ours, theirs, truths = ([out, *torch.autograd.grad(out.sum(), leaves(a))] for out, a in ((g(a), a) for g, a in calls))
        for got, want, truth in zip(ours, theirs, truths, strict=True):
            assert_as_exact(got, want, truth, dtype)
        assert [g.stride() for g in ours[1:]] == [t.stride() for t in leaves(args)]
    assert counter.frame_count == 1


@pytest.mark.usefixtures("fresh_dynamo")
def test_an_infinite_limit_survives_code_generation() -> None:
    args = Case(dtype=torch.float32).args()

    def f(x: Tensor) -> Tensor:
        return run([x, *args[1:]], activation="swiglu_oai", activation_args=[1.702, math.inf])

    torch.testing.assert_close(torch.compile(f, fullgraph=True)(args[0]), f(args[0]))


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_inference_sees_live_weights() -> None:
    args = Case(dtype=torch.float32).args(requires_grad=True)
    compiled = torch.compile(lambda x: run([x, *args[1:]]), fullgraph=True)
    with torch.no_grad():
        compiled(args[0])
        args[3][0].data.mul_(2)
        torch.testing.assert_close(compiled(args[0]), run(args))


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_with_some_weights_frozen() -> None:
    """LoRA-like: only the routing weights and the last projection train."""
    args = Case(dtype=torch.float32).args()
    trained = [args[2].requires_grad_(), args[5][0].requires_grad_()]
    compiled = torch.compile(lambda: run(args), fullgraph=True)
    torch.testing.assert_close(torch.autograd.grad(compiled().sum(), trained), torch.autograd.grad(run(args).sum(), trained))


def test_a_graph_of_make_fx_says_what_it_cannot() -> None:
    """Behind autograd it holds parts that have no gradients; in front of it, the op."""
    case = Case(experts=2, separate=False)
    args = case.args(requires_grad=True)

    def call(x: Tensor) -> Tensor:
        return torch.ops.moefuse.experts(x, *args[1:], **case.options)  # type: ignore[no-any-return]

    wanted = call(args[0])
    graph = make_fx(call)(args[0])
    with torch.no_grad():
        torch.testing.assert_close(graph(args[0]), wanted)
    with pytest.raises(RuntimeError, match="trace with pre_dispatch=True, or run that graph under"):
        graph(args[0])
    whole = make_fx(call, pre_dispatch=True)(args[0])
    whole(args[0]).sum().backward()
    assert args[0].grad is not None
