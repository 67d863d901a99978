"""Modules that only explain, as whoever compiles asks them: ``doors.history`` answers quietly, ``report.history`` may raise."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moefuse.report.quietly import Door

if TYPE_CHECKING:
    from moefuse.evidence import opaque as opaque, suspects as suspects
    from moefuse.passes.graph import module_names as module_names
    from moefuse.report import history as history
else:
    history = Door("report.history", watched=lambda report, compiled, *_: compiled)
    module_names = Door("passes.graph.module_names", of_traced="", in_its_model="")
    opaque = Door("evidence.opaque", opaque=lambda *_: [])
    suspects = Door("evidence.suspects", suspects=lambda *_: [])
