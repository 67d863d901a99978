"""What tests of loading, saving and undoing have each rank do."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import moefuse
from moefuse.parallel.files import Files
from tests.dist import layers, scenes

E = 4


class Buffered(layers.Stacked):
    """With a buffer that no checkpoint has."""

    def __init__(self, experts: int) -> None:
        super().__init__(experts)
        self.register_buffer("scale", torch.full((layers.H,), 0.5), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.scale)  # type: ignore[operator]


def single(kind: type[nn.Module], seed: int = 5) -> nn.Module:
    torch.manual_seed(seed)
    return layers.Model(kind, E)


def mesh_for(how: dict[str, Any], shape: tuple[int, ...]) -> DeviceMesh:
    if len(shape) == 2:
        return init_device_mesh("cpu", shape, mesh_dim_names=("ep", "tp"))
    return scenes.mesh()


def on_meta(kind: type[nn.Module], how: dict[str, Any], shape: tuple[int, ...] = (2,), count: int = E) -> nn.Module:
    """A model that was built without memory, with garbage in it now."""
    with torch.device("meta"):
        model = layers.Model(kind, count)
        moefuse.parallelize(model, mesh_for(how, shape), **how)
    assert all(p.is_meta for p in model.parameters())
    return garbage(model.to_empty(device="cpu"))


def garbage(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            local.fill_(float("nan") if local.is_floating_point() else 99)
    return model


def apart(model: Any, wanted: nn.Module, rank: int) -> float:
    x = torch.randn(4 + rank, layers.H, generator=torch.Generator().manual_seed(rank)).to(next(wanted.parameters()).dtype)
    with torch.no_grad():
        return float((model(x) - wanted(x)).abs().max())


def loaded(rank: int, kind: type[nn.Module], how: dict[str, Any], shape: tuple[int, ...], path: str) -> list[float]:
    """Differences from one process: of a model from the meta device, a copy, wider, back again, emptied and loaded anew; compiled."""
    rank //= shape[1] if len(shape) == 2 else 1
    wanted = single(kind)
    model = on_meta(kind, how, shape)
    found = moefuse.load(model, path)
    assert found.missing_keys == found.unexpected_keys == []
    worst = [apart(model, wanted, rank), apart(copy.deepcopy(model), wanted, rank)]
    worst.append(apart(model.double(), copy.deepcopy(wanted).double(), rank))
    worst.append(apart(model.float(), wanted, rank))
    garbage(model.to("meta").to_empty(device="cpu"))
    moefuse.load(model, path)
    return [*worst, apart(scenes.compiled(model), wanted, rank)]


def trained(rank: int) -> float:
    """Copies of experts on four ranks: gradients are averaged where Parameters are other objects than those that were spread."""
    torch.manual_seed(5)
    wanted = layers.Model(layers.Stacked, 2)
    state = {key: value.clone() for key, value in wanted.state_dict().items()}
    emptied, assigned = on_meta(layers.Stacked, {}, (4,), 2), on_meta(layers.Stacked, {}, (4,), 2)
    emptied.load_state_dict(state)
    assigned.load_state_dict(state, assign=True)
    worst = 0.0
    for model in (emptied, copy.deepcopy(emptied), assigned):
        every = [torch.randn(5, layers.H, generator=torch.Generator().manual_seed(r)) for r in range(4)]
        model(every[rank]).square().mean().backward()
        wanted.zero_grad()
        sum((wanted(x).square().mean() for x in every), torch.zeros(())).div(4).backward()
        for layer, theirs in ((model.first, wanted.first), (model.second, wanted.second)):
            grad: Any = layer._parameters["down"].grad  # type: ignore[union-attr]
            full = theirs.down.grad  # type: ignore[union-attr]
            mine = full[rank % 2 : rank % 2 + 1]  # type: ignore[index]
            worst = max(worst, float((grad.to_local() - mine).abs().max()))
    return worst


def bytes_read(rank: int, kind: type[nn.Module], how: dict[str, Any], shape: tuple[int, ...], path: str) -> tuple[int, int, list[str]]:
    """(bytes read of experts, bytes of experts that this rank holds, keys that were read whole)."""
    model = on_meta(kind, how, shape)
    read: list[int] = []
    whole: list[str] = []
    part, all_of = Files.part, Files.whole

    def counted(self: Files, key: str, at: Any) -> Tensor:
        found = part(self, key, at)
        read.append(found.numel() * found.element_size())
        return found

    def noted(self: Files, key: str) -> Tensor:
        whole.append(key)
        return all_of(self, key)

    Files.part, Files.whole = counted, noted  # type: ignore[method-assign, assignment]
    try:
        moefuse.load(model, path)
    finally:
        Files.part, Files.whole = part, all_of  # type: ignore[method-assign]
    locals_of = [p.to_local() for p in model.parameters() if isinstance(p, DTensor)]
    return sum(read), sum(p.numel() * p.element_size() for p in locals_of), whole


def loaded_beside_fsdp(rank: int, path: str) -> tuple[float, float, str]:
    """The rest of the model is FSDP's, from the meta device as well: errors of its outputs and its full state, and what undoing raises."""
    with torch.device("meta"):
        model = layers.Model(layers.Stacked, E)
        mesh = scenes.mesh()
        plan = moefuse.parallelize(model, mesh)
        for block in (model.first, model.second, model):
            fully_shard(block, mesh=mesh, ignored_params=plan.parameters)
    garbage(model.to_empty(device="cpu"))
    moefuse.load(model, path)
    wanted = single(layers.Stacked)
    state = moefuse.full_state_dict(model, keep=rank == 0)
    apart_state = max((float((state[key] - value).abs().max()) for key, value in wanted.state_dict().items() if state), default=0.0)
    text = "nothing"
    try:
        moefuse.unparallelize(model)
    except moefuse.ParallelError as error:
        text = str(error)
    return apart(model, wanted, rank), apart_state, text


