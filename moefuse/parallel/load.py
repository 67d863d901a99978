"""``moefuse.load``: a checkpoint of the whole model into one whose experts are spread; each rank reads what it holds."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from moefuse.errors import ParallelError, first_line
from moefuse.parallel.api import ON_META
from moefuse.parallel.files import Files, opened
from moefuse.parallel.shard import Held, holders_of, keys_of
from moefuse.parallel.sources import Experts, Names, misfits, read, sources, unlike
from moefuse.parallel.state import slots_here


@dataclass(frozen=True)
class Spread:
    """One Parameter of which this rank holds a part.

    Attributes:
        name: in ``held.names``.
        shape: of one expert's.
        places: the keys that a checkpoint of the model has for it: of each expert, or one of all of them under -1.
    """

    held: Held
    name: str
    parameter: DTensor
    shape: tuple[int, ...]
    places: Mapping[int, Sequence[str]]

    @property
    def keys(self) -> list[str]:
        """All keys of the checkpoint that a Parameter is made of."""
        return [key for keys in self.places.values() for key in keys]

    @property
    def own(self) -> str:
        """The key that a message names: the first, or the Parameter's own name."""
        return next(iter(self.keys), self.name)


def load(model: nn.Module, path: str | Path, *, strict: bool = True, merge: Mapping[str, Sequence[str]] | None = None) -> Any:
    """Fill a model from safetensors files; of experts that are spread, each rank reads its own, and of slices its slices.

    Every rank calls it; nothing is communicated. A model that was built on the meta device gets memory first (``model.to_empty``).

    Args:
        path: a file; a folder with ``model.safetensors.index.json``, with ``model.safetensors``, or with any safetensors files.
        strict: whether a key that is missing or left over is an error.
        merge: where the module has stacked weights, the checkpoint each expert's, and several make one: of the module's Parameter the
            paths from an expert, in order, e.g. ``{"gate_up": ("gate.weight", "up.weight")}``. For models of transformers its own mapping
            is used.

    Returns:
        ``missing_keys`` and ``unexpected_keys``, as of ``load_state_dict``.

    Raises:
        RuntimeError: with ``strict``, keys are missing or left over; or a tensor has another shape. The model is as it was then. Or a file
            cannot be read to its end, which the error says.
        ParallelError: the model is on the meta device; how the checkpoint's experts make those of the module is not known.
    """
    _check_memory(model)
    files = opened(path)
    if _of_transformers(model):
        model.tie_weights()  # type: ignore[operator]  # ``to_empty`` has made several of one Parameter
    spread = _spread(model)
    rest = _rest(model, {id(each.parameter) for each in spread})
    names = _names(model, files, {*rest, *(key for each in spread for key in each.keys)})
    found = [sources(files, names, e.places, e.held.where.experts, e.shape, (merge or {}).get(e.name, ())) for e in spread]
    wrong = [w for each, of in zip(spread, found, strict=True) if of is not None for w in misfits(files, each.own, each.shape, of)]
    wrong += [
        text for key, value in _plain(model, rest).items() if key in names.renamed for text in unlike(files, names.renamed[key], value)
    ]
    if wrong:
        raise RuntimeError(_text(model, wrong))
    state = {key: _like(files.whole(names.renamed[key]), value) for key, value in rest.items() if key in names.renamed}
    used = {piece.key for of in found for pieces in of or () for piece in pieces}
    used |= {names.renamed[key] for key in (*state, *(key for e in spread for key in e.keys)) if key in names.renamed}
    missing = [
        key for e, of in zip(spread, found, strict=True) if of is None or e.held.listed for key in e.keys if key not in names.renamed
    ]
    filled = {id(rest[key]) for key in state}
    missing += [key for key, value in rest.items() if key not in state and id(value) not in filled]
    unexpected = [key for key in files if key not in used]
    if strict and (missing or unexpected):
        raise RuntimeError(_text(model, [*_keys("Missing", missing), *_keys("Unexpected", unexpected)]))
    try:
        result = model.load_state_dict(state, strict=False)
        for each, of in zip(spread, found, strict=True):
            if of is not None:
                _fill(files, each, of)
    except Exception as error:
        raise RuntimeError(
            f"moefuse.load stopped in the middle of {files.path}: some weights of {type(model).__name__} are the checkpoint's on this "
            f"rank, and some are not; load it again, or another one: {first_line(error)}"
        ) from error
    _other_buffers(model)
    return result._replace(missing_keys=missing, unexpected_keys=unexpected)


