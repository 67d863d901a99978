"""Environment variables that are on or off, in all the words that people use; and the one that is a size."""

from __future__ import annotations

import os

WORDS = {"1": "1", "true": "1", "yes": "1", "on": "1", "0": "0", "false": "0", "no": "0", "off": "0"}
"""What may be written -> ``"0"`` or ``"1"``. Upper case is the same."""


def normal(text: str) -> str:
    """``"0"`` or ``"1"`` for a word of either meaning; any other text as it is."""
    return WORDS.get(text.lower(), text)


def is_off(variable: str) -> bool:
    """Whether a variable says no. One that is not set does not."""
    return normal(os.environ.get(variable, "1")) == "0"


def workspace() -> int | None:
    """Bytes that a call may take beside its result (MOEFUSE_WORKSPACE_MIB); None if the user sets no limit."""
    text = os.environ.get("MOEFUSE_WORKSPACE_MIB", "")
    if text and not text.isdecimal():
        raise ValueError(f"MOEFUSE_WORKSPACE_MIB={text!r} is no number of MiB")
    return int(text) << 20 if text else None
