"""Small models for the question whether there are experts in them: those that have some that moefuse cannot fuse, and those without any.

Experts: ``counted``, ``chosen``, ``elsewhere``. None: ``backbones``, ``several``, ``places``. Each puts its models into one of the lists.
"""

from tests.programs.suspects import backbones, chosen, counted, elsewhere, parts, places, several
from tests.programs.suspects.parts import HAVE, HAVE_NOT, Make

FILES = tuple(module.__file__ for module in (parts, counted, chosen, elsewhere, backbones, several, places))

__all__ = ["FILES", "HAVE", "HAVE_NOT", "Make"]
