"""``python -m moefuse warmup``: :func:`moefuse.warmup` for a model, or for the sizes of one."""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch

from moefuse import _torch_private
from moefuse.api import compile, warmup
from moefuse.cli import target
from moefuse.cli.command import CommandError, doing
from moefuse.cli.words import SIZES
from moefuse.errors import first_line
from moefuse.machine.logs import unlogged
from moefuse.spec import ExpertsSpec


def run(given: argparse.Namespace) -> int:
    tokens = _tokens(given.tokens)
    numbers = [getattr(given, name) for name in SIZES]
    named = ", ".join(f"--{name.replace('_', '-')}" for name in SIZES)
    if bool(given.model) == any(number is not None for number in numbers):
        raise CommandError(f"name a model (MODULE:NAME), or its sizes ({named})")
    if not given.model and None in numbers:
        raise CommandError(f"sizes are missing: give all of {named}")
    try:
        what: Any = _ran(given) if given.model else _spec(given)
        report = warmup(what, tokens, budget_s=given.budget, progress=sys.stderr.isatty())
    except (TypeError, ValueError) as error:
        raise CommandError(first_line(error)) from error
    print(report)
    return 0


def _tokens(text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise CommandError(f"--tokens {text} are no numbers: give them with commas between, e.g. 1,8,512") from None


def _spec(given: argparse.Namespace) -> ExpertsSpec:
    return ExpertsSpec(
        given.experts,
        given.top_k,
        given.hidden,
        given.intermediate,
        given.dtype,
        given.activation,
        gating=given.gating,
        weights=given.weights,
    )


def _ran(given: argparse.Namespace) -> object:
    """The model, compiled and called once, so that its layers are known."""
    model, inputs = target.on_gpu(*target.load(given.model, given.inputs))
    doing("compiling the model")
    compiled = compile(model)
    try:
        with unlogged(_torch_private.FAKES_LOG), torch.no_grad():
            compiled(*inputs)
    except Exception as error:
        raise CommandError(f"the compiled model fails on these inputs: {target.why(error)}") from error
    return compiled
