"""Frames that Dynamo leaves to eager, for the modules that they were traced with, and not for all others that run the same code.

Dynamo marks the *code* of a frame that it gives up on, and never looks at it again: neither for another layer of the same class, nor in
another mode, nor in another model that is compiled later. What was compiled of that code before goes unused as well. That suits a break of
the graph that is in the code. Where capture gives up it is one layer's doing (an excluded layer, a hook on one expert), and so such a frame
is left for the modules that were in it, with the hooks and submodules that they have, and in the mode it was called in. Where one call is
the reason (experts of the same modules were fused in another one, the call is wrong and raises, or it has no tokens, of which a loop that
asks for them runs nothing) it is left for calls with the same sizes. What is remembered goes with what Dynamo knows of the code, in
``torch.compiler.reset()``.
"""

from __future__ import annotations

import collections
import contextvars
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from moefuse import _torch_private
from moefuse.capture.dynamo.module_state import State
from moefuse.program.runs import now

_KEY = "moefuse_left"
_FUSED = "moefuse_fused"
_EVER = "moefuse_fused_ever"
LIMIT = 1024
"""Modules in modes, and calls, for which one code is left; from there on it is left as Dynamo leaves it."""
CALLS = 8
"""Calls for which code is left although its experts were fused in others; from there on it is left for its modules."""

STATES = 8
"""Ways in which modules have hooks and submodules, for which code is left; from there on it is left whatever becomes of them."""


class _Calls:
    """Calls of one kind for which code is left: of modules that are still there, with the hooks and submodules that they had then.

    ``said``: when a report was last known to say so. ``wrong``: the program raises in them.
    """

    def __init__(self, refs: tuple[weakref.ref[Any], ...]) -> None:
        self.refs = refs
        self.states: list[State] = []
        self.said = now()
        self.wrong = False

    def gone(self) -> bool:
        """Whether a module has gone, which can have left its identity to another."""
        return any(ref() is None for ref in self.refs)

    def holds(self) -> bool:
        return not self.gone() and (not self.states or len(self.states) >= STATES or any(state.holds() for state in self.states))


_Remembered = dict[tuple[Any, ...], _Calls]

_attempt: contextvars.ContextVar[list[Any] | None] = contextvars.ContextVar("moefuse_attempt", default=None)
_ours: weakref.WeakSet[types.CodeType] = weakref.WeakSet()
_with_experts: weakref.WeakKeyDictionary[types.CodeType, int | None] = weakref.WeakKeyDictionary()
"""Code of which something was compiled with experts fused, and Dynamo's number of its frame."""


class Event(NamedTuple):
    """A frame of ours ran in eager: when, which code with which modules, and whether for torch's limit of graphs for one code."""

    at: int
    code: types.CodeType
    modules: tuple[weakref.ref[nn.Module], ...]
    limit: bool

    def concerns(self, module: nn.Module) -> bool:
        """Whether the frame is of a module, or of one inside of it."""
        found = {id(m) for ref in self.modules if (m := ref()) is not None}
        return bool(found) and any(id(m) in found for m in module.modules())


_events: collections.deque[Event] = collections.deque(maxlen=1024)


def events(start: int) -> list[Event]:
    """The frames that ran in eager since then."""
    return [event for event in list(_events) if event.at >= start]


def _eager(frame: Any, *, limit: bool = False) -> None:
    _events.append(Event(now(), frame.f_code, tuple(map(weakref.ref, modules(frame.f_locals))), limit))


def attempted(observer: Any) -> None:
    """A frame of ours is being traced, once more perhaps."""
    attempts = _attempt.get()
    if attempts is not None:
        attempts.append(observer)


def ours() -> list[types.CodeType]:
    """The code of all frames that were traced for us."""
    return list(_ours)


def convert(
    original: Callable[[], Any], frame: Any, frame_state: dict[str, Any], owner: object, again: Callable[[int], None] = lambda _: None
) -> Any:
    """What Dynamo makes of a frame, where ``original`` asks it; ``owner`` stands for the compiled program that the frame belongs to.

    ``again``: told when a frame is left once more whose experts are fused in other calls, and when a report last said so.
    """
    code = frame.f_code
    known: _Remembered | None = frame_state.get(_KEY)
    if known is not None:
        found = modules(frame.f_locals)
        key = _key(owner, found)
        calls = _left(known, key) or _left(known, (*key, *_sizes(frame.f_locals)))
        if calls is not None:
            _eager(frame)
            if not calls.wrong and _same(owner, found) in frame_state.get(_EVER, ()):
                again(calls.said)
                calls.said = now()
            return _nothing()
    attempts: list[Any] = []
    token = _attempt.set(attempts)
    try:
        result = original()
    finally:
        _attempt.reset(token)
    if attempts:
        _ours.add(code)
    if code not in _ours:
        return result
    found = modules(frame.f_locals)
    if attempts and attempts[-1].fused and result.guarded_code is not None:
        _with_experts[code] = getattr(getattr(result.guarded_code, "compile_id", None), "frame_id", None)
        with_fused = frame_state.setdefault(_FUSED, {})
        if len(with_fused) < LIMIT:
            _note(with_fused, _key(owner, found), owner, found)
            frame_state.setdefault(_EVER, set()).add(_same(owner, found))
    elif _limited(result):
        _eager(frame, limit=True)
    elif _is_left(result) and _torch_private.kept_out() is not None:
        result.apply_to_code = False  # the transform around is the reason, and not the code
    elif _is_left(result):
        _eager(frame)
        _remember(result, frame, frame_state, owner, attempts[-1] if attempts else None)
    return result


