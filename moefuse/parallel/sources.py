"""Of what tensors of a checkpoint the Parameters of experts are made, and the parts of them that a rank reads."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from moefuse.errors import ParallelError
from moefuse.parallel.files import Files


@dataclass(frozen=True)
class Piece:
    """A tensor of a checkpoint, or a row of one, that is a part of one expert's Parameter.

    Attributes:
        expert: its row, if the tensor is stacked.
        axis, start, size: where it stands in the expert's Parameter.
    """

    key: str
    expert: int | None
    axis: int
    start: int
    size: int


Experts = Sequence[Sequence[Piece]]
"""[E]: of each expert the pieces; none where a checkpoint does not have it."""


@dataclass(frozen=True)
class Merged:
    """Tensors of a checkpoint that are one stacked Parameter of the model: of each part the keys of all experts, joined along ``axis``."""

    parts: tuple[tuple[str, ...], ...]
    axis: int


@dataclass(frozen=True)
class Names:
    """What the keys of a checkpoint are in the model: ``renamed`` is by the model's keys, and so is ``merged``."""

    renamed: Mapping[str, str]
    merged: Mapping[str, Merged] = field(default_factory=dict)


def sources(
    files: Files, names: Names, places: Mapping[int, Sequence[str]], experts: int, shape: Sequence[int], merge: Sequence[str]
) -> Experts | None:
    """Of what one Parameter of the experts is made; None if it is stacked and the checkpoint does not have it.

    Args:
        places: the model's keys for it: of each expert of a list that is in the model, or one of all of them under -1.
        shape: of one expert's.
        merge: what the user says it is made of: paths from an expert.

    Raises:
        ParallelError: it could be made in several ways.
    """
    if -1 not in places:
        found = [next((key for key in places.get(expert, ()) if key in names.renamed), None) for expert in range(experts)]
        return [[] if key is None else [Piece(names.renamed[key], None, 0, 0, shape[0])] for key in found]
    key = next((key for key in places[-1] if key in names.renamed or key in names.merged), places[-1][0])
    if key in names.renamed:
        return [[Piece(names.renamed[key], expert, 0, 0, shape[0])] for expert in range(experts)]
    if key in names.merged:
        return _joined(files, key, names.merged[key], experts)
    parts = _by_path(files, key[: key.rfind(".") + 1], experts)
    if not parts:
        return None
    return _joined(files, key, _chosen(files, key, parts, shape, merge), experts)


def _joined(files: Files, key: str, merged: Merged, experts: int) -> Experts:
    counts = {len(part) for part in merged.parts}
    if counts != {experts}:
        raise ParallelError(f"{key} has {experts} experts, and the checkpoint {' and '.join(map(str, sorted(counts)))}")
    sizes = [files.shape(part[0])[merged.axis] for part in merged.parts]
    starts = [sum(sizes[:n]) for n in range(len(sizes))]
    return [
        [Piece(part[expert], None, merged.axis, start, size) for part, start, size in zip(merged.parts, starts, sizes, strict=True)]
        for expert in range(experts)
    ]


def _by_path(files: Files, prefix: str, experts: int) -> dict[str, tuple[str, ...]]:
    """The keys of all experts, by path from an expert: ``<prefix>[experts.]<number>.<path>``."""
    form = re.compile(rf"{re.escape(prefix)}(?:\w*[a-z_]\w*\.)?(\d+)\.(.+)")
    found: dict[str, dict[int, str]] = {}
    for key in files:
        if match := form.fullmatch(key):
            found.setdefault(match[2], {})[int(match[1])] = key
    return {path: tuple(keys[e] for e in range(experts)) for path, keys in found.items() if sorted(keys) == list(range(experts))}


