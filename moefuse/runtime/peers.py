"""Other ranks that fail, leave or do something else: how they are told, and what a rank raises.

Where numbers of tokens are exchanged (``Terms.tells``), a rank that raises before its tokens are sent says so in their place, and the
others raise at once. A rank that fails in the middle of a call has left the order of collectives, and what it sends next would be taken
for something else: so every later call on that mesh raises in this process, and the first of them tells the others, if they still listen.
Whatever does not come ends with the timeout of the process group.
"""

from __future__ import annotations

import contextvars
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import torch.distributed as dist
from torch import Tensor

from moefuse.errors import ParallelError, PeerError, first_line
from moefuse.runtime import pieces, providers
from moefuse.runtime.debug import compare
from moefuse.runtime.groups import FAILED, Terms
from moefuse.runtime.words import LEFT, REFUSED, Call, say, why

_running: contextvars.ContextVar[Call | None] = contextvars.ContextVar("moefuse_running", default=None)


@contextmanager
def peers(terms: Terms, layer: str, op: str, rows: Sequence[Tensor] = (), place: Tensor | None = None) -> Iterator[Call]:
    """One call of an op that communicates; errors name the layer, by the table of its experts where there is one.

    Raises:
        PeerError: another rank has failed, left, or makes another call: torch's error, or its timeout, in one sentence.
        ParallelError: with ``debug=True``, what was promised of tokens or weights is not so.
    """
    pieces.note(op)
    call = Call(terms, layer, op, rows, place)
    _in_step(call)
    if (recorder := providers.recorder()) is not None:
        recorder.guard(terms.group.standing.guard)
    token = _running.set(call)
    try:
        with lost_peers(call, f"the mesh {terms.mesh!r}"):
            if terms.debug:
                compare(call)
            yield call
    except BaseException as error:
        # What every rank raises alike leaves nobody behind.
        if not call.agreed and not isinstance(error, ParallelError):
            terms.group.standing.leave(first_line(error))
            terms.group.standing.told = isinstance(error, PeerError)
        raise
    finally:
        _running.reset(token)


def _in_step(call: Call) -> None:
    """Raises where this rank has left the order of collectives, and tells the others of it once."""
    standing = call.terms.group.standing
    if standing.guard.value == FAILED:
        standing.leave("in a call from its record, which raised a RuntimeError")
    if not standing.left:
        return
    if call.terms.tells and not standing.told:
        standing.told = True
        with suppress(RuntimeError):
            say(call.terms.group, call.word(LEFT))
    raise PeerError(
        f"{call.name}: this rank and the others of the mesh {call.terms.mesh!r} are not in step any more since an earlier error "
        f"({standing.left}): start all processes again"
    )


def running(terms: Terms) -> Call:
    """The call that this thread makes."""
    return _running.get() or Call(terms, "a layer", "a call")


def told(terms: Terms, number: int) -> list[int]:
    """[P]: what each rank says; on the host.

    Raises:
        PeerError: another rank has raised, or makes another call.
    """
    call = running(terms)
    call.said = True  # whatever comes of it: nobody listens for a second one
    return call.heard(say(terms.group, call.word(number)))


def refuse(terms: Terms) -> None:
    """Tell the others that this rank has raised, in place of its number of tokens."""
    if terms.tells:
        told(terms, REFUSED)


@contextmanager
def lost_peers(layer: str | Call, whose: str) -> Iterator[None]:
    """Name the layer where another rank is not there any more."""
    try:
        yield
    except PeerError as error:
        raise type(error)(f"{_name(layer)}: {error}") from error.__cause__
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "ProcessGroup" not in str(error) and not _lost(error):
            raise
        raise PeerError(f"{_name(layer)}: another rank of {whose} failed, or did not come{why()}: {error}") from error


def _name(layer: str | Call) -> str:
    return layer if isinstance(layer, str) else layer.name


def _lost(error: RuntimeError) -> bool:
    """Whether gloo says that a connection has gone, or that time is up."""
    text = str(error).lower()
    return any(word in text for word in ("connection", "timed out", "timeout", "gloo"))
