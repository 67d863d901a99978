"""moefuse as an experts implementation of transformers' float8 experts (``FP8Experts``).

Importing this module registers the name ``"moefuse"`` beside transformers' own implementations; ``import moefuse`` does it as soon as that
part of transformers is there::

    model = AutoModelForCausalLM.from_pretrained(path, experts_implementation="moefuse")

Weights stay as they are held, and activations are rounded as transformers' own kernels round them (``ops/meaning/token_codes.py``): for
each token and the inputs of a block, or the whole token where a weight has one scale, or by powers of two for 32 inputs where scales of
weights are such. It needs no kernel of the hub, and no ``torch.compile``. Tokens and routing weights have gradients, through the weights
that codes stand for; weights and scales have none, as in transformers.

Where gate and up have blocks of their own, because their width is no multiple of a block's, they are two projections. What cannot be run
exactly is an error that names the module and what it has.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from moefuse.integrations.transformers import NAME, _activation, _refuse, experts_forward
from moefuse.ops.meaning.encoding import MADE, POWERS, Encoding, Packing, Rounding
from moefuse.program import called

try:
    from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS, FP8Experts
except ImportError as error:
    raise ImportError(
        "moefuse.integrations.transformers_fp8 needs the registry of float8 experts of newer releases of transformers 5 "
        "(transformers.integrations.finegrained_fp8.ALL_FP8_EXPERTS_FUNCTIONS)"
    ) from error

_MX = 32
_STACK = 3
_FLOAT8, _BYTES = torch.float8_e4m3fn, (torch.float8_e8m0fnu, torch.uint8)
Held = tuple[Tensor, Tensor, str]
"""The storage of a projection, its scales, and how it is held."""


def fp8_experts_forward(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The forward of a module: ``hidden_states`` [T, H], ``top_k_index`` and ``top_k_weights`` [T, K]; returns [T, H].

    Raises:
        ExpertsModuleError: the op does not compute what the module does.
    """
    gated = bool(self.has_gate)
    if cast(Tensor, self.down_proj).element_size() > 1:
        return experts_forward(self, hidden_states, top_k_index, top_k_weights)
    if self.activation_scheme != "dynamic":
        raise _refuse(self, f"activation_scheme={self.activation_scheme!r}: scales of activations that are Parameters")
    activation, arguments = _body(self, gated)
    first = _projections(self, "gate_up_proj" if gated else "up_proj", 2 if gated else 1)
    (last,) = _projections(self, "down_proj", 1)
    parts = [*first, last]
    gating = "separate" if len(first) > 1 else "merged" if gated else "plain"
    stacks = [[storage] for storage, _, _ in parts]
    tokens, top_k = hidden_states.size(0), top_k_index.size(-1)
    called.ran(self, "experts_extended", hidden_states)
    out = torch.ops.moefuse.experts_extended(
        hidden_states, top_k_index.reshape(tokens, top_k), top_k_weights.reshape(tokens, top_k),
        stacks[0], stacks[1] if len(first) > 1 else [], stacks[-1], [], [], [], *([] for _ in range(6)),
        [scale for _, scale, _ in parts],
        encodings=[parts[0][2], parts[1][2] if len(first) > 1 else "", parts[-1][2]],
        activation=activation, activation_args=arguments, gating=gating,
    )  # fmt: skip
    return cast(Tensor, out)


def _body(module: nn.Module, gated: bool) -> tuple[str, list[float]]:
    """The op's activation, and its constants."""
    own = cast(Any, module)
    named = _activation(own.act_fn)
    if not gated:
        if named is None:
            raise _refuse(module, f"the op has no activation `{own.act_fn}`")
        return named, []
    if own._apply_gate.__func__ is not FP8Experts._apply_gate:
        raise _refuse(module, "it has an _apply_gate of its own")
    if getattr(own, "gate_softcap", None) is not None:  # 5.17 has none
        raise _refuse(module, "gate and up are capped by tanh (mlp_gate_softcap)")
    if own.swiglu_alpha is not None:
        return "swiglu_oai", [float(own.swiglu_alpha), float(own.swiglu_limit)]
    if named is None or (own.limit is not None and named != "silu"):
        raise _refuse(module, f"the op has no activation `{own.act_fn}`{'' if own.limit is None else ' with clamps'}")
    return (named, []) if own.limit is None else ("silu_clamp", [float(own.limit)])


def _projections(module: nn.Module, name: str, halves: int) -> list[Held]:
    """A projection as the op takes it: one, or gate and up where each has blocks of its own."""
    storage, scale = (getattr(module, part).detach() for part in (name, f"{name}_scale_inv"))
    if storage.dim() != _STACK or scale.dim() != _STACK:
        raise _refuse(module, f"`{name}` has shape {tuple(storage.shape)} and scales {tuple(scale.shape)}")
    bn, bk, encoding = _encoding(module, name, storage, scale)
    features, inputs = storage.shape[1], storage.shape[2] * (2 if storage.dtype == torch.int8 else 1)
    if bk and inputs % bk:
        raise _refuse(module, f"`{name}` has {inputs} inputs, no multiple of the {bk} that share a scale")
    half, (rows, columns) = features // halves, scale.shape[1:]
    whole, apart = (-(-n // bn) if bn else 1 for n in (features, half))
    if columns != (inputs // bk if bk else 1) or rows not in (whole, halves * apart):
        raise _refuse(module, f"`{name}` [{features}, {inputs}] has scales {[rows, columns]} for blocks {[bn, bk]}")
    if halves > 1 and bn and half % bn and whole == halves * apart:
        raise _refuse(module, f"`{name}`: a block of {bn} rows may belong to the gate alone, or reach from it into up")
    if rows == whole:
        return [(storage, scale, encoding)]
    return [(storage[:, i * half : (i + 1) * half], scale[:, i * apart : (i + 1) * apart], encoding) for i in range(halves)]


def _encoding(module: nn.Module, name: str, storage: Tensor, scale: Tensor) -> tuple[int, int, str]:
    """Blocks, and how a projection is held and its rows are rounded: as transformers' kernels choose by dtypes and sizes."""
    powers, packed = scale.dtype in _BYTES, storage.dtype == torch.int8
    if not powers and scale.dtype != torch.float32:
        raise _refuse(module, f"`{name}` has scales in {scale.dtype}")
    inputs = storage.shape[2] * (2 if packed else 1)
    if powers and scale.shape[1] == storage.shape[1] and scale.shape[2] * _MX == inputs:
        return 1, _MX, _text(1, _MX, powers, packed, True)
    if storage.dtype != _FLOAT8:
        raise _refuse(module, f"`{name}` is {storage.dtype} with scales {tuple(scale.shape)} in {scale.dtype}")
    block: Any = module.block_size
    bn, bk = (0, 0) if block is None else (int(block[0]), int(block[1]))
    return bn, bk, _text(bn, bk, powers, False, False)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _text(bn: int, bk: int, powers: bool, packed: bool, power: bool) -> str:
    """An encoding as the op takes it."""
    table, packing = (MADE["e2m1"], Packing(1, (0, 4))) if packed else ("e4m3", None)
    rounding = Rounding("e4m3", bk, power=power)
    return str(Encoding(table, (bn, bk), scale=POWERS if powers else "", packing=packing, activation=rounding))


ALL_FP8_EXPERTS_FUNCTIONS.register(NAME, fp8_experts_forward)
