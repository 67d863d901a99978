"""What the keys of a checkpoint are in a model of Hugging Face transformers, by transformers' own mapping.

Checkpoints have one tensor for each expert's projection, the modules of transformers 5 have stacked ones. Where a release has no such
mapping, its modules have the names of the checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from torch import nn

from moefuse.errors import ParallelError
from moefuse.parallel.sources import Merged, Names

try:
    from transformers import conversion_mapping, core_model_loading
except ImportError:
    conversion_mapping = core_model_loading = None


def names_of(model: nn.Module, keys: Iterable[str], wanted: set[str]) -> Names:
    """Read the mapping for these keys of a checkpoint.

    Args:
        wanted: the keys of the model.

    Raises:
        ParallelError: transformers computes something of them that is more than stacking experts and joining their projections.
    """
    if core_model_loading is None:
        return Names({key: key for key in keys if key in wanted})
    changes = conversion_mapping.get_model_conversion_mapping(model)
    converters = [c for c in changes if isinstance(c, core_model_loading.WeightConverter)]
    renamings = [c for c in changes if not isinstance(c, core_model_loading.WeightConverter)]
    prefix: Any = getattr(model, "base_model_prefix", None)
    known = dict.fromkeys(wanted, True)
    renamed: dict[str, str] = {}
    parts: dict[str, dict[str, list[str]]] = {}
    for key in sorted(keys, key=_natural):
        target, pattern = core_model_loading.rename_source_key(key, renamings, converters, prefix, known)
        if pattern is None:
            renamed[target] = key
        else:
            parts.setdefault(target, {}).setdefault(pattern, []).append(key)
    return Names(renamed, {target: _merged(target, by_pattern, converters) for target, by_pattern in parts.items() if target in wanted})


def _merged(target: str, parts: dict[str, list[str]], converters: list[Any]) -> Merged:
    converter = next(c for c in converters if next(iter(parts)) in c.source_patterns)
    stacks, *joins = converter.operations
    stacked = isinstance(stacks, core_model_loading.MergeModulelist) and stacks.dim == 0
    joined = len(joins) == 1 and isinstance(joins[0], core_model_loading.Concatenate) and joins[0].dim > 0
    if not stacked or not (joined or not joins) or len(parts) != len(converter.source_patterns):
        raise ParallelError(
            f"{target} is made by transformers from {sorted(parts)} by {converter.operations}, which moefuse.load does not do: use "
            "from_pretrained, and moefuse.parallelize behind it"
        )
    return Merged(tuple(tuple(parts[pattern]) for pattern in converter.source_patterns), joins[0].dim - 1 if joins else 0)


def _natural(key: str) -> list[tuple[int, str]]:
    """Numbers in their order."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", key)]
