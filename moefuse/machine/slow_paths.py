"""What this process does more slowly than it could, because something of the machine is missing: notes for the reports."""

from __future__ import annotations


class LostError(Exception):
    """A way of computing something is lost, and there is another: whoever asked for the result asks again."""


_notes: dict[str, str] = {}


def taken(what: str, why: str) -> None:
    """Remember that ``what`` runs the slow way. The reason is what a user can repair."""
    _notes[what] = f"{what} ({why})"


def notes() -> list[str]:
    """One line for each slow path that was taken so far."""
    return list(_notes.values())
