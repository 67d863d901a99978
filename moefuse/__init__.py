"""moefuse: a torch.compile backend that fuses mixture-of-experts code, wherever the model comes from."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

import moefuse.ops  # noqa: F401  # registers torch.ops.moefuse.*, which rewritten and cached graphs call
from moefuse._version import __version__ as __version__
from moefuse.api import (
    benchmark as benchmark,
    compile as compile,
    compile_layers as compile_layers,
    explain as explain,
    warmup as warmup,
)
from moefuse.config import Options as Options
from moefuse.errors import (
    CompilerError as CompilerError,
    FusionError as FusionError,
    OptionError as OptionError,
    ParallelError as ParallelError,
    PeerError as PeerError,
    RoutingError as RoutingError,
    TooManyTokens as TooManyTokens,
)
from moefuse.gains.gains import Gains as Gains
from moefuse.integrations import on_import as _on_import
from moefuse.replay.api import capture_routing as capture_routing, load_of as load_of, replay_routing as replay_routing
from moefuse.report.history import last_report as last_report, reports as reports
from moefuse.report.report import FusionReport as FusionReport
from moefuse.spec import ExpertsSpec as ExpertsSpec
from moefuse.tuning.measure.report import WarmupReport as WarmupReport

if TYPE_CHECKING:
    from moefuse.inductor_pass import MoEFusionPass as MoEFusionPass
    from moefuse.parallel.api import parallelize as parallelize
    from moefuse.parallel.clip import clip_grad_norm_ as clip_grad_norm_
    from moefuse.parallel.load import load as load
    from moefuse.parallel.state import full_state_dict as full_state_dict
    from moefuse.parallel.unshard import unparallelize as unparallelize

__all__ = [
    "CompilerError",
    "ExpertsSpec",
    "FusionError",
    "FusionReport",
    "Gains",
    "MoEFusionPass",
    "OptionError",
    "Options",
    "ParallelError",
    "PeerError",
    "RoutingError",
    "TooManyTokens",
    "WarmupReport",
    "__version__",
    "benchmark",
    "capture_routing",
    "clip_grad_norm_",
    "compile",
    "compile_layers",
    "explain",
    "full_state_dict",
    "last_report",
    "load",
    "load_of",
    "parallelize",
    "replay_routing",
    "reports",
    "unparallelize",
    "warmup",
]

_PARALLEL = {
    "clip_grad_norm_": "moefuse.parallel.clip",
    "full_state_dict": "moefuse.parallel.state",
    "load": "moefuse.parallel.load",
    "parallelize": "moefuse.parallel.api",
    "unparallelize": "moefuse.parallel.unshard",
}

_on_import.wait()


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> object:
    # It derives from one of Inductor's classes, and importing Inductor takes a second.
    if name == "MoEFusionPass":
        from moefuse.inductor_pass import MoEFusionPass

        return MoEFusionPass
    # torch.distributed's meshes and tensors take a second, too.
    if name in _PARALLEL:
        return getattr(importlib.import_module(_PARALLEL[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
