"""The passes that moefuse gives to Inductor: the stamp, with what has to be done last, and all of moefuse for people who stay on Inductor.

Importing this module imports Inductor, which takes a second: it is only done when something is compiled or MoEFusionPass is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from moefuse import _torch_private, cache
from moefuse._torch_private import CustomGraphPass
from moefuse.config import Options
from moefuse.errors import FusionError, OptionError
from moefuse.passes.block.overlap_placement import start_early
from moefuse.pipeline import publish, rewrite
from moefuse.report.doors import history


class CacheStamp(CustomGraphPass):
    """Its ``uuid`` keeps Inductor from serving what an older moefuse or other options produced; shared experts start early behind it.

    Args:
        key: what the caches are keyed on.
        first: the user's pass, to run as if the stamp were not there; only for a torch whose slot holds one pass.
    """

    def __init__(self, key: str, first: Callable[[torch.fx.Graph], None] | None = None) -> None:
        self._key, self._first = key, first

    def __call__(self, graph: torch.fx.Graph) -> None:
        if self._first is not None:
            self._first(graph)
        start_early(graph)

    def uuid(self) -> str | None:
        if self._first is None:
            return self._key
        users = self._first.uuid() if isinstance(self._first, CustomGraphPass) else None
        # None tells Inductor not to cache, as it would not without the stamp.
        return f"{self._key} after {users!r}" if users else None


class MoEFusionPass(CustomGraphPass):
    """moefuse as a custom pass of ``backend="inductor"``::

        with torch._inductor.config.patch(pre_grad_custom_pass=moefuse.MoEFusionPass()):
            torch.compile(model)(x)

    The slot ``pre_grad_custom_pass`` is the one that sees the graph as Dynamo traced it; no other fits. The pass has no access to the
    model's weights, so ``verify="probe"`` works on synthetic ones. On a hit in Inductor's cache the pass does not run, and then
    there is no report.

    Args:
        options: moefuse's own options, as for the backend.

    Raises:
        OptionError: for an unknown option, an option of Inductor, or an illegal value.
    """

    def __init__(self, options: Mapping[str, object] | None = None) -> None:
        self._options, rest = Options.from_user(options)
        self._given = dict(options or {})
        if rest:
            raise OptionError(f"MoEFusionPass takes moefuse's options only; give {', '.join(map(repr, rest))} to torch.compile")

    def __call__(self, graph: torch.fx.Graph) -> None:
        gm = graph.owning_module
        if not self._options.enabled:
            publish.say_disabled(self._options, self._given)
        if not self._options.enabled or gm is None or _torch_private.forward_level():
            return  # under forward-mode AD Inductor is left to say itself what it cannot do
        _torch_private.keep_what_is_mutated()
        report = rewrite.rewrite(gm, None, self._options)
        if _torch_private.communicates(gm):
            _torch_private.keep_order()
        history.record(report)
        with _torch_private.surfacing(FusionError):
            publish.publish(report, self._options)

    def uuid(self) -> str:
        return f"pass {cache.key(self._options)}"
