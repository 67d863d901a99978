"""Tensors in safetensors files, by name, of which parts can be read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@dataclass(frozen=True)
class Files:
    """A checkpoint of one or several files; none of its tensors is read before it is asked for.

    Attributes:
        where: of each key, the file that has it.
    """

    path: str
    where: dict[str, Any]

    def __contains__(self, key: object) -> bool:
        return key in self.where

    def __iter__(self) -> Iterator[str]:
        return iter(self.where)

    def shape(self, key: str) -> tuple[int, ...]:
        """The shape of a tensor, from the file's header."""
        return tuple(self.where[key].get_slice(key).get_shape())

    def part(self, key: str, at: Sequence[slice]) -> Tensor:
        """Some rows, columns, .. of a tensor; nothing else is read."""
        if not at:
            return self.whole(key)
        found: Tensor = self.where[key].get_slice(key)[tuple(at)]
        return found

    def whole(self, key: str) -> Tensor:
        """All of a tensor."""
        found: Tensor = self.where[key].get_tensor(key)
        return found


def opened(path: str | Path) -> Files:
    """One file; a folder with an index, with ``model.safetensors``, or with any files of this kind.

    Raises:
        ImportError: the package safetensors is missing.
        FileNotFoundError: there is nothing of this kind.
        ValueError: two files have a tensor of one name, or the index names one that is not there.
    """
    safe_open = _safe_open()
    path = Path(path)
    if path.is_file():
        return Files(str(path), _keys([safe_open(path, framework="pt")]))
    if (index := path / INDEX).is_file():
        names: dict[str, str] = json.loads(index.read_text())["weight_map"]
        files = {name: safe_open(path / name, framework="pt") for name in sorted(set(names.values()))}
        there = {name: set(file.keys()) for name, file in files.items()}
        lost = next((key for key, name in names.items() if key not in there[name]), None)
        if lost is not None:
            raise ValueError(f"{index} says that {lost} is in {names[lost]}, which does not have it")
        return Files(str(path), {key: files[name] for key, name in names.items()})
    found = [path / SINGLE] if (path / SINGLE).is_file() else sorted(path.glob("*.safetensors"))
    if not found:
        raise FileNotFoundError(f"{path} is no safetensors file, and no folder with any")
    return Files(str(path), _keys([safe_open(file, framework="pt") for file in found]))


def _keys(files: Sequence[Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for file in files:
        for key in file.keys():  # noqa: SIM118  (it is no dict)
            if key in out:
                raise ValueError(f"two files have a tensor {key}: name the one to load, or write an index ({INDEX})")
            out[key] = file
    return out


def _safe_open() -> Callable[..., Any]:
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise ImportError("moefuse.load needs the package safetensors: pip install safetensors") from error
    return safe_open
