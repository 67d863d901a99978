"""moefuse as an experts implementation of Hugging Face transformers.

Importing this module registers the name ``"moefuse"``, so that it can be given wherever transformers takes one. ``import moefuse`` imports
it as soon as transformers is there, see `on_import`::

    import moefuse
    model = AutoModelForCausalLM.from_pretrained(path, experts_implementation="moefuse")
    model.set_experts_implementation("moefuse")

That replaces the experts of every class decorated with ``use_experts_implementation``, with or without ``torch.compile``. It needs no
recognition: the decorator's flags say what an experts module computes. ``torch.compile(model, backend="moefuse")`` needs no import of
this module and also covers classes that are not decorated.

What is computed equals transformers' own ``grouped_mm``: rows in the dtype of the weights, the module's own ``_apply_gate`` or
``act_fn``, the optional norm after each expert, the weighted sum in the dtype of the hidden states. Expert ids outside the module's
experts (the sentinels of expert parallelism) contribute nothing. A gate that is the default one around a known activation becomes one
fused op; any other gate runs as the user wrote it, between two grouped matrix products.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import moefuse.ops  # noqa: F401  (defines torch.ops.moefuse)
from moefuse.program import called

try:
    import transformers
except ImportError as error:
    raise ImportError(
        "moefuse.integrations.transformers needs the package transformers (5.0 or newer): pip install transformers"
    ) from error

try:
    from transformers import activations as hf_activations
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate
except ImportError as error:
    raise ImportError(
        "moefuse.integrations.transformers needs the experts registry of transformers 5.0 or newer "
        f"(transformers.integrations.moe); transformers {transformers.__version__} has none. "
        'torch.compile(model, backend="moefuse") works without it.'
    ) from error

NAME = "moefuse"


class ExpertsModuleError(RuntimeError):
    """An experts module that this implementation cannot honour exactly; the text names the module and the flag."""


def _refuse(module: nn.Module, what: str) -> ExpertsModuleError:
    return ExpertsModuleError(
        f'experts_implementation="{NAME}" cannot run {type(module).__module__}.{type(module).__qualname__}: {what}. '
        'Choose "grouped_mm", "batched_mm" or "eager" for this model with set_experts_implementation().'
    )


def _flag(module: nn.Module, name: str, default: bool) -> bool:
    """A flag of the decorator; older transformers set fewer of them."""
    return bool(getattr(module, name, default))


def _activation_table() -> tuple[tuple[object, str], ...]:
    """(class or function, name of the op's activation); gelu classes that choose a formula by an argument are read in `_activation`."""
    named = {
        "SiLUActivation": "silu",
        "NewGELUActivation": "gelu_tanh",
        "ReLUSquaredActivation": "relu2",
        "LinearActivation": "identity",
    }
    table: list[tuple[object, str]] = [(nn.SiLU, "silu"), (nn.ReLU, "relu"), (nn.Sigmoid, "sigmoid"), (nn.Tanh, "tanh"), (nn.Mish, "mish")]
    table += [(nn.Identity, "identity"), (F.silu, "silu"), (F.relu, "relu"), (F.gelu, "gelu"), (torch.relu, "relu")]
    table += [(torch.sigmoid, "sigmoid"), (torch.tanh, "tanh"), (F.sigmoid, "sigmoid"), (F.tanh, "tanh")]
    table += [(getattr(hf_activations, cls), name) for cls, name in named.items() if hasattr(hf_activations, cls)]
    return tuple(table)


_ACTIVATIONS = _activation_table()
_GELU = getattr(hf_activations, "GELUActivation", None)
_GELU_TANH = getattr(hf_activations, "GELUTanh", None)


def _observed(module: nn.Module) -> bool:
    """Whether calling the module does more than its class's forward: a hook, or a forward put on the instance (a hub kernel)."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return "forward" in module.__dict__ or any(len(h) > 0 for h in hooks)


def _activation(act_fn: Callable[[Tensor], Tensor]) -> str | None:
    """The op's name of an activation, by identity of its class or function; None when it must be called as it is."""
    if not isinstance(act_fn, nn.Module):
        for key, name in _ACTIVATIONS:
            if act_fn is key:
                return name
        return None
    if _observed(act_fn):
        return None
    kind = type(act_fn)
    if kind is nn.GELU:
        return "gelu_tanh" if cast(nn.GELU, act_fn).approximate == "tanh" else "gelu"
    if kind is _GELU:
        return "gelu" if act_fn.act is F.gelu else None
    if kind is _GELU_TANH:
        return "gelu_tanh"
    for key, name in _ACTIVATIONS:
        if kind is key:
            return name
    return None


def _fused_activation(module: nn.Module) -> str | None:
    """The activation of a module that the fused op computes exactly, else None."""
    if _flag(module, "has_post_expert_norm", False):
        return None
    if _flag(module, "has_gate", True):
        default_gate = _gates_by_default(module)
        if not _flag(module, "is_concatenated", True) and default_gate:
            raise _refuse(module, "is_concatenated=False, but its _apply_gate is the default one, which splits gate and up as two halves")
        if not default_gate:
            return None
    return _activation(cast("Callable[[Tensor], Tensor]", module.act_fn))


def _gates_by_default(module: nn.Module) -> bool:
    """Whether gate and up become one as in most models.

    Not through the module's class: where a parametrization is registered that is another one, which Dynamo does not see. And not with a
    default for ``__func__``: Dynamo answers with that.
    """
    try:
        return cast(Any, module)._apply_gate.__func__ is _default_apply_gate
    except AttributeError:
        return False


def _tensor(module: nn.Module, name: str, ndim: int) -> Tensor:
    try:
        value = getattr(module, name)
    except AttributeError:  # not a default: for that Dynamo asks the module first, which runs a parametrization while it traces it
        value = None
    if not isinstance(value, Tensor):
        flags = f"has_gate={_flag(module, 'has_gate', True)}, has_bias={_flag(module, 'has_bias', False)}"
        raise _refuse(module, f"its flags ({flags}) promise a tensor `{name}`, which it does not have")
    if hasattr(value, "device_mesh"):
        raise _refuse(module, f"`{name}` is a DTensor; expert parallelism of transformers hands local shards to the experts")
    if value.dim() != ndim or not value.dtype.is_floating_point or value.dtype.itemsize < 2:
        raise _refuse(module, f"`{name}` is {value.dtype} with shape {tuple(value.shape)}, expected {ndim}-D floating point")
    return value


def _projection(module: nn.Module, name: str) -> tuple[Tensor, list[Tensor]]:
    """One projection as an [E, out, in] view, and its bias as a list of none or one."""
    weight = _tensor(module, name, 3)
    if _flag(module, "is_transposed", False):
        weight = weight.transpose(-2, -1)
    return weight, [_tensor(module, f"{name}_bias", 2)] if _flag(module, "has_bias", False) else []


def experts_forward(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The forward of an experts module: ``hidden_states`` [T, H], ``top_k_index`` and ``top_k_weights`` [T, K]; returns [T, H]."""
    gated = _flag(self, "has_gate", True)
    w_in, b_in = _projection(self, "gate_up_proj" if gated else "up_proj")
    w_out, b_out = _projection(self, "down_proj")
    num_tokens, top_k = hidden_states.size(0), top_k_index.size(-1)
    ids, weights = top_k_index.reshape(num_tokens, top_k), top_k_weights.reshape(num_tokens, top_k)
    x, out_dtype = hidden_states.to(w_in.dtype), hidden_states.dtype
    ops: Any = torch.ops.moefuse

    activation = _fused_activation(self)
    called.ran(self, "experts" if activation is not None else "grouped_linear", x)
    if activation is not None:
        gating = "merged" if gated else "plain"
        fused = ops.experts(
            x, ids, weights, [w_in], [], [w_out], b_in, [], b_out, activation=activation, gating=gating, out_dtype=out_dtype
        )
        return cast(Tensor, fused)

    gate = cast("Callable[[Tensor], Tensor]", self._apply_gate if gated else self.act_fn)
    rows, order, offsets = ops.permute(x, ids, w_in.size(0))
    rows = gate(ops.grouped_linear(rows, offsets, [w_in], b_in))
    rows = ops.grouped_linear(rows.to(w_out.dtype), offsets, [w_out], b_out)
    if _flag(self, "has_post_expert_norm", False):
        rows = cast("Callable[[Tensor], Tensor]", self.post_expert_norm)(rows)
    return cast(Tensor, ops.combine(rows, weights, order, offsets, top_k, out_dtype))


ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
