"""Which report :func:`moefuse.last_report` returns.

One report per ``torch.compile`` call (``model.compile()`` is one too): every frame that Dynamo compiled for it, and of each frame the
latest compilation, so that a recompilation for new shapes replaces its predecessor and is not counted twice. ``last_report()`` is the
report of the ``torch.compile`` call that compiled something most recently, in any thread.
"""

from __future__ import annotations

import threading

from moefuse import _torch_private
from moefuse.report import FusionReport

_lock = threading.Lock()
_owner: object | None = None
_frames: dict[object, FusionReport] = {}


def record(report: FusionReport, owner: object | None = None) -> None:
    """Remember one graph's report under the current Dynamo frame and ``torch.compile`` call (``owner``, if that is known already)."""
    global _owner, _frames
    owner = _torch_private.torch_compile_call() if owner is None else owner
    frame = _torch_private.frame_id()
    with _lock:
        if owner is None or owner is not _owner:
            _owner, _frames = owner, {}
        # A direct call of the backend has no frame number; its reports stand side by side.
        _frames[object() if frame is None else frame] = report


def withdraw(report: FusionReport) -> None:
    """Forget a graph that the compiler behind moefuse gave up on: Dynamo comes back with parts of it, or the user has the error."""
    with _lock:
        for key in [key for key, known in _frames.items() if known is report]:
            del _frames[key]


def last_report() -> FusionReport | None:
    """The report of the most recent compilation through moefuse, or None if there was none.

    It covers every frame of the ``torch.compile`` call that compiled something most recently, the latest compilation of each; the
    object is a copy and does not change afterwards.
    """
    with _lock:
        reports = list(_frames.values())
    if not reports:
        return None
    return FusionReport.merged(reports)
