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


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_ops_below_autograd_in_a_graph(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the graph is for Inductor, on CUDA (here a CPU that stands for it), no op has an entry at autograd that is Python; gradients
    are the same, and a graph of who differentiates it himself keeps the ops that refuse that."""
    from torch._dynamo.backends.common import aot_autograd

    from moefuse.ops import schema

    if device == "cuda":
        monkeypatch.setattr(schema, "COMPILED_ON", ("cpu",))
    args = Case().args(requires_grad=True)
    trained = [args[0], args[2], args[3][0], args[5][0]]
    names: list[str] = []

    def seen(gm: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        names.extend(
            n.target.name() for n in gm.graph.nodes if isinstance(n.target, torch._ops.OpOverload) and "moefuse" in n.target.name()
        )
        return gm

    def layer() -> Tensor:
        xs, order, offsets = torch.ops.moefuse.permute(args[0], args[1], 3)
        return run(args) + torch.ops.moefuse.combine(xs, args[2], order, offsets, args[1].shape[1], None)[:, :1]

    found = torch.compile(layer, backend=aot_autograd(fw_compiler=seen, bw_compiler=seen))()
    torch.testing.assert_close(torch.autograd.grad(found.sum(), trained), torch.autograd.grad(layer().sum(), trained))
    assert {name for name in names if name.startswith("moefuse::experts")}
    assert {name.endswith("_compiled") for name in names if "experts_backward" not in name} == {device == "cuda"}
    with pytest.raises(RuntimeError, match="has no gradient"):
        make_fx(layer)()()


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_compiled_op_is_the_op() -> None:
    """The same results, from one reference."""
    from moefuse.ops import schema

    x, ids, _, w, *_ = Case().args()
    xs, order, offsets = torch.ops.moefuse.permute(x, ids, w[0].shape[0])
    for found, right in zip(torch.ops.moefuse.permute_compiled(x, ids, w[0].shape[0]), (xs, order, offsets), strict=True):
        assert torch.equal(found, right)
    for name in schema.COMPILED:
        op, compiled = (getattr(torch.ops.moefuse, n).default._schema for n in (name, f"{name}_compiled"))
        assert str(op).partition("(")[2] == str(compiled).partition("(")[2]
