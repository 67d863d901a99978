"""Run a program compiled, beside eager: several calls, and everything that a user can see of each."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, cast

import torch
from torch import Tensor, nn

from moefuse import Options, _torch_private
from moefuse.capture import entry
from moefuse.pipeline import rewrite
from moefuse.report.report import FusionReport
from tests.programs.effects import layers, words
from tests.programs.effects.ambient import AROUND
from tests.programs.effects.layers import SIZED, H
from tests.programs.effects.overlaps import relate
from tests.programs.effects.program import Program, build, change, interfere

Seen = dict[str, Any]
"""What one call leaves, by name."""

RAISES, NONE = "raises", "no gradient"
"""In what a call leaves: that it raised as the program asserts something, and which gradients are None."""

_PLACES = re.compile(r"\S+\.cpp:\d+|\d+")

TOLERANCE = 1e-7
"""Of float64, relative to the largest entry: sums in another order are right, anything else is not."""


@dataclass
class Verdict:
    """``wrong``: what a user would see. ``theirs``: torch alone is wrong, or it is right behind AOTAutograd, where every user has it.

    ``no_program``: eager raises, or computes no numbers. ``stopped``: refused, and not looked at any further.
    """

    wrong: list[str] = field(default_factory=list)
    theirs: list[str] = field(default_factory=list)
    no_program: str = ""
    fused: int = 0
    codes: list[str] = field(default_factory=list)
    stopped: bool = False

    @property
    def failed(self) -> bool:
        """Whether it is moefuse that is wrong."""
        return bool(self.wrong) or "internal-error" in self.codes


class RefusedError(Exception):
    """Nothing was fused in a loop that depends on data; the rest would be Dynamo's pieces of it."""


def verdict(p: Program, behind: str = "eager") -> Verdict:
    """What is wrong with a program compiled by moefuse with one of torch's backends behind the rewrite.

    What differs is looked at again with AOTAutograd behind it, and beside that without moefuse: autograd of eager sees a write through
    ``.data`` to what it has saved, a compiler does not.
    """
    with _quiet():
        try:
            expected = calls(p, None)
        except Exception as error:
            return Verdict(no_program=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        if not all(_finite(value) for seen in expected for value in seen.values()):
            return Verdict(no_program="not finite")
        report = FusionReport()
        got = _attempt(p, _fusing(p, report, behind, patient=p.patient))
        wrong = [] if got is None else [got] if isinstance(got, str) else _unlike(got, expected)
        if not wrong and isinstance(got, list) and behind == "eager" and (unsaid := _unsaid(got, expected, report)):
            return Verdict([unsaid])
        if not wrong and behind == "eager" and (said := words.untrue(report, p.source + source_of_layers())):
            return Verdict(said, fused=len(report.fused), codes=[s.code for s in report.skipped])
        found = Verdict(wrong, fused=len(report.fused), codes=[s.code for s in report.skipped], stopped=got is None)
        if not wrong:
            return found
        if isinstance(got, str) and behind != "eager" and _same_error(got, _attempt(p, behind)):
            found.wrong, found.theirs = [], wrong
            return found
        found.wrong = _unseen(p, _ours(p, "aot_eager" if behind == "eager" else behind, wrong, expected), expected)
        found.theirs = [] if found.wrong else wrong
        return found


@functools.cache
def source_of_layers() -> str:
    """What all programs have in common."""
    return inspect.getsource(layers)


def _unseen(p: Program, wrong: list[str], expected: list[Seen]) -> list[str]:
    """What stays of a difference without gradients of which eager is wrong itself.

    NumPy and ``.data`` write behind autograd's back to what it has saved; with copies of that it would say something else. Of a call that
    eager refuses, though torch's compiler drops the assertion, eager says nothing: its earlier calls tell which gradients are no truth.
    """
    if not wrong or p.around:  # torch.func has no such hooks, and programs with something around them do not write so
        return wrong
    with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.clone, lambda t: t):
        corrupted = {*_unlike(calls(p, None), expected)}
    if expected and RAISES in expected[-1]:
        corrupted |= {f"call {number}: {at.partition(': ')[2]}" for at in corrupted for number in range(len(expected) - 1, len(p.tokens))}
    return [name for name in wrong if name not in corrupted]


