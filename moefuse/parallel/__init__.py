"""Experts on several processes: what users import is re-exported by ``moefuse``. The design: docs/design/distributed.md."""

from __future__ import annotations
