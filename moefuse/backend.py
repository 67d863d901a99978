"""The torch.compile backend, the entry point ``torch_dynamo_backends: moefuse``."""

from __future__ import annotations

import dataclasses
import functools
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from moefuse import _torch_private, cache
from moefuse.capture import entry
from moefuse.capture.dynamo import armed, ddp
from moefuse.config import Options
from moefuse.diagnosis.doors import missed_layers
from moefuse.errors import FusionError, OptionError
from moefuse.pipeline import inference_inputs, publish, rewrite
from moefuse.program.runs import Begun
from moefuse.replay import calls
from moefuse.replay.choices import opened
from moefuse.report import launched, waiting
from moefuse.report.doors import history
from moefuse.report.entries import count
from moefuse.report.quietly import quietly
from moefuse.report.report import FusionReport
from moefuse.runtime import pieces

OVERLAP = 8
"""Tokens up to which shared experts run on a stream of their own, where Inductor records CUDA graphs."""


def backend(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[object],
    *,
    mode: str | None = None,
    options: Mapping[str, object] | None = None,
    name: str | None = None,
) -> _torch_private.CompiledFn:
    """Fuse the mixture-of-experts regions of ``gm``, then compile it with Inductor.

    A plain function and not an instance: torch sets an attribute on a registered backend, and recompiles when backends are not equal.

    Args:
        gm: Dynamo's graph; rewritten in place.
        example_inputs: fake tensors and symbolic sizes, as Dynamo passes them.
        mode: as for ``torch.compile(backend="inductor")``.
        options: options of moefuse (:class:`moefuse.Options`) and of Inductor.
        name: name of the compiled region, from a torch whose ``torch.compile`` has that argument.

    Raises:
        OptionError: for an unknown option or an illegal value.
        CompilerError: when Inductor has C++ to compile, and finds no compiler.
        FusionError: under ``strict``, when mixture-of-experts code is left as it was.
        RuntimeError: torch's own, for an unknown mode or an Inductor option with a value of the wrong type.
    """
    with _torch_private.surfacing(ValueError, RuntimeError):
        own, patches = parse(mode, options)
    if armed.now() and own.fuse_router:
        own = dataclasses.replace(own, fuse_router=False)  # what it chooses has to be seen
    if not own.enabled:
        publish.say_disabled(own, options)
    if not own.enabled or _torch_private.given_fakes():
        return _torch_private.compile_fx(gm, example_inputs, patches, name)
    frame = entry.frame()
    missed_layers.watch(own)
    with waiting.told("looking for experts, and proving what is fused"), _torch_private.random_stream_of(patches):
        report, saved = rewrite.rewrite_and_keep(gm, example_inputs, own, frame)
    missed_layers.watch_lost(report, own)
    launched.note(report, _torch_private.records_graphs(patches))
    history.record(report)
    with _torch_private.surfacing(FusionError):
        publish.publish(report, own)
    from moefuse.inductor_pass import CacheStamp

    stamped = _torch_private.with_stamp(patches, functools.partial(CacheStamp, _key(own)))
    compiler = ddp.in_buckets(lambda graph, inputs: _torch_private.compile_fx(graph, inputs, stamped, name))
    if _torch_private.forward_level():
        # What Inductor writes keeps no tangents, and need not say so. Run as it is, the graph has them: of the ops, too.
        _torch_private.guard_forward_level()
        compiler = _as_it_is

    def run_compiler() -> _torch_private.CompiledFn:
        if not armed.now() or not report.fused:
            return compiler(gm, example_inputs)
        found = opened(gm, example_inputs)
        calls.closed.update(found.closed)
        if not found.choices:
            return compiler(gm, example_inputs)
        return calls.running(found, compiler(found.graph, [*example_inputs, *found.given]))

    try:
        frozen = inference_inputs.kept(gm, example_inputs) if report.fused else []
        with waiting.told(f"Inductor compiles a graph with {count(len(report.fused), 'fused layer')}"):
            compiled = rewrite.compile_or_restore(gm, report, saved, frame, run_compiler)
        compiled = inference_inputs.ordinary(compiled, frozen)
        compiled = history.watched(report, compiled, example_inputs)
        spread = _torch_private.communicates(gm)
        if report.fused and (spread or pieces.inside()):
            compiled = pieces.telling(compiled)
        return _torch_private.failures.as_raised(compiled) if spread else compiled
    except Exception:
        history.withdraw(report)
        raise


def _as_it_is(gm: torch.fx.GraphModule, example_inputs: Sequence[object]) -> _torch_private.CompiledFn:
    return gm.forward


def _key(own: Options) -> str:
    """What Inductor's caches are keyed on; where that cannot be read, nothing that is in them may be taken."""
    key: str = quietly(cache.key, own, otherwise=lambda: f"moefuse {uuid.uuid4()}")
    return key


def parse(mode: str | None, options: Mapping[str, object] | None) -> tuple[Options, dict[str, object]]:
    """moefuse's options, and Inductor's config patches from ``mode`` and the rest of ``options``."""
    own, rest = Options.from_user(options)
    if mode is not None and options:
        raise RuntimeError("Either mode or options can be specified, but both can't be specified at the same time.")
    patches = _torch_private.inductor_config(mode, rest)
    if own.overlap is None:
        own = dataclasses.replace(own, overlap=OVERLAP if _torch_private.records_graphs(patches) else 0)
    return own, patches


def _capture_options(arguments: Mapping[str, Any]) -> Options | None:
    """moefuse's own part of what the user gave ``torch.compile``; None if that is wrong, which the call of the backend reports."""
    try:
        return Options.from_user(arguments.get("options"))[0]
    except OptionError:
        return None


def _frame_skipped(report: FusionReport, own: Options, owner: object) -> None:
    """Dynamo gave up on a frame before it had a graph for us."""
    missed_layers.watch_lost(report, own, owner)
    call = None if report.skipped else _torch_private.running_call()
    if call is None:
        history.record(report, owner)
    else:  # a call that raises takes nothing from what the report says of others
        record = functools.partial(history.record, report, owner, history.place(report))
        call.at_end(f"moefuse.skipped: {id(report)}", record, before=True)
    missed_layers.watch(own, owner)
    with _torch_private.surfacing(FusionError):
        publish.publish(report, own, owner)


Begun.question, Begun.ended = staticmethod(_torch_private.kept_out), staticmethod(missed_layers.kept_out)
entry.enable(backend, _capture_options, _frame_skipped)
