"""Who runs the rows: what each takes, in which dtypes and at which sizes, and that it really ran. Fresh memory holds NaN meanwhile."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moefuse.ops import autograd
from moefuse.ops.meaning.encoding import Encoding
from moefuse.runtime import dense, native, providers
from tests.cpu.coded_case import ENCODINGS

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAVE_TRITON = importlib.util.find_spec("triton") is not None
KINDS = ("experts", "terms", "codes", "codes and terms")
TIER = ("permute", "linear", "rows", "combine", "body")


def poisoned(t: Tensor) -> Tensor:
    """Uninitialised memory as it may be at worst: NaN, or addresses and rows far away."""
    if t.is_floating_point():
        return t.fill_(float("nan"))
    return t.fill_(True if t.dtype == torch.bool else min(torch.iinfo(t.dtype).max, 1 << 30))


@contextlib.contextmanager
def fresh_memory_is_nan() -> Iterator[None]:
    """On the CPU every tensor that is made without values is :func:`poisoned`."""
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
            made = getattr(owner, name)
            patch.setattr(owner, name, lambda *a, made=made, **k: poisoned(made(*a, **k)))
        yield


@contextlib.contextmanager
def portable(parts: bool = False) -> Iterator[None]:
    """The code in torch; ``parts``: with a backward of several ops, as on a GPU."""
    with fresh_memory_is_nan(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(autograd, "IN_PARTS", ("cpu",) if parts else ())
        native.configure(False)
        try:
            yield
        finally:
            native.configure(True)


@contextlib.contextmanager
def compiled(few: bool = False) -> Iterator[None]:
    """The C++ kernels, 16 bits multiplied in float32 on any CPU; none of the three ops that they have goes elsewhere."""
    left, run = [], providers.run

    def spy(op: str, *args: Any) -> Any:
        left.append(op)
        return run(op, *args)

    with fresh_memory_is_nan(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(providers, "run", spy)
        native.widen(True, True)
        native.configure(True, 1 << 40 if few else -1)
        try:
            yield
        finally:
            native.configure(True)
            native.widen(torch.float16 in native.WIDENED, torch.bfloat16 in native.WIDENED)
    assert not {"experts", "experts_forward", "experts_backward"} & {*left}, "C++ did not take it"


@contextlib.contextmanager
def as_provider(functions: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Functions in front of all others for CPU tensors, one of which has to run."""
    before, ran = {name: list(providers.PROVIDERS[name]) for name in functions}, []

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            ran.append(name)
            return function(*args)

        return run

    for name, function in functions.items():
        providers.register(name, providers.Provider("contract", lambda *a: None, noted(name, function), device="cpu"))
    try:
        yield
    finally:
        for name, order in before.items():
            for other in reversed(order):
                providers.register(name, other)
            providers.unregister(name, "contract")
    assert ran, "nothing ran"


MODULES = {
    "training": ("experts_forward", "experts_hidden", "experts_backward_rows", "experts_backward_in", "experts_backward_out"),
    "extended": ("experts_extended", "experts_extended_forward", "experts_extended_hidden", "experts_extended_backward"),
    "grouped": (
        "permute", "grouped_linear", "grouped_linear_backward", "expert_rows", "expert_rows_backward", "combine", "combine_backward",
    ),
    "grouped_coded": ("grouped_linear_coded", "grouped_linear_coded_backward"),
}  # fmt: skip
"""Of ``moefuse/kernels/triton/provide``, with the ops that they have."""


@contextlib.contextmanager
def triton(form: str = "") -> Iterator[None]:
    """The kernels in Triton's interpreter; ``form``: how inference is cut, which sizes decide otherwise."""
    functions = {}
    for module, names in MODULES.items():
        provided = importlib.import_module(f"moefuse.kernels.triton.provide.{module}")
        functions |= {name: getattr(provided, name) for name in names}

    def experts(call: Any) -> Tensor:
        from moefuse.kernels.triton.host.plan import Plan

        out: Tensor = Plan(call, _config(form)).run(call)
        return out

    with portable(parts=True), as_provider({**functions, "experts": experts}):
        yield


def _config(form: str) -> Any:
    from moefuse.tuning.problem import Config, Tiles, Vectors

    if not form:
        return None
    if form.startswith("vectors"):
        part: Any = Vectors(8, 8, at=2, parts=3 if "parts" in form else 1)
        return Config(0, part, part)
    part = Tiles(16, 16, 4, 1, swap="swapped" in form)
    return Config(16, part, part)


@contextlib.contextmanager
def on_device() -> Iterator[None]:
    """What the allocator gives next held NaN."""
    spoiled = torch.full((64 << 20,), float("nan"), device="cuda")
    del spoiled
    yield


