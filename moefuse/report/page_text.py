"""Text in HTML."""

from __future__ import annotations

import html
import re


def escaped(text: object) -> str:
    """Text as HTML text or an attribute's value."""
    return html.escape(str(text))


def marked_up(text: str) -> str:
    """A message with its `code` set as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escaped(text))


def tag(name: str, content: str, kind: str = "") -> str:
    """An element around HTML; ``kind`` is its class."""
    attribute = f' class="{kind}"' if kind else ""
    return f"<{name}{attribute}>{content}</{name}>"
