"""The functions that users call: compile, compile_layers, explain, benchmark, warmup."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import nn

from moefuse import _torch_private, backend as _backend
from moefuse.diagnosis import trial
from moefuse.evidence.layers import layers_of
from moefuse.gains import measure
from moefuse.gains.gains import Gains
from moefuse.passes.graph.module_names import name_within
from moefuse.report.report import FusionReport
from moefuse.spec import ExpertsSpec

if TYPE_CHECKING:
    from moefuse.tuning.measure.report import WarmupReport

_Model = TypeVar("_Model", bound=Callable[..., Any])


def compile(
    model: _Model,
    *,
    mode: str | None = None,
    options: Mapping[str, object] | None = None,
    dynamic: bool | None = None,
    fullgraph: bool = False,
) -> _Model:
    """``torch.compile(model, backend="moefuse", ...)``, with the options checked now instead of at the first call.

    Raises:
        OptionError: for an unknown option or an illegal value.
        RuntimeError: torch's own, for an unknown mode, or mode and options together.
    """
    _check_callable("compile", model)
    _backend.parse(mode, options)
    plain: Any = None if options is None else dict(options)
    compiled: Any = torch.compile(model, backend=_backend.backend, mode=mode, options=plain, dynamic=dynamic, fullgraph=fullgraph)
    return cast(_Model, compiled)


def compile_layers(
    model: nn.Module, *, modules: str | None = None, mode: str | None = None, options: Mapping[str, object] | None = None
) -> list[str]:
    """Compile the mixture-of-experts layers of ``model``, each in place, and nothing around them.

    For servers and ``generate``, where sizes change from call to call: layers of a kind share one graph, which serves every number of
    tokens, 0 and 1 among them (others serve inference mode, and calls that record gradients). Names in ``state_dict`` stay. What is built
    like experts with a router is compiled; :func:`moefuse.reports` has what was fused, once the layers have run.

    Args:
        model: a module; layers that are compiled already are compiled as is said here.
        modules: regular expression; the modules whose name matches (``re.search``) are compiled, instead of those that are found.
        mode: as for ``torch.compile``; one that records CUDA graphs records one for each size.
        options: options of moefuse and Inductor, as for :func:`compile`; ``any_size`` is set unless they say False.

    Returns:
        The names of the modules that were compiled, the empty one for ``model`` itself.

    Raises:
        OptionError: for an unknown option or an illegal value.
        TypeError: ``model`` is no module, or ``modules`` no text.
        ValueError: it has no such layers, ``modules`` is no regular expression, or names a list of modules, which nobody calls.
        RuntimeError: torch's own, for an unknown mode, or mode and options together.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"moefuse.compile_layers needs a module, got {type(model).__name__}")
    if not isinstance(modules, str | None):
        raise TypeError(f"moefuse.compile_layers: modules is a regular expression, got {type(modules).__name__}")
    _, patches = _backend.parse(mode, options)
    try:
        found = layers_of(model, modules)
    except re.error as error:
        raise ValueError(f"modules={modules!r} is no regular expression ({error})") from None
    if not found:
        built = "is built like experts with a router: say which are, modules=r'..'" if modules is None else f"has a name like {modules!r}"
        raise ValueError(f"moefuse.compile_layers: no module of {type(model).__name__} {built}")
    for name, module in found.items():
        if type(module).forward is nn.Module.forward:
            what, inside = f"{name or 'the model'} ({type(module).__name__})", f"^{name}\\.[^.]+$" if name else "^[^.]+$"
            raise ValueError(f"moefuse.compile_layers: {what} has no forward; for what is in it say modules=r'{inside}'")
    given = dict(options or {}) if mode is None else patches  # torch takes one of the two
    together: Any = _torch_private.Together({"any_size": True, **given})
    for module in found.values():
        module.compile(backend=_backend.backend, dynamic=True, options=together)
        name_within(model, module)
    return list(found)