def merged(rank: int, path: str, merge: dict[str, tuple[str, ...]], how: dict[str, Any]) -> float:
    model = on_meta(layers.Stacked, how)
    moefuse.load(model, path, merge=merge)
    return apart(model, single(layers.Stacked), rank)


def error_of(rank: int, path: str, kind: type[nn.Module], empty: bool = True, **how: Any) -> str:
    """What loading raises, and whether it has read anything."""
    with torch.device("meta"):
        model = layers.Model(kind, E)
        moefuse.parallelize(model, scenes.mesh())
    if empty:
        model.to_empty(device="cpu")
    try:
        moefuse.load(model, path, **how)
    except (ImportError, RuntimeError, ValueError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def lenient(rank: int, path: str) -> tuple[list[str], list[str], int]:
    """With ``strict=False``, onto a model that has other values: what is missing, left over, and how many tensors are not the file's."""
    model, _ = scenes.both(layers.Listed, E)
    found = moefuse.load(model, path, strict=False)
    state, wanted = moefuse.full_state_dict(model), single(layers.Listed).state_dict()
    return found.missing_keys, found.unexpected_keys, sum(not torch.equal(state[key], wanted[key]) for key in wanted)


def unknown_buffers(rank: int, path: str) -> list[str]:
    with torch.device("meta"):
        model = layers.Model(Buffered, E)
        moefuse.parallelize(model, scenes.mesh())
    model.to_empty(device="cpu")
    texts = []
    for _ in range(2):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            moefuse.load(model, path)
        texts += [str(w.message) for w in seen if "moefuse" in str(w.message)]
        for layer in (model.first, model.second):
            layer.scale.fill_(0.5)  # type: ignore[union-attr, operator]
    assert apart(model, single(Buffered), rank) <= 1e-5
    return texts


def undone(rank: int, kind: type[nn.Module], how: dict[str, Any], shape: tuple[int, ...]) -> tuple[float, float]:
    """(difference of a gathered state, of the model once its experts are on every rank again) after both were spread and changed."""
    wanted = single(kind)
    for parameter in wanted.parameters():
        parameter.note = "a library's"  # type: ignore[attr-defined]
    wanted.first.requires_grad_(False)  # type: ignore[union-attr]
    model = single(kind)
    for parameter in model.parameters():
        parameter.note = "a library's"  # type: ignore[attr-defined]
    model.first.requires_grad_(False)  # type: ignore[union-attr]
    moefuse.parallelize(model, mesh_for(how, shape), **how)
    state = moefuse.full_state_dict(model, keep=rank == 0)
    theirs = wanted.state_dict()
    assert sorted(state) == (sorted(theirs) if rank == 0 else [])
    gathered = max((float((state[key] - theirs[key]).abs().max()) for key in state), default=0.0)
    moefuse.unparallelize(model)
    assert [(n, type(m)) for n, m in model.named_modules()] == [(n, type(m)) for n, m in wanted.named_modules()]
    assert [(n, type(p), p.requires_grad, p.shape, p.__dict__) for n, p in model.named_parameters()] == [
        (n, type(p), p.requires_grad, p.shape, p.__dict__) for n, p in wanted.named_parameters()
    ]
    assert [sorted(vars(m)) for m in model.modules()] == [sorted(vars(m)) for m in wanted.modules()]
    assert all(torch.equal(model.state_dict()[key], theirs[key]) for key in theirs)
    assert dict(model.named_buffers()).keys() == dict(wanted.named_buffers()).keys()
    rank //= shape[1] if len(shape) == 2 else 1
    # Nothing communicates there, so one rank says it for all.
    worst = apart(scenes.compiled(model) if dist.get_rank() == 0 else model, wanted, rank)
    moefuse.parallelize(model, mesh_for(how, shape), **how)
    return gathered, max(worst, apart(model, wanted, rank))


def undone_twice(rank: int) -> list[str]:
    model, _ = scenes.both(layers.Stacked)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        moefuse.unparallelize(model)
    texts = [str(w.message) for w in seen if "moefuse" in str(w.message)]
    del optimizer
    try:
        moefuse.unparallelize(model)
    except moefuse.ParallelError as error:
        texts.append(str(error))
    return texts
