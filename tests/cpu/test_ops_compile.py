"""``moefuse::experts`` under the machinery of torch: what tests/contract/test_fakes.py has not."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from tests.cpu.ops_case import Case, run

CHECKED = [
    pytest.param(Case(), id="stacked"),
    pytest.param(Case(separate=True, gating="separate"), id="a-parameter-per-expert"),
    pytest.param(Case(transposed=True, gating="interleaved", weight_on_input=True), id="in-out-storage-weight-on-input"),
]


@pytest.mark.parametrize("case", CHECKED)
def test_opcheck_of_the_internal_ops(case: Case) -> None:
    tensors, counts, *body, dtype = case.call().pack()
    torch.library.opcheck(torch.ops.moefuse.experts_forward.default, (tensors, counts, *body, dtype))
    out, h, order, offsets = torch.ops.moefuse.experts_forward(tensors, counts, *body, dtype)
    x, _, weights, *flat = tensors
    for needs in (0b11111111, 0b00100101):
        call = ([torch.ones_like(out), x, weights, h, order, offsets, *flat], counts, needs, *body)
        torch.library.opcheck(torch.ops.moefuse.experts_backward.default, call)


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
