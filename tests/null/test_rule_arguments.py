"""Every argument that torch's schemas have is read by an operation's rule, shown by the result, or as it is by default."""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from moefuse.errors import message
from moefuse.passes.graph.calls import Call
from moefuse.passes.graph.signatures import Form, _forms
from moefuse.passes.ir.evaluate import Rows64
from moefuse.passes.ir.facts import Lost, Rows
from moefuse.passes.match.arguments import GRADIENTS, _names, taken
from moefuse.passes.rules import EVERYTHING, RULES, SHOWN, Rule
from tests.null.rules_case import E, H, I, K, T, fact_of, trace

READ_AS_THEY_ARE = {"on_pointwise", "on_random", "on_fill", "on_arange", "on_operator", "on_flat"}
"""Rules that replay all arguments, look at each of them, or bind them to a library's schema themselves."""

OTHER: dict[type, Any] = {bool: False, int: 3, float: 0.25, str: "other", type(None): 5, list: [1]}
"""Another value than a default of this type, if that is not ``False`` itself."""

SIGNATURES = [
    (name, rule, form) for name, rule in sorted(RULES.items()) for form in _forms(name, name) if rule.__name__ not in READ_AS_THEY_ARE
]
OPTIONS = [(name, rule, form, option) for name, rule, form in SIGNATURES for option in form.defaults]


def other(default: Any) -> Any:
    value = OTHER.get(type(default), "other")
    return value if value != default else True


def called(name: str, form: Form, option: str, value: Any, by_place: bool) -> Call:
    """A call with everything that is required, and one option."""
    required = [n for n in form.positional if n not in form.defaults]
    if by_place and option in form.positional:
        at = form.positional.index(option)
        args = [form.defaults.get(n, "given") for n in form.positional[:at]]
        return Call(name, (*args, value), {})
    return Call(name, tuple("given" for _ in required), {option: value})


def node() -> torch.fx.Node:
    return torch.fx.Graph().placeholder("x")


@pytest.mark.parametrize("by_place", [False, True])
def test_each_option_is_read_shown_or_refused(by_place: bool) -> None:
    """Of all operations that have a rule and a schema. What changes gradients alone is refused where they are recorded."""
    wrong = []
    for name, rule, form, option in OPTIONS:
        mine, value = _names(rule), other(form.defaults[option])
        call = called(name, form, option, value, by_place)
        if (mine.any_position and by_place) or not form.fits(call.args, call.kwargs):
            continue
        at = node()
        at.target = name
        found = taken(rule, at, call, True)
        handed = [v is value or v == value for v in (*found.args, *found.kwargs.values())]
        shown = EVERYTHING in mine.shown or option in mine.shown
        if not shown and not any(handed) and option not in dict(found.unread):
            wrong.append((name, option))
        if option in GRADIENTS and dict(found.unread) != {option: value}:
            wrong.append((name, option, "with gradients"))
        if option in GRADIENTS and taken(rule, at, call, False).unread:
            wrong.append((name, option, "without gradients"))
    assert not wrong


def test_the_options_are_many() -> None:
    """The test above is about something."""
    assert len(OPTIONS) > 100
    assert {"padding_idx", "sparse_grad", "dtype", "descending", "include_self"} <= {option for *_, option in OPTIONS}


