"""Dynamo's state, for looking without leaving a trace."""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import functools
import inspect
import re
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch

from moefuse._torch_private.errors import break_text, guard_text, in_words
from moefuse._torch_private.types import CompiledFn


@dataclasses.dataclass
class TraceLog:
    """What Dynamo gave up on while it traced, and why it compiled frames again."""

    breaks: list[str] = dataclasses.field(default_factory=list)
    recompiles: list[str] = dataclasses.field(default_factory=list)
    refresh: Callable[[], None] = lambda: None


@contextlib.contextmanager
def any_size() -> Iterator[None]:
    """What is compiled inside takes sizes of 0 and 1 for sizes like any other.

    torch.export has this setting, and vLLM compiles with it. It is the process's: whoever else compiles waits. Not for where gradients are
    recorded: AOTAutograd then takes the strides of what it saves to be those of the call that it compiles for.
    """
    from torch._dynamo import convert_frame
    from torch.fx.experimental import _config

    with convert_frame.compile_lock, contextlib.ExitStack() as setting:
        fx: Any = _config
        if hasattr(fx, "backed_size_oblivious"):
            setting.enter_context(fx.patch(backed_size_oblivious=True))
        yield


@contextlib.contextmanager
def borrowed_dynamo() -> Iterator[TraceLog]:
    """Trace as in a fresh process and leave Dynamo as it was: caches of what the user compiled, counters, recorded sizes.

    ``torch._dynamo.reset()`` would throw away everything that the user has compiled. The log is filled when the block ends, and by its
    ``refresh``. Inside another such block, what that one compiled is kept.
    """
    from torch._dynamo import convert_frame, eval_frame, pgo, utils

    log = TraceLog()
    with convert_frame.compile_lock:
        seen = _seen_codes()
        for code in seen:
            # A frame that Dynamo skipped earlier has no compiled code to lose; it has to be tried again to learn why.
            if not eval_frame._debug_get_cache_entry_list(code):
                reset_code(code)
        kept = {code: set(map(id, eval_frame._debug_get_cache_entry_list(code))) for code in seen}
        backends = set(eval_frame.cached_backends)
        counters = {name: dict(counter) for name, counter in utils.counters.items()}
        sizes = copy.deepcopy(pgo._CODE_STATE)
        reasons = len(utils.graph_break_reasons)
        metrics = utils._compilation_metrics
        utils._compilation_metrics = collections.deque()

    def refresh() -> None:
        log.breaks = [break_text(reason.reason, reason.user_stack) for reason in utils.graph_break_reasons[reasons:]]
        log.breaks += _given_up(utils._compilation_metrics)
        log.recompiles = [guard_text(m.recompile_reason) for m in utils._compilation_metrics if m.recompile_reason]

    log.refresh = refresh
    try:
        yield log
    finally:
        with convert_frame.compile_lock:
            refresh()
            utils._compilation_metrics = metrics
            del utils.graph_break_reasons[reasons:]
            pgo._CODE_STATE = sizes
            utils.counters.clear()
            for name, values in counters.items():
                utils.counters[name].update(values)
            for new in set(eval_frame.cached_backends) - backends:
                del eval_frame.cached_backends[new]
            for code in _seen_codes():
                _drop_new_entries(code, kept.get(code))


def broken_graphs() -> collections.Counter[str]:
    """How often Dynamo has broken a graph, or failed to, by its reasons."""
    from torch._dynamo import utils

    broken = collections.Counter[str]()
    for text, times in (*utils.counters["graph_break"].items(), *utils.counters["unimplemented"].items()):
        explained = re.search(r"^ *Explanation: (.+)$", text, re.MULTILINE)
        reason = explained[1] if explained else in_words(text)
        broken[re.sub(r"functools\.partial\(<function (\w+) at \w+>\)", r"\1", reason)] += times
    return broken


def compile_isolated(fn: Callable[..., Any], backend: CompiledFn | str) -> Callable[..., Any]:
    """``torch.compile`` that takes no code of the user's. Its recompilations do not count against theirs, where torch can do that."""
    from torch._dynamo.backends.registry import lookup_backend

    # Code that was compiled with an equal backend would be taken; two of these are not equal.
    own = functools.partial(lookup_backend(backend))
    options: dict[str, Any] = {"isolate_recompiles": True} if "isolate_recompiles" in inspect.signature(torch.compile).parameters else {}
    compiled: Callable[..., Any] = torch.compile(fn, backend=own, **options)
    return compiled


