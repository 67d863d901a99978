"""``python -m moefuse bench``: :func:`moefuse.benchmark` of a model that is built for it."""

from __future__ import annotations

import argparse
import sys

from moefuse.api import benchmark
from moefuse.cli import target
from moefuse.cli.command import CommandError, check_page, writing


def run(given: argparse.Namespace) -> int:
    if not 0 < given.budget < float("inf"):
        raise CommandError(f"--budget {given.budget:g} is no time: give seconds")
    if given.html:
        check_page(given.html)
    model, args, kwargs, changed = target.asked(given)
    model, (args, kwargs) = target.on_gpu(model, (args, kwargs))
    with target.called_with(args, kwargs):
        gains = benchmark(model, *args, train=given.train, budget_s=given.budget, progress=sys.stderr.isatty(), **kwargs)
    if changed:
        gains.notes.append(f"a model of its config: random weights, {changed}")
    if given.html:
        with writing(given.html):
            gains.save_html(given.html)
    print(gains.to_json() if given.json else gains)
    return 1 if gains.off or any(row.problem for row in gains.model.rows) else 0
