"""``python -m moefuse explain``: the report of a model that is built for it."""

from __future__ import annotations

import argparse
import contextlib
import logging
from collections.abc import Callable
from typing import Any

import torch

from moefuse.api import explain
from moefuse.cli import hugging_face, target
from moefuse.cli.command import CommandError, doing
from moefuse.errors import first_line
from moefuse.pipeline.publish import USER_DECIDED
from moefuse.report.report import FusionReport


def run(given: argparse.Namespace) -> int:
    model, args, kwargs, changed = _model(given)
    if isinstance(model, torch.nn.Module):
        model.train(given.train)
    doing("compiling on trial")
    report = _explained(model, args, kwargs, given.train)
    if changed:
        report.notes.append(f"a model of its config: random weights, {changed}")
    if given.html:
        _save(report, given.html)
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
    # What the log would say is in the report.
    log = logging.getLogger("moefuse")
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        with contextlib.nullcontext() if train else torch.no_grad():
            return explain(model, *args, **kwargs)
    except Exception as error:
        shapes = ", ".join(
            f"{v.dtype}{list(v.shape)}".removeprefix("torch.") for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor)
        )
        text = f"the model cannot be called with {shapes or 'these inputs'}: {type(error).__name__}: {first_line(error)}"
        raise CommandError(text) from error
    finally:
        log.setLevel(before)


def _save(report: FusionReport, path: str) -> None:
    try:
        report.save_html(path)
    except OSError as error:
        raise CommandError(f"{path} cannot be written: {error.strerror}") from error
