"""What torch can do with a function, it can do with an op: forward-mode AD, torch.func, second derivatives, batches of gradients.

An op that cannot says so by its name. No tangent is lost, for a result without one is a derivative of zero.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck

from moefuse.ops.meaning.encoding import Encoding, Rounding
from moefuse.ops.meaning.reference import experts_reference
from moefuse.ops.schema import SCHEMAS
from tests.cpu import lora_case
from tests.cpu.coded_case import ENCODINGS, coded, hold
from tests.cpu.ops_case import Case, leaves

ops = torch.ops.moefuse
SMALL = Case(tokens=4, hidden=3, inter=2, experts=3, hidden_out=3, activation="gelu_tanh")


def _flat(args: list[Any], call: Callable[..., Any]) -> tuple[Callable[..., Any], list[Tensor]]:
    """``call(*args)`` as a function of the tensors in ``args`` that can have a gradient."""
    inputs = [t.detach().clone().requires_grad_() for t in leaves(args)]

    def function(*given: Tensor) -> Any:
        left = iter(given)

        def of(a: Any) -> Any:
            if isinstance(a, list):
                return [of(t) for t in a]
            return next(left) if isinstance(a, Tensor) and a.is_floating_point() else a

        return call(*map(of, args))

    return function, inputs


def _weighted(*, tokens: int = 4, experts: int = 3, top_k: int = 2) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows of some width, ids with one of no expert, and their order and offsets."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, 3, generator=g, dtype=torch.float64)
    ids = torch.randint(-1, experts, (tokens, top_k), generator=g)
    _, order, offsets = ops.permute(x, ids, experts)
    return x, ids, order, offsets


def _grouped(name: str) -> tuple[Callable[..., Any], list[Tensor]]:
    x, ids, order, offsets = _weighted()
    g = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    rows, weights = draw(8, 3), draw(4, 2)
    calls: dict[str, tuple[list[Any], Callable[..., Any]]] = {
        "permute": ([x], lambda x: ops.permute(x, ids, 3)[0]),
        "grouped_linear": ([rows, draw(3, 2, 3), draw(3, 2)], lambda r, w, b: ops.grouped_linear(r, offsets, [w], [b])),
        "grouped_linear of lists": (
            [rows, [draw(2, 3) for _ in range(3)]],
            lambda r, w: ops.grouped_linear(r, offsets, w, []),
        ),
        "expert_rows": ([draw(3, 2)], lambda v: ops.expert_rows([v], offsets, 8)),
        "combine": ([rows, weights], lambda r, w: ops.combine(r, w, order, offsets, 2, None)),
        "combine without weights": ([rows], lambda r: ops.combine(r, None, order, offsets, 2, None)),
        "own": ([x], lambda x: ops.own(x)),
        "topk": ([draw(4, 5)], lambda s: ops.topk(s, 2)[0]),
    }
    return _flat(*calls[name])


GROUPED = (
    "permute", "grouped_linear", "grouped_linear of lists", "expert_rows", "combine", "combine without weights", "own", "topk",
)  # fmt: skip


def _experts(case: Case, name: str = "experts", **more: Any) -> tuple[Callable[..., Any], list[Tensor]]:
    return _flat(case.args(), lambda *args: getattr(ops, name)(*args, **case.options, **more))


def _lora(**more: Any) -> tuple[Callable[..., Any], list[Tensor]]:
    sizes = lora_case.Sizes(tokens=3, experts=3, hidden=2, inner=2)
    args = lora_case.arguments("merged", torch.float64, torch.float64, rank=1, sizes=sizes)
    return _flat(args, lambda *given: ops.experts_extended(*given, scales=lora_case.SCALES, **more))


def _coded() -> tuple[Callable[..., Any], list[Tensor]]:
    case = SMALL.with_(hidden=8, inter=8, hidden_out=8, tokens=2)
    data, _, options = coded(case, ENCODINGS["uint8 zeros"], None, ENCODINGS["uint8 zeros"])
    x, ids, weights, w_in, w_up, w_out, *more = data
    biases, codes = more[:3], more[3:]
    return _flat([x, weights, *biases], lambda x, w, *b: ops.experts_extended(x, ids, w, w_in, w_up, w_out, *b, *codes, **options))


def _grouped_coded() -> tuple[Callable[..., Any], list[Tensor]]:
    _, _, _, offsets = _weighted()
    encoding = ENCODINGS["uint8 zeros"]
    storage, codes = hold(encoding, 3, 2, 8, torch.Generator().manual_seed(2)).lists(separate=False)
    rows, bias = torch.randn(8, 8, dtype=torch.float64), torch.randn(3, 2, dtype=torch.float64)
    return _flat([rows, bias], lambda r, b: ops.grouped_linear_coded(r, offsets, storage, codes, [b], str(encoding)))


FUNCTIONS: dict[str, Callable[[], tuple[Callable[..., Any], list[Tensor]]]] = {
    "experts": lambda: _experts(SMALL),
    "experts, weights first": lambda: _experts(SMALL.with_(weight_on_input=True, gating="interleaved")),
    "experts apart": lambda: _experts(SMALL.with_(separate=True, gating="separate", bias=False)),
    "plain experts": lambda: _experts(SMALL.with_(gating="plain", transposed=True)),
    "recomputed_experts": lambda: _experts(SMALL, "recomputed_experts"),
    "low-rank terms": _lora,
    "low-rank terms, recomputed": lambda: _lora(recompute=True),
    "weights in few bits": _coded,
    "grouped_linear_coded": _grouped_coded,
} | {name: lambda name=name: _grouped(name) for name in GROUPED}  # type: ignore[misc]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_derivatives_of_every_kind(name: str) -> None:
    """Backward and forward, one by one and in batches, and of the gradients again; each against differences."""
    function, inputs = FUNCTIONS[name]()
    assert gradcheck(function, inputs, check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True, fast_mode=True)
    assert gradgradcheck(function, inputs, check_fwd_over_rev=name in GROUPED, check_batched_grad=True, fast_mode=True)


SCORES = {"softmax": (False, True), "sigmoid": (True, False)}


@pytest.mark.parametrize("score", SCORES)
def test_ops_of_inference_have_tangents(score: str) -> None:
    """They have no gradients, which they say; forward-mode AD is asked for without any."""
    from moefuse.ops.meaning.recipe import Recipe, route_reference
    from moefuse.ops.meaning.reference import router_logits_reference

    by_choice, renormalise = SCORES[score]
    recipe = Recipe(2, score, by_choice=by_choice, renormalise=renormalise)
    g = torch.Generator().manual_seed(3)
    x, w, routed, shared = (torch.randn(5, 4, generator=g) for _ in range(4))
    gate = torch.rand(5, 1, generator=g)
    calls: list[tuple[Callable[..., Any], Callable[..., Any], list[Tensor]]] = [
        (
            lambda x, w: ops.router_logits(x, w, None, torch.float32),
            lambda x, w: router_logits_reference(x, w, None, torch.float32),
            [x, w],
        ),
        (
            lambda x: ops.route(x, None, *recipe.arguments, torch.float32)[0],
            lambda x: route_reference(x, None, recipe, torch.float32)[0],
            [x],
        ),
        (
            lambda routed, shared, gate: ops.shared_join(routed, shared, gate, 0.5, [], 0),
            lambda routed, shared, gate: routed + 0.5 * gate * shared,
            [routed, shared, gate],
        ),
    ]
    for function, expected, inputs in calls:
        directions = tuple(torch.randn(t.shape, generator=g) for t in inputs)
        with torch.no_grad():
            got, want = (torch.func.jvp(f, tuple(inputs), directions) for f in (function, expected))
        torch.testing.assert_close(got, want)


def test_a_shared_expert_has_a_tangent() -> None:
    case = SMALL.with_(experts=1, top_k=1, low_id=0, high_id=1, bias=False, dtype=torch.float32)
    x, ids, weights, *lists = case.args()
    tensors, counts, *how = case.call([x, ids, torch.ones_like(weights), *lists]).pack()

    def start(x: Tensor) -> Any:
        return ops.shared_start([x, *tensors[3:]], counts, *how, 0)

    def expected(x: Tensor) -> Any:
        return experts_reference(x, ids, torch.ones_like(weights), *lists, **case.options)

    with torch.no_grad():
        got, want = (torch.func.jvp(f, (x,), (torch.ones_like(x),)) for f in (start, expected))
    torch.testing.assert_close(got, want)


# --- torch.func ---------------------------------------------------------------------------------------------------------------------


def _score(out: Tensor) -> Tensor:
    return out.square().sum()


TRANSFORMS: dict[str, Callable[..., Any]] = {
    "grad": lambda f, x, w, a, b: torch.func.grad(lambda *given: _score(f(*given)), (0, 1, 2, 3))(x, w, a, b),
    "vjp": lambda f, *given: torch.func.vjp(f, *given)[1](torch.ones(4, 3, dtype=torch.float64)),
    "jvp": lambda f, *given: torch.func.jvp(f, given, tuple(map(torch.ones_like, given))),
    "jacrev": lambda f, *given: torch.func.jacrev(f, (0, 1))(*given),
    "jacfwd": lambda f, *given: torch.func.jacfwd(f, (0, 1))(*given),
    "hessian": lambda f, *given: torch.func.hessian(lambda *z: _score(f(*z)), 1)(*given),
    "linearize": lambda f, x, *rest: torch.func.linearize(lambda x: f(x, *rest), x)[1](torch.ones_like(x)),
    "vmap of tokens": lambda f, x, *rest: torch.func.vmap(f, (0, None, None, None))(torch.stack([x, x + 1]), *rest),
    "vmap of weights": lambda f, x, w, a, b: torch.func.vmap(f, (None, None, 0, 0))(x, w, torch.stack([a, a + 1]), torch.stack([b, b])),
    "gradients of samples": lambda f, x, *rest: torch.func.vmap(torch.func.grad(lambda *z: _score(f(*z))), (0, None, None, None))(
        torch.stack([x, x + 1]), *rest
    ),
}


@pytest.mark.parametrize(("name", "autocast"), [*((name, False) for name in TRANSFORMS), ("jvp", True), ("grad", True)])
def test_torch_func(name: str, autocast: bool) -> None:
    """The same as of the reference; autocast around it changes nothing, as it changes nothing of the op."""
    x, ids, weights, (w_in,), _, (w_out,), *_ = SMALL.with_(bias=False).args()

    def of(op: Any) -> Callable[..., Any]:
        return lambda x, w, a, b: op(x, ids, w, [a], [], [b], [], [], [])

    expected = TRANSFORMS[name](of(experts_reference), x, weights, w_in, w_out)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        torch.testing.assert_close(TRANSFORMS[name](of(ops.experts), x, weights, w_in, w_out), expected)


def test_what_cannot_be_batched_says_so() -> None:
    """Ids that differ have other numbers of rows, in eager code, too."""
    x, ids, *rest = SMALL.args()
    with pytest.raises(RuntimeError, match=r"moefuse::experts cannot be batched so: vmap: .*dynamic shape"):
        torch.func.vmap(lambda ids: ops.experts(x, ids, *rest))(torch.stack([ids, ids]))


# --- tangents -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("grad", "frozen"), [*itertools.product((False, True), repeat=2)])
@pytest.mark.parametrize("which", [0, 2, 3, 5], ids=("x", "weights", "w_in", "w_out"))
def test_tangent_of_each_argument(which: int, grad: bool, frozen: bool) -> None:
    """With gradients recorded and without."""
    found = []
    for op in (ops.experts, experts_reference):
        args = SMALL.args(requires_grad=not frozen)
        with torch.set_grad_enabled(grad), forward_ad.dual_level():
            target = args[which][0] if isinstance(args[which], list) else args[which]
            dual = forward_ad.make_dual(target, torch.ones_like(target))
            args[which] = [dual] if isinstance(args[which], list) else dual
            found.append(forward_ad.unpack_dual(op(*args, **SMALL.options)).tangent)
    assert found[0] is not None
    torch.testing.assert_close(*found)


def test_without_a_tangent_the_kernel_runs() -> None:
    """An open level alone costs no composite, and changes no bit."""
    args, seen = SMALL.args(), []
    expected = ops.experts(*args, **SMALL.options)

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with forward_ad.dual_level(), Watch():
        assert torch.equal(ops.experts(*args, **SMALL.options), expected)
    assert ops.experts_infer.default in seen
    assert torch.ops.aten.index_put.default not in seen


BELOW = {
    "experts_infer",
    "experts_extended_infer",
    "ep_experts_infer",
    "unpacked",
    "ep_local_ids",
    "room",
    "own_numbers",
}
"""What only other ops call, below autograd, or compiled graphs, which depend on whether a level is open; and what has no numbers."""

_MADE: dict[str, Callable[[Tensor], Any]] = {
    "Tensor": lambda t: t, "Optional[Tensor]": lambda t: t, "List[Tensor]": lambda t: [t], "int": lambda t: 1, "float": lambda t: 1.0,
    "str": lambda t: "", "bool": lambda t: False, "List[int]": lambda t: [1], "List[float]": lambda t: [1.0],
    "List[bool]": lambda t: [True], "List[str]": lambda t: [""], "Optional[List[Tensor]]": lambda t: [t],
}  # fmt: skip


@pytest.mark.parametrize("name", [s.partition("(")[0] for s in SCHEMAS])
def test_no_tangent_is_lost(name: str) -> None:
    """Every op has a composite, or refuses a tensor with a tangent before it does anything."""
    if name in BELOW or torch._C._dispatch_has_kernel_for_dispatch_key(f"moefuse::{name}", "FuncTorchBatched"):
        return
    op = getattr(ops, name).default
    with torch.no_grad(), forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones(2, 2), torch.ones(2, 2))
        args = [_MADE[str(a.type)](dual) for a in op._schema.arguments if not a.kwarg_only]
        kwargs = {a.name: _MADE[str(a.type)](dual) for a in op._schema.arguments if a.kwarg_only and not a.has_default_value()}
        with pytest.raises(RuntimeError, match=f"moefuse::{name} has no rules for forward-mode AD"):
            op(*args, **kwargs)


def test_rounded_activations_say_that_they_have_no_tangent() -> None:
    """Their gradient passes a rounding as if it was not there: a rule of its own."""
    encoding = Encoding("s8", (1, 0), activation=Rounding("s8"))
    case = SMALL.with_(hidden=8, inter=8, hidden_out=8, dtype=torch.float32)
    args, _, options = coded(case, encoding, None, encoding)
    with (
        forward_ad.dual_level(),
        pytest.raises(RuntimeError, match=r"experts_extended with activations in few bits .* no rules for forward-mode AD"),
    ):
        ops.experts_extended(forward_ad.make_dual(args[0], args[0]), *args[1:], **options)
    args[0].requires_grad_()
    with pytest.raises(RuntimeError, match=r"no rules for forward-mode AD, torch\.func or a second derivative"):
        torch.autograd.grad(ops.experts_extended(*args, **options).sum(), args[0], create_graph=True)