@dataclass(frozen=True)
class By:
    """One who runs rows of the kinds ``takes``: ``running()`` while it does. ``sizes`` go before those of ``Case``, ``many`` where there
    are loops over rows. ``shown``: so many cases of a test run (0: all), for the interpreter takes a second for each."""

    name: str
    running: Callable[[], AbstractContextManager[None]]
    takes: Sequence[str]
    dtypes: Sequence[torch.dtype]
    sizes: Mapping[str, int] = field(default_factory=dict)
    many: bool = False
    trains: bool = True
    device: str = "cpu"
    interpreted: bool = False
    shown: int = 0
    grad_dtypes: Sequence[torch.dtype] = ()
    """Those in which it has gradients, if they are fewer."""

    @property
    def here(self) -> bool:
        """It can run in this process."""
        if self.device == "cuda":
            return torch.cuda.is_available()
        return self.interpreted == INTERPRETED and (HAVE_TRITON or not self.interpreted)

    def computes(self, op: str, grad: bool = False) -> list[torch.dtype]:
        """The dtypes of a kind of call; weights in few bits have no kernels for float64 on a GPU."""
        kernels = self.interpreted or self.device == "cuda"
        return [d for d in (grad and self.grad_dtypes) or self.dtypes if not (kernels and op == "codes" and d == F64)]

    def rows(self, tokens: int) -> int:
        """So many tokens, or as many of them as the interpreter has time for."""
        return min(tokens, 7) if self.interpreted else tokens

    def encoding(self, name: str) -> Encoding:
        """How weights are held; the interpreter cuts where it should round to bfloat16."""
        found = ENCODINGS[name]
        return replace(found, arithmetic="f16") if self.interpreted and found.arithmetic == "bf16" else found

    def marks(self) -> list[Any]:
        """Why it does not run here, visibly."""
        if self.device == "cuda":
            return [pytest.mark.gpu]
        if self.interpreted and not HAVE_TRITON:
            return [pytest.mark.skip(reason="triton is not installed")]
        if self.interpreted != INTERPRETED:
            return [pytest.mark.skip(reason=f"{'unset' if INTERPRETED else 'set'} TRITON_INTERPRET")]
        return QUIET if self.interpreted else []


QUIET = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),  # the interpreter, about NumPy
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy, about NaN
]
ODD = {"tokens": 5, "hidden": 20, "inter": 12, "hidden_out": 17, "experts": 4, "top_k": 3}
LOOPS = {"tokens": 23, "hidden": 70, "inter": 37, "hidden_out": 131, "experts": 3, "top_k": 2}
DEVICE = {"tokens": 70, "hidden": 96, "inter": 64, "hidden_out": 96, "experts": 9, "top_k": 4}
TRITON = functools.partial(By, dtypes=(F32, F16), sizes=ODD, interpreted=True, shown=1)
PROVIDERS = [
    By("portable", portable, (*KINDS, *TIER), (F64, F32, BF16, F16), many=True),
    By("parts", functools.partial(portable, parts=True), ("experts",), (F64, BF16)),
    By("c++", compiled, ("experts",), (F64, F32, BF16, F16), {**LOOPS, "tokens": 230}, many=True, grad_dtypes=(F32, BF16, F16)),
    By("c++ few", functools.partial(compiled, few=True), ("experts",), (F64, F32, BF16, F16), LOOPS, trains=False),
    By("dense", lambda: _dense(), ("experts",), (F64, BF16), trains=False),
    TRITON("triton", triton, (*KINDS[:3], *TIER), dtypes=(F64, F32, F16), shown=3),
    *(TRITON(f"triton {form}", functools.partial(triton, form), ("experts",), trains=False)
      for form in ("tiles", "tiles swapped", "vectors", "vectors in parts")),
    By("cuda", on_device, (*KINDS[:3], *TIER), (BF16, F32, F16, F64), DEVICE, many=True, device="cuda", grad_dtypes=(F32, BF16, F64, F16)),
    By("cuda few", on_device, ("experts", "terms"), (BF16, F32, F16, F64), {**DEVICE, "tokens": 3, "top_k": 2}, device="cuda"),
]  # fmt: skip


@contextlib.contextmanager
def _dense() -> Iterator[None]:
    """The fallback for a GPU without Triton, which runs anywhere."""
    with portable(), as_provider({"experts": dense.experts}):
        yield


def table(
    rows: Sequence[Any],
    keep: Callable[[By], bool] = lambda by: True,
    dtypes: int = 1,
    grad: bool = False,
    few: bool = False,
    in_turn: bool = False,
) -> Any:
    """A test of each row by each who takes it, in the first ``dtypes`` of its dtypes: ``(by, row, dtype)``.

    On a GPU half as many, for each is compiled. ``few``: the test has other parameters, too, so the interpreter shows fewer cases.
    ``in_turn``: rows are a product of parts, and each is shown in one dtype: each part is in all of them.
    """
    cases = []
    for by in PROVIDERS:
        if not keep(by) or (grad and not by.trains):
            continue
        taken = [row for row in rows if row.op in by.takes]
        most = max(dtypes // 2, 1) if by.device == "cuda" else dtypes
        own = [(row, dtype) for row in taken for dtype in by.computes("codes" if getattr(row, "encoding", "") else row.op, grad)[:most]]
        own = own if by.here else own[:1]  # shown as skipped
        each = len(own) // len(taken) if in_turn and by.here and by.device == "cpu" else 1
        shown = _spread(len(own), by.shown // (3 if few else 1)) if by.shown else _in_turn(len(own), each)
        for i, (row, dtype) in enumerate(own):
            marks = [*by.marks(), *([] if i in shown else [pytest.mark.thorough])]
            cases.append(pytest.param(by, row, dtype, marks=marks, id=f"{by.name}-{row.name}-{str(dtype)[6:]}"))
    return pytest.mark.parametrize(("by", "row", "dtype"), cases)


def _in_turn(count: int, each: int) -> set[int]:
    """Of rows in ``each`` dtypes one of each row; what alternates from row to row is in all of them, too."""
    return {row * each + (row + row // each) % each for row in range(count // each)}


def _spread(count: int, shown: int) -> set[int]:
    """So many numbers below ``count``, in equal parts of it at places that differ."""
    part = count // max(shown, 1)
    return {j * part + (5 * j + 3) % part for j in range(shown)} if part else {*range(min(count, shown))}
