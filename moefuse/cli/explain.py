"""``python -m moefuse explain``: the report of a model that is built for it."""

from __future__ import annotations

import argparse
import contextlib

import torch

from moefuse.api import explain
from moefuse.cli import target
from moefuse.cli.command import check_page, doing, writing
from moefuse.pipeline.publish import USER_DECIDED


def run(given: argparse.Namespace) -> int:
    if given.html:
        check_page(given.html)
    model, args, kwargs, changed = target.asked(given)
    if isinstance(model, torch.nn.Module):
        model.train(given.train)
    doing("compiling on trial")
    with target.called_with(args, kwargs), contextlib.nullcontext() if given.train else torch.no_grad():
        report = explain(model, *args, **kwargs)
    if changed:
        report.notes.append(f"a model of its config: random weights, {changed}")
    if given.html:
        with writing(given.html):
            report.save_html(given.html)
    print(report.to_json() if given.json else report)
    left = [skipped for skipped in report.skipped if skipped.code not in USER_DECIDED]
    return 1 if given.strict and (left or not report.fused) else 0
