"""Measuring layers: every target at every bucket of tokens, within a budget of time, into the user's store."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch

from moefuse.passes.lower.program import NotComparableError, Program
from moefuse.runtime import providers
from moefuse.tuning import store
from moefuse.tuning.entries import Entry, Pair
from moefuse.tuning.measure import compare, targets
from moefuse.tuning.measure.progress import Progress
from moefuse.tuning.measure.report import Tuned, WarmupReport
from moefuse.tuning.measure.targets import Target
from moefuse.tuning.problem import Problem

log = logging.getLogger(__name__)

MAX_TOKENS = 1 << 24
COMPARING = 0.5
"""Most of a problem's time that is kept from its search for the programs to compare."""


@dataclass(frozen=True)
class Tools:
    """What measuring needs of the machine; tests bring their own.

    Attributes:
        timer: of configurations (``kernels/triton/tune/timing.py``).
        compiler: makes a compiler of candidates, as a context manager.
        pair: times two programs.
        clock: seconds.
        backend: compiles programs.
    """

    timer: Any
    compiler: Callable[[], AbstractContextManager[Any]]
    pair: compare.Timer
    clock: Callable[[], float] = time.monotonic
    backend: Any = "inductor"


def on_cuda() -> Tools:
    """Measuring on a CUDA device."""
    from moefuse.kernels.triton.tune import compiling, timing

    return Tools(timing.graph_time, compiling.Workers, timing.pair_time)


def run(what: Any, tokens: Sequence[int], budget_s: float, progress: bool, tools: Tools | None = None) -> WarmupReport:
    """:func:`moefuse.warmup`; see there."""
    counts = _checked(tokens, budget_s)
    found, notes = targets.of(what)
    reason = _impossible(tools)
    if reason is not None:
        return WarmupReport(notes=[reason])
    tools = tools or on_cuda()
    report, clock = WarmupReport(notes=notes), tools.clock
    start = clock()
    wanted = [(target, problem, asked) for target in found for problem, asked in targets.buckets(target, counts)]
    # Small numbers of tokens of all layers first: they are quick, and every layer gets something.
    wanted.sort(key=lambda w: w[1].tokens)
    if not wanted:
        return report
    try:
        with _on(wanted[0][0].device), tools.compiler() as compiler, Progress(len(wanted), progress) as bar, torch.no_grad():
            for i, (target, problem, asked) in enumerate(wanted):
                now = clock()
                deadline = now + max(start + budget_s - now, 0.0) / (len(wanted) - i)
                bar.at(f"T={problem.tokens} {target.name}")
                with _on(target.device):
                    report.tuned.append(_one(target, problem, asked, deadline, start + budget_s, tools, compiler, report))
                bar.step()
    finally:
        providers.forget_records()
    report.seconds = clock() - start
    return report


def _checked(tokens: Sequence[int], budget_s: float) -> list[int]:
    legal = f"whole numbers from 1 to {MAX_TOKENS}, e.g. tokens=[1, 8, 512]"
    if isinstance(tokens, int | str | bytes):
        raise TypeError(f"tokens must be a list of {legal}, got {tokens!r}")
    counts = list(tokens)
    for count in counts:
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MAX_TOKENS:
            raise ValueError(f"tokens must be {legal}, got {count!r}")
    if not counts:
        raise ValueError(f"tokens must be {legal}, got none")
    if isinstance(budget_s, bool) or not isinstance(budget_s, int | float) or not 0 < budget_s < math.inf:
        raise ValueError(f"budget_s must be a positive number of seconds, got {budget_s!r}")
    return counts


def _impossible(tools: Tools | None) -> str | None:
    """Why nothing can be measured here."""
    if not store.enabled():
        return f"{store.SWITCH}=0 forbids tuning"
    if tools is not None:
        return None
    if not torch.cuda.is_available():
        return "nothing to tune without a CUDA device: the kernels for the CPU choose by rules"
    kernels = providers.triton_kernels()
    return f"nothing is tuned without the Triton kernels: {kernels}" if isinstance(kernels, str) else None


@contextlib.contextmanager
def _on(device: torch.device) -> Iterator[None]:
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device):
        yield


def _one(
    target: Target, problem: Problem, asked: tuple[int, ...], deadline: float, end: float, tools: Tools, compiler: Any, report: WarmupReport
) -> Tuned:
    """Search, store, compare, store."""
    from moefuse.kernels.triton.host.layout import device_of
    from moefuse.kernels.triton.tune.call import Kind, make
    from moefuse.kernels.triton.tune.search import Search, current_form, library_times

    row = Tuned(target.name, target.spec, problem.tokens, asked)
    name = device_of(target.device).name
    report.device = report.device or name
    programs, reasons = _programs(target, problem.tokens)
    now = tools.clock()
    until = deadline - min(sum(map(compare.seconds, programs.values())), COMPARING * (deadline - now))
    lists = next((found for site in target.sites if (found := site.tensors()) is not None), None)
    try:
        call = make(problem, Kind(**target.kind), target.device, lists)
        form = current_form(call)
        outcome = Search(call, tools.timer, compiler, until, tools.clock).run()
        if outcome.config is None:
            return replace(row, tried=outcome.tried, problem=next(iter(outcome.failed), "no configuration works"))
        entry = Entry(problem, outcome.config, outcome.us, when=int(time.time()))
        _save(name, entry, report)
        # From here on calls take the new configuration: what the library's forms do themselves, and the comparison.
        providers.forget_records()
        library = library_times(call, tools.timer)
        del call
    except torch.OutOfMemoryError:
        return replace(row, problem="not enough memory on the device")
    entry = replace(entry, library=library)
    if library:
        _save(name, entry, report)
        providers.forget_records()
    row = replace(
        row,
        us=min((outcome.us, *library.values())),
        before_us=library.get(form or "", outcome.before_us),
        config=outcome.config.to_json(),
        library=entry.form or "",
        tried=outcome.tried + len(library),
    )
    pairs: dict[str, Pair] = {}
    for label, program in programs.items():
        if tools.clock() + 0.5 * compare.seconds(program) > end:
            reasons.append("no time was left")
            continue
        try:
            pairs[label] = compare.compare(program, problem.tokens, tools.pair, tools.backend)
        except NotComparableError as error:
            reasons.append(str(error))
        except torch.OutOfMemoryError:
            reasons.append("not enough memory on the device")
    if pairs:
        _save(name, replace(entry, programs=pairs), report)
    times = {label: (pair.program_us, pair.fused_us) for label, pair in pairs.items()}
    return replace(row, programs=times, not_compared=tuple(dict.fromkeys(reasons)))


def _programs(target: Target, tokens: int) -> tuple[dict[str, Program], list[str]]:
    """(programs that were matched and run with so many tokens, one of each name; why there is none of other names)."""
    found: dict[str, Program] = {}
    reasons: dict[str, str] = {}
    for program in dict.fromkeys(site.program for site in target.sites):
        if not isinstance(program, Program):
            reasons[str(program)] = str(program)
            continue
        try:
            compare.symbols(program, tokens)
            found[program.name] = program
        except NotComparableError as error:
            reasons[program.name] = str(error)
    return found, [why for name, why in reasons.items() if name not in found]


def _save(device: str, entry: Entry, report: WarmupReport) -> None:
    try:
        report.path = str(store.save(device, [entry]))
    except OSError as error:
        note = f"measurements could not be kept: {error}"
        report.notes += [note] if note not in report.notes else []
