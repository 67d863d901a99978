"""The C++ kernel: what goes through an activation, when it steps aside, and how it is loaded. What it computes: tests/contract."""

from __future__ import annotations

import logging
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import fresh_cache, run_and_get_code

from moefuse import _torch_private
from moefuse.machine import cache_folder, slow_paths
from moefuse.ops import ACTIVATIONS
from moefuse.ops.meaning.call import Body, ExpertsCall
from moefuse.runtime import native, providers
from tests.cpu.ops_case import Case, every_body, reference, run, tensors, to
from tests.forked import printed

pytestmark = pytest.mark.skipif(not native.ready(), reason="no working C++ compiler")

keeps_text = pytest.mark.skipif(not all(_torch_private.libtorch_functions(_torch_private.MAY_LACK)), reason="this libtorch keeps no text")


class Log:
    """Calls that reached the general op."""

    def __init__(self) -> None:
        self.general = 0


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    log = Log()
    run = providers.run

    def spy(op: str, *args: Any) -> Any:
        log.general += op == "experts"
        return run(op, *args)

    monkeypatch.setattr(providers, "run", spy)
    return log


@pytest.mark.parametrize("activation", [name for name in ACTIVATIONS if name not in ("swiglu_oai", "silu_clamp")])
def test_special_values_go_through_an_activation_as_in_torch(activation: str) -> None:
    values = torch.tensor([[math.nan, math.inf, -math.inf, -0.0, 1e-30, 90.0, -90.0, 1e4, -1e4]])
    one = torch.ones(1, 9, 9).mul(torch.eye(9))
    # Each projection is the identity on one element at a time, so that an infinity meets no zero.
    for v in values[0]:
        args = [v.view(1, 1), torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1), [one[:, :1, :1]], [], [one[:, :1, :1]], [], [], []]
        options = {"gating": "plain", "activation": activation}
        torch.testing.assert_close(run(args, **options), reference(args, **options), equal_nan=True)


@pytest.mark.parametrize("activation", [name for name in ACTIVATIONS if name not in ("swiglu_oai", "silu_clamp")])
def test_an_activation_is_off_by_a_few_roundings_everywhere(activation: str) -> None:
    """Of its value, or of its argument; also where it is close to zero."""
    half = torch.linspace(0, 6, 2000)[:, None]
    values, one = torch.cat((-half.flip(0), half)), torch.ones(1, 1, 1)
    args = [values, torch.zeros(4000, 1, dtype=torch.int64), torch.ones(4000, 1), [one], [], [one], [], [], []]
    got = run(args, gating="plain", activation=activation)
    wide = values.double().requires_grad_()
    exact = ACTIVATIONS[activation].forward(wide, None, ())
    (slope,) = torch.autograd.grad(exact.sum(), wide)
    allowed = 2.5 * torch.finfo(torch.float32).eps * (exact.abs() + (wide * slope).abs())
    assert ((got - exact).abs() <= allowed).all()
    if activation == "tanh":
        assert torch.equal(got.flip(0), -got)


def strided(t: Tensor) -> Tensor:
    """The same values with no dimension contiguous."""
    return torch.stack([t, t], dim=-1)[..., 0]


def one_odd(args: list[Any]) -> None:
    args[3][1] = args[3][1].t().contiguous().t()


STEPS_ASIDE = [
    pytest.param(Case(), lambda args: args[3].__setitem__(0, strided(args[3][0])), id="weights-contiguous-in-no-dimension"),
    pytest.param(Case(), lambda args: args[6].__setitem__(0, strided(args[6][0])), id="bias-not-contiguous"),
    pytest.param(Case(separate=True), one_odd, id="one-expert-stored-the-other-way"),
]


@pytest.mark.parametrize(("case", "change"), STEPS_ASIDE)
def test_what_it_leaves_to_the_general_op(case: Case, change: Any, log: Log) -> None:
    args = case.args()
    change(args)
    torch.testing.assert_close(run(args), reference(args))
    assert log.general == 1


def general_args() -> list[Any]:
    """A call that the C++ kernel does not take."""
    args = Case().args()
    args[3][0] = strided(args[3][0])
    return args


CALLS = [
    pytest.param(Case(separate=True).args, id="list"),
    pytest.param(Case().args, id="stacked"),
    pytest.param(Case(tokens=2000, separate=True).args, id="many-list"),
    pytest.param(Case(tokens=2000).args, id="many-stacked"),
    pytest.param(general_args, id="general"),
]


@pytest.mark.parametrize("make", CALLS)
def test_no_reference_to_a_tensor_is_kept_or_lost(make: Any) -> None:
    args = make()
    before = [t._use_count() for t in tensors(args)]  # type: ignore[attr-defined]
    for _ in range(3):
        run(args)
    assert [t._use_count() for t in tensors(args)] == before  # type: ignore[attr-defined]


