"""The site's page of all that ``moefuse`` exports, from its docstrings; ``docs/site.py`` asks for it."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

FUNCTIONS = (
    ("Compiling", ("compile", "compile_layers", "explain", "last_report", "reports", "benchmark", "warmup")),
    ("Several ranks", ("parallelize", "unparallelize", "load", "full_state_dict", "clip_grad_norm_")),
    ("Routing", ("capture_routing", "replay_routing", "load_of")),
)
CLASSES = ("Options", "FusionReport", "Gains", "WarmupReport", "ExpertsSpec", "MoEFusionPass")
_SECTIONS = ("Args", "Attributes", "Returns", "Yields", "Raises")


def page() -> str:
    """The page's text."""
    import moefuse

    errors = sorted(name for name in moefuse.__all__ if name.endswith("Error") or name == "TooManyTokens")
    known = {name for _, names in FUNCTIONS for name in names} | {*CLASSES, *errors, "__version__"}
    missing = sorted({*moefuse.__all__} - known)
    groups = [*FUNCTIONS, ("Classes", (*CLASSES, *missing)), ("Errors", tuple(errors))]
    head = "# Reference\n\nAll that `import moefuse` gives, from its docstrings. Letters of shapes: [glossary](design/glossary.md).\n"
    parts = (f"\n## {title}\n{''.join(_entry(name, getattr(moefuse, name)) for name in names if name)}" for title, names in groups)
    return head + "".join(parts)


def _entry(name: str, thing: Any) -> str:
    title = f"\n### {name}\n\n"
    if inspect.isfunction(thing):
        title += f"```text\nmoefuse.{name}{_signature(thing)}\n```\n\n"
    elif issubclass(thing, Exception):
        title = f"\n### {name}({thing.__bases__[0].__name__})\n\n"
    return title + "\n".join(_lines(inspect.getdoc(thing) or "")).strip() + "\n"


def _signature(function: Any) -> str:
    """As it is written, types and all, an argument in a line where it is long."""
    text = str(inspect.signature(function, eval_str=False)).replace("'", "")
    if len(text) < 100:
        return text
    arguments = [str(p).replace("'", "") for p in inspect.signature(function).parameters.values()]
    kinds = [p.kind for p in inspect.signature(function).parameters.values()]
    first = next((i for i, kind in enumerate(kinds) if kind is inspect.Parameter.KEYWORD_ONLY), None)
    if first is not None and inspect.Parameter.VAR_POSITIONAL not in kinds:
        arguments.insert(first, "*")
    return "(\n" + "".join(f"    {argument},\n" for argument in arguments) + ")" + text[text.rindex(")") + 1 :]


def _lines(doc: str) -> Iterator[str]:
    """A docstring as Markdown: sections are lists, roles and double backticks are code."""
    doc = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", doc).replace("``", "`")
    for block in re.split(r"\n\n", doc):
        title, _, rest = block.partition("\n")
        if not (title.endswith(":") and title[:-1] in _SECTIONS):
            yield from (*textwrap.dedent(block).splitlines(), "")
            continue
        yield from (f"**{title[:-1]}**", "")
        items = re.split(r"\n(?=\S)", textwrap.dedent(rest))
        for item in items if title[:-1] not in ("Returns", "Yields") else [" ".join(items)]:
            text = " ".join(item.split())
            named = re.match(r"([\w.*]+(?:, [\w.*]+)*): (.*)", text)
            yield f"- `{named[1]}`: {named[2]}" if named else f"- {text}"
        yield ""
