"""How rows travel between the ranks that hold experts: one module for each transport, chosen by the terms of a call."""

from __future__ import annotations

from moefuse.runtime.groups import Terms
from moefuse.runtime.transports import all_reduce, all_to_all, allgather, rails, symm
from moefuse.runtime.transports.base import Transport as Transport

_BY_NAME: dict[str, Transport] = {
    "allgather": allgather.TRANSPORT,
    "all_reduce": all_reduce.TRANSPORT,
    "all_to_all": all_to_all.TRANSPORT,
    "rails": rails.TRANSPORT,
    "symm": symm.TRANSPORT,
}


def transport(terms: Terms) -> Transport:
    """The one that a plan has chosen."""
    return _BY_NAME[terms.transport]
