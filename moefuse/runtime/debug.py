"""``parallelize(debug=True)``: before each op that communicates, ranks compare what they run and what was promised of their tokens.

That is an exchange on the host for each op, and a checksum of tokens that should be equal: for finding a mistake, not for speed. Before
the first op of a mesh, what is in ``Standing.first`` runs: the comparison of weights (``moefuse/parallel/same.py``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moefuse.errors import ParallelError, TooManyTokens
from moefuse.runtime.words import Call, say

_AT_ONCE = 1 << 22
"""Elements."""
_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def compare(call: Call) -> None:
    """Compare one call of an op with that of the other ranks.

    Raises:
        PeerError: they run something else.
        TooManyTokens: any of them has more tokens than ``max_tokens``.
        ParallelError: tokens, or numbers of tokens, or weights differ that were said to be equal.
    """
    terms, group = call.terms, call.terms.group
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise ParallelError(f"{call.name}: debug=True compares ranks on the host, which no CUDA graph does: use one of the two")
    counts = call.heard(say(group, call.word(call.rows[0].shape[0] if call.rows else 0)))
    while group.standing.first:
        group.standing.first.pop(0)()
    if call.op.split()[0] not in ("ep_dispatch", "ep_experts"):
        return
    most = max(counts)
    if isinstance(terms.most, int) and most > terms.most:
        call.agreed = True
        raise TooManyTokens(f"rank {group.ranks[counts.index(most)]} has {most} tokens, and max_tokens={terms.most} was promised")
    if terms.tokens == "replicated" or terms.most == "equal":
        said = 'tokens="replicated"' if terms.tokens == "replicated" else 'max_tokens="equal"'
        if (other := _other(counts)) is not None:
            raise ParallelError(
                f"ranks {group.ranks[0]} and {group.ranks[other]} have {counts[0]} and {counts[other]} tokens at {call.name}, but {said} "
                "was said"
            )
    if terms.tokens == "replicated" and (other := _other(say(group, sum(map(checksum, call.rows)) & (1 << 62) - 1))) is not None:
        raise ParallelError(
            f'ranks {group.ranks[0]} and {group.ranks[other]} hold different tokens at {call.name}, but tokens="replicated" was said'
        )


def _other(found: Sequence[int]) -> int | None:
    """The first place whose number is not that of place 0."""
    return next((i for i, number in enumerate(found) if number != found[0]), None)


def checksum(tensor: Tensor) -> int:
    """Of all bits in their order, an int64: any change of one element changes it."""
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).detach().contiguous()
    bits = flat.view(-1).view(_OF_SIZE[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, bits.numel(), _AT_ONCE):
        part = bits[start : start + _AT_ONCE].long()
        total += (torch.arange(start, start + part.numel(), device=tensor.device).mul_(2).add_(1) * part).sum()
    return int(total)
