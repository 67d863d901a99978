"""What an ``autograd.Function`` notes for its backward pass while it runs forward: attributes of ``ctx``.

Nothing but backward reads them, so a function that returns early where there are no rows may note there what it will. What the other way
notes is what counts, and what backward is traced with.
"""

from __future__ import annotations

from typing import Any

from moefuse.capture.dynamo import contexts
from moefuse.capture.opened import RETURN, Scope


def begin(scope: Scope) -> None:
    """Remember what has been noted where a function may return early."""
    if scope.join == RETURN:
        scope.notes = [(c, contexts.noted(scope.translator, c)) for c in contexts.contexts(scope.translator, scope.locals.values())]


def takes(scope: Scope, variable: Any) -> bool:
    """Whether a change of an object is such a note."""
    return any(context is variable for context, _ in scope.notes)


def forget(scope: Scope) -> None:
    """Let be as if nothing had been noted in the scope."""
    for context, before in scope.notes:
        contexts.put_back(scope.translator, context, before)
