"""Doors from other libraries into moefuse. Nothing here is imported by ``import moefuse``."""