def explain(model: Callable[..., Any], *args: Any, **kwargs: Any) -> FusionReport:
    """Report what compiling ``model`` for this call would give, without writing code; what the call does is taken back.

    A model that is compiled already is looked at from under its compilation. Frames go through Dynamo, moefuse and the front half of
    Inductor, whose errors are raised as the compiled call would raise them, and then run: what stands behind a graph break depends on
    values. Where something was fused, the model is called again, and with inputs that are larger by one; ``notes`` says what such calls
    do not fuse.

    Nothing stays behind: neither what the user has compiled, nor Dynamo's counters, nor :func:`moefuse.last_report`. Put back are random
    states (torch, Python, NumPy), and of all that ``model`` and the arguments reach by attributes, containers and closures: contents,
    gradients and other properties of tensors, attributes, lists, dicts, sets, deques and arrays. A tensor is copied when something is
    about to write to it, so only what the model writes takes memory. Not put back: files, output, the network; globals, attributes of
    classes, iterators; writes that bypass torch's dispatcher (a NumPy view of a tensor, a kernel launched by hand, another thread).

    Returns:
        The report; ``graph_breaks`` has every place where Dynamo left the graph, and frames that it did not trace at all.
    """
    _check_callable("explain", model)
    return trial.explain(model, args, kwargs)


def benchmark(
    model: Callable[..., Any], *args: Any, train: bool = False, budget_s: float = 60.0, progress: bool = True, **kwargs: Any
) -> Gains:
    """Measure a call of ``model`` in eager, compiled with Inductor, and compiled with moefuse.

    The three are called in turns, one call each, in changing order, after they are compiled and warm; what is compared are calls of the
    same turn. A turn's time is that of the host, up to where the device is done. Of each kind of layer that moefuse fused one is measured
    by itself, too, on the input that it has in the model. First results are compared with those in eager (in training gradients, too),
    relative to the largest value. A model that is compiled already is measured from under its compilation.

    Nothing stays behind, as with :func:`explain`: what a call changes is put back, before each next call too. What the user has compiled
    stays; :func:`last_report` says what it said. Not put back are torch's statistics of peak memory.

    Args:
        model: a module or a function.
        args: of the call.
        train: forward and backward, in training mode, with the sum of all floating-point outputs (each number plus or minus) as the loss;
            else inference mode of the module and no gradients.
        budget_s: seconds for the timing, without the compilations; every way has five turns at least and 200 at most.
        progress: show a bar (with tqdm installed), or lines on stderr if that is a terminal.
        kwargs: of the call, but for the names above.

    Returns:
        Times, memory (on CUDA devices) and differences; ``print`` it, or ``save_html(path)``. Where a compiler fails it says how.

    Raises:
        TypeError: the first argument cannot be called.
        ValueError: an illegal budget, a model with lazy weights, or training of outputs without gradients.
        Exception: what the call raises in eager.
    """
    _check_callable("benchmark", model)
    return measure.run(model, args, kwargs, train=train, budget_s=budget_s, progress=progress)


def warmup(
    model_or_specs: Callable[..., Any] | ExpertsSpec | Iterable[ExpertsSpec],
    tokens: Sequence[int],
    *,
    budget_s: float = 120.0,
    progress: bool = True,
) -> WarmupReport:
    """Measure which kernels are the fastest for a model's experts on this GPU, and keep the result for this and later processes.

    Nothing is tuned unless this is called: until then calls take shipped configurations, or rules. For each different layer and each
    bucket of rows per expert (T*K/E up to the next power of two) that ``tokens`` falls into, configurations are compiled beside each
    other, timed on random routings, and the fastest that agrees with the reference is kept in the user's cache folder. For the regions of
    a model the program that was matched is timed too, as Inductor compiles it alone; a region that is not faster than it is left alone
    from the next compilation on (``not-faster``). What has been compiled already stays, and takes the new configuration at its next call;
    CUDA graphs recorded before stay valid and keep the old one. Weights are only read, no random state is touched.

    Args:
        model_or_specs: a model that has run compiled at least once (its fused regions are measured, on its own weights), or one or more
            :class:`moefuse.ExpertsSpec` (measured on random weights).
        tokens: numbers of tokens T of one forward pass, e.g. ``[1, 8, 512]``.
        budget_s: seconds; every layer and number of tokens gets its share, and at least what runs now is timed.
        progress: show a bar (with tqdm installed) or lines on stderr.

    Returns:
        What was measured. On a machine with nothing to tune (no CUDA device, ``MOEFUSE_AUTOTUNE=0``, a model that has not run yet) it is
        empty, and its notes say why.

    Raises:
        TypeError: the first argument is neither a model nor specs.
        ValueError: illegal tokens, budget, or a spec of no fused op.
    """
    from moefuse.tuning.measure import warmup as _warmup

    return _warmup.run(model_or_specs, tokens, budget_s, progress)


def _check_callable(name: str, model: object) -> None:
    if not callable(model):
        raise TypeError(f"moefuse.{name} needs a module or a function, got {type(model).__name__}")
