"""What a call did is taken back: what the tensors hold, what they are, Python's objects, random states. In eager: nothing is compiled."""

from __future__ import annotations

import collections
import dataclasses
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from moefuse import _torch_private
from moefuse.diagnosis.undo import taken_back


@dataclasses.dataclass(slots=True)
class Slotted:
    seen: int = 0


class State(nn.Module):
    """One of everything that a forward can leave a trace in."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)
        self.register_buffer("counts", torch.zeros(4))
        self.other = self.counts.view(2, 2)
        self.cache: list[Tensor] = [torch.zeros(3)]
        self.table: dict[str, Any] = {"b": 1, "a": {"deep": [1]}}
        self.ordered = collections.OrderedDict(a=1, b=2)
        self.names, self.queue = {"x"}, collections.deque([1, 2], maxlen=2)
        self.calls, self.slotted = 0, Slotted()
        self.array, self.generator = np.zeros(3), torch.Generator()
        self.python, self.numpy = random.Random(0), np.random.default_rng(0)
        number = 0

        def count() -> int:
            nonlocal number
            number += 1
            return number

        self.count = count


def step(m: State) -> None:
    optimizer = torch.optim.SGD(m.linear.parameters(), 0.1)
    m.linear(torch.ones(2, 3)).sum().backward()
    optimizer.step()


def grown(m: State) -> None:
    m.counts.resize_(100).fill_(1)


def replaced(m: State) -> None:
    m.linear.weight.data = torch.ones(5, 5)
    m.linear.weight.requires_grad_(False)
    m.linear.weight.mark = 3  # type: ignore[attr-defined]


CHANGES: dict[str, Callable[[State], object]] = {
    "buffer in place": lambda m: m.counts.add_(1),
    "a view of it": lambda m: m.other[0].fill_(2),
    "behind autograd's back": lambda m: m.linear.weight.data.mul_(2),
    "through detach": lambda m: m.linear.weight.detach().clamp_(0, 0.1),
    "as_strided": lambda m: m.counts.as_strided((2,), (2,), 1).fill_(3),
    "out": lambda m: torch.add(m.counts, 1, out=m.counts),
    "foreach": lambda m: torch._foreach_add_([m.counts, m.linear.bias.data], 1.0),
    "index": lambda m: m.counts.__setitem__(torch.tensor([1, 2]), 5.0),
    "running statistics": lambda m: m.norm(torch.randn(4, 3)),
    "a whole training step": step,
    "another size": grown,
    "another storage": replaced,
    "a buffer with history": lambda m: m.counts.add_(m.linear.bias.sum()),
    "another buffer": lambda m: setattr(m, "counts", torch.ones(4)),
    "an attribute": lambda m: setattr(m, "calls", 3),
    "a new attribute": lambda m: setattr(m, "fresh", 3),
    "a missing attribute": lambda m: delattr(m, "calls"),
    "a list": lambda m: m.cache.append(torch.ones(3)),
    "a tensor in a list": lambda m: m.cache[0].add_(1),
    "a dict": lambda m: m.table.update(b=2, c=3),
    "deep in a dict": lambda m: m.table["a"]["deep"].clear(),
    "order of a dict": lambda m: m.ordered.move_to_end("a"),
    "a set": lambda m: m.names.add("y"),
    "a queue": lambda m: m.queue.append(3),
    "slots": lambda m: setattr(m.slotted, "seen", 1),
    "a variable of a closure": lambda m: m.count(),
    "an array": lambda m: m.array.fill(1),
    "a hook": lambda m: m.linear.register_forward_hook(lambda *_: None),
    "its own generator": lambda m: torch.randn(2, generator=m.generator),
    "Python's own generator": lambda m: m.python.random(),
    "NumPy's own generator": lambda m: m.numpy.random(),
    "random numbers": lambda m: (torch.randn(2), random.random(), np.random.rand()),
}


def observed(m: State) -> Any:
    """Everything about a model that a test can compare."""
    tensors = [*m.linear.parameters(), *m.norm.buffers(), m.counts, m.other, *m.cache]
    assert m.count.__closure__ is not None
    return (
        [(t.tolist(), t.stride(), id(t), t._version, dict(vars(t))) for t in tensors],
        [(t.requires_grad, t.grad_fn, t.grad if t.is_leaf else None) for t in tensors if not t._is_view()],
        [list(vars(module)) for module in m.modules()],
        list(m.linear._forward_hooks),
        (str(m.table), list(m.ordered), sorted(m.names), list(m.queue), getattr(m, "calls", None), m.slotted.seen),
        (m.count.__closure__[0].cell_contents, m.array.tolist()),
        (m.generator.get_state().tolist(), m.python.getstate(), str(m.numpy.bit_generator.state)),
        (torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())),
    )


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_is_taken_back(change: Callable[[State], object]) -> None:
    model = State()
    before = observed(model)
    with taken_back(model):
        change(model)
        assert observed(model) != before, "the change changes something"
    assert observed(model) == before


def test_arguments_are_taken_back_too() -> None:
    x, cache = torch.zeros(3), {"seen": [torch.zeros(2)]}
    with taken_back((x,), cache):
        x.add_(1)
        cache["seen"][0].add_(1)
        cache["seen"].append(x)
    assert x.tolist() == [0, 0, 0]
    assert [t.tolist() for t in cache["seen"]] == [[0, 0]]


def test_it_is_taken_back_when_the_call_raises() -> None:
    model = State()

    def fails() -> None:
        with taken_back(model):
            model.counts.add_(1)
            model.calls = 1 // 0

    with pytest.raises(ZeroDivisionError):
        fails()
    assert model.counts.sum() == 0


def test_a_backward_pass_can_still_run() -> None:
    """What autograd saved is what it was, and counts as unchanged."""
    weight = torch.ones(3, requires_grad=True)
    loss = (weight * weight).sum()
    with taken_back([weight]), torch.no_grad():
        weight.mul_(5)
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [2, 2, 2]


def test_only_what_is_written_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model must not be doubled in memory, and what a call makes for itself is nobody's."""
    copied: list[int] = []
    clone = torch.UntypedStorage.clone
    monkeypatch.setattr(torch.UntypedStorage, "clone", lambda storage: (copied.append(storage.nbytes()), clone(storage))[1])
    model = State()
    with taken_back(model):
        scratch = torch.zeros(1000)
        scratch.add_(model.linear(torch.ones(3)).sum())
        model.counts.add_(1)
        model.other.add_(1)
    assert copied == [16]


def test_tensors_of_a_class_of_their_own() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    value = TwoTensor(torch.zeros(3), torch.zeros(3))
    with taken_back([value]):
        value.add_(1)
        assert value.a.sum() == 3
    assert value.a.sum() == value.b.sum() == 0


def test_every_write_is_announced_first() -> None:
    seen: list[Tensor] = []
    a, b = torch.zeros(2), torch.ones(2)
    with _torch_private.before_writes(lambda t: seen.append(t.clone())):
        torch.add(a, b, out=a)
        a.copy_(b)
        a + b
    assert [t.tolist() for t in seen] == [[0, 0], [1, 1]]


def test_lazy_modules_are_lazy_again() -> None:
    """Their first call gives weights a shape, and modules and weights another class."""
    model, x = nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(2)), torch.randn(3, 5)
    with taken_back(model, x):
        model(x).sum().backward()
    assert [type(m) for m in model] == [nn.LazyLinear, nn.ReLU, nn.LazyLinear]
    assert all(isinstance(p, nn.UninitializedParameter) for p in model.parameters())
    assert model(torch.randn(3, 7)).shape == (3, 2)  # of other features: nothing is left of the first call
    model(torch.randn(3, 7)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
