"""The search for the configuration of one problem: starts, then neighbours of the best, as long as that helps and there is time.

Whole calls are timed, so nothing is assumed of how many launches a call has. The first and the second projection run one after the other,
so their settings are varied apart and the best of both are then tried together.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from moefuse.kernels.triton.config import choose, shipped
from moefuse.kernels.triton.host.layout import device_of
from moefuse.kernels.triton.provide import library
from moefuse.kernels.triton.tune import candidates
from moefuse.kernels.triton.tune.call import Call
from moefuse.kernels.triton.tune.check import Truth
from moefuse.kernels.triton.tune.compiling import Compiler
from moefuse.kernels.triton.tune.timing import Timer
from moefuse.tuning.problem import Config

log = logging.getLogger(__name__)

ENOUGH = 0.99
"""A round that does not come below this share of the best time is the last one."""
ROUNDS = 4
COMPILING = 0.6
"""Share of the time left that one round may compile."""


@dataclass
class Outcome:
    """What one search found.

    Attributes:
        config: the fastest configuration that is right; None if there is none.
        us: its time in microseconds.
        before, before_us: what a call took until now, and its time (infinite if that could not be measured).
        tried: configurations that were timed.
        failed: why the others were not, with the number of each.
        times: every configuration that was timed.
    """

    config: Config | None
    us: float
    before: Config
    before_us: float
    tried: int = 0
    failed: dict[str, int] = field(default_factory=dict)
    times: list[tuple[Config, float]] = field(default_factory=list)


class Search:
    """One problem's search. ``deadline`` is a time of ``clock``."""

    def __init__(self, call: Call, timer: Timer, compiler: Compiler, deadline: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.call, self.timer, self.compiler, self.deadline, self.clock = call, timer, compiler, deadline, clock
        self.device = device_of(call.sets[0][0].device)
        self.times: dict[Config, float] = {}
        self.failed: dict[Config, str] = {}
        self.truth: Truth | None = None

    def run(self, more: Iterable[Config] = (), rounds: int = ROUNDS) -> Outcome:
        """Search; ``more`` are further configurations to begin with."""
        p, device = self.call.problem, self.device
        item = candidates.itemsize(p)
        specialised = self.call.plan().specialised
        before = choose(p, device.name, device.hopper, device.shared, item, specialised)
        first = shipped(p, device.name, device.hopper, device.shared, item, specialised)
        # What runs now needs no worker, and is measured whatever the time says: the rest has something to beat.
        self._measure(before)
        self._round(candidates.unique(p, device, [first, *candidates.starts(p, device, before, specialised), *more]))
        for _ in range(rounds):
            best = self.best()
            if best is None or self.clock() > self.deadline:
                break
            self._refine(best)
            if self.times[self.best() or best] > ENOUGH * self.times[best]:
                break
        best = self._right()
        reasons: dict[str, int] = {}
        for why in self.failed.values():
            reasons[why] = reasons.get(why, 0) + 1
        us = self.times[best] if best is not None else float("inf")
        times = sorted(self.times.items(), key=lambda e: e[1])
        return Outcome(best, us, before, self.times.get(before, float("inf")), len(times), reasons, times)

    def best(self) -> Config | None:
        """The fastest configuration so far."""
        return min(self.times, key=self.times.__getitem__, default=None)

    def _refine(self, best: Config) -> None:
        """Neighbours of ``best`` in one kernel, in the other, and the best of both together."""
        p, device = self.call.problem, self.device
        ups = [replace(best, up=part) for part in candidates.neighbours(best.up)]
        downs = [replace(best, down=part) for part in candidates.neighbours(best.down)]
        # One of each in turn: if time runs out, both kernels had some.
        mixed = [c for pair in zip(ups, downs, strict=False) for c in pair] + ups[len(downs) :] + downs[len(ups) :]
        self._round(candidates.unique(p, device, [replace(best, pdl=not best.pdl), *mixed]))
        found = self.best() or best
        up = min((c for c in self.times if c.bm == best.bm and c.down == best.down), key=self.times.__getitem__, default=found)
        down = min((c for c in self.times if c.bm == best.bm and c.up == best.up), key=self.times.__getitem__, default=found)
        self._round(candidates.unique(p, device, [replace(found, bm=best.bm, up=up.up, down=down.down)]))

    def _round(self, configs: Iterable[Config]) -> None:
        """Compile beside each other, then time one after the other."""
        new = [c for c in configs if c not in self.times and c not in self.failed]
        now = self.clock()
        if not new or now > self.deadline:
            return
        p, kind = self.call.problem, self.call.kind
        answers = self.compiler([(p, kind, c) for c in new], now + COMPILING * (self.deadline - now))
        for config, problem in zip(new, answers, strict=True):
            if problem is not None:
                self.failed[config] = problem
            elif self.clock() < self.deadline:
                self._measure(config)

    def _measure(self, config: Config) -> None:
        good = min(self.times.values(), default=float("inf"))
        try:
            plan = self.call.plan(config)
            runs = [functools.partial(plan.run, plan.uniform(call)) for call in self.call.calls]
            for run in runs:
                run()
            self.times[config] = self.timer(runs, good, config)
        except Exception as error:
            # A configuration that a device cannot run is not worth an error; a device that is lost fails them all, and there is no winner.
            self.failed[config] = _first_line(error)

    def _right(self) -> Config | None:
        """The fastest configuration whose result is right."""
        for config in sorted(self.times, key=self.times.__getitem__):
            try:
                self.truth = self.truth or Truth(self.call)
                problem = self.truth.problem(self.call.plan(config).run(self.call.calls[0]))
            except Exception as error:
                problem = _first_line(error)
            if not problem:
                return config
            log.warning("a configuration is wrong and is not used: %s for %s with %s", problem, self.call.problem, config)
            self.failed[config] = problem
            del self.times[config]
        return None


def library_times(call: Call, timer: Timer) -> dict[str, float]:
    """Microseconds of the call with products by the library, by form: those that it takes, and that are right."""
    calls = call.calls
    if library.refusal_of(calls[0]) is not None:
        return {}
    truth, times = Truth(call), {}
    for form in library.FORMS:
        try:
            plan = library.LibraryPlan(calls[0], form)
            if plan.up is not None and not plan.steps:
                continue  # our own half of this form is made of tiles
            runs = [functools.partial(plan.run, each) for each in calls]
            first, *_ = [run() for run in runs]
            problem = truth.problem(first)
            if problem:
                log.warning("products by the library are wrong and are not used: %s for %s in form %s", problem, call.problem, form)
                continue
            times[form] = timer(runs, float("inf"), form)
        except Exception as error:
            log.debug("the library cannot run %s in form %s: %s", call.problem, form, _first_line(error))
    return times


def current_form(call: Call) -> str | None:
    """The form of the library's that a call takes now; None if it takes our own kernels."""
    return library.form_for(call.calls[0])


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
