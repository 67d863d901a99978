"""Write what docs/refusals.md says to do about each refusal to where the package's pages find it. Run after editing the table.

python docs/advice.py
"""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
TARGET = ROOT / "moefuse/report/advice.json"


def advice() -> dict[str, str]:
    """Code -> the last column of its row, links as their text."""
    rows = re.findall(r"^\| `([a-z-]+)` \|.*\| (.*?) \|$", (ROOT / "docs/refusals.md").read_text(), flags=re.MULTILINE)
    return {code: re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text) for code, text in rows}


if __name__ == "__main__":
    TARGET.write_text(json.dumps(advice(), indent=1, ensure_ascii=False) + "\n")
