"""Parametrisations that a call registers and removes again: one graph for us, what eager computes, and nothing left behind."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

from moefuse import Options
from tests.cpu.capture_case import Seen, capturing

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


class Scaled(nn.Module):
    """Counts its calls, which is a side effect."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(3.0))
        self.calls = 0

    def forward(self, w: Tensor) -> Tensor:
        self.calls += 1
        return w * self.scale


class Quiet(Scaled):
    def forward(self, w: Tensor) -> Tensor:
        return w * self.scale


class Doubled(nn.Module):
    def __init__(self, factor: Tensor) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, w: Tensor) -> Tensor:
        return w * self.factor


class Inverse(Scaled):
    def right_inverse(self, w: Tensor) -> Tensor:
        return w / 3


class Longer(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return torch.cat([w, w])


class Halved(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w.half()


class Model(nn.Module):
    """``body(model, x)`` with whatever it registers on ``inner``."""

    def __init__(self, body: Callable[[Model, Tensor], Any], kind: type[nn.Module] = Scaled) -> None:
        super().__init__()
        self.body = body
        self.inner = nn.Linear(4, 4)
        self.inner.register_buffer("shift", torch.ones(4))
        self.extra, self.another = kind(), Scaled()

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


@contextmanager
def registered(module: nn.Module, name: str, extra: nn.Module, **how: bool) -> Iterator[None]:
    parametrize.register_parametrization(module, name, extra, **how)
    try:
        yield
    finally:
        parametrize.remove_parametrizations(module, name, leave_parametrized=False)


def once(model: Model, x: Tensor) -> Tensor:
    with registered(model.inner, "weight", model.extra):
        return model.inner(x)


def twice(model: Model, x: Tensor) -> Tensor:
    with registered(model.inner, "weight", model.extra):
        return model.inner(model.inner(x))


def kept(model: Model, x: Tensor) -> Tensor:
    with registered(model.inner, "weight", model.extra), parametrize.cached():
        return model.inner(model.inner(x))


def two_names(model: Model, x: Tensor) -> Tensor:
    with registered(model.inner, "weight", model.extra), parametrize.cached():
        with registered(model.inner, "bias", Doubled(x[0] * 2)), parametrize.cached():
            y = model.inner(x)
        return y + model.inner(x)


def again(model: Model, x: Tensor) -> Tensor:
    """The value that is kept is the first one's, until the outermost block ends."""
    with registered(model.inner, "bias", model.another), parametrize.cached():
        with registered(model.inner, "weight", Doubled(x.sum())):
            y = model.inner(x)
        with registered(model.inner, "weight", model.extra):
            return y + model.inner(x)


def of_a_buffer(model: Model, x: Tensor) -> Tensor:
    with registered(model.inner, "shift", model.extra):
        return x + model.inner.shift


def of_another_shape(model: Model, x: Tensor) -> Tensor:
    with registered(model.inner, "weight", Longer(), unsafe=True):
        return F.linear(x, model.inner.weight)


def looked_at(model: Model, x: Tensor) -> Tensor:
    inner = model.inner
    before = hasattr(inner, "parametrizations"), parametrize.is_parametrized(inner)
    with registered(inner, "weight", model.extra):
        known = inner.parametrizations
        inside = ("weight" in known, "bias" in known, len(known), len(known["weight"]), known["weight"].original is inner.bias)
        there = parametrize.is_parametrized(inner), parametrize.is_parametrized(inner, "bias"), hasattr(inner, "parametrizations")
        original = known["weight"].original.requires_grad_(inner.bias.requires_grad)
        y = inner(x) + known.weight[0](original).sum()
    return y * (1 + sum(2**i * bool(v) for i, v in enumerate((*before, *inside, *there, "weight" in known))))


def without_gradients(model: Model, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = once(model, x)
    return y + once(model, x)


def in_a_checkpoint(model: Model, x: Tensor) -> Tensor:
    def body(x: Tensor) -> Tensor:
        with registered(model.inner, "weight", Doubled(x.sum())), parametrize.cached():
            return model.inner(model.inner(x))

    return checkpoint(body, x, use_reentrant=False)  # type: ignore[no-any-return]


def removed_by_an_error(model: Model, x: Tensor) -> Tensor:
    try:
        with registered(model.inner, "weight", model.extra):
            y = model.inner(x)
            raise KeyError
    except KeyError:
        return y + model.inner(x)


ONE_GRAPH = [
    once,
    twice,
    kept,
    two_names,
    again,
    of_a_buffer,
    of_another_shape,
    looked_at,
    without_gradients,
    in_a_checkpoint,
    removed_by_an_error,
]


def for_good(model: Model, x: Tensor) -> Tensor:
    if not parametrize.is_parametrized(model.inner):
        parametrize.register_parametrization(model.inner, "weight", model.extra)
    return model.inner(x)


def left_as_it_is(model: Model, x: Tensor) -> Tensor:
    parametrize.register_parametrization(model.inner, "weight", model.extra)
    y = model.inner(x)
    parametrize.remove_parametrizations(model.inner, "weight")
    return y + model.inner(x)


def broken(model: Model, x: Tensor) -> Tensor:
    with registered(model.inner, "weight", model.extra):
        y = model.inner(x)
        torch._dynamo.graph_break()
        return y + model.inner(x)


def named(model: Model, x: Tensor) -> Any:
    with registered(model.inner, "weight", model.extra):
        return model.inner(x), sorted(name for name, _ in model.named_parameters())


def dictionary(model: Model, x: Tensor) -> Any:
    with registered(model.inner, "weight", model.extra):
        return model.inner(x), "weight" in model.inner._parameters, "weight" in vars(model.inner)


def by_type(model: Model, x: Tensor) -> Any:
    with registered(model.inner, "weight", model.extra):
        return model.inner(x), type(model.inner).__name__


def by_class(model: Model, x: Tensor) -> Any:
    with registered(model.inner, "weight", model.extra):
        return model.inner(x), model.inner.__class__.__name__


def set_inside(model: Model, x: Tensor) -> Tensor:
    with registered(model.inner, "weight", model.extra):
        try:
            model.inner.weight = torch.ones(4, 4)  # type: ignore[assignment]
        except RuntimeError:  # it has no inverse
            return model.inner(x)
        return x


def second(model: Model, x: Tensor) -> Tensor:
    parametrize.register_parametrization(model.inner, "weight", model.extra)
    parametrize.register_parametrization(model.inner, "weight", model.another)
    y = model.inner(x)
    parametrize.remove_parametrizations(model.inner, "weight", leave_parametrized=False)
    return y


def beside_one_for_good(model: Model, x: Tensor) -> Tensor:
    if not parametrize.is_parametrized(model.inner, "bias"):
        parametrize.register_parametrization(model.inner, "bias", model.another)
    with registered(model.inner, "weight", model.extra), parametrize.cached():
        return model.inner(x) + model.inner.bias


def in_an_outer_block(model: Model, x: Tensor) -> Tensor:
    with parametrize.cached():
        y = once(model, x)
        return y + once(model, x)


AS_EVER: dict[Callable[[Model, Tensor], Any], str | None] = {
    for_good: "it is still there where the graph ends",
    left_as_it_is: "the tensor stays parametrised when it is removed",
    broken: None,
    named: "`_parameters` of the module is read",
    dictionary: "`_parameters` of the module is read",
    by_type: "the module is asked for its class",
    by_class: "the module is asked for its class",
    set_inside: "`__dict__` of the module is read",
    second: "the tensor gets a second one",
    beside_one_for_good: "it is still there where the graph ends",
    in_an_outer_block: None,
}
"""And what the report says, beside the breaks themselves."""


TWICE_REGISTERED = (again, left_as_it_is, in_an_outer_block)
"""Each registration writes the Parameter to itself, so eager has no gradients of what was computed before the second."""


def state(model: Model) -> Any:
    """What a call may leave behind."""
    counts = [m.calls for m in model.modules() if isinstance(m, Scaled)]
    return type(model.inner).__name__, sorted(n for n, _ in model.named_parameters()), sorted(model.state_dict()), sorted(counts)


def run(compiled: Callable[[Tensor], Any], model: Model) -> tuple[list[Any], Any]:
    """Tensors, and everything else, of two calls."""
    seen, rest = [], []
    for _ in range(2):
        model.zero_grad()
        x = X.clone().requires_grad_()
        with torch.set_grad_enabled(model.body not in TWICE_REGISTERED):
            out, *more = found if isinstance(found := compiled(x), tuple) else (found,)
        if out.requires_grad:
            out.square().sum().backward()
        seen += [out, x.grad, {n: p.grad for n, p in model.named_parameters()}]
        rest += [more, state(model)]
    return seen, rest


def same(actual: tuple[list[Any], Any], expected: tuple[list[Any], Any]) -> None:
    torch.testing.assert_close(actual[0], expected[0])
    assert actual[1] == expected[1]


def both(body: Callable[[Model, Tensor], Any], kind: type[nn.Module] = Scaled) -> tuple[Model, Seen, Any, Any]:
    """A program in eager and compiled by us: the model, what our backend has seen, and the results."""
    torch.manual_seed(0)
    model = Model(body, kind)
    expected = run(twin := copy.deepcopy(model), twin)
    seen = Seen()
    return model, seen, run(torch.compile(model, backend=capturing(seen)), model), expected


@pytest.mark.sampled(1)
@pytest.mark.parametrize("body", ONE_GRAPH, ids=lambda f: f.__name__)
def test_one_graph(body: Callable[[Model, Tensor], Any]) -> None:
    """Values, gradients, side effects, and identities; the second call takes the first one's graph."""
    torch.manual_seed(0)
    identities = {}
    model = Model(body)
    identities = {n: id(p) for n, p in model.named_parameters()}
    order = list(model.state_dict())
    expected = run(twin := copy.deepcopy(model), twin)
    seen = Seen()
    actual = run(torch.compile(model, backend=capturing(seen), fullgraph=True), model)
    same(actual, expected)
    graphs = len(seen.graphs)
    assert graphs == 1 or (graphs == 2 and any(m.calls for m in model.modules() if isinstance(m, Scaled)))  # the counters are constants
    assert type(model.inner) is nn.Linear
    assert {n: id(p) for n, p in model.named_parameters()} == identities
    assert list(model.state_dict()) == order


@pytest.mark.sampled(3)
@pytest.mark.parametrize("body", AS_EVER, ids=lambda f: f.__name__)
def test_as_ever(body: Callable[[Model, Tensor], Any]) -> None:
    """What is more than a value for a while breaks the graph where it does for every other backend, and computes what eager does."""
    _, seen, actual, expected = both(body)
    same(actual, expected)
    text = AS_EVER[body]
    notes = seen.report.notes
    assert all(text is not None and text in note and f"{__file__}:" in note for note in notes)
    assert bool(notes) == (text is not None)
    torch._dynamo.reset()
    graphs: list[Any] = []

    def plain(gm: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    torch.manual_seed(0)
    run(torch.compile(other := Model(body), backend=plain), other)
    assert len(seen.graphs) == len(graphs)


def test_around_a_checkpoint() -> None:
    """What the checkpoint's graph has computed is not used outside of it. Eager has an error there: in backward nothing is registered."""

    def around(model: Model, x: Tensor, call: Callable[..., Tensor]) -> Tensor:
        with registered(model.inner, "weight", Doubled(x.sum())), parametrize.cached():
            return model.inner(call(model.inner, x))

    torch.manual_seed(0)
    model, seen = Model(lambda m, x: around(m, x, lambda f, x: checkpoint(f, x, use_reentrant=False))), Seen()
    plain = Model(lambda m, x: around(m, x, lambda f, x: f(x)))
    plain.load_state_dict(model.state_dict())
    expected = run(plain, plain)
    actual = run(torch.compile(model, backend=capturing(seen)), model)
    torch.testing.assert_close(actual[0], expected[0])
    assert len(seen.graphs) == 1


def test_a_checkpoint_that_writes() -> None:
    """Eager runs its body again in backward, and adds twice; one graph would add once."""

    def body(model: Model, x: Tensor) -> Tensor:
        def inner(x: Tensor) -> Tensor:
            with registered(model.inner, "weight", Doubled(x.sum())):
                model.inner.shift.add_(1)
                return model.inner(x)

        return checkpoint(inner, x, use_reentrant=False)  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model, seen = Model(body), Seen()
    twin = copy.deepcopy(model)
    same(run(torch.compile(model, backend=capturing(seen)), model), run(twin, twin))
    assert model.inner.shift.tolist() == twin.inner.shift.tolist() == [5.0] * 4
    assert any("run again in backward writes" in note for note in seen.report.notes)


def test_a_right_inverse_is_left_to_torch() -> None:
    _, seen, actual, expected = both(once, Inverse)
    same(actual, expected)
    assert len(seen.graphs) != 1


def test_the_errors_of_the_check() -> None:
    def body(model: Model, x: Tensor) -> Tensor:
        with registered(model.inner, "weight", model.extra):
            return model.inner(x)

    texts = []
    for backend in (None, capturing(Seen())):
        model = Model(body, Halved)
        with pytest.raises(ValueError, match="may not change the dtype") as error:
            (model if backend is None else torch.compile(model, backend=backend))(X)
        texts.append(str(error.value))
        assert type(model.inner) is nn.Linear
        assert isinstance(model.inner.weight, nn.Parameter)
    assert texts[0] == texts[1]


def test_values_that_somebody_keeps_outside() -> None:
    """``cached()`` around the call: the second forward has the first one's weight, as in eager; and outside of the block it has its own."""
    torch.manual_seed(0)
    model = Model(once)
    twin, seen = copy.deepcopy(model), Seen()
    compiled = torch.compile(model, backend=capturing(seen))

    def results(call: Callable[[Tensor], Tensor], of: Model) -> list[Tensor]:
        out = [call(X)]
        with torch.no_grad(), parametrize.cached():
            out.append(call(X))
            of.extra.scale.mul_(2)
            out.append(call(X))
        return [*out, call(X)]

    torch.testing.assert_close(results(compiled, model), results(twin, twin))


def test_a_norm_that_is_there_for_good() -> None:
    """It draws on its buffers each time that it is asked for: in ``cached()``, once."""

    def body(model: Model, x: Tensor) -> Tensor:
        with registered(model.inner, "weight", model.extra), parametrize.cached():
            return model.inner(model.normed(model.normed(x)))  # type: ignore[operator]

    torch.manual_seed(0)
    model = Model(body)
    model.normed = spectral_norm(nn.Linear(4, 4))
    twin = copy.deepcopy(model)
    same(run(torch.compile(model, backend=capturing(Seen())), model), run(twin, twin))
    torch.testing.assert_close(dict(model.named_buffers()), dict(twin.named_buffers()))


def test_one_that_is_there_for_good() -> None:
    torch.manual_seed(0)
    model = Model(lambda model, x: model.inner(x))
    parametrize.register_parametrization(model.inner, "weight", Doubled(torch.tensor(2.0)))
    expected = model(X)
    seen = Seen()
    torch.testing.assert_close(torch.compile(model, backend=capturing(seen), fullgraph=True)(X), expected)
    parametrize.remove_parametrizations(model.inner, "weight", leave_parametrized=False)
    torch.testing.assert_close(torch.compile(model, backend=capturing(seen))(X), model(X))


def test_other_backends_and_no_capture() -> None:
    """Without our backend, or with ``options={"capture": False}``, graphs break as they did."""
    torch.manual_seed(0)
    model, counts = Model(once), []
    for options in (Options(), Options(capture=False)):
        seen = Seen()
        torch.compile(model, backend=capturing(seen, options))(X)
        counts.append(len(seen.graphs))
        torch._dynamo.reset()
    graphs: list[Any] = []
    torch.compile(model, backend=lambda gm, _: graphs.append(gm) or gm.forward)(X)
    assert counts[0] == 1
    assert counts[1] == len(graphs) != 1


def test_a_hook_that_comes_later() -> None:
    """A call that eager would see in pieces is one graph: a hook on the module is no surprise that goes unnoticed."""
    model, seen = Model(once, Quiet), Seen()
    compiled = torch.compile(model, backend=capturing(seen))
    before = compiled(X)
    model.inner.register_forward_hook(lambda *_: _[2] * 2)
    torch.testing.assert_close(compiled(X), before * 2)