def _unsaid(got: list[Seen], expected: list[Seen], report: FusionReport) -> str:
    """Gradients that eager leaves None, of which no note of the report says that they are zeros: optimizers tell them apart."""
    if any("get gradients of zeros" in note for note in report.notes):
        return ""
    for number, (a, b) in enumerate(zip(got, expected, strict=True)):
        if differ := sorted(a.get(NONE, set()) ^ b.get(NONE, set())):
            return f"call {number}: None or zeros, the gradients of {', '.join(differ)}"
    return ""


def _same_error(got: str, plain: Any) -> bool:
    """Whether torch stops with the same error without moefuse; its text has numbers of its own."""
    return isinstance(plain, str) and _PLACES.sub("", got) == _PLACES.sub("", plain)


def fails(p: Program) -> bool:
    """Whether moefuse is wrong about a program."""
    return verdict(p).failed


def _ours(p: Program, behind: str, wrong: list[str], expected: list[Seen]) -> list[str]:
    """What of a difference is moefuse's."""
    plain = _attempt(p, behind)
    if isinstance(plain, str) and behind != "inductor":  # what users have is Inductor, which may take what AOTAutograd alone does not
        behind = "inductor"
        plain = _attempt(p, behind)
    if isinstance(plain, str):  # torch cannot compile it at all: what Dynamo made of it runs as it is
        direct = _attempt(p, "eager")
        return [] if isinstance(direct, str) or _unlike(direct, expected) else wrong
    again = _attempt(p, _fusing(p, FusionReport(), behind))
    if again is None or plain is None or _wrong_in_one_graph(p, behind):
        return []
    return [again] if isinstance(again, str) else sorted({*_unlike(again, expected)} & {*_unlike(again, plain)})


def calls(p: Program, backend: Any) -> list[Seen]:
    """Every call of a program, and what it leaves; ``backend`` None is eager."""
    torch._dynamo.reset()
    model = build(p)
    run: Callable[..., Any] = model if backend is None else torch.compile(model, backend=backend, dynamic=p.dynamic)
    found = []
    for number, tokens in enumerate(p.tokens):
        if number == 1:
            change(model)
            interfere(p, model)
        x = torch.randn(tokens, H, generator=torch.Generator().manual_seed(10 * p.seed + number))
        around = p.around[number % len(p.around)] if p.around else ""
        found.append(_call(p, run, model, x, number, may_raise=number > 0 and p.promises, around=around))
        if RAISES in found[-1]:
            break
    return found


def _call(p: Program, run: Callable[..., Any], model: nn.Module, x: Tensor, number: int, may_raise: bool, around: str = "") -> Seen:
    model.zero_grad(set_to_none=True)
    if around:
        torch.manual_seed(7)
        return {around: AROUND[around](run, model, x, p.grad)}
    leaf = x.clone().requires_grad_(p.grad)
    torch.manual_seed(7)
    with torch.set_grad_enabled(p.grad):
        fed = leaf.clone()
        relate(p.related, number, model, fed)
        try:
            out = run(fed)
        except Exception as error:
            if not may_raise or _refused(error):
                raise
            return {RAISES: True}  # what was updated before that is not compared
        # Before the backward pass, which recomputes what checkpoints left out.
        seen = {
            "output": out.detach().clone(),
            "strides": _strides(out),
            "input": fed.detach().clone(),
            "random state": torch.get_rng_state(),
        }
        _write_later(p, model)
        if out.requires_grad:
            (out * torch.linspace(-1, 1.5, out.numel()).view(out.shape)).sum().backward()
    seen |= {name: t.detach().clone() for name, t in (*model.named_parameters(), *model.named_buffers())}
    leaves = {"x": leaf, **dict(model.named_parameters())}
    seen |= {f"gradient of {name}": _grad(t) for name, t in leaves.items()}
    seen[NONE] = {name for name, t in leaves.items() if t.grad is None}
    return seen | {f"Python {name}": value for name, value in _python(model)}


def _strides(out: Tensor) -> list[int]:
    """Those that mean something."""
    return [step for step, size in zip(out.stride(), out.shape, strict=True) if size > 1]


def _write_later(p: Program, model: nn.Module) -> None:
    """What the caller does to what the layers gave away; they forget it then."""
    for layer in model.children():
        if p.later and layer.kept is not None:
            with torch.no_grad():
                exec(p.later, {"kept": layer.kept})
        layer.kept = None


def _grad(t: Tensor) -> Tensor:
    """The gradient; zeros where there is none, as of an expert without tokens, for which a fused op says zero."""
    return torch.zeros_like(t) if t.grad is None else t.grad.clone()


