"""The layers of gallery.md (``layers/*.py``), and what is reported of each: ``python docs/gallery.py`` writes the reports again."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

PAGE = Path(__file__).parent / "gallery.md"
LAYERS = PAGE.parent / "layers"
_ENTRY = re.compile(r"^## \[(?P<title>[^\n]+)\]\(layers/(?P<name>\w+)\.py\)\n\n```text\n(?P<report>.*?)^```\n", re.MULTILINE | re.DOTALL)


class Entry(NamedTuple):
    """A layer of the page: ``make()`` of its file returns the module and its inputs."""

    title: str
    name: str
    report: str


def entries(page: str | None = None) -> list[Entry]:
    """All layers in the order of the page."""
    return [Entry(**found.groupdict()) for found in _ENTRY.finditer(PAGE.read_text() if page is None else page)]


def made(entry: Entry) -> tuple[Any, tuple[Any, ...]]:
    """The module and its inputs, from their file: reports say the line."""
    spec = importlib.util.spec_from_file_location(f"gallery_{entry.name}", LAYERS / f"{entry.name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses ask for it
    spec.loader.exec_module(module)
    return module.make()  # type: ignore[no-any-return]


def shown(report: Any) -> str:
    """A report as the page has it: without this machine's folder, and without rounding errors, which differ from one to the next."""
    text = str(report).replace(f"{LAYERS}/", "")
    return re.sub(r", error (at most )?[\d.e-]+ of what rounding may make", "", text).rstrip() + "\n"


def reported(entry: Entry) -> str:
    """The report of a training step."""
    import torch

    import moefuse

    torch._dynamo.reset()
    layer, inputs = made(entry)
    scalar(torch.compile(layer, backend="moefuse")(*inputs)).backward()
    return shown(moefuse.last_report())


def scalar(out: Any) -> Any:
    """What is differentiated of whatever a layer returns; squares alone would be constant behind a norm."""
    import torch

    tensors = [t for t in (out if isinstance(out, tuple | list) else [out]) if hasattr(t, "requires_grad") and t.requires_grad]
    return sum((t * torch.linspace(-1, 1.5, t.numel()).view(t.shape)).sum() for t in tensors)


def _written() -> Iterator[str]:
    page, at = PAGE.read_text(), 0
    for found in _ENTRY.finditer(page):
        yield page[at : found.start("report")] + reported(Entry(**found.groupdict()))
        at = found.end("report")
    yield page[at:]


if __name__ == "__main__":
    PAGE.write_text("".join(list(_written())))
