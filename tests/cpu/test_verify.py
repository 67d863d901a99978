"""The proof of a rewrite: what it checks, what it must never do, and how often it runs."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moefuse.config import Options
from moefuse.passes import driver, replacement
from moefuse.passes.prove import verify
from moefuse.report.entries import Fused, Skipped

E, K, H, INNER = 4, 2, 8, 6


class Layer(nn.Module):
    """Gathered expert weights; the input is halved in place first."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(H, E)
        self.w_in, self.w_out = nn.Parameter(torch.randn(E, 2 * INNER, H)), nn.Parameter(torch.randn(E, H, INNER))

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(0.5)
        weights, ids = self.gate(x).softmax(-1).topk(K)
        dense = torch.zeros_like(self.gate(x)).scatter(1, ids, weights)
        gate, up = torch.einsum("th,eih->tei", x, self.w_in).chunk(2, -1)
        y = torch.einsum("tei,ehi->teh", F.silu(gate) * up, self.w_out)
        return torch.einsum("te,teh->th", dense, y)


class Light:
    """A backend that only fuses, and keeps what was said."""

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or Options()
        self.fused: list[Fused] = []
        self.skipped: list[Skipped] = []
        self.graphs = 0

    def __call__(self, gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        result = driver.fuse(gm, inputs, self.options)
        self.fused += result.fused
        self.skipped += result.skipped
        self.graphs += 1
        return gm.forward


@pytest.fixture(autouse=True)
def _fresh(fresh_dynamo: None) -> None:
    torch.manual_seed(0)


def test_the_users_tensors_are_not_written_to() -> None:
    # zeros_like looks at a value that is computed behind an in-place write: running it on the real input halved that input twice.
    model, x = Layer(), torch.randn(3, H)
    expected, seen, light = x.clone(), x.clone(), Light()
    with torch.no_grad():
        want = model(expected)
        got = torch.compile(model, backend=light)(seen)
    assert len(light.fused) == 1
    torch.testing.assert_close(seen, expected, rtol=0, atol=0)
    torch.testing.assert_close(got, want)


def test_identical_layers_are_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    original = verify.verify
    monkeypatch.setattr(replacement, "verify", lambda *args: calls.append(1) or original(*args))
    model, light = nn.Sequential(*(Layer() for _ in range(3))), Light()
    with torch.no_grad():
        torch.compile(model, backend=light)(torch.randn(3, H))
    assert len(light.fused) == 3
    assert len(calls) == 1


def test_verification_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replacement, "verify", lambda *_: pytest.fail("verified"))
    light = Light(Options(verify="off"))
    with torch.no_grad():
        torch.compile(Layer(), backend=light)(torch.randn(3, H))
    assert [f.error for f in light.fused] == [None]


def test_the_error_of_a_sound_rewrite_is_within_its_allowance() -> None:
    light = Light()
    with torch.no_grad():
        torch.compile(Layer(), backend=light)(torch.randn(5, H))
    (fused,) = light.fused
    assert fused.error is not None
    assert 0 <= fused.error <= 1


def settled(rows: int, *errors: tuple[float, float]) -> tuple[bool, int]:
    """(whether a replacement is as exact as the original, draws of tokens); the last of the errors is that of all further draws."""
    seen: list[str] = []

    def probe(kind: str) -> verify.Errors:
        seen.append(kind)
        return verify.Errors(rows, *errors[min(len(seen), len(errors)) - 1], eps=1e-7)

    found = verify._settled(probe, "one")
    assert isinstance(found, verify.Errors)
    assert set(seen) == {"one"}
    return found.ours <= found.allowed, len(seen)


def test_few_rows_do_not_settle_it() -> None:
    # Two tokens may be lucky in the original; sixteen times two are not.
    assert settled(2, (1e-7, 9e-7), (2e-7, 2e-7)) == (True, 16)
    assert settled(40, (1e-7, 9e-7), (1e-7, 6e-7)) == (False, 2)
    assert settled(2, (1e-7, 9e-7)) == (False, 16)
    assert settled(2, (1e-7, 5e-7), (1e-7, 9e-7)) == (True, 1)
    assert settled(64, (1e-7, 9e-7), (2e-7, 2e-7)) == (False, 1)


