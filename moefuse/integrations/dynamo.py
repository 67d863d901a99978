"""``backend="moefuse"`` where the package is imported and not installed, so that torch finds no entry point of it."""

from moefuse import _torch_private

_torch_private.name_backend("moefuse", "moefuse.backend:backend")
