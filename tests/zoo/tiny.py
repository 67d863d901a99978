"""Tiny mixture-of-experts models of transformers: real classes, random weights, two layers, eight experts, top-2.

``build("mixtral")`` returns an eval-mode float32 model whose weights are large enough that every expert matters in the output (the
default initialisation makes them vanish beside the residual stream). ``tokens(2, 8)`` makes inputs for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

LAYERS, HIDDEN, EXPERTS, TOP_K, VOCAB = 2, 64, 8, 2, 128

# One value for every spelling of the same idea; a config gets only the names that it knows.
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "intermediate_size_mlp": 96,
    "dense_intermediate_size": 96,
    "shared_expert_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 48,
    "moe_hidden_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "n_routed_experts": EXPERTS,
    "moe_num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "moe_topk": TOP_K,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "first_k_dense_replace": 0,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "sliding_window": 8,
}


@dataclass(frozen=True)
class Family:
    """Where a model class lives and what its tiny config needs beyond `SIZES`.

    Attributes:
        folder: folder of the family in ``transformers.models``.
        model: name of the model class.
        config: settings that win over `SIZES`.
        layers: number of layers with experts in the tiny model.
        registry: whether the experts class is decorated with ``use_experts_implementation``.
        since: first release of transformers in which that is so, or whose code traces in one graph.
    """

    folder: str
    model: str
    config: dict[str, Any] = field(default_factory=dict)
    layers: int = LAYERS
    registry: bool = True
    since: str = "5"


_LATENT_ATTENTION = {"num_key_value_heads": 4, "head_dim": 8}
_MAMBA = {"ssm_state_size": 16, "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 1, "chunk_size": 8, "use_mamba_kernels": False}
_SPARSE = {"mlp_layer_types": ["sparse"] * LAYERS}

FAMILIES: dict[str, Family] = {
    "aria": Family("aria", "AriaTextForCausalLM", since="5.23"),
    "deepseek_v3": Family("deepseek_v3", "DeepseekV3ForCausalLM", _LATENT_ATTENTION | _SPARSE),
    "glm4_moe": Family("glm4_moe", "Glm4MoeForCausalLM", _SPARSE),
    "gpt_oss": Family("gpt_oss", "GptOssForCausalLM", {"layer_types": ["sliding_attention", "full_attention"]}),
    "granitemoe": Family("granitemoe", "GraniteMoeForCausalLM"),
    "llama4": Family("llama4", "Llama4ForCausalLM", {"moe_layers": [0, 1], "layer_types": ["full_attention"] * 2}, registry=False),
    "minimax_m3_vl": Family("minimax_m3_vl", "MiniMaxM3VLForCausalLM"),
    "mixtral": Family("mixtral", "MixtralForCausalLM"),
    "muse_spark": Family("muse_spark", "MuseSparkTextModel", {"layer_types": ["sliding_attention", "full_attention"]}),
    "nemotron_h": Family("nemotron_h", "NemotronHForCausalLM", _MAMBA | {"layers_block_type": ["attention", "moe"]}, layers=1),
    "olmoe": Family("olmoe", "OlmoeForCausalLM"),
    "openai_privacy_filter": Family("openai_privacy_filter", "OpenAIPrivacyFilterForTokenClassification"),
    "phimoe": Family("phimoe", "PhimoeForCausalLM"),
    "qwen2_moe": Family("qwen2_moe", "Qwen2MoeForCausalLM"),
    "qwen3_moe": Family("qwen3_moe", "Qwen3MoeForCausalLM"),
}


def make_config(name: str, **changes: Any) -> Any:
    """The family's tiny config; ``changes`` win over everything."""
    family = FAMILIES[name]
    config_class = model_class(name).config_class
    default = config_class()
    known = {key for key in SIZES if key in default.__dict__}
    optional = {key for key in ("sliding_window", "q_lora_rank") if default.__dict__.get(key, 0) is None}
    return config_class(**{key: SIZES[key] for key in known - optional} | family.config | changes)


def model_class(name: str) -> Any:
    """The transformers class of a family; skips the test when the installed transformers does not have it."""
    family = FAMILIES[name]
    module = pytest.importorskip(f"transformers.models.{family.folder}.modeling_{family.folder}")
    return getattr(module, family.model)


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


def tokens(batch: int = 2, length: int = 8, seed: int = 0) -> Tensor:
    """Token ids that avoid the special ones."""
    return torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def hidden(model: nn.Module, ids: Tensor, **kwargs: Any) -> Tensor:
    """The main output of a model: logits, or the last hidden state of a headless one."""
    out = model(input_ids=ids, use_cache=False, **kwargs)
    return out.logits if getattr(out, "logits", None) is not None else out.last_hidden_state
