"""Mixture-of-experts programs as people write them: a description (:class:`Program`), a builder, a reference and a checker."""

from tests.programs.model import MoE, build, inputs_for
from tests.programs.program import Body, Dense, Filled, Masked, Noise, Program, Routing, Selected, Slots, Sorted, Store, invalid

__all__ = [
    "Body",
    "Dense",
    "Filled",
    "Masked",
    "MoE",
    "Noise",
    "Program",
    "Routing",
    "Selected",
    "Slots",
    "Sorted",
    "Store",
    "build",
    "inputs_for",
    "invalid",
]
