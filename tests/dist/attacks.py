"""What an adversary had two ranks do; each function says what became of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import moefuse
from tests.cpu.capture_case import Seen, capturing
from tests.dist import faults, layers, scenes

E = 4


class Single(nn.Module):
    """Router and experts are Parameters of one module."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Parameter(torch.randn(E, layers.H))
        self.gate_up = nn.Parameter(torch.randn(E, 2 * layers.I, layers.H) * 0.3)
        self.down = nn.Parameter(torch.randn(E, layers.H, layers.I) * 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = (x @ self.router.t()).softmax(-1).topk(layers.K)
        out = torch.zeros_like(x)
        for e in range(E):
            token, slot = torch.where(ids == e)
            gate, up = (x[token] @ self.gate_up[e].t()).chunk(2, -1)
            out.index_add_(0, token, ((torch.nn.functional.silu(gate) * up) @ self.down[e].t()) * weights[token, slot, None])
        return out


class Triple(Single):
    """Two weights of one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(E, layers.I, layers.H))
        self.third = nn.Parameter(torch.randn(E, layers.I, layers.H))


def _tried(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _run(model: nn.Module) -> Any:
    return torch.compile(model, backend=capturing(Seen(), behind=scenes.BEHIND))


def _models(*kinds: type[nn.Module]) -> list[nn.Module]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    made, mesh = [kind() for kind in kinds], faults.mesh(20)
    for model in made:
        moefuse.parallelize(model, mesh)
    return made


def other_layers(rank: int) -> str:
    """Blocks that hold everything themselves, and each rank runs another one."""
    model = nn.ModuleList([Single(), Single()])
    moefuse.parallelize(model, faults.mesh(20))
    run = _run(model[rank])
    with torch.no_grad():
        return _tried(lambda: run(torch.randn(3, layers.H)))


def other_models(rank: int) -> str:
    """Two models of one form, and each rank begins with another."""
    models = _models(Single, Single)
    run = _run(models[rank])
    with torch.no_grad():
        return _tried(lambda: run(torch.randn(3, layers.H)))


def other_weights(rank: int) -> str:
    """One layer, in eager mode, and each rank reads another of its weights."""
    (model,) = _models(Triple)
    return _tried(lambda: getattr(model, ("first", "third")[rank]).sum())


def other_gradients(rank: int) -> str:
    """Both weights are read, and each rank asks for the gradient of another first."""
    (model,) = _models(Triple)
    sums = [model.first.square().sum(), model.third.square().sum()]  # type: ignore[operator]
    return _tried(sums[rank].backward)


def other_backward(rank: int) -> str:
    """Layers of one shape that are compiled one by one, so that graphs have no names for them; each rank's loss is of another."""
    torch._dynamo.reset()
    model = layers.Model(layers.Stacked, 2)
    moefuse.parallelize(model, faults.mesh(20), debug=True)
    x = torch.randn(5, layers.H)
    with scenes.codeless():
        outs = [torch.compile(layer, backend="moefuse")(x) for layer in (model.first, model.second)]
    return _tried(outs[rank].square().sum().backward)


def writes(rank: int) -> list[str]:
    """Ways to write to what is put together from all ranks; all of them have to be said to be lost."""
    single, listed = layers.Stacked(E), layers.Listed(E)
    for model in (single, listed):
        moefuse.parallelize(model, faults.mesh(20))
    expert: Any = listed.experts[3]  # type: ignore[index]
    linear = next(m for m in expert.modules() if isinstance(m, nn.Linear))

    def set_data() -> None:
        single.down.data = torch.zeros(E, layers.H, layers.I)  # type: ignore[union-attr]

    def in_place() -> None:
        down: Any = single.down
        down *= 2

    def set_rows() -> None:
        single.down[0] = 0  # type: ignore[operator,index]

    with torch.no_grad():
        ways: list[Callable[[], Any]] = [
            lambda: single.down.mul_(2),  # type: ignore[operator]
            lambda: single.down.data.mul_(2),  # type: ignore[union-attr,operator]
            lambda: single.down[1].view(-1).zero_(),  # type: ignore[operator,index]
            set_data, in_place, set_rows,
            lambda: torch._foreach_mul_([torch.ones(2), single.down], 2),
            lambda: torch.mul(torch.ones(E, layers.H, layers.I), 2, out=single.down),  # type: ignore[call-overload]
            lambda: torch.max(torch.ones(E, layers.H, 2), -1, out=(single.down[..., 0], torch.ones(E, layers.H).long())),  # type: ignore[index]
            lambda: nn.init.normal_(linear.weight),
            lambda: linear.weight.copy_(torch.zeros_like(linear.weight)),
            linear.reset_parameters,
        ]  # fmt: skip
        return [_tried(way) for way in ways]


def reads(rank: int) -> tuple[bool, bool, bool]:
    """Whether what is computed from gathered weights is plain, their gradients arrive, and NumPy's view of one takes no writes."""
    single = layers.Stacked(E)
    wanted = single.down.detach().square().sum()
    moefuse.parallelize(single, faults.mesh(20))
    down: Any = single.down
    locked = not down.detach().numpy().flags.writeable
    norm = down.square().sum()
    flat = torch.cat([down.flatten(1), torch.zeros(E, 1)], 1)
    target = torch.empty(E, layers.H, layers.I)
    target.copy_(down.detach())
    norm.backward()
    grad: Any = single._parameters["down"].grad  # type: ignore[union-attr]
    same = torch.allclose(norm.detach(), wanted) and torch.allclose(grad.full_tensor(), 2 * target)
    return type(norm) is torch.Tensor and type(flat) is torch.Tensor, same, locked


def incomplete(rank: int) -> list[str]:
    """A checkpoint of the whole model, of which one expert is missing, or of another shape, or both, in a list: what each rank says."""
    model = layers.Listed(E)
    state = dict(model.state_dict())
    moefuse.parallelize(model, faults.mesh(20))
    key = next(key for key in state if ".1." in key and key.endswith("weight"))
    shorter = {k: v for k, v in state.items() if k != key}
    found = [
        _tried(lambda: model.load_state_dict(shorter)),
        _tried(lambda: model.load_state_dict({**state, key: torch.zeros(3, 3)})),
        str(list(model.load_state_dict(shorter, strict=False).missing_keys) == [key]),
    ]
    model.load_state_dict(state)
    return found


def in_parts(rank: int) -> list[str]:
    """A checkpoint in files, one behind the other, and one that lacks a key: (what was not loaded) of each."""
    torch.manual_seed(0)
    model, other = layers.Listed(E), layers.Listed(E).state_dict()
    moefuse.parallelize(model, faults.mesh(20))
    before = {key: value.clone() for key, value in moefuse.full_state_dict(model).items()}
    lacks = "experts.1.0.weight"
    model.load_state_dict({key: value for key, value in other.items() if key != lacks}, strict=False)
    shorter = _differing(model, other)
    kept = torch.equal(moefuse.full_state_dict(model)[lacks], before[lacks])
    model.load_state_dict(before)
    for expert in range(E):
        part = {key: value for key, value in other.items() if key.startswith(f"experts.{expert}.")}
        model.load_state_dict(part, strict=False)
    return [str(shorter == [lacks] and kept), str(_differing(model, other))]


def _differing(model: nn.Module, wanted: dict[str, Any]) -> list[str]:
    found = moefuse.full_state_dict(model)
    return [key for key, value in wanted.items() if not torch.equal(found[key], value)]