def _chosen(files: Files, key: str, parts: Mapping[str, tuple[str, ...]], shape: Sequence[int], merge: Sequence[str]) -> Merged:
    """Which of the experts' Parameters in a checkpoint are a stacked one: what the user says, or the only one of that shape."""
    if merge:
        lost = [path for path in merge if path not in parts]
        if lost:
            raise ParallelError(f"merge says that {key} is made of {lost[0]!r}; the experts of the checkpoint have {sorted(parts)}")
        shapes = [files.shape(parts[path][0]) for path in merge]
        axis = next((n for n in range(len(shape)) if sum(s[n] for s in shapes if len(s) == len(shape)) == shape[n]), None)
        if axis is None:
            raise ParallelError(f"{key} is {list(shape)} for each expert, and what merge says it is made of is {[list(s) for s in shapes]}")
        return Merged(tuple(parts[path] for path in merge), axis)
    same = [path for path, keys in parts.items() if files.shape(keys[0]) == tuple(shape)]
    name = key.rpartition(".")[2]
    named = [path for path in same if path.split(".")[0] == name]
    chosen = named if len(named) == 1 else same
    if len(chosen) != 1:
        raise ParallelError(
            f"{key} is {list(shape)} for each expert, and which of the checkpoint's {sorted(parts)} it is made of is not known: "
            f"say it, e.g. moefuse.load(..., merge={{{name!r}: ({', '.join(repr(p) for p in sorted(parts)[:2])})}})"
        )
    return Merged((parts[chosen[0]],), 0)


def misfits(files: Files, key: str, shape: Sequence[int], experts: Experts) -> Iterator[str]:
    """What is wrong with the shapes of tensors that a Parameter is made of, as ``load_state_dict`` says it."""
    for piece in (piece for pieces in experts for piece in pieces if piece.expert is None):
        wanted = (*shape[: piece.axis], piece.size, *shape[piece.axis + 1 :])
        if files.shape(piece.key) != wanted:
            yield _mismatch(piece.key, files.shape(piece.key), wanted)
    pieces = next((pieces for pieces in experts if pieces), None)
    if pieces is None:
        return
    first = pieces[0]
    if first.expert is not None and files.shape(first.key) != (len(experts), *shape):
        yield _mismatch(first.key, files.shape(first.key), (len(experts), *shape))
    if sum(piece.size for piece in pieces) != shape[first.axis]:
        yield f"{key} is {list(shape)} for each expert, and its parts {[piece.size for piece in pieces]} along dimension {first.axis}"


def unlike(files: Files, key: str, own: Tensor) -> Iterator[str]:
    """The same of a plain tensor; torch takes one element for a number."""
    found = files.shape(key)
    if found != tuple(own.shape) and not (found == (1,) and own.dim() == 0):
        yield _mismatch(key, found, own.shape)


def _mismatch(key: str, found: Sequence[int], wanted: Sequence[int]) -> str:
    return f"size mismatch for {key}: the checkpoint has {list(found)}, the model {list(wanted)}"


def read(
    files: Files, pieces: Sequence[Piece], shape: Sequence[int], spans: tuple[int, Sequence[tuple[int, int, int]]], out: Tensor
) -> None:
    """Read the part of one expert's Parameter that a rank holds, and nothing else.

    Args:
        shape: of the whole.
        spans: (dimension, [(start, stop, where it stands in ``out``)]).
    """
    cut, ranges = spans
    for piece in pieces:
        for start, stop, at in ranges:
            box = [(0, size) for size in shape]
            box[cut] = (start, stop)
            low, high = box[piece.axis]
            box[piece.axis] = (max(low, piece.start), min(high, piece.start + piece.size))
            if any(low >= high for low, high in box):
                continue
            here, there = _moved(box, cut, at - start), _moved(box, piece.axis, -piece.start)
            lead = [] if piece.expert is None else [slice(piece.expert, piece.expert + 1)]
            out[here].copy_(files.part(piece.key, (*lead, *there)).view(out[here].shape))


def _moved(box: Sequence[tuple[int, int]], axis: int, by: int) -> tuple[slice, ...]:
    return tuple(slice(low + by, high + by) if n == axis else slice(low, high) for n, (low, high) in enumerate(box))