@contextlib.contextmanager
def not_compiled(model: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """The callable under ``torch.compile``, ``model.compile()`` and ``submodule.compile()``, for as long as the block runs."""
    # A compiled module has both attributes, and the second is only its forward, without hooks.
    found: Any = getattr(model, "_orig_mod", None) or getattr(model, "_torchdynamo_orig_callable", model)
    inner: Callable[..., Any] = found
    modules = list(inner.modules()) if isinstance(inner, torch.nn.Module) else []
    compiled = {module: module.__dict__.pop("_compiled_call_impl") for module in modules if "_compiled_call_impl" in module.__dict__}
    try:
        yield inner
    finally:
        for module, call in compiled.items():
            module.__dict__["_compiled_call_impl"] = call


def compile_front(gm: torch.fx.GraphModule, example_inputs: Sequence[object]) -> CompiledFn:
    """What Inductor does with a graph up to where it writes code: its errors are Inductor's; what it returns runs in eager.

    Nothing is taken from torch's caches of compiled code or put there.
    """
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx as inductor_compile_fx

    def as_it_is(traced: torch.fx.GraphModule, *_: Any, **__: Any) -> CompiledFn:
        return traced.forward

    inputs, instead = cast(Any, list(example_inputs)), cast(Any, as_it_is)
    with config.patch(enable_autograd_cache=False):
        return cast(CompiledFn, inductor_compile_fx(gm, inputs, inner_compile=instead))


def guard_names() -> dict[str, Any]:
    """What the expressions of guards may have in them, beside the frame's locals and globals."""
    from torch._dynamo import guards

    return dict(guards._get_closure_vars())


_epoch: types.CodeType | None = None


def epoch() -> object:
    """An object that is another one behind each ``torch.compiler.reset()``."""
    global _epoch
    from torch._dynamo import convert_frame

    # A code that Dynamo has seen is forgotten with all others.
    if _epoch is None or _epoch not in convert_frame.input_codes:
        _epoch = (lambda: None).__code__.replace(co_name="moefuse_epoch")
        convert_frame.input_codes.add(_epoch)
    return _epoch


def _seen_codes() -> list[types.CodeType]:
    from torch._dynamo import convert_frame

    return [code for weak in convert_frame.input_codes.seen if (code := weak()) is not None]


def reset_code(code: types.CodeType) -> None:
    """Forget what was compiled of this code."""
    torch._C._dynamo.eval_frame.reset_code(code)


def _drop_new_entries(code: types.CodeType, kept: set[int] | None) -> None:
    from torch._dynamo import eval_frame
    from torch._dynamo.guards import DeletedGuardManagerWrapper

    if not kept:
        reset_code(code)
        return
    for entry in eval_frame._debug_get_cache_entry_list(code):
        manager = entry.guard_manager
        if id(entry) not in kept and manager.extra_state is not None:
            manager.extra_state.invalidate(entry, DeletedGuardManagerWrapper("moefuse.explain"))


def _function(name: str) -> str:
    """A function as its author knows it, also where Dynamo has made one of what stands behind a break."""
    resumed = re.fullmatch(r"torch_dynamo_resume_in_(.*)_at_(\d+)", name)
    return name if resumed is None else f"{resumed[1]} behind line {resumed[2]}"


def _given_up(metrics: Iterable[Any]) -> list[str]:
    """Frames that Dynamo runs in eager altogether: its break counters do not show them, its metrics do."""
    texts = []
    for metric in metrics:
        # SkipFrame alone is no loss: it means a frame without tensor operations.
        if metric.fail_type in (None, "SkipFrame"):
            continue
        place = f" at {metric.fail_user_frame_filename}:{metric.fail_user_frame_lineno}" if metric.fail_user_frame_filename else ""
        code = "a function" if metric.co_name is None else _function(metric.co_name)
        texts.append(f"{in_words(metric.fail_reason or metric.fail_type)} (all of {code} runs in eager){place}")
    return texts
