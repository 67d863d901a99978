"""Options: what the user decides. Validated on the way in, so that a typing error is an error message and never a silent default."""

from __future__ import annotations

import difflib
import os
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Literal, get_args

from moefuse.errors import OptionError
from moefuse.machine import environment

Verify = Literal["probe", "graph", "off"]
Quantised = Literal["exact", "weights", "off"]

ENVIRONMENT: dict[str, tuple[str, dict[str, object]]] = {
    "MOEFUSE_DISABLE": ("enabled", {"0": True, "1": False}),
    "MOEFUSE_VERIFY": ("verify", {value: value for value in get_args(Verify)}),
    "MOEFUSE_STRICT": ("strict", {"0": False, "1": True}),
    "MOEFUSE_CAPTURE": ("capture", {"0": False, "1": True}),
}
"""Environment variable -> (the option whose default it sets, legal text -> value). For 0 and 1 there are words, see environment.py."""

SWITCHES: dict[str, tuple[str, ...]] = {
    "MOEFUSE_CPU_KERNEL": ("0", "1"),
    "MOEFUSE_AUTOTUNE": ("0", "1"),
    "MOEFUSE_OVERLAP": ("0", "1"),
    "MOEFUSE_DIRECT_LAUNCH": ("0", "1"),
    "MOEFUSE_SPECIALISED": ("0", "1"),
    "MOEFUSE_WORKSPACE_MIB": (),
    "MOEFUSE_CACHE_DIR": (),
    "MOEFUSE_HOST": (),
}
"""Environment variables that set no option -> legal texts, none where any text is.

MOEFUSE_CPU_KERNEL=0 leaves the C++ kernels out; MOEFUSE_AUTOTUNE=0 forbids tuning, and nothing that was tuned earlier is used;
MOEFUSE_WORKSPACE_MIB=n runs long prefills in chunks, so that a call takes about n MiB in addition to its result;
MOEFUSE_SPECIALISED=0 leaves out the warp-specialised kernels on Hopper;
MOEFUSE_OVERLAP=0 runs shared experts in order instead of beside the routed ones;
MOEFUSE_HOST=name is what ``moefuse.parallelize`` takes for this process's host.
"""


