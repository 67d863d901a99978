"""What is said of a graph: reported, counted, logged, warned of once, and raised if strict."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
from collections.abc import Iterator, Mapping

from moefuse import _torch_private
from moefuse.config import Options
from moefuse.errors import FusionError
from moefuse.machine.logs import unlogged
from moefuse.passes.graph.module_names import roots_of
from moefuse.report.doors import history
from moefuse.report.entries import Skipped, may_be_done
from moefuse.report.grouping import pattern
from moefuse.report.quietly import quietly
from moefuse.report.report import FusionReport

# Named after the backend, not after this file: it is the name in the documentation for TORCH_LOGS.
log = logging.getLogger("moefuse.backend")

USER_DECIDED = frozenset({"excluded", "limit", "not-faster"})
"""Codes of regions that an option or a measurement told moefuse to leave: neither a warning nor, under strict, an error."""

_warned: set[tuple[str, ...]] = set()
_warned_lock = threading.Lock()


def publish(report: FusionReport, options: Options, owner: object | None = None) -> None:
    """Log, count and trace one graph's report; warn about regions that were left. ``owner``: the ``torch.compile`` call, if known already.

    Raises:
        FusionError: under ``strict`` when a region was left for a reason that is not an option.
    """
    quietly(_log, report)
    left = [skipped for skipped in report.skipped if skipped.code not in USER_DECIDED]
    call, owner = _torch_private.running_call(), _torch_private.torch_compile_call() if owner is None else owner
    waiting = [s for s in left if s.given_up and quietly(may_wait, s, otherwise=False)] if call is not None and owner is not None else []
    models = quietly(_models, otherwise=())
    for skipped in waiting:
        call.at_end(f"moefuse: {skipped}", functools.partial(_publish_left, skipped, owner, options, models))  # type: ignore[union-attr]
    left = [skipped for skipped in left if skipped not in waiting]
    if left and options.strict:
        raise FusionError(text_of(report))
    for skipped in left:
        if skipped.code != "internal-error":  # logged with its traceback
            quietly(_warn_once, skipped, models)


def _log(report: FusionReport) -> None:
    _count(report)
    _torch_private.trace_artifact("moefuse_report", report.to_json)
    log.info("%s", _log_line(report))
    for fused in report.fused:
        log.debug("fused %s %s %s", fused.module, fused.location, fused.spec)


def text_of(report: FusionReport) -> str:
    """The text of an error, whatever becomes of the report's."""
    plain = "\n".join(f"{s.location} {s.code}: {s.message}" for s in report.skipped)
    text: str = quietly(str, report, otherwise=plain)
    return text


@contextlib.contextmanager
def warned_later() -> Iterator[None]:
    """Warn of nothing in this block; what it would have said is said where it comes up the next time."""
    with _warned_lock:
        before = set(_warned)
    try:
        with unlogged("moefuse"):
            yield
    finally:
        with _warned_lock:
            _warned.intersection_update(before)


def say_disabled(options: Options, given: Mapping[str, object] | None) -> None:
    """A report of a graph that moefuse, switched off, has not looked at: under ``strict`` and ``expect`` with a warning, and no error."""
    by = "options={'enabled': False}" if "enabled" in (given or {}) else f"MOEFUSE_DISABLE={os.environ.get('MOEFUSE_DISABLE', '')}"
    report = FusionReport(graph_count=1, disabled=by)
    history.record(report)
    log.info("%s", report.summary)
    asked = [name for name, wanted in (("strict", options.strict), ("expect", options.expect is not None)) if wanted]
    if not asked:
        return
    with _warned_lock:
        known = ("disabled", by, *asked) in _warned
        _warned.add(("disabled", by, *asked))
    if not known:
        log.warning("moefuse is disabled by %s: nothing is fused, and there are no errors of %s", by, " and ".join(asked))


def may_wait(skipped: Skipped) -> bool:
    """Whether these experts may be fused after all, in a frame that Dynamo makes where this graph is given up."""
    return may_be_done(skipped) and skipped.code not in USER_DECIDED


def _publish_left(skipped: Skipped, owner: object, options: Options, models: tuple[str, ...]) -> None:
    """Say at the end of a call what was refused in a graph that was given up, unless it was fused in another one."""
    report = history.report_of(owner)
    if report is not None and skipped not in report.skipped:
        return
    if options.strict:
        raise FusionError(text_of(report or FusionReport(skipped=[skipped])))
    _warn_once(skipped, models)


def raise_strict(report: FusionReport) -> None:
    """Raises FusionError with the report as its text, out of Dynamo as itself."""
    with _torch_private.surfacing(FusionError):
        raise FusionError(text_of(report))


def _count(report: FusionReport) -> None:
    _torch_private.count("graphs", report.graph_count)
    _torch_private.count("fused", len(report.fused))
    _torch_private.count("skipped", len(report.skipped))
    for skipped in report.skipped:
        _torch_private.count(f"skipped: {skipped.code}")


def _log_line(report: FusionReport) -> str:
    modules = ", ".join(dict.fromkeys(fused.module for fused in report.fused if fused.module))
    return f"{report.summary} ({modules})" if modules else report.summary


def _models() -> tuple[str, ...]:
    """The classes of the models that are compiled."""
    traced = _torch_private.traced()
    return () if traced is None else tuple(sorted(type(root).__qualname__ for root in roots_of(traced).values()))


def _warn_once(skipped: Skipped, models: tuple[str, ...]) -> None:
    # Models of two kinds may share the line, in a helper function, and the reader of one warning would not think of the other model.
    # The text is no part of the key: sizes and names of values in it change from one compilation to the next. The report has them all.
    key = (skipped.code, skipped.location, pattern(skipped.module), *models)
    with _warned_lock:
        if key in _warned:
            return
        _warned.add(key)
    where = " in ".join(part for part in (skipped.location, skipped.module) if part)
    log.warning(
        "mixture-of-experts code at %s was not fused (%s): %s. It still runs, as without moefuse; "
        'silence this with logging.getLogger("moefuse").setLevel("ERROR") or options={"exclude": ...}',
        where or "an unknown place",
        skipped.code,
        skipped.message,
    )
