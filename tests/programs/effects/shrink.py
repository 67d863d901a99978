"""The smallest program that still fails: effects go one by one, then statements, then whatever makes the layer special."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.programs.effects.layers import Spelling
from tests.programs.effects.program import Program


def shrunk(p: Program, fails: Callable[[Program], bool], most: int = 40) -> Program:
    """A program from which nothing can be taken away, or the best that so many attempts found."""
    while most > 0:
        for smaller in _smaller(p):
            most -= 1
            if fails(smaller):
                p = smaller
                break
            if most <= 0:
                return p
        else:
            return p
    return p


def _smaller(p: Program) -> Iterator[Program]:
    for at in range(len(p.effects)):
        yield replace(p, effects=p.effects[:at] + p.effects[at + 1 :])
    for name in ("twins", "dynamic"):
        if getattr(p, name):
            yield replace(p, **{name: False})
    if len(set(p.tokens)) > 1:
        yield replace(p, tokens=p.tokens[:1] * len(p.tokens))
    if len(p.tokens) > 1:
        yield replace(p, tokens=p.tokens[:-1])
    for at, effect in enumerate(p.effects):
        for gone in range(len(effect.statements) if len(effect.statements) > 1 else 0):
            rest = effect.statements[:gone] + effect.statements[gone + 1 :]
            yield replace(p, effects=(*p.effects[:at], replace(effect, statements=rest), *p.effects[at + 1 :]))
    plain = Spelling()
    for name in ("checkpoint", "route", "start", "own", "skip", "add", "sum", "body"):
        if getattr(p.spelling, name) != getattr(plain, name):
            yield replace(p, spelling=replace(p.spelling, **{name: getattr(plain, name)}))
    if p.grad:
        yield replace(p, grad=False)
