"""Tiny mixture-of-experts models of transformers: real classes, random weights, two layers, eight experts, top-2.

``build("mixtral")`` returns an eval-mode float32 model whose weights are large enough that every expert matters in the output (the
default initialisation makes them vanish beside the residual stream). ``tokens(2, 8)`` makes inputs for it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.zoo.families import FAMILIES, LAYERS

HIDDEN, EXPERTS, TOP_K, VOCAB = 64, 8, 2, 128

# One value for every spelling of the same idea; a config gets only the names that it knows.
SIZES: dict[str, Any] = {
    # the model
    **dict.fromkeys(("vocab_size",), VOCAB),
    **dict.fromkeys(("hidden_size", "d_model"), HIDDEN),
    **dict.fromkeys(("num_hidden_layers", "n_layers", "num_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_heads"), 4),
    **dict.fromkeys(("max_position_embeddings", "model_max_length", "max_seq_len"), 128),
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    **dict.fromkeys(("sliding_window", "sliding_window_size"), 8),
    # experts
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), EXPERTS),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"), TOP_K),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("n_group", "num_expert_group"), 2),
    "topk_group": 1,
    "norm_topk_prob": True,
    "moe_renormalize": True,
    **dict.fromkeys(("intermediate_size", "intermediate_size_mlp", "dense_intermediate_size", "ffn_hidden_size"), 96),
    **dict.fromkeys(
        (
            "moe_intermediate_size expert_ffn_hidden_size shared_expert_intermediate_size shared_experts_intermediate_size "
            "shared_intermediate_size share_expert_dim moe_shared_expert_intermediate_size"
        ).split(),
        48,
    ),
    "moe_hidden_size": 32,
    # every layer has experts
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index", "expert_layer_offset"), 0),
    **dict.fromkeys(("decoder_sparse_step", "expert_layer_period"), 1),
    "moe_layer_end_index": LAYERS - 1,
    "mlp_only_layers": [],
    # latent, indexed and linear attention
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "index_topk": 4,
    "index_head_dim": 16,
    "index_n_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    # no random numbers: two runs would not be comparable
    **dict.fromkeys(("router_jitter_noise", "input_jitter_noise", "attention_dropout", "hidden_dropout"), 0.0),
}


def make_config(name: str, **changes: Any) -> Any:
    """The family's tiny config; ``changes`` win over everything."""
    family = FAMILIES[name]
    config_class = model_class(name).config_class
    default = dict(config_class().__dict__)
    generation = family.old if major() == "4" else family.new
    absent = {key for key in ("sliding_window", "sliding_window_size", "q_lora_rank") if default.get(key, 0) is None}
    known = {key: value for key, value in SIZES.items() if key in default and key not in absent}
    if "qk_rope_head_dim" in default:  # latent attention: one key head for each query head, whose width follows from other settings
        known["num_key_value_heads"] = known["num_attention_heads"]
        known.pop("head_dim", None)
    return config_class(**known | _by_layer(default) | family.config | generation | changes)


def _by_layer(default: dict[str, Any]) -> dict[str, Any]:
    """Lists with one item for each layer: experts in every layer, and of everything else the first kinds that there are."""
    out = {}
    for key in ("layer_types", "mlp_layer_types", "indexer_types"):
        if isinstance(default.get(key), list | tuple) and default[key]:
            kinds = [kind for kind in dict.fromkeys(default[key]) if (key, kind) != ("mlp_layer_types", "dense")]
            out[key] = ["full"] * LAYERS if key == "indexer_types" else (kinds * LAYERS)[:LAYERS]
    return out


def major() -> str:
    """``"4"`` or ``"5"``."""
    import transformers

    return transformers.__version__.partition(".")[0]


def model_class(name: str) -> Any:
    """The transformers class of a family; skips the test when the installed transformers does not have it."""
    folder = FAMILIES[name].folder or name
    module = pytest.importorskip(f"transformers.models.{folder.replace('/', '.')}.modeling_{folder.rpartition('/')[2]}")
    return getattr(module, FAMILIES[name].model)


def build(name: str, *, seed: int = 0, experts_implementation: str | None = None, **changes: Any) -> Any:
    """A tiny float32 model of the family in eval mode, the same for the same seed."""
    config = make_config(name, **changes)
    torch.manual_seed(seed)
    chosen = {} if experts_implementation is None else {"experts_implementation": experts_implementation}
    model = model_class(name)._from_config(config, **chosen).eval()
    _scale_up(model, seed)
    return model


@torch.no_grad()
def _scale_up(model: nn.Module, seed: int) -> None:
    """Weights of about unit gain and biases that are not zero, so that an error in one expert shows in the output."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2 or not bool(torch.isfinite(parameter).all()):
            parameter.normal_(0.0, 0.1, generator=generator)
        elif name.endswith("bias"):
            parameter.normal_(0.0, 0.05, generator=generator)
    for name, buffer in model.named_buffers():
        if name.endswith("bias"):  # that of a router may be a buffer
            buffer.normal_(0.0, 0.05, generator=generator)


def tokens(batch: int = 2, length: int = 8, seed: int = 0) -> Tensor:
    """Token ids that avoid the special ones."""
    return torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def inputs(name: str, batch: int = 2, length: int = 8, seed: int = 0) -> dict[str, Any]:
    """What a family takes: token ids or embeddings, as keyword arguments."""
    family = FAMILIES[name]
    out: dict[str, Any] = {"attention_mask": torch.ones(batch, length, dtype=torch.int64)} if family.masked else {}
    if family.inputs == "pair":
        behind = {"decoder_input_ids": tokens(batch, length, seed + 1)}
        behind |= {"decoder_attention_mask": torch.ones(batch, length, dtype=torch.int64)} if family.masked else {}
        return out | behind | {"input_ids": tokens(batch, length, seed)}
    if family.inputs == "ids":
        return out | {"input_ids": tokens(batch, length, seed)}
    generator = torch.Generator().manual_seed(seed)
    if family.inputs == "images":
        return {"pixel_values": torch.randn(2, 3, 32, 32, generator=generator), "dataset_index": torch.tensor([0, 1])}
    if family.inputs == "patches":
        return {"pixel_values": torch.randn(16, 48, generator=generator), "grid_thw": torch.tensor([[1, 4, 4]])}
    return out | {"inputs_embeds": torch.randn(batch, length, HIDDEN, generator=torch.Generator().manual_seed(seed))}


def hidden(model: nn.Module, ids: Tensor | None = None, **kwargs: Any) -> Tensor:
    """The main output of a model: logits, the last hidden state of a headless one, or the feature map of a backbone."""
    cache = {} if "pixel_values" in kwargs else {"use_cache": False}
    out = model(**({} if ids is None else {"input_ids": ids}), **cache, **kwargs)
    found = (getattr(out, name, None) for name in ("logits", "last_hidden_state", "feature_maps"))
    first = next(value for value in found if value is not None)
    return first[-1] if isinstance(first, tuple) else first  # type: ignore[no-any-return]