@pytest.mark.parametrize("rule", sorted(set(RULES.values()), key=lambda r: (r.__module__, r.__name__)), ids=lambda r: str(r.__name__))
def test_a_rule_reads_what_it_names(rule: Rule) -> None:
    function: Any = ast.parse(textwrap.dedent(inspect.getsource(rule))).body[0]
    read = {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    parameters = inspect.signature(rule).parameters.values()
    assert {p.name for p in parameters} - {"ctx", "node"} <= read
    keywords = [p for p in parameters if p.kind is inspect.Parameter.VAR_KEYWORD]
    assert not keywords or rule.__name__ in READ_AS_THEY_ARE
    assert rule in SHOWN


def test_defaults_that_are_written_out_change_nothing() -> None:
    def rows(**options: Any) -> Any:
        return fact_of(lambda x, ids: F.embedding(torch.where(ids == 1)[0], x, **options))

    assert isinstance(rows(padding_idx=None, max_norm=None, norm_type=2.0, scale_grad_by_freq=False, sparse=False), Rows)
    assert isinstance(rows(), Rows)


REFUSED = {
    "padding_idx=1": lambda x, ids: F.embedding(torch.where(ids == 1)[0], x, padding_idx=1),
    "padding_idx=0": lambda x, ids: F.embedding(torch.where(ids == 1)[0], x, 0),
    "scale_grad_by_freq=True": lambda x, ids: F.embedding(torch.where(ids == 1)[0], x, None, None, 2.0, True),
    "sparse=True": lambda x, ids: F.embedding(torch.where(ids == 1)[0], x, sparse=True),
    "sparse_grad=True": lambda x, ids: torch.gather(x, 0, torch.where(ids == 1)[0][:, None].expand(-1, H), sparse_grad=True),
}


@pytest.mark.parametrize("argument", REFUSED)
def test_a_refusal_names_the_argument(argument: str) -> None:
    found = fact_of(REFUSED[argument])
    assert isinstance(found, Lost)
    assert (found.code, found.details["argument"]) == ("no-rule", argument)
    assert message(found.code, found.details).startswith(f"expert rows go through `{found.details['op']}` with `{argument}`, which no rule")


@pytest.mark.parametrize("argument", REFUSED)
def test_without_gradients_it_means_nothing(argument: str) -> None:
    with torch.no_grad():
        assert isinstance(fact_of(REFUSED[argument]), Rows)


def test_counts_with_weights_are_no_counts() -> None:
    assert fact_of(lambda ids, weights: torch.bincount(ids.flatten(), weights.flatten(), E)) is None
    assert fact_of(lambda ids, weights: torch.bincount(ids.flatten(), weights=weights.flatten(), minlength=E)) is None


def test_descending_order_is_none() -> None:
    assert fact_of(lambda ids: ids.flatten().argsort(-1, True)) is None
    assert fact_of(lambda ids: ids.flatten().argsort(stable=True, descending=True)) is None
    assert fact_of(lambda ids: ids.flatten().argsort(stable=True, descending=False)) is not None


def test_embedding_as_aten_has_it() -> None:
    """Its arguments stand the other way round."""
    embedding = torch.ops.aten.embedding.default
    assert isinstance(fact_of(lambda x, ids: embedding(x, torch.where(ids == 1)[0])), Rows)
    assert isinstance(fact_of(lambda x, ids: embedding(x, torch.where(ids == 1)[0], 1)), Lost)


INSIDE = {
    "softmax of float64": lambda h: F.softmax(h, -1, 3, torch.float64),
    "softmax by place": lambda h: h.softmax(-1, torch.float64),
    "log_softmax": lambda h: h.log_softmax(-1, dtype=torch.float64),
    "mean": lambda h: h - h.mean(-1, True, dtype=torch.float64),
    "biased deviation": lambda h: h / h.std(-1, False, keepdim=True),
    "biased variance": lambda h: h / h.var(-1, keepdim=True, correction=0),
    "variance by a flag": lambda h: h / h.var(-1, unbiased=False, keepdim=True),
    "sum": lambda h: h + h.sum(-1, True, dtype=torch.float64),
    "largest": lambda h: h - h.amax(-1, keepdim=True),
    "logsumexp": lambda h: h - h.logsumexp(-1, True),
    "layer_norm": lambda h: F.layer_norm(h, (I,), None, None, 0.5),
    "layer_norm by name": lambda h: F.layer_norm(h, normalized_shape=(I,), eps=0.5),
    "add": lambda h: torch.add(h, h, alpha=3),
    "sub": lambda h: torch.sub(h, 1, alpha=2),
    "rsub": lambda h: torch.rsub(h, 1, alpha=2),
    "leaky_relu": lambda h: F.leaky_relu(h, 0.3),
    "elu": lambda h: F.elu(h, 0.5),
    "softplus": lambda h: F.softplus(h, beta=2, threshold=0.1),
    "gelu": lambda h: F.gelu(h, approximate="tanh"),
    "hardtanh": lambda h: F.hardtanh(h, -0.1, 0.2),
    "nan_to_num": lambda h: torch.nan_to_num(h, nan=1.0),
    "addcmul": lambda h: torch.addcmul(h, h, h, value=0.5),
    "addcdiv": lambda h: torch.addcdiv(h, h, h.exp(), value=2),
    "div": lambda h: torch.div(h, 2, rounding_mode="floor"),
}


@pytest.mark.parametrize("name", INSIDE)
def test_an_option_inside_of_an_expert_is_kept(name: str) -> None:
    """What the rules say of it has the program's values and gradients, or nothing is said."""
    function = INSIDE[name]
    traced = trace(lambda x, ids, w_up: function(torch.einsum("th,tkih->tki", x, w_up[ids])))
    if not isinstance(traced.fact, Rows):
        assert traced.fact is None or isinstance(traced.fact, Lost)
        return
    made = torch.Generator().manual_seed(0)
    x, w_up = (torch.randn(*size, generator=made, dtype=torch.float64, requires_grad=True) for size in ((T, H), (E, I, H)))
    ids = torch.randint(E, (T, K), generator=made)
    token, slot = torch.where(ids == 1)
    values = {"x": x, "w_up": w_up}
    ours = Rows64(lambda n: values[n.name], 1, token, token, token * K + slot).run(traced.fact.expr)
    theirs = function(torch.einsum("th,tkih->tki", x, w_up[ids]))[token, slot]
    pairs = [(ours, theirs)] + ([] if name == "div" else [tuple(torch.autograd.grad(v.sin().sum(), x)[0] for v in (ours, theirs))])  # type: ignore[misc]
    for a, b in pairs:
        torch.testing.assert_close(a, b)