@dataclass(frozen=True)
class Options:
    """moefuse's own options; everything else in ``options=`` goes to Inductor.

    Attributes:
        verify: ``"probe"`` runs each fused op and the code it replaces on the model's own weights and keeps the original if they
            disagree; ``"graph"`` also runs the whole graph before and after, and puts it back if anything differs that its user may see
            (docs/design/debugging.md has what that costs); ``"off"`` checks nothing.
        strict: raise :class:`moefuse.FusionError` when mixture-of-experts code is found and not fused.
        exclude: regular expression; regions whose module path matches (``re.search``) stay as they are.
        max_rewrites: fuse at most this many regions per graph (for bisecting); None for no limit.
        enabled: False hands every graph to Inductor as it is.
        capture: False leaves data-dependent expert loops to Dynamo, which breaks the graph there.
        cost_gate: leave a region alone whose program was measured to be at least as fast as the fused op; False fuses it all the same.
        router_topk: run ``torch.topk`` of a fused region's router as one kernel on CUDA devices, which gives equal scores to the lowest
            expert.
        fuse_router: in inference on CUDA devices, run all that such a router does with its logits as one kernel, and their product as
            another where tokens are few or both factors are cast; scores are rounded differently then, so that nearly equal ones may
            change places.
        overlap: up to so many tokens, shared experts start before the router and run beside the routed ones on a stream of their own
            (inference in a CUDA graph); 0 leaves them as they are. None is 8 where Inductor records CUDA graphs
            (``mode="reduce-overhead"``), else 0: give a number if you record them yourself.
        recompute: in training, compute hidden activations of fused layers again in backward instead of keeping them: S x 2I values less a
            layer, for the first product once more, and the same bits. A layer that keeps them all the same has a note in the report.
        expect: raise :class:`moefuse.FusionError` unless, when a call that compiled something returns, so many layers are fused.
        any_size: in inference a size that is symbolic may be 0 or 1 as well, where torch compiles another graph for each of these: with
            ``dynamic=True`` one graph serves every number of tokens. Calls that record gradients are compiled as torch does it.
        quantised: ``"exact"`` reads how quantised weights are held, where a program unpacks them expert by expert, and multiplies what is
            stored, with the bits that the program has, and rounds activations where an operator of the program does; ``"weights"`` rounds
            no activations, which is more exact than such a program; ``"off"`` leaves such layers alone.
    """

    verify: Verify = "probe"
    strict: bool = False
    exclude: str | None = None
    max_rewrites: int | None = None
    enabled: bool = True
    capture: bool = True
    cost_gate: bool = True
    router_topk: bool = True
    fuse_router: bool = False
    overlap: int | None = None
    recompute: bool = False
    expect: int | None = None
    any_size: bool = False
    quantised: Quantised = "exact"

    def __post_init__(self) -> None:
        if self.verify not in get_args(Verify):
            raise _illegal("verify", self.verify, _one_of(get_args(Verify)))
        if self.quantised not in get_args(Quantised):
            raise _illegal("quantised", self.quantised, _one_of(get_args(Quantised)))
        for name in ("strict", "enabled", "capture", "cost_gate", "router_topk", "fuse_router", "recompute", "any_size"):
            if not isinstance(getattr(self, name), bool):
                raise _illegal(name, getattr(self, name), "True or False")
        for name in ("max_rewrites", "overlap", "expect"):
            number = getattr(self, name)
            if isinstance(number, bool) or not isinstance(number, int | None) or (number or 0) < 0:
                raise _illegal(name, number, "a non-negative integer or None")
        self._check_exclude()

    def _check_exclude(self) -> None:
        legal = "a regular expression for module paths, e.g. r'layers\\.0\\.', or None"
        if self.exclude is None:
            return
        if not isinstance(self.exclude, str):
            raise _illegal("exclude", self.exclude, legal)
        try:
            re.compile(self.exclude)
        except re.error as error:
            raise _illegal("exclude", self.exclude, f"{legal} ({error})") from None

    @classmethod
    def from_user(cls, options: Mapping[str, object] | None) -> tuple[Options, dict[str, object]]:
        """Split ``torch.compile(options=...)`` into moefuse's options and Inductor's.

        Environment variables give the defaults; what is written in ``options`` wins.

        Raises:
            OptionError: a name that neither moefuse nor Inductor knows, or an illegal value, with the legal ones in the text.
        """
        if options is not None and not isinstance(options, Mapping):
            raise OptionError(f"options must be a dict, got {type(options).__name__}")
        given = dict(options or {})
        own_names = tuple(field.name for field in fields(cls))
        own = _environment_defaults() | {name: given.pop(name) for name in own_names if name in given}
        if given:
            _check_inductor_names(given, own_names)
        return cls(**own), given  # type: ignore[arg-type]  # __post_init__ checks what mypy cannot see

    def fingerprint(self) -> str:
        """A string that differs whenever an option does; part of the compile cache key."""
        return ";".join(f"{field.name}={getattr(self, field.name)!r}" for field in sorted(fields(self), key=lambda f: f.name))


def _illegal(name: str, value: object, legal: str) -> OptionError:
    return OptionError(f"option {name}={value!r} is not legal; use {legal}")


def _one_of(values: Iterable[object]) -> str:
    return " or ".join(repr(value) for value in values)


def _check_inductor_names(given: Mapping[str, object], own_names: tuple[str, ...]) -> None:
    from moefuse import _torch_private

    for name, value in given.items():
        if isinstance(name, str) and _torch_private.is_inductor_option(name, value):
            continue
        close = difflib.get_close_matches(str(name), (*own_names, *_torch_private.inductor_option_names()), n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise OptionError(
            f"unknown option {name!r}{hint}; moefuse's options are {', '.join(sorted(own_names))}; "
            "Inductor's options are accepted too, see torch._inductor.list_options()"
        )


def _environment_defaults() -> dict[str, object]:
    defaults: dict[str, object] = {}
    for variable, text in os.environ.items():
        if not variable.startswith("MOEFUSE_"):
            continue
        if variable in SWITCHES:
            if SWITCHES[variable]:
                _legal(variable, text, SWITCHES[variable])
            continue
        if variable not in ENVIRONMENT:
            known = ", ".join((*ENVIRONMENT, *SWITCHES))
            # warnings.warn shows one line once per text and place, and can be filtered.
            warnings.warn(f"environment variable {variable} is unknown to moefuse; it reads {known}", stacklevel=3)
            continue
        option, legal = ENVIRONMENT[variable]
        defaults[option] = legal[_legal(variable, text, tuple(legal))]
    return defaults


def _legal(variable: str, text: str, legal: tuple[str, ...]) -> str:
    """The legal text that an environment variable has, or has a word for."""
    switch = "0" in legal
    found = environment.normal(text) if switch else text
    if found in legal:
        return found
    words = " (or false, no, off, true, yes, on)" if switch else ""
    raise OptionError(f"environment variable {variable}={text!r} is not legal; use {_one_of(legal)}{words}")