def _python(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for at, layer in enumerate(model.children()):
        for name, value in vars(layer).items():
            if not name.startswith("_") and name != "training":
                yield f"{at}.{name}", copy.deepcopy(value)


def _wrong_in_one_graph(p: Program, behind: str) -> bool:
    """Whether torch alone is wrong about the same statements around experts at which it has no reason to break the graph."""
    if p.spelling.body not in SIZED or p.meanwhile or p.related:  # of what is done to modules and memory, one graph of torch's sees less
        return False
    whole = dataclasses.replace(p, spelling=dataclasses.replace(p.spelling, body="dense"))
    try:
        expected = calls(whole, None)
    except Exception:  # statements that only fit the other spelling
        return False
    got = _attempt(whole, behind)
    return not isinstance(got, list) or bool(_unlike(got, expected))


# --- compilers --------------------------------------------------------------------------------------------------------------------


def _fusing(p: Program, report: FusionReport, behind: str, patient: bool = True) -> Callable[..., Any]:
    """A Dynamo backend: moefuse's capture and passes, then one of torch's backends."""
    own = Options(verify=p.verify)  # type: ignore[arg-type]

    def backend(gm: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        frame = entry.frame()
        found, saved = rewrite.rewrite_and_keep(gm, example_inputs, own, frame)
        report.extend(found)
        if not patient and report.skipped and not report.fused and p.spelling.body in SIZED:
            raise RefusedError
        if behind == "eager" or _torch_private.forward_level():  # as moefuse's backend: no compiler's code keeps tangents
            return gm.forward
        compiler = functools.partial(torch._dynamo.lookup_backend(behind), gm, example_inputs)
        return rewrite.compile_or_restore(gm, found, saved, frame, compiler)

    def read(_arguments: Mapping[str, Any]) -> Options:
        return own

    def skipped(found: FusionReport, _own: Options, _owner: object) -> None:
        report.extend(found)

    return entry.enable(backend, read, skipped)


def _attempt(p: Program, backend: Any) -> list[Seen] | str | None:
    """What every call leaves, an exception as text, or None where it was not worth while."""
    try:
        return calls(p, backend)
    except Exception as error:
        if _refused(error):
            return None
        cause = getattr(error, "inner_exception", None) or error  # without the name of the backend, which is ours or torch's
        return f"{type(cause).__name__}: {str(cause)[:300]}"


def _refused(error: Exception) -> bool:
    return isinstance(error, RefusedError) or isinstance(getattr(error, "inner_exception", None), RefusedError)


def _unlike(got: list[Seen], expected: list[Seen]) -> list[str]:
    """What differs, by call and name."""
    found = []
    for number, (a, b) in enumerate(zip_longest(got, expected, fillvalue=cast(Seen, {}))):
        names = dict.fromkeys((*b, *a))
        found += [f"call {number}: {name}" for name in names if name != NONE and not _same(a.get(name), b.get(name))]
    return found


def _same(got: Any, expected: Any) -> bool:
    if isinstance(expected, Tensor):
        if not isinstance(got, Tensor) or got.shape != expected.shape or got.dtype != expected.dtype:
            return False
        if not expected.is_floating_point() or not expected.numel():
            return torch.equal(got, expected)
        return bool((got - expected).abs().max() <= TOLERANCE * (1 + expected.abs().max()))
    if isinstance(expected, list | tuple):
        return isinstance(got, list | tuple) and len(got) == len(expected) and all(map(_same, got, expected))
    return bool(got == expected)


def _finite(value: Any) -> bool:
    return not isinstance(value, Tensor) or not value.is_floating_point() or bool(value.isfinite().all())


@contextmanager
def _quiet() -> Iterator[None]:
    """float64, the same random numbers whoever compiles, and no warnings of refusals."""
    import torch._inductor.config

    logs, dtype = [logging.getLogger(name) for name in ("moefuse", "torch._dynamo")], torch.get_default_dtype()
    levels = [log.level for log in logs]
    for log in logs:
        log.setLevel(logging.CRITICAL)
    torch.set_default_dtype(torch.float64)
    try:
        with warnings.catch_warnings(), torch._inductor.config.patch(fallback_random=True):
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_default_dtype(dtype)
        for log, level in zip(logs, levels, strict=True):
            log.setLevel(level)
        torch._dynamo.reset()
