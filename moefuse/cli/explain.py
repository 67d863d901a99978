"""``python -m moefuse explain``: the report of a model that is built for it."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from moefuse import _torch_private
from moefuse.api import explain
from moefuse.cli import hugging_face, target
from moefuse.cli.command import CommandError, doing
from moefuse.pipeline.publish import USER_DECIDED
from moefuse.report.report import FusionReport


def run(given: argparse.Namespace) -> int:
    if given.html:
        _check_page(given.html)
    model, args, kwargs, changed = _model(given)
    if isinstance(model, torch.nn.Module):
        model.train(given.train)
    doing("compiling on trial")
    report = _explained(model, args, kwargs, given.train)
    if changed:
        report.notes.append(f"a model of its config: random weights, {changed}")
    if given.html:
        with _writing(given.html):
            report.save_html(given.html)
    print(report.to_json() if given.json else report)
    left = [skipped for skipped in report.skipped if skipped.code not in USER_DECIDED]
    return 1 if given.strict and (left or not report.fused) else 0


def _model(given: argparse.Namespace) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], str]:
    if bool(given.model) == bool(given.hf):
        raise CommandError("name one model: MODULE:NAME, or --hf PATH")
    if given.layers < 1:
        raise CommandError(f"--layers {given.layers} leaves nothing: give 1 or more")
    if given.hf:
        model, kwargs, changed = hugging_face.build(given.hf, given.layers)
        return (model, (), kwargs, changed) if not given.inputs else (model, tuple(map(target.tensor, given.inputs)), {}, changed)
    made, args = target.load(given.model, given.inputs)
    return made, args, {}, ""


def _explained(model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], train: bool) -> FusionReport:
    try:
        # What the log would say is in the report, or in the error.
        with target.unlogged("moefuse", _torch_private.FAKES_LOG), contextlib.nullcontext() if train else torch.no_grad():
            return explain(model, *args, **kwargs)
    except Exception as error:
        shapes = ", ".join(
            f"{v.dtype}{list(v.shape)}".removeprefix("torch.") for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor)
        )
        raise CommandError(f"the model cannot be called with {shapes or 'these inputs'}: {target.why(error)}") from error


def _check_page(path: str) -> None:
    """Said before a model is built and compiled, which may take minutes."""
    file = Path(path).resolve()
    new = not file.exists()
    with _writing(path), file.open("a"):
        pass
    if new:
        file.unlink()


@contextlib.contextmanager
def _writing(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CommandError(f"{path} cannot be written: {error.strerror}") from error
