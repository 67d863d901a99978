"""Environment variables that are on or off, in all the words that people use."""

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
