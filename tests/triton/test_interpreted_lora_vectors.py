"""Low-rank terms for few slots by matrix-vector kernels, in the interpreter, against weights with the terms added, in float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cpu.lora_case import SCALES, Sizes, arguments, merged, moved, ours
from tests.triton.interpreted_case import interpreted

pytestmark = [
    pytest.mark.sampled(2),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),  # the interpreter, about NumPy
]
FEW = Sizes(tokens=3, experts=5, top_k=2, hidden=12, inner=10)


@pytest.fixture(autouse=True)
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Every case runs by vectors."""
    from moefuse.kernels.triton.provide import extended, lora_vectors

    count, run = [0], lora_vectors.experts

    def counted(*args: Any) -> Tensor:
        count[0] += 1
        return run(*args)

    (vectors,) = (k for k in extended.KERNELS if k.run is run)
    monkeypatch.setattr(extended, "KERNELS", [vectors._replace(run=counted), *(k for k in extended.KERNELS if k is not vectors)])
    with interpreted(extended, ("experts_extended",)):
        yield count
    assert count[0]


def check(args: list[Any], tolerance: float, **options: Any) -> None:
    with torch.no_grad():
        found, exact = ours(args, **options), merged(moved(args, torch.float64), **options)
    assert found.isfinite().all()
    assert float((found.double() - exact).norm()) <= tolerance * float(exact.norm())


@pytest.mark.parametrize("stacked", [True, False], ids=("stacked", "list"))
@pytest.mark.parametrize("on_input", [False, True], ids=("output", "input"))
@pytest.mark.parametrize("gating", ["merged", "interleaved", "separate", "plain"])
def test_values(gating: str, on_input: bool, stacked: bool) -> None:
    args = arguments(gating, torch.float64, torch.float64, stacked=stacked, sizes=FEW)
    check(args, 1e-12, gating=gating, weight_on_input=on_input)


@pytest.mark.parametrize("up_first", [False, True])
def test_halves_in_either_order(up_first: bool) -> None:
    """The factor has the order of the weight's rows."""
    check(arguments("merged", torch.float64, torch.float64, sizes=FEW), 1e-12, gating="merged", up_first=up_first)


@pytest.mark.parametrize("rank", [1, 3, 16, 20, 70])
def test_ranks(rank: int) -> None:
    """Of one, odd, a whole block, and of several blocks; more than the inner size."""
    check(arguments("merged", torch.float32, torch.float32, rank=rank, sizes=FEW), 1e-5)


@pytest.mark.parametrize("of", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_factors_in_a_dtype_of_their_own(dtype: torch.dtype, of: torch.dtype) -> None:
    check(arguments("merged", dtype, of, sizes=FEW), 1e-5 if dtype == torch.float32 else 2e-3)


def test_experts_as_the_fastest_dimension() -> None:
    """B of PEFT's stacked experts: [out, r, E] in memory."""
    args = arguments("merged", torch.float32, torch.float32, sizes=FEW)
    for i in (10, 14):
        args[i] = [t.detach().permute(1, 2, 0).contiguous().permute(2, 0, 1) for t in args[i]]
    check(args, 1e-5)


def test_inputs_as_the_slowest_dimension() -> None:
    """Weights and factors that are stored [E, in, out]: blocks have many outputs, and inputs are not shared out."""
    args = arguments("merged", torch.float32, torch.float32, sizes=Sizes(1, 5, 2, 64, 32))
    for i in (3, 5, 9, 10, 13, 14):
        args[i] = [t.detach().transpose(1, 2).contiguous().transpose(1, 2) for t in args[i]]
    check(args, 1e-5)


@pytest.mark.parametrize("which", range(3))
def test_one_term_alone(which: int) -> None:
    args = arguments("separate", torch.float32, torch.float32, sizes=FEW)
    args[9:] = [part if i // 2 == which else [] for i, part in enumerate(args[9:])]
    check(args, 1e-5, gating="separate")


def test_rows_of_nobody() -> None:
    """An id of no expert adds nothing, and what memory held there is not read."""
    args = arguments("merged", torch.float32, torch.float32, sizes=FEW)
    args[1] = torch.full_like(args[1], FEW.experts)
    with torch.no_grad():
        assert not ours(args).any()


def test_the_same_as_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many rows take tiles; neither form rounds what the other one does not, in float32."""
    from moefuse.kernels.triton.provide import lora_vectors

    args = arguments("interleaved", torch.float32, torch.float32, sizes=FEW)
    with torch.no_grad():
        few = ours(args, gating="interleaved")
        monkeypatch.setattr(lora_vectors, "blocks_of", lambda call: None)
        many = torch.ops.moefuse.experts_extended(*args, scales=SCALES, gating="interleaved")
    torch.testing.assert_close(few, many, rtol=1e-5, atol=1e-5)
