"""The moefuse ops. Importing this registers all of them: ``torch.ops.moefuse.experts``, ``permute``, ``grouped_linear``,
``expert_rows``, ``combine``, ``own`` and ``topk`` (and the internal ``*_forward`` / ``*_backward`` ops they differentiate through)."""

from __future__ import annotations

from moefuse.ops import (
    bounded as _bounded,  # noqa: F401  (defines its ops)
    experts,
    extended as _extended,  # noqa: F401  (defines its ops)
    grouped,
    grouped_coded as _grouped_coded,  # noqa: F401  (defines its ops)
    own as _own,  # noqa: F401  (defines its op)
    parallel as _parallel,  # noqa: F401  (defines its ops)
    recomputed as _recomputed,  # noqa: F401  (defines its ops)
    rounds as _rounds,  # noqa: F401  (defines its op)
    router,
    row_codes as _row_codes,  # noqa: F401  (defines its op)
    shared as _shared,  # noqa: F401  (defines its ops)
    slices as _slices,  # noqa: F401  (defines its ops)
    spread as _spread,  # noqa: F401  (defines its ops)
    unpacked as _unpacked,  # noqa: F401  (defines its op)
    whole as _whole,  # noqa: F401  (defines its ops)
)
from moefuse.ops.meaning.activations import ACTIVATIONS, Activation
from moefuse.ops.meaning.reference import experts_reference

__all__ = ["ACTIVATIONS", "Activation", "experts", "experts_reference", "grouped", "router"]
