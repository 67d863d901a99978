"""Layers that are refused: one for each way to lose what a rewrite needs, each one statement away from :class:`plain.Plain`.

They are written as users write them. The statement that a refusal must name is marked with a comment ``# at: <code>``.
"""

from pathlib import Path

FILES = sorted(map(str, Path(__file__).parent.glob("*.py")))
