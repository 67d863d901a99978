"""Doors from other libraries into moefuse. None of these libraries is imported by ``import moefuse``; see `on_import`."""
