"""The process that compiles: one job per line on stdin, one answer per line on stdout (see ``compiling.py``).

Its argument is the number of the device to compile for.
"""

from __future__ import annotations

import json
import os
import sys


def main() -> None:
    # Whatever a compiler prints must not be taken for an answer.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    import torch

    from moefuse.kernels.triton.tune.compiling import compile_one, from_json

    if torch.cuda.is_available():
        torch.cuda.set_device(int(sys.argv[1]))
    for line in sys.stdin:
        answers.write(json.dumps(compile_one(from_json(json.loads(line)))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
