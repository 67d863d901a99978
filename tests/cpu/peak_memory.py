"""The most memory that a call takes: every allocation on the CPU, also those inside of an op."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch


def peak(run: Callable[[], Any]) -> int:
    """Bytes that ``run`` has allocated, and not freed yet, at the most."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    alive = most = 0
    for event in sorted((e for e in events if e["name"] == "[memory]"), key=lambda e: e["ts"]):
        alive += event["args"]["Bytes"]
        most = max(most, alive)
    return most
