"""The command ``moefuse``: what ``python -m moefuse`` does, with help and ``--version`` at once.

A module beside the package, because importing anything of the package imports torch, which takes seconds.
"""

from __future__ import annotations

import runpy
from importlib.util import find_spec
from pathlib import Path


def main() -> int:
    """Run the command; help, the version and wrong words end the process before torch is imported."""
    package = find_spec("moefuse")
    assert package is not None
    assert package.origin is not None
    folder = Path(package.origin).parent
    version = runpy.run_path(str(folder / "_version.py"))["__version__"]
    runpy.run_path(str(folder / "cli" / "words.py"))["parser"]("moefuse", version).parse_args()
    from moefuse.cli import main as command

    return command.main(program="moefuse")
