"""Programs with effects: writes through views, updates of buffers and of Python's state, random numbers, values that are neutral at first.

:func:`draw` makes a program of a seed, :func:`verdict` runs it beside eager, :func:`shrunk` makes a failing one small.
"""

from tests.programs.effects.program import NAMES, Program, draw
from tests.programs.effects.run import Verdict, verdict
from tests.programs.effects.shrink import shrunk

__all__ = ["NAMES", "Program", "Verdict", "draw", "shrunk", "verdict"]
