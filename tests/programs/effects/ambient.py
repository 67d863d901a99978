"""What may be around a call: derivatives of other kinds, hooks on what gradients keep, modes. Of each, what a user gets of it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

Run = Callable[[Tensor], Tensor]
Around = Callable[[Run, nn.Module, Tensor, bool], Any]


def _direction(t: Tensor) -> Tensor:
    return torch.linspace(-1, 1.5, t.numel(), dtype=t.dtype).view(t.shape)


def _score(out: Tensor) -> Tensor:
    return (out * _direction(out)).sum() + out.square().sum()


def _tangent(dual: Tensor) -> list[Tensor | None]:
    primal, tangent = forward_ad.unpack_dual(dual)
    return [primal.detach().clone(), None if tangent is None else tangent.detach().clone()]


def _dual(run: Run, model: nn.Module, x: Tensor, grad: bool) -> Any:
    with torch.set_grad_enabled(grad), forward_ad.dual_level():
        return _tangent(run(forward_ad.make_dual(x, _direction(x))))


def _frozen(run: Run, model: nn.Module, x: Tensor, grad: bool) -> Any:
    wanted = [p.requires_grad for p in model.parameters()]
    model.requires_grad_(False)
    try:
        return _dual(run, model, x, grad)
    finally:
        for p, each in zip(model.parameters(), wanted, strict=True):
            p.requires_grad_(each)


def _of_weights(run: Run, model: nn.Module, x: Tensor, grad: bool) -> Any:
    """Tangents on parameters, which stand in the places of the module's."""
    before = "_orig_mod." if hasattr(run, "_orig_mod") else ""
    with torch.set_grad_enabled(grad), forward_ad.dual_level():
        duals = {before + name: forward_ad.make_dual(p.detach(), _direction(p)) for name, p in model.named_parameters()}
        return _tangent(torch.func.functional_call(run, duals, (x,)))  # type: ignore[arg-type]


def _of_a_gradient(run: Run, model: nn.Module, x: Tensor, grad: bool) -> Any:
    """Forward over reverse."""
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x.clone().requires_grad_(), _direction(x))
        (found,) = torch.autograd.grad(_score(run(dual)), dual)
        return _tangent(found)


def _jvp(run: Run, model: nn.Module, x: Tensor, grad: bool) -> Any:
    with torch.set_grad_enabled(grad):
        return [t.detach() for t in torch.func.jvp(run, (x,), (_direction(x),))]


def _func_grad(run: Run, model: nn.Module, x: Tensor, grad: bool) -> Any:
    return torch.func.grad(lambda z: _score(run(z)))(x).detach()


def _leaves(leaf: Tensor, model: nn.Module) -> list[Tensor]:
    return [leaf, *(p for p in model.parameters() if p.requires_grad)]


def _backward(run: Run, model: nn.Module, x: Tensor) -> Any:
    leaf = x.clone().requires_grad_()
    found = torch.autograd.grad(_score(run(leaf.clone())), _leaves(leaf, model), allow_unused=True, materialize_grads=True)
    return [t.clone() for t in found]


def _twice(run: Run, model: nn.Module, x: Tensor, grad: bool) -> Any:
    leaf = x.clone().requires_grad_()
    inputs = _leaves(leaf, model)
    first = torch.autograd.grad(_score(run(leaf.clone())), inputs, create_graph=True, allow_unused=True, materialize_grads=True)
    loss = sum(_score(t) for t in first if t.requires_grad)
    second = torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)  # type: ignore[arg-type]
    return [t.detach() for t in (*first, *second)]


def _batch(run: Run, model: nn.Module, x: Tensor, grad: bool) -> Any:
    leaf = x.clone().requires_grad_()
    out = run(leaf.clone())
    pulls = torch.stack([_direction(out), torch.ones_like(out)])
    return [t.detach() for t in torch.autograd.grad(out, leaf, pulls, is_grads_batched=True)]


def _inside(around: Callable[[], Any]) -> Around:
    def call(run: Run, model: nn.Module, x: Tensor, grad: bool) -> Any:
        with around():
            return _backward(run, model, x)

    return call


def _inference(run: Run, model: nn.Module, x: Tensor, grad: bool) -> Any:
    """In it; and behind it, with a tensor that was made in it."""
    with torch.inference_mode():
        inside, made = run(x.clone()), x.clone()
    with torch.no_grad():
        return [inside.clone(), run(made).clone()]


def _fakes(run: Run, model: nn.Module, x: Tensor, grad: bool) -> Any:
    with torch.set_grad_enabled(grad), FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv()) as mode:
        return list(run(mode.from_tensor(x)).shape)


def _thread(run: Run, model: nn.Module, x: Tensor, grad: bool) -> Any:
    found: list[Any] = []
    dtype = torch.get_default_dtype()

    def work() -> None:
        torch.set_default_dtype(dtype)
        try:
            found.append(_backward(run, model, x))
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]


class _Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _Operators(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


AROUND: dict[str, Around] = {
    "nothing": _inside(contextlib.nullcontext),
    "dual": _dual,
    "dual, frozen": _frozen,
    "dual weights": _of_weights,
    "dual of a gradient": _of_a_gradient,
    "func.jvp": _jvp,
    "func.grad": _func_grad,
    "second derivative": _twice,
    "batch of gradients": _batch,
    "hooks": _inside(lambda: torch.autograd.graph.saved_tensors_hooks(torch.Tensor.clone, lambda t: t)),
    "on the CPU": _inside(torch.autograd.graph.save_on_cpu),
    "anomaly": _inside(lambda: torch.autograd.detect_anomaly(check_nan=False)),
    "inference": _inference,
    "fakes": _fakes,
    "thread": _thread,
    "functions": _inside(_Functions),
    "operators": _inside(_Operators),
}
"""By name: given what runs, the model, its tokens and whether gradients are recorded."""

SELDOM = ("dual of a gradient", "fakes")
"""What eager refuses of most programs: ``silu`` has no such derivative, and many loops cannot be looked at without numbers."""
