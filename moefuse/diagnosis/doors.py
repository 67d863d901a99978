"""What is asked quietly of the last look at a call; see :mod:`moefuse.report.doors`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moefuse.report.quietly import Door

if TYPE_CHECKING:
    from moefuse.diagnosis import missed_layers as missed_layers
else:
    missed_layers = Door("diagnosis.missed_layers", missing=lambda *_: [])
