"""Faults put into a copy of moefuse one at a time, each with the tests of the contract that have to fail.

python -m tests.contract.faults              whoever computes on a CPU
TRITON_INTERPRET=1 python -m tests.contract.faults    the kernels, in Triton's interpreter
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent.parent
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


class Fault(NamedTuple):
    """In ``file`` the first ``old`` becomes ``new``; ``test`` and ``only`` (``-k`` of pytest) name what fails then."""

    what: str
    file: str
    old: str
    new: str
    test: str
    only: str


RUNTIME, CPP, DEVICE = "moefuse/runtime", "kernels/cpu", "kernels/triton/device"
PORTABLE = [
    Fault("negative ids are experts, counted from the end", f"{RUNTIME}/routing.py", "if 0 <= e < num_experts:", "if e < num_experts:",
          "untouched", "contribute and portable-stacked"),
    Fault("ids behind the last are the last expert", f"{RUNTIME}/routing.py", "clamp_(max=num_experts)", "clamp_(max=num_experts - 1)",
          "edges", "every_edge and portable-no-valid-id or many_rows and portable-no-valid-id"),
    Fault("slots are sorted in any order", f"{RUNTIME}/routing.py", "stable=True)", "stable=True)\n    order = order.flip(0)",
          "edges", "many_rows and portable-sorted"),
    Fault("rows of nobody are what memory held", f"{RUNTIME}/grouped.py", "out[ends[-1] :].zero_()", "pass",
          "values", "the_tier and portable-linear"),
    Fault("routing weights are applied twice", f"{RUNTIME}/cpu.py", "* self.scale[slots, None].to(self.wide))",
          "* self.scale[slots, None].to(self.wide) ** 2)", "values", "every_storage and portable and input"),
    Fault("up is gate", f"{RUNTIME}/cpu.py", "self.project(1, h[:, features:]", "self.project(0, h[:, features:]",
          "values", "every_storage and portable-separate"),
    Fault("the scale of a term is forgotten", f"{RUNTIME}/cpu.py", ".mul_(scale)", "", "values", "test_terms and portable"),
    Fault("the gradient of b_up is forgotten", f"{RUNTIME}/backward.py", "*d_in.b_in, *d_in.b_up,",
          "*d_in.b_in, *(b.mul(0) for b in d_in.b_up),", "gradients", "every_storage and portable-separate"),
    Fault("routing weights have no gradient through the bias", f"{RUNTIME}/backward.py", "if w_out.bias:", "if False:",
          "gradients", "every_storage and portable-merged and output"),
    Fault("the gradient of w_out misses the routing weight", f"{RUNTIME}/backward.py", "(value if need.on_input else value * scale)",
          "(value)", "gradients", "every_storage and portable-merged and output"),
    Fault("the gradient through a term misses its scale", f"{RUNTIME}/backward.py", ", alpha=stack.term.scale)", ")",
          "gradients", "test_terms and portable"),
    Fault("every expert's value reaches every token", f"{RUNTIME}/dense.py", "masked_fill(~valid[:, k : k + 1], 0)", "nan_to_num(7.0)",
          "edges", "every_edge and dense"),
    Fault("routing weights of nobody are read", f"{RUNTIME}/grouped.py", "rows.masked_fill(dead[:, k : k + 1], 0)", "rows",
          "untouched", "rows_of_nobody and portable-combine"),
    Fault("derivative of a clamp passes where it is off", "moefuse/ops/meaning/activations.py", "torch.where(", "(lambda c, a, b: a)(",
          "gradients", "every_body and portable"),
    Fault("relu2 is half as steep", f"{CPP}/derivative.h", "return {r * r, 2.f * r,", "return {r * r, r,",
          "gradients", "every_body and c++-relu2"),
    Fault("a clamp's gradient passes everywhere", f"{CPP}/derivative.h", "where(up_passes, grad * g * s)", "(grad * g * s)",
          "gradients", "every_body and c++-swiglu"),
    Fault("a constant of gelu_tanh", f"{CPP}/activations.h", "(v + 0.044715f *", "(v + 0.0447f *",
          "values", "every_body and c++ and gelu_tanh"),
]  # fmt: skip
KERNELS = [
    Fault("ids below zero are experts", f"{DEVICE}/routing.py", "(raw >= 0) & (raw < E)", "(raw < E)",
          "edges", "permute_sorts and triton"),
    Fault("halves in the wrong order", f"{DEVICE}/gemm.py", "            gate, up = up, gate\n", "            gate, up = gate, up\n",
          "values", "every_body and triton and interleaved-up-first"),
    Fault("biases of the second half are those of the first", f"{DEVICE}/gemm.py", "(first + n).to(tl.int64) * weights.at.bias_n",
          "n.to(tl.int64) * weights.at.bias_n", "values", "every_storage and triton and tiles and merged"),
    Fault("no mask on the last block of inputs", f"{DEVICE}/gemm.py", "mask=(n[:, None] < N) & (k[None, :] < limit)", "mask=n[:, None] < N",
          "edges", "strides and triton and tiles"),
    Fault("no mask on the last block of inputs of a vector", f"{DEVICE}/gemv.py", "mask=(n[:, None] < N) & (k[None, :] < limit), other",
          "mask=n[:, None] < N, other", "edges", "strides and triton and vectors"),
    Fault("the bias is at the wrong feature", f"{DEVICE}/gemv.py", "(first + n).to(tl.int64) * at.bias_n", "n.to(tl.int64) * at.bias_n",
          "values", "every_storage and triton and vectors and merged"),
    Fault("the gradient of w_out misses the routing weight", f"{DEVICE}/backward.py", "(value * scale if SCALE else value)", "value",
          "gradients", "every_storage and triton"),
    Fault("the gradient of up is that of gate", f"{DEVICE}/backward.py", "halves.UP, d_up.to(dtype)", "halves.UP, d_gate.to(dtype)",
          "gradients", "every_storage and triton"),
]  # fmt: skip


def caught(fault: Fault, copy: Path) -> bool:
    """Whether its tests fail with the fault in the copy, which is as before then. All cases run, also those of which a sample is shown."""
    path = copy / fault.file
    before = path.read_text()
    assert fault.old in before, fault
    path.write_text(before.replace(fault.old, fault.new, 1))
    command = [
        sys.executable,
        "-m",
        "pytest",
        f"tests/contract/test_{fault.test}.py",
        "-k",
        fault.only,
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
    ]
    found = [f"{copy}", str(ROOT / ".venv/triton")] if INTERPRETED else [str(copy)]
    try:
        done = subprocess.run(
            command,
            cwd=copy,
            env={**os.environ, "HYPOTHESIS_PROFILE": "deep", "PYTHONPATH": os.pathsep.join(found)},
            capture_output=True,
            check=False,
        )
    finally:
        path.write_text(before)
    assert done.returncode in (0, 1), done.stdout.decode()[-2000:]
    return done.returncode == 1


def main() -> None:
    """Say of each fault whether it was caught; fail if one was not."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(ROOT, copy, symlinks=True, ignore=shutil.ignore_patterns(".git", ".venv*", "__pycache__", "results"))
        missed = []
        for fault in KERNELS if INTERPRETED else PORTABLE:
            good = caught(fault, copy)
            sys.stdout.write(f"{'caught' if good else 'MISSED'}  {fault.file}: {fault.what}\n")
            sys.stdout.flush()
            missed += [] if good else [fault.what]
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
