"""Spellings of research and remote code: short layers as people publish them, each with what moefuse makes of it."""

from tests.programs.research import around, capacity, combines, gathered, masks, published, remote, remote_twins, stores
from tests.programs.research.base import SPELLINGS, TWINS, Expected, Layer

__all__ = [
    "SPELLINGS",
    "TWINS",
    "Expected",
    "Layer",
    "around",
    "capacity",
    "combines",
    "gathered",
    "masks",
    "published",
    "remote",
    "remote_twins",
    "stores",
]
