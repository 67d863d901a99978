"""The mixture-of-experts layers of a model, to be compiled by themselves."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable

from torch import nn

from moefuse.evidence.suspects import Pair, Suspect, suspects

_OF_TOKENS = 2
"""Arguments of a layer's forward at most: tokens, and ids or a mask beside them. What takes more has other things to do, too."""


def layers_of(model: nn.Module, modules: str | None = None) -> dict[str, nn.Module]:
    """Modules by their name: those with experts and their router, and of a block that does more the ones that hold its stacked experts.

    Args:
        modules: regular expression; the modules whose name matches (``re.search``), the outermost of them, whatever they hold.
    """
    if modules is not None:
        return _outermost({name: module for name, module in model.named_modules() if re.search(modules, name)})
    firm, loose = [], []
    for suspect in suspects([model]):
        pairs = [pair for pair in suspect.pairs if pair.router is not None and not pair.loose]
        firm += _parts(suspect, pairs) if pairs else []
        loose += [] if pairs else _holders(suspect, suspect.pairs)
    classes = {type(part) for _, module in firm for part in module.modules()}
    return _outermost(dict(firm + [(name, holder) for name, holder in loose if type(holder) in classes]))


def _parts(suspect: Suspect, pairs: list[Pair]) -> list[tuple[str, nn.Module]]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    taken = [p for p in inspect.signature(suspect.module.forward).parameters.values() if p.kind in kinds]
    held = _holders(suspect, pairs) if len(taken) > _OF_TOKENS else []
    return held or [(suspect.name, suspect.module)]


def _holders(suspect: Suspect, pairs: Iterable[Pair]) -> list[tuple[str, nn.Module]]:
    """Modules that hold stacks of experts themselves, and compute with them."""
    stacks = frozenset[int]().union(*(pair.tensors for pair in pairs if len(pair.experts) == 1))
    inside = suspect.module.named_modules(prefix=suspect.name)
    return [(name, m) for name, m in inside if any(id(p) in stacks and p.dim() > 2 for p in m.parameters(recurse=False))]


def _outermost(found: dict[str, nn.Module]) -> dict[str, nn.Module]:
    inner = {id(part) for module in found.values() for part in module.modules() if part is not module}
    return {name: module for name, module in found.items() if id(module) not in inner}
