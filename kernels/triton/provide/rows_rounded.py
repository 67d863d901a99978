"""Provider of ``moefuse::row_codes``."""

from __future__ import annotations

from torch import Tensor

from moefuse.kernels.triton.host import token_codes
from moefuse.kernels.triton.host.layout import DTYPES
from moefuse.kernels.triton.launch.recorded import recorded
from moefuse.ops.meaning.token_codes import Rounding


def supports(x: Tensor, rounding: Rounding) -> str | None:
    """None, or why no kernel rounds such tokens."""
    return None if x.dtype in DTYPES else f"no kernel for {x.dtype}"


@recorded
def row_codes(x: Tensor, rounding: Rounding) -> Tensor:
    """Of :func:`moefuse.ops.meaning.token_codes.packed`."""
    return token_codes.packed_rows(x, rounding)