def test_a_result_that_is_next_to_nothing_does_not_settle_it() -> None:
    """One number for a token may cancel: the error of its size is large then, in one draw of many."""
    sizes = iter([1e-3, *[1.0] * 15])
    found = verify._settled(lambda _: verify.Errors(1, 1e-7, 1e-4 if (size := next(sizes)) < 1 else 1e-7, 1e-7, size=size), "one")
    assert isinstance(found, verify.Errors)
    assert found.ours <= found.allowed
    wrong = verify._settled(lambda _: verify.Errors(1, 1e-7, 9e-7, 1e-7, size=1e-3), "one")
    assert isinstance(wrong, verify.Errors)
    assert wrong.ours > wrong.allowed


def test_a_wrong_meaning_in_a_further_draw_is_a_refusal() -> None:
    found = iter([verify.Errors(2, 1e-7, 9e-7, 1e-7), "the original differs"])
    assert verify._settled(lambda _: next(found), "random") == "the original differs"


MISREAD: dict[str, Any] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "mish": F.mish,
    "1.1 silu": lambda x: 1.1 * F.silu(x),
    "silu(1.05 x)": lambda x: F.silu(1.05 * x),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("program", MISREAD.values(), ids=MISREAD)
def test_a_misreading_is_found_in_every_dtype(program: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read as silu computes something else. 512 roundings of 16 bits, the allowance of long sums in float32, hid that."""
    run = verify.replay

    def computed(x: Tensor) -> Tensor:
        return program(x)  # type: ignore[no-any-return]

    def replay(nodes: Any, *args: Any) -> Any:
        for node in nodes:
            node.target = computed if node.target is F.silu else node.target
        return run(nodes, *args)

    monkeypatch.setattr(verify, "replay", replay)
    light = Light()
    with torch.no_grad():
        torch.compile(wide(dtype), backend=light)(torch.randn(40, 64, dtype=dtype))
    (skipped,) = light.skipped
    assert skipped.code == "verification-failed"
    assert "the original differs from its recognised meaning by" in skipped.message


def wide(dtype: torch.dtype) -> Layer:
    """A layer of more than a few numbers, so that sums are sums."""
    layer = Layer()
    layer.gate = nn.Linear(64, 8)
    layer.w_in, layer.w_out = nn.Parameter(torch.randn(8, 96, 64) / 8), nn.Parameter(torch.randn(8, 64, 48) / 7)
    return layer.to(dtype)


def _tf32(x: Tensor) -> Tensor:
    return ((x.detach().contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


@pytest.mark.parametrize("leave", [False, True], ids=["", "leave"])
@pytest.mark.parametrize("trained", [False, True], ids=["inference", "training"])
def test_products_that_are_rounded_to_tf32(trained: bool, leave: bool) -> None:
    """As on a GPU with ``torch.set_float32_matmul_precision("high")``, which Trainer sets for whoever compiles: no misreading."""
    light, setting = Light(), torch.backends.mkldnn.matmul
    setting.fp32_precision = "tf32" if leave else "ieee"
    try:
        with torch.library._scoped_library("aten", "IMPL") as library, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            library.impl("bmm", lambda a, b: torch.bmm(_tf32(a), _tf32(b), out=a.new_empty(len(a), a.shape[1], b.shape[2])), "CPU")
            with torch.set_grad_enabled(trained):
                torch.compile(wide(torch.float32), backend=light)(torch.randn(40, 64))
    finally:
        setting.fp32_precision = "none"
    assert len(light.fused) == leave
    assert [s.code for s in light.skipped] == ([] if leave else ["verification-failed"])


def test_dynamic_sizes_add_no_guard() -> None:
    # A guard of ours would show as one more graph for every new number of tokens.
    light = Light()
    compiled = torch.compile(Layer(), backend=light, dynamic=True)
    with torch.no_grad():
        for tokens in (3, 5, 9, 17):
            compiled(torch.randn(tokens, H))
    assert light.graphs == 1
    assert len(light.fused) == 1
    assert light.skipped == []


def test_weights_are_read_live() -> None:
    # No copy is kept: an optimizer's in-place update shows in the next call.
    model, x = Layer(), torch.randn(3, H)
    compiled = torch.compile(model, backend=Light())
    with torch.no_grad():
        compiled(x.clone())
        model.w_out.data.mul_(2.0)
        torch.testing.assert_close(compiled(x.clone()), model(x.clone()))