def _remember(result: Any, frame: Any, frame_state: dict[str, Any], owner: object, attempt: Any) -> None:
    """Where not the code is the reason, have Dynamo look at it again in other calls: those of other modules, or of other sizes."""
    found, with_experts = modules(frame.f_locals), frame.f_code in _with_experts
    key, known = _key(owner, found), frame_state.setdefault(_KEY, {})
    wrong = attempt is not None and attempt.erred
    fused = _left(frame_state.get(_FUSED, {}), key) is not None if found else with_experts
    empty = any(isinstance(value, torch.Tensor) and not value.numel() for value in _leaves(frame.f_locals))
    if wrong or fused or empty:
        calls = sum(len(other) > len(key) and other[: len(key)] == key for other in known)
        key = (*key, *_sizes(frame.f_locals)) if wrong or empty or calls < CALLS else key
    state = State(found)
    if not (wrong or fused or empty) and (not found or not (with_experts or attempt is None or attempt.gave_up or state.hooked)):
        return
    if len(known) < LIMIT:
        result.apply_to_code = False
        # Whoever wants an error has it in each call.
        if not (fused and not wrong and attempt is not None and attempt.insists):
            calls_left = _note(known, key, owner, found)
            calls_left.states.append(state)
            calls_left.wrong = wrong


def _note(known: _Remembered, key: tuple[Any, ...], owner: object, found: list[nn.Module]) -> _Calls:
    calls = known.get(key)
    if calls is None or calls.gone():
        calls = known[key] = _Calls(tuple(weakref.ref(item) for item in (owner, *found)))
    return calls


def modules(f_locals: Any) -> list[nn.Module]:
    """The modules that a frame was called with."""
    return [value for value in f_locals.values() if isinstance(value, nn.Module)]


def _key(owner: object, found: list[nn.Module]) -> tuple[Any, ...]:
    modes = ((id(module), vars(module).get("training")) for module in found)  # in its __init__ a module has none
    return (id(owner), torch.is_grad_enabled(), *modes)


def _same(owner: object, found: list[nn.Module]) -> tuple[int, ...]:
    """As :func:`_key`, in any mode."""
    return (id(owner), *map(id, found))


def _leaves(f_locals: Any) -> list[Any]:
    return tree_flatten(list(f_locals.values()))[0]


def _sizes(f_locals: Any) -> tuple[Any, ...]:
    """What tells one call from another: sizes and dtypes of tensors, and numbers and names beside them."""
    return ("called with", *map(_size, _leaves(f_locals)))


def _size(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype
    return value if isinstance(value, int | str) else type(value)


def _left(known: _Remembered, key: tuple[Any, ...]) -> _Calls | None:
    """What is known of such calls, if a frame is left for them."""
    calls = known.get(key)
    return calls if calls is not None and calls.holds() else None


def _nothing() -> Any:
    from torch._dynamo.types import ConvertFrameReturn

    return ConvertFrameReturn(apply_to_code=False)


def _is_left(result: Any) -> bool:
    """Whether Dynamo runs the frame in eager from now on, and those that it calls as ever."""
    from torch._C._dynamo.eval_frame import _FrameAction as FrameAction

    strategy = result.frame_exec_strategy
    return result.guarded_code is None and (strategy.cur_action, strategy.recursive_action) == (FrameAction.SKIP, FrameAction.DEFAULT)


def _limited(result: Any) -> bool:
    """Whether Dynamo compiles nothing more of a code: torch's limit is reached."""
    from torch._C._dynamo.eval_frame import _FrameAction as FrameAction

    return result.guarded_code is None and result.frame_exec_strategy.cur_action == FrameAction.RUN_ONLY


def limited(code: types.CodeType, result: Any) -> bool:
    """Whether experts of a code are fused in other calls, and Dynamo compiles nothing more of it."""
    return code in _with_experts and _limited(result)


def frame_of(code: types.CodeType) -> int | None:
    """Dynamo's number of the frame of a code with experts."""
    return _with_experts.get(code)


def look_again(codes: Iterable[types.CodeType]) -> None:
    """These codes are about to be compiled by us: no compilation of another program, before or after, may stand in the way."""
    from torch._C._dynamo.eval_frame import _FrameAction as FrameAction, _FrameExecStrategy as FrameExecStrategy, set_code_exec_strategy

    for code in codes:
        if left_by_another(code):
            set_code_exec_strategy(code, FrameExecStrategy(FrameAction.DEFAULT, FrameAction.DEFAULT))
        _ours.add(code)


def left_by_another(code: types.CodeType) -> bool:
    """Whether Dynamo has seen a code, has compiled nothing of it, and no frame of ours was among those that it saw."""
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list
    from torch._dynamo.convert_frame import input_codes

    return code not in _ours and code in input_codes and not _debug_get_cache_entry_list(code)