@keeps_text
@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried ..."), torch.OutOfMemoryError, r"^CUDA out of memory\. Tried \.\.\."),
        (ValueError("no room"), ValueError, "^no room"),
        (MemoryError("no room"), RuntimeError, "^MemoryError: no room"),
    ],
    ids=["out-of-memory", "value", "memory"],
)
def test_errors_of_the_general_op_reach_the_caller(
    error: Exception, kind: type[Exception], text: str, grad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With their text and, where libtorch has one for it, their type. They were RuntimeErrors without either."""

    def broken(*args: Any) -> Any:
        raise error

    monkeypatch.setattr(providers, "run", broken)
    args = general_args()
    args[0].requires_grad_(grad)
    with pytest.raises(kind, match=text) as raised:
        run(args)
    assert type(raised.value) is kind


@keeps_text
def test_an_output_that_does_not_fit_into_memory() -> None:
    """libtorch's own text, which accelerate's find_executable_batch_size looks for, and no argument is kept or lost."""
    args = Case(hidden_out=1, dtype=torch.float32).args()
    args[5] = [args[5][0].expand(-1, 1 << 48, -1)]
    args[8] = []
    before = [t._use_count() for t in tensors(args)]  # type: ignore[attr-defined]
    for _ in range(3):
        with pytest.raises(RuntimeError, match="can't allocate memory"):
            run(args)
    assert [t._use_count() for t in tensors(args)] == before  # type: ignore[attr-defined]


def test_options_survive_the_encoding() -> None:
    for c in every_body():
        for on_input in (False, True):
            body = c.with_(weight_on_input=on_input).call().body
            assert Body.decode(*body.encode()) == body


@pytest.mark.parametrize("case", [Case(), Case(separate=True), Case(tokens=2000)], ids=["stacked", "list", "many"])
def test_opcheck(case: Case) -> None:
    c = case.with_(dtype=torch.float32)
    options = {k: v for k, v in c.options.items() if k != "out_dtype"}
    args = ExpertsCall.of(*c.args(), **options).pack()
    for op in (torch.ops.moefuse.experts_infer.default, torch.ops.moefuse.experts_infer_general.default):
        torch.library.opcheck(op, args, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_compiled_model_calls_the_internal_op_only() -> None:
    args = to(Case().args(), torch.float32)
    with torch.no_grad(), fresh_cache():
        out, (code,) = run_and_get_code(torch.compile(lambda x: run([x, *args[1:]]), fullgraph=True), args[0])
    assert "moefuse.experts_infer.default(" in code
    assert "moefuse.experts.default(" not in code
    torch.testing.assert_close(out, run(args))


@pytest.fixture
def not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """As before the first use. The dispatcher keeps the kernel that this process has registered."""
    for name, unit in native.UNITS.items():
        monkeypatch.setitem(native.UNITS, name, native.Unit(unit.sources))
    monkeypatch.setattr(slow_paths, "_notes", {})


@pytest.mark.parametrize("error", [RuntimeError("no compiler\nsecond line"), OSError("noexec"), AttributeError("torch_list_size")], ids=str)
@pytest.mark.usefixtures("not_loaded")
def test_a_kernel_that_does_not_compile_is_one_debug_line(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(source: str, folder: Path) -> Any:
        raise error

    monkeypatch.setattr(_torch_private, "build_cpp", fail)
    with caplog.at_level(logging.DEBUG, native.log.name):
        assert not native.ready()
        assert not native.ready()
    first = str(error).split("\n")[0]
    assert [r.getMessage() for r in caplog.records] == [f"the C++ kernel is not available, experts run in torch: {first}"]


@pytest.mark.usefixtures("not_loaded")
def test_the_switch_leaves_the_kernel_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.SWITCH, "0")
    monkeypatch.setattr(_torch_private, "build_cpp", lambda source, folder: pytest.fail("compiled"))
    assert not native.ready()


def test_a_process_without_the_kernel(tmp_path: Path) -> None:
    program = """
import os
os.environ |= {variables}
from moefuse.runtime import native
from tests.cpu.ops_case import Case, reference, run
args = Case().args()
torch.testing.assert_close(run(args), reference(args))
assert not native.ready()
"""
    without = [{"MOEFUSE_CPU_KERNEL": "0"}, {"CXX": "/nowhere/g++"}]
    environment = {**os.environ, cache_folder.VARIABLE: str(tmp_path)}
    printed("import torch, pytest", [program.format(variables=variables) for variables in without], environment=environment)
