"""The kernels that move rows between GPUs compile for every target, without spills, and move 16 bytes at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.triton.test_compiled import SHARED, spills

INTEGERS = dict.fromkeys(("T", "M", "E", "N", "F", "slots", "rank", "first", "K"), "i32") | dict.fromkeys(
    ("set_bytes", "at_w", "at_ids", "at", "at_flags", "at_came", "patience"), "i64"
)
TENSORS = {
    **dict.fromkeys(("x", "out_x", "rows", "own", "out"), "*bf16"),
    **dict.fromkeys(("w", "out_w"), "*fp32"),
    **dict.fromkeys(("ids", "local", "place", "turn", "took", "flags", "came"), "*i32"),
    "bases": "*i64",
    "parts": "*bf16",
    "to": "*i64",
    "scale": "fp32",
}
SIZES = {"FX": 2048, "FW": 8, "BX": 2048, "BW": 8, "BK": 8, "WORLD": 8, "F": 2048, "B": 2048}
FLAGS = {"TABLE": True, "WEIGHTS": True, "SCALED": True, "WAITS": True, "BP": 8, "APART": True, "EACH": 8}


@pytest.mark.parametrize("arch", [a for a in SHARED if a != 89])
@pytest.mark.parametrize(
    "name",
    [
        "local_ids", "sum_ranks", "push_tokens", "take_tokens", "push_rows", "take_rows", "push_back", "take_sums", "barrier",
        "barrier_of_its_own", "push_beside", "tell", "wait_for",
    ],
)  # fmt: skip
def test_compiles(name: str, arch: int | str, tmp_path: Path) -> None:
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from moefuse.kernels.triton.device import ranks, symm

    kernel = getattr(ranks if hasattr(ranks, name) else symm, name)
    sizes = {**SIZES, "B": 1024} if name == "take_sums" else SIZES  # of every rank
    known: dict[str, Any] = {**sizes, **FLAGS, "WIDE": tl.float32, "TIMED": not isinstance(arch, str)}
    constants = {n: known[n] for n in kernel.arg_names if n in known and (n, name) != ("F", "sum_ranks")}
    signature = {n: "constexpr" if n in constants else TENSORS.get(n) or INTEGERS[n] for n in kernel.arg_names}
    # What the launcher finds: pointers and sizes of buffers are multiples of sixteen.
    aligned = {
        n for n in kernel.arg_names if TENSORS.get(n, "").startswith("*") or INTEGERS.get(n) == "i64" or (n, name) == ("F", "sum_ranks")
    }
    attributes = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(kernel.arg_names) if n in aligned}
    target = GPUTarget("hip", arch, 64) if isinstance(arch, str) else GPUTarget("cuda", arch, 32)
    compiled = triton.compile(ASTSource(kernel, signature, constants, attributes), target=target, options={"num_warps": 4})
    assert spills(compiled, arch, tmp_path) == 0
    if arch == 90 and name in ("barrier", "barrier_of_its_own"):
        for needed in ("atom.global.sys.release.exch", "ld.volatile.global", "globaltimer", "trap", "atom.global.sys.acquire.add"):
            assert needed in compiled.asm["ptx"], compiled.asm["ptx"]
    elif arch == 90 and name in ("tell", "wait_for"):
        assert f"atom.global.sys.{'release' if name == 'tell' else 'acquire'}.exch" in compiled.asm["ptx"]
    elif arch == 90 and name != "local_ids":
        assert "ld.global.v4" in compiled.asm["ptx"] or "ld.global.v2.b64" in compiled.asm["ptx"], "rows are read in small pieces"