def _spread(model: nn.Module) -> list[Spread]:
    out, keys = [], keys_of(model)
    for module, held in holders_of(model).items():
        for name, own in held.names.items():
            parameter: Any = module._parameters[own]
            out.append(Spread(held, name, parameter, tuple(parameter.shape[1:]), keys.get((module, name), {})))
    return out


def _rest(model: nn.Module, spread: set[int]) -> dict[str, Tensor]:
    """All other Parameters and buffers that a checkpoint has, by key; one that has several names under each."""
    found: dict[str, Tensor] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        tensors = {n: b for n, b in module._buffers.items() if n not in module._non_persistent_buffers_set}
        for name, tensor in {**module._parameters, **tensors}.items():
            if tensor is not None and id(tensor) not in spread:
                found[f"{path}.{name}".lstrip(".")] = tensor
    return found


def _plain(model: nn.Module, rest: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those of modules that take a tensor as it is, and make nothing else of it."""

    def plain(key: str) -> bool:
        owner = model.get_submodule(key.rpartition(".")[0])
        return type(owner)._load_from_state_dict is nn.Module._load_from_state_dict and not owner._load_state_dict_pre_hooks

    return {key: value for key, value in rest.items() if plain(key)}


def _names(model: nn.Module, files: Files, wanted: set[str]) -> Names:
    """What keys of a checkpoint are in the model; a model of transformers says it."""
    if _of_transformers(model):
        from moefuse.parallel.transformers_keys import names_of

        return names_of(model, files, wanted)
    return Names({key: key for key in files if key in wanted})


def _of_transformers(model: nn.Module) -> bool:
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def _like(whole: Tensor, own: Tensor) -> Tensor:
    """A whole tensor for a Parameter that another library has sharded."""
    if not isinstance(own, DTensor):
        return whole
    device = own.to_local().device
    return distribute_tensor(whole.to(device, own.dtype), own.device_mesh, own.placements, src_data_rank=None)


def _fill(files: Files, each: Spread, experts: Experts) -> None:
    local, where = each.parameter.to_local(), each.held.where
    with torch.no_grad():
        for row, slot in enumerate(slots_here(each.parameter, where)):
            if slot < len(where.mine):
                read(files, experts[where.mine[slot]], each.shape, where.spans(each.name, each.shape), local[row])
            else:
                local[row].zero_()


def _check_memory(model: nn.Module) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise ParallelError(f"{name} is on the meta device: call model.to_empty(device=...) before moefuse.load")


def _other_buffers(model: nn.Module) -> None:
    """Buffers that no checkpoint has, and that ``to_empty`` has filled with anything: a model of transformers computes them anew."""
    unknown = _unwritten(model)
    if unknown and _of_transformers(model):
        for owner in dict.fromkeys(name.rpartition(".")[0] for name in unknown):
            _initialized(model, model.get_submodule(owner))
        unknown = _unwritten(model)
    if unknown:
        warnings.warn(
            f"{unknown[0]} is in no checkpoint and was on the meta device: moefuse.load does not know its values, so write them yourself "
            f"({len(unknown)} such buffers)",
            stacklevel=3,
        )


def _unwritten(model: nn.Module) -> list[str]:
    """Buffers that nobody has written to since they have memory, as their versions say."""
    buffers = dict(model.named_buffers())
    found = [name for name in getattr(model, ON_META, ()) if name in buffers]
    return [name for name in found if buffers[name].is_inference() or not buffers[name]._version]


def _initialized(model: Any, module: nn.Module) -> None:
    """Let a model of transformers compute the buffers of a module; it initializes Parameters in that call as well, which are kept."""
    kept: list[tuple[Tensor, Tensor]] = [(p, p.detach().clone()) for p in module.parameters(recurse=False)]
    kept += [(b, b.clone()) for n, b in module._buffers.items() if b is not None and n not in module._non_persistent_buffers_set]
    with torch.no_grad():
        model._init_weights(module)
        for tensor, value in kept:
            tensor.copy_(value)


def _keys(kind: str, keys: Sequence[str]) -> list[str]:
    return [f"{kind} key(s) in the checkpoint: {', '.join(map(repr, keys))}."] if keys else []


def _text(model: nn.Module, lines: Sequence[str]) -> str:
    return "\n\t".join([f"Error(s) in loading a checkpoint for {type(model).__name__}:", *lines])
