"""Integrations are there when the library that they belong to is, in whatever order the two are imported.

``import moefuse`` imports none of these libraries. One that is there already gets its integration at once; for another one a finder waits
in ``sys.meta_path``, which acts behind the import of one named module and then leaves.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import logging
import sys
import types
from collections.abc import Sequence

log = logging.getLogger("moefuse.integrations")

INTEGRATIONS = {
    "accelerate.utils.dataclasses": "moefuse.integrations.accelerate",
    "torch._dynamo.backends.registry": "moefuse.integrations.dynamo",
    "transformers.distributed.expert_parallel": "moefuse.integrations.transformers_ep",
    "transformers.integrations.finegrained_fp8": "moefuse.integrations.transformers_fp8",
    "transformers.integrations.moe": "moefuse.integrations.transformers",
    "transformers.trainer": "moefuse.integrations.transformers_trainer",
    "transformers.utils.output_capturing": "moefuse.integrations.transformers_outputs",
}
"""The module that an integration adds something to -> the integration."""


def wait() -> None:
    """Import each integration now if its library is there, else when it comes."""
    for name, integration in INTEGRATIONS.items():
        if name in sys.modules:
            _integrate(integration)
        elif not any(isinstance(finder, _Finder) and finder.name == name for finder in sys.meta_path):
            sys.meta_path.insert(0, _Finder(name, integration))


def _integrate(integration: str) -> None:
    try:
        importlib.import_module(integration)
    except Exception as error:  # an import of somebody else's library must not fail because of us
        log.info("%s is not available: %s", integration, error)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module as the other finders do, with a loader that tells when it has been executed."""

    def __init__(self, name: str, integration: str) -> None:
        self.name, self._integration = name, integration

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name:
            return None
        others = (finder for finder in list(sys.meta_path) if finder is not self and hasattr(finder, "find_spec"))
        found = next((spec for finder in others if (spec := finder.find_spec(fullname, path, target)) is not None), None)
        if found is not None and found.loader is not None and hasattr(found.loader, "exec_module"):
            found.loader = _Loader(found.loader, self, self._integration)
        return found


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader, finder: _Finder, integration: str) -> None:
        self._loader, self._finder, self._integration = loader, finder, integration

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        # Whoever looks at the module later (inspect, pickle) finds its own loader.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        _integrate(self._integration)
