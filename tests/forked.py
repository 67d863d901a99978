"""Programs that want a process of their own each: one process imports what all of them need, and each runs in a fork of it.

Importing torch takes longer than what most of them do.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PARENT = """
import json as _json, os as _os, sys as _sys, tempfile as _tempfile, traceback as _traceback

_before, _programs = _json.load(_sys.stdin)
exec(_before, globals())


def _forked(program):
    with _tempfile.TemporaryFile() as out, _tempfile.TemporaryFile() as err:
        child = _os.fork()
        if not child:
            code = 1
            try:
                _os.dup2(out.fileno(), 1)
                _os.dup2(err.fileno(), 2)
                exec(program, globals())
                code = 0
            except SystemExit as end:
                code = end.code or 0
            except BaseException:
                _traceback.print_exc()
            finally:
                _sys.stdout.flush()
                _sys.stderr.flush()
                _os._exit(code)
        code = _os.waitstatus_to_exitcode(_os.waitpid(child, 0)[1])
        texts = [f.seek(0) or f.read().decode() for f in (out, err)]
    return code, *texts


_answers = [_forked(program) for program in _programs]
_sys.stdout.write(_json.dumps(_answers))
"""


@dataclass(frozen=True)
class Done:
    """How one program ended, and what it wrote."""

    returncode: int
    stdout: str
    stderr: str


def forked(before: str, programs: Sequence[str], cwd: Path | None = None, environment: Mapping[str, str] | None = None) -> list[Done]:
    """What each program does behind ``before``, which runs once and starts no threads."""
    given = json.dumps([textwrap.dedent(before), [textwrap.dedent(program) for program in programs]])
    command = [sys.executable, "-c", PARENT]
    env = dict(environment or os.environ)
    done = subprocess.run(command, input=given, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [Done(*answer) for answer in json.loads(done.stdout)]


def printed(before: str, programs: Sequence[str], cwd: Path | None = None, environment: Mapping[str, str] | None = None) -> list[str]:
    """What each of them prints; none may fail."""
    ends = forked(before, programs, cwd, environment)
    for program, end in zip(programs, ends, strict=True):
        assert end.returncode == 0, f"{program}\n{end.stderr}"
    return [end.stdout.strip() for end in ends]
