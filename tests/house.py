"""What the project weighs, and how straight it stands: ``python -m tests.house [--walks] [--json]``.

Rooms are folders (and single files at the top of the package), with the links to ``passes/`` and ``kernels/`` followed. An arrow is an
import, wherever it stands: in a function and for types alone, too. :data:`FLOORS` has the rooms from the ground up; an arrow to a higher
one runs up. A walk is the rooms that a call goes through, each function counted where it first runs: a stay is one room without a break.
"""

from __future__ import annotations

import argparse
import ast
import functools
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "moefuse"

FLOORS = (
    "_version",
    "errors",
    "spec",
    "machine",
    "program",
    "_torch_private",
    "config",
    "ops.meaning",
    "runtime",
    "tuning",
    "kernels.triton",
    "kernels.triton.device",
    "kernels.triton.words",
    "kernels.triton.launch",
    "kernels.triton.hopper",
    "kernels.triton.host",
    "kernels.triton.provide",
    "kernels.triton.tune",
    "runtime.transports",
    "ops",
    "passes.graph",
    "evidence",
    "report",
    "passes.ir",
    "passes.infer",
    "passes.encodings",
    "passes.rules",
    "passes.rules.routing",
    "passes.rules.rows",
    "passes.rules.sums",
    "passes.rules.refused",
    "passes.match",
    "passes.lower",
    "passes.prove",
    "passes.block",
    "passes",
    "tuning.measure",
    "capture.dynamo",
    "capture",
    "pipeline",
    "replay",
    "cache",
    "inductor_pass",
    "diagnosis",
    "parallel",
    "integrations",
    "backend",
    "gains",
    "api",
    "__init__",
    "cli",
    "__main__",
)
"""The rooms, from the ground up."""

CONCERNS = {
    "recognition": "passes/graph passes/ir passes/infer passes/rules passes/match passes/prove passes/lower passes/block"
    " passes/driver.py passes/replacement.py",
    "quantised weights": "passes/encodings kernels/triton/words",
    "capture": "moefuse/capture",
    "private torch": "moefuse/_torch_private",
    "ops": "moefuse/ops moefuse/runtime",
    "GPU kernels": "kernels/triton",
    "CPU kernels": "kernels/cpu kernels/libtorch.h",
    "several ranks": "moefuse/parallel moefuse/runtime/transports",
    "reports": "moefuse/report moefuse/evidence moefuse/diagnosis moefuse/gains moefuse/program",
    "tuning": "moefuse/tuning",
    "ways in": "moefuse/pipeline moefuse/replay moefuse/integrations moefuse/cli moefuse/machine moefuse",
}
"""Folders and files of the product; the longest name that a file begins with counts."""


def modules() -> dict[str, Path]:
    """Dotted names without ``moefuse.``, and their files."""
    found = {}
    for folder in (PACKAGE, PACKAGE / "passes", PACKAGE / "kernels"):
        for path in sorted(folder.rglob("*.py")):
            name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
            found["__init__" if name == "__init__" else name.removesuffix(".__init__")] = path
    return found


MODULES = modules()


def room(name: str) -> str:
    """The folder of a module; a file at the top is a room of its own."""
    return ".".join(MODULES[name].parent.relative_to(PACKAGE).parts) or name


def imports(source: str) -> Iterator[tuple[str, bool]]:
    """(module of moefuse, whether in a function) for each import, those for types included."""

    def visit(node: ast.AST, inside: bool) -> Iterator[tuple[str, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ImportFrom) and (child.module or "").split(".")[0] == "moefuse":
                where = (child.module or "").removeprefix("moefuse").removeprefix(".")
                for alias in child.names:
                    whole = f"{where}.{alias.name}".removeprefix(".")
                    yield whole if whole in MODULES else where or "__init__", inside
            elif isinstance(child, ast.Import):
                names = [alias.name for alias in child.names if alias.name.split(".")[0] == "moefuse"]
                yield from ((name.removeprefix("moefuse").removeprefix(".") or "__init__", inside) for name in names)
            yield from visit(child, inside or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef))

    yield from visit(ast.parse(source), False)


