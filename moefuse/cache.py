"""CacheStamp: Inductor's on-disk caches must never serve code that an older moefuse, or other options, produced.

torch keys its caches on the graph, not on the Python behind a custom op: an edited backward formula would be ignored
(pytorch#144344). The stamp is a pass that does nothing and whose ``uuid`` is part of the key.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

import torch

from moefuse import _torch_private
from moefuse.config import Options


@functools.cache
def source_hash() -> str:
    """SHA-256 over the name and content of every source file of this package, passes and kernels included.

    Once per process, from contents: torch's ``get_hash_for_files`` remembers a path and would miss an edit.
    """
    root = Path(__file__).parent
    digest = hashlib.sha256()
    # rglob does not enter the symlinked folders before Python 3.13, so they are named.
    files = {path for folder in (root, root / "passes", root / "kernels") for path in folder.rglob("*.py")}
    for path in sorted(files):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root)}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def stamp_key(options: Options) -> str:
    """What the caches must be keyed on besides the graph."""
    return f"moefuse {source_hash()} {options.fingerprint()}"


@functools.cache
def stamp(options: Options) -> object:
    """A graph pass that does nothing and has :func:`stamp_key` as its ``uuid``."""
    return _stamp_class()(stamp_key(options))


@functools.cache
def _stamp_class() -> type:
    # Inductor only accepts subclasses of its own base class, and importing that must wait until something is compiled.
    return type("CacheStamp", (_StampBase, _torch_private.custom_graph_pass()), {"__module__": __name__})


class _StampBase:
    def __init__(self, key: str) -> None:
        self._key = key

    def __call__(self, graph: torch.fx.Graph) -> None:
        """Nothing to do: only the key matters."""

    def uuid(self) -> str:
        return self._key

    def __reduce__(self) -> tuple[object, ...]:
        # The class is made at run time, so pickle has to be told how to find it.
        return (_restore_stamp, (self._key,))


def _restore_stamp(key: str) -> object:
    return _stamp_class()(key)
