"""What Inductor's on-disk caches have to be keyed on besides the graph.

torch keys its caches on the graph, not on the Python behind a custom op: an edited backward formula would be ignored
(pytorch#144344). moefuse's passes carry this key as their ``uuid``.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

import torch

from moefuse.config import Options
from moefuse.runtime import groups

_NOT_SOURCES = frozenset({".pyc", ".pyo", ".so"})


@functools.cache
def source_hash() -> str:
    """SHA-256 over the name and content of every source file of this package, passes and kernels included.

    Once per process, from contents: torch's ``get_hash_for_files`` remembers a path and would miss an edit.
    """
    root = Path(__file__).parent
    # rglob does not follow links to folders, so the two that are links in a checkout are named.
    found = {path for folder in (root, root / "passes", root / "kernels") for path in folder.rglob("*")}
    digest = hashlib.sha256()
    for path in sorted(found):
        if path.suffix in _NOT_SOURCES or not path.is_file():
            continue
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root)}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def key(options: Options) -> str:
    """Equal for equal sources, equal options, equal decisions of the cost gate and equal numbers of experts, and for nothing else.

    Torch's key of a DTensor has its whole shape and not that of the part that is here: of 5 experts on 2 ranks, one has 3 and one 2, and
    both would be given what the first to compile has left.
    """
    return f"moefuse {source_hash()} {options.fingerprint()}{_decisions() if options.cost_gate else ''}{groups.held()}"


def devices() -> list[str]:
    """Names of the devices that measurements can be of."""
    if not torch.cuda.is_initialized():
        return []
    return sorted({torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())})


def _decisions() -> str:
    from moefuse.tuning import store

    prints = [store.fingerprint(device) for device in devices()]
    return f" gate {prints}" if any(prints) else ""