@functools.cache
def imported() -> Mapping[str, list[tuple[str, bool]]]:
    """Module -> its :func:`imports`, all read at the first call."""
    return {name: list(imports(path.read_text())) for name, path in MODULES.items()}


def arrows() -> dict[str, set[str]]:
    """Module -> modules that it imports."""
    found = {name: {target for target, _ in its} & set(MODULES) - {name} for name, its in imported().items()}
    return {name: targets - {"__init__"} for name, targets in found.items()}


def circles(graph: Mapping[str, set[str]]) -> set[str]:
    """What is in an import circle, or between two."""
    left = dict(graph)
    while ends := [n for n, targets in left.items() if not targets & set(left) or not any(n in others for others in left.values())]:
        for name in ends:
            del left[name]
    return set(left)


def rooms_of(graph: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """The arrows between rooms."""
    found: dict[str, set[str]] = {}
    for name, targets in graph.items():
        found.setdefault(room(name), set()).update({room(t) for t in targets} - {room(name)})
    return found


def arrows_up(graph: Mapping[str, set[str]]) -> list[str]:
    """Imports of a module on a higher floor."""
    floor = {name: i for i, name in enumerate(FLOORS)}
    return sorted(f"{n} -> {t}" for n, targets in graph.items() for t in targets if floor[room(t)] > floor[room(n)])


def lines(*folders: str) -> Counter[str]:
    """Lines of code in folders, by concern where one is named."""
    found: Counter[str] = Counter()
    names = sorted(((prefix, c) for c, prefixes in CONCERNS.items() for prefix in prefixes.split()), key=lambda pair: -len(pair[0]))
    for path in sorted(path for folder in folders for path in (ROOT / folder).rglob("*")):
        if path.suffix not in (".py", ".cpp", ".h", ".css") or not path.is_file():
            continue
        name = str(path.relative_to(ROOT))
        concern = next((c for prefix, c in names if name == prefix or name.startswith(f"{prefix}/")), folders[0])
        found[concern] += len(path.read_text().splitlines())
    return found


DOORS = ("_torch_private", "capture.dynamo")
"""Rooms in which private torch may be named."""


def private_names() -> dict[str, set[str]]:
    """Names of torch that are private, as they are imported or written out, and the rooms that have them."""
    found: dict[str, set[str]] = {}
    for name, path in MODULES.items():
        for private in private_in(path.read_text()):
            found.setdefault(private, set()).add(room(name))
    return found


def private_in(source: str) -> set[str]:
    """Such names in a file."""
    found: set[str] = set()

    def written(node: ast.AST) -> str | None:
        if isinstance(node, ast.Name):
            return node.id
        before = written(node.value) if isinstance(node, ast.Attribute) else None
        return None if before is None or not isinstance(node, ast.Attribute) else f"{before}.{node.attr}"

    def add(name: str | None) -> None:
        if name is not None and name.startswith("torch.") and any(p.startswith("_") and not p.startswith("__") for p in name.split(".")):
            found.add(name)

    inner: set[ast.AST] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                add(f"{node.module}.{alias.name}")
        elif isinstance(node, ast.Import):
            for alias in node.names:
                add(alias.name)
        elif isinstance(node, ast.Attribute) and node not in inner:
            inner.update(ast.walk(node.value))
            add(written(node))
    return found


def wrapped() -> set[str]:
    """Callables of Dynamo that are wrapped once capture is on."""
    import torch

    import moefuse  # noqa: F401

    torch.compile(torch.nn.Linear(2, 2), backend="moefuse")(torch.zeros(1, 2))
    found: set[str] = set()
    for name, module in list(sys.modules.items()):
        if name.startswith("torch._dynamo"):
            for owner in [o for o in vars(module).values() if isinstance(o, type)]:
                found |= {f"{owner.__qualname__}.{key}" for key, value in vars(owner).items() if getattr(value, "moefuse", False) is True}
    return found


def schemas() -> int:
    """Operators that are registered."""
    from moefuse.ops.schema import SCHEMAS

    return len(SCHEMAS)


def walk(call: Callable[[], Any], inside: str = "") -> list[str]:
    """The rooms that a call goes through, in order; ``inside``: only below calls of this function (``module:name``)."""
    seen: set[Any] = set()
    found: list[str] = []
    depth = 0 if inside else 1

    def watch(frame: Any, event: str, _: Any) -> None:
        nonlocal depth
        name = frame.f_globals.get("__name__", "")
        if inside and f"{name}:{frame.f_code.co_name}" == inside:
            depth += {"call": 1, "return": -1}.get(event, 0)
        if event != "call" or depth <= 0 or frame.f_code in seen or not name.startswith("moefuse."):
            return
        seen.add(frame.f_code)
        here = room(module) if (module := name.removeprefix("moefuse.")) in MODULES else ""
        if here and (not found or found[-1] != here):
            found.append(here)

    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


def walks() -> dict[str, list[str]]:
    """A graph from the backend, a 16-bit training call and a quantised inference call of the GPU kernels (interpreted)."""
    import torch

    import moefuse
    from moefuse.ops.meaning.call import ExpertsCall

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = torch.nn.Linear(16, 4, bias=False)
            self.experts = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weights, ids = self.gate(x).softmax(-1).topk(2)
            out = torch.zeros_like(x)
            for e, expert in enumerate(self.experts):
                t, k = torch.where(ids == e)
                out.index_add_(0, t, expert(x[t]) * weights[t, k, None])
            return out

    layer = torch.compile(Layer(), backend="moefuse")
    x = torch.randn(8, 16)
    found = {"a graph": walk(lambda: layer(x), "moefuse.pipeline.rewrite:rewrite_and_keep")}
    assert moefuse.last_report() is not None
    from moefuse.kernels.triton.provide import extended, training

    ids = torch.randint(4, (8, 2))
    weights = torch.rand(8, 2)
    lists = [[torch.randn(4, 64, 16)], [], [torch.randn(4, 16, 32)], [], [], []]
    call = ExpertsCall.of(x, ids, weights, *lists, activation="silu", gating="merged")
    found["a training call"] = walk(lambda: training.experts_forward(call))

    storage = [[torch.randint(-127, 127, (4, 64, 16), dtype=torch.int8)], [], [torch.randint(-127, 127, (4, 16, 32), dtype=torch.int8)]]
    codes = [torch.rand(4, 64, 1), torch.rand(4, 16, 1)]
    text = "s8;1x0;f32;number;;"
    held = ExpertsCall.of_extended(
        x, ids, weights, *storage, *([] for _ in range(9)), codes, encodings=[text, "", text], activation="silu", gating="merged"
    )
    found["a quantised call"] = walk(lambda: extended.experts_extended(held))
    return found


def measured() -> dict[str, Any]:
    """Everything that needs no call."""
    graph = arrows()
    product = lines("moefuse", "passes", "kernels")
    return {
        "lines": dict(product.most_common()),
        "product": sum(product.values()),
        "tests": sum(lines("tests").values()),
        "docs (words)": sum(len(p.read_text().split()) for p in [*ROOT.glob("docs/**/*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]),
        "files": len(MODULES),
        "rooms": len(rooms_of(graph)),
        "arrows between rooms": sum(map(len, rooms_of(graph).values())),
        "arrows up": len(arrows_up(graph)),
        "modules in circles": len(circles(graph)),
        "rooms in circles": len(circles(rooms_of(graph))),
        "files at the top": len(list(PACKAGE.glob("*.py"))),
        "schemas": schemas(),
        "private names": len(private_names()),
        "wrapped callables": len(wrapped()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--walks", action="store_true", help="the walks, too (needs Triton, interpreted: TRITON_INTERPRET=1)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = measured()
    if args.walks:
        found["walks"] = {name: {"stays": len(rooms), "rooms": len(set(rooms))} for name, rooms in walks().items()}
    if args.json:
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
        return
    for name, value in found.items():
        if not isinstance(value, dict):
            sys.stdout.write(f"{name:24}{value:>8}\n")
            continue
        for key, one in value.items():
            sys.stdout.write(f"  {key:22}{one if isinstance(one, int) else ', '.join(f'{n} {k}' for k, n in one.items()):>8}\n")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
