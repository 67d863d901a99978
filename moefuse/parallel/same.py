"""Whether all ranks have the same weights, where they should: every plain Parameter and buffer of a model, and the tables of experts."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from moefuse.errors import ParallelError
from moefuse.parallel import views
from moefuse.runtime.collectives import all_gather
from moefuse.runtime.debug import checksum
from moefuse.runtime.groups import Group
from moefuse.runtime.words import say


def later(model: nn.Module, group: Group) -> Callable[[], None]:
    """What compares the weights that the model has when it is called; nothing, if it is gone by then on any rank."""
    found = weakref.ref(model)

    def check() -> None:
        there = found()
        if all(say(group, int(there is not None))) and there is not None:
            same_weights(there, group)

    return check


def same_weights(model: nn.Module, group: Group) -> None:
    """A collective call.

    Raises:
        ParallelError: ranks have other Parameters, or other values of one.
    """
    plain = dict(_plain(model))
    names = "".join(f"{name} {tensor.dtype} {list(tensor.shape)}\n" for name, tensor in plain.items())
    sums = say(group, zlib.crc32(names.encode()))
    other = next((i for i, found in enumerate(sums) if found != sums[0]), None)
    if other is not None:
        raise ParallelError(
            f"the models of ranks {group.ranks[0]} and {group.ranks[other]} have Parameters of other names or shapes: build the "
            "same model on all ranks"
        )
    mine = torch.tensor([checksum(tensor) for tensor in plain.values()], dtype=torch.int64, device="cpu")
    every = mine.repeat(group.size)
    all_gather(every, mine, group.host)
    rows = every.view(group.size, -1)
    differs = (rows != rows[0]).nonzero()
    if len(differs):
        rank, number = differs[differs[:, 1].argmin()].tolist()
        raise ParallelError(
            f"ranks {group.ranks[0]} and {group.ranks[rank]} hold different values of {list(plain)[number]}, which all ranks should have "
            "alike: build the model from one seed, or load the same weights, on all of them"
        )


def _plain(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """What no library has sharded or packed."""
    for name, parameter in model.named_parameters():
        if type(parameter.data) is torch.Tensor:
            yield name, parameter
    for name, buffer in model.named_buffers():
        if type(buffer) is torch.Tensor:
            yield name, buffer
    for path, module in model.named_modules():
        if (table := getattr(module, views.PLACE, None)) is not None:
            yield f"{path}.{views.PLACE}".lstrip("."), table
