"""Which kernel computes a call: tables of kernels, each with what it refuses and the rows of an expert for which it is the best.

The tables are ``extended.KERNELS`` (experts whose weights are held in few bits or have low-rank terms) and ``coded_products.KERNELS`` (one
product with weights in few bits). :func:`choose` takes the first kernel whose range has the call's rows and that refuses nothing;
``python -m moefuse doctor`` prints them. The last of a table takes every call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

REST = math.inf


class Kernel(NamedTuple):
    """One way to compute a call.

    Attributes:
        name: for reports and tests.
        refusal: why it does not take a call; None: it does. Looks at devices, dtypes and sizes, never at data.
        rows: mean rows of an expert from which and up to which (included) it is the best of those that take a call.
        run: computes the call.
    """

    name: str
    refusal: Callable[..., str | None]
    rows: tuple[float, float]
    run: Callable[..., Any]

    def answer(self, mean: float, *call: Any) -> str | None:
        """Why a call with so many rows for an expert is not computed so; None: it may be."""
        least, most = self.rows
        return self.refusal(*call) if least <= mean <= most else f"for {least:g} to {most:g} rows of an expert"


def choose(kernels: Sequence[Kernel], mean: float, *call: Any) -> Kernel:
    """The first kernel that takes a call; ``mean``: rows of an expert."""
    return next(kernel for kernel in kernels if kernel.answer(mean, *call) is None)


def answers(kernels: Sequence[Kernel], mean: float, *call: Any) -> dict[str, str | None]:
    """What each kernel says of a call."""
    return {kernel.name: kernel.answer(mean, *call) for kernel in kernels}


def lines(kernels: Sequence[Kernel]) -> list[str]:
    """The table, a line for each kernel in the order in which they are asked."""
    return [f"{k.name}: {_range(*k.rows)}" for k in kernels]


def _range(least: float, most: float) -> str:
    if most == REST:
        return f"from {least:g} rows of an expert on" if least else "any number of rows"
    return f"up to {most:g} rows of an expert"
