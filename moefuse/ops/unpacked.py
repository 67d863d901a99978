"""``moefuse::unpacked``: the weights of all experts that a storage and what belongs to it stand for (``encoding.dequantise``).

No program runs it: it stands in a graph while the graph is read, for a stack of which the program unpacks what its slots chose.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moefuse.ops.meaning.encoding import dequantise, parse
from moefuse.ops.schema import implement


def _unpacked(storage: Tensor, codes: Sequence[Tensor], encoding: str, dtype: torch.dtype) -> Tensor:
    """storage [E, N', K'] and scales, and zeros if there are some, -> [E, N, K] in ``dtype``."""
    return dequantise(parse(encoding), storage, codes[0], codes[1] if len(codes) > 1 else None, dtype)


def _fake(storage: Tensor, codes: Sequence[Tensor], encoding: str, dtype: torch.dtype) -> Tensor:
    return storage.new_empty(parse(encoding).logical(tuple(storage.shape)), dtype=dtype)


implement("unpacked", kernel=_unpacked, fake=_fake, autograd=None)
