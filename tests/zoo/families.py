"""The mixture-of-experts families of transformers, and what a tiny model of each needs beyond ``tiny.SIZES``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

LAYERS = 2


@dataclass(frozen=True)
class Family:
    """Where a model class lives and what its tiny config needs.

    Attributes:
        model: name of the model class.
        config: settings that win over ``tiny.SIZES``; ``old`` and ``new`` are for transformers 4 and 5 only.
        folder: folder of the family in ``transformers.models``; the family's name if empty.
        layers: number of expert layers that a forward pass runs.
        registry: whether the experts class is decorated with ``use_experts_implementation`` (transformers 5).
        since: first release of transformers in which that is so, or whose code traces in one graph without capture.
        loops: major releases in which all that breaks the graph is a loop over experts, or nothing: one graph with capture.
        inputs: ``"ids"``, ``"embeds"``, ``"images"``, ``"patches"``, or ``"pair"`` for token ids of an encoder and a decoder.
        alone: why nothing of it is fused, where that is for the better.
        masked: whether the model needs an attention mask where there is nothing to mask.
    """

    model: str
    config: dict[str, Any] = field(default_factory=dict)
    folder: str = ""
    old: dict[str, Any] = field(default_factory=dict)
    new: dict[str, Any] = field(default_factory=dict)
    layers: int = LAYERS
    registry: bool = True
    since: str = "5"
    loops: tuple[str, ...] = ("4", "5")
    inputs: str = "ids"
    alone: str = ""
    masked: bool = False


def _rope(**settings: Any) -> dict[str, Any]:
    """Rotary settings under the name of each generation."""
    both = {"rope_type": "default", **settings}
    return {"old": {"rope_scaling": both}, "new": {"rope_parameters": {"rope_theta": 1e4, **both}}}


_FIVE = ("5",)
_MAMBA = {"ssm_state_size": 16, "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 1, "chunk_size": 8, "use_mamba_kernels": False}
_NEMOTRON = _MAMBA | {"layers_block_type": ["attention", "moe"]}
_SLIDING = {"layer_types": ["sliding_attention", "full_attention"]}
_HYBRID = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 8, "mamba_n_groups": 1}
_MROPE = _rope(mrope_section=[3, 3, 2])
_DBRX = {"ffn_hidden_size": 96, "moe_num_experts": 8, "moe_top_k": 2}

_SPARSE_PAIR = {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "num_layers": 1, "num_decoder_layers": 1}

FAMILIES: dict[str, Family] = {
    "afmoe": Family("AfmoeForCausalLM", _SLIDING),
    "aria": Family("AriaTextForCausalLM", since="5.23", loops=("4", "5.23")),
    "axk1": Family("AXK1ForCausalLM"),
    "axk2": Family("AXK2ForCausalLM"),
    "bailing_hybrid": Family("BailingHybridForCausalLM"),
    "beam": Family("BeamForCausalLM"),
    "cohere2_moe": Family("Cohere2MoeForCausalLM"),
    "dbrx": Family(
        "DbrxForCausalLM",
        {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0}, "resid_pdrop": 0.0, "emb_pdrop": 0.0},
        old={"ffn_config": _DBRX},
        new={"ffn_config": _DBRX | {"hidden_size": 64}},
        registry=False,
    ),
    "deepseek_ocr2": Family("DeepseekOcr2TextModel", {"mlp_layer_types": ["sparse"] * LAYERS}),
    "deepseek_v2": Family("DeepseekV2ForCausalLM"),
    "deepseek_v2_group": Family("DeepseekV2ForCausalLM", {"topk_method": "group_limited_greedy"}, "deepseek_v2"),
    "deepseek_v3": Family("DeepseekV3ForCausalLM"),
    "deepseek_v32": Family("DeepseekV32ForCausalLM"),
    "deepseek_v4": Family("DeepseekV4ForCausalLM"),
    "diffusion_gemma": Family("DiffusionGemmaEncoderTextModel"),
    "doge": Family(
        "DogeForCausalLM",
        {"is_moe": True, "num_experts": 16},
        registry=False,
        loops=(),
        alone="an expert is one vector in and one out: two dot products of gathered rows per slot, which no grouped product makes faster",
    ),
    "dots1": Family("Dots1ForCausalLM"),
    "dots3_note": Family("Dots3NoteForCausalLM", {"num_key_value_heads": 4}),
    "dots3_note_vision": Family(
        "Dots3NoteVisionModel",
        {"adapter_in_dim": 64, "adapter_out_dim": 64, "patch_size": 4, "mlp_layer_types": ["sparse"] * LAYERS},
        "dots3_note",
        loops=(),
        inputs="patches",
    ),
    "ernie4_5_moe": Family("Ernie4_5_MoeForCausalLM"),
    "ernie4_5_vl_moe": Family(
        "Ernie4_5_VLMoeTextModel",
        {"moe_intermediate_size": [48, 32], "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2]}},
    ),
    "exaone_moe": Family("ExaoneMoeForCausalLM"),
    "flex_olmo": Family("FlexOlmoForCausalLM"),
    "flint": Family("FlintForCausalLM"),
    "gemma4": Family("Gemma4ForCausalLM", {"enable_moe_block": True, "vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 16}),
    "glm4_moe": Family("Glm4MoeForCausalLM"),
    "glm4_moe_lite": Family("Glm4MoeLiteForCausalLM"),
    "glm4v_moe": Family("Glm4vMoeTextModel", **_rope(mrope_section=[2, 1, 1], partial_rotary_factor=0.5), masked=True),
    "glm5_next": Family("Glm5NextTextModel", {"num_key_value_heads": 4, "qk_rope_head_dim": 0, "index_kpool": 2}, loops=()),
    "glm_moe_dsa": Family("GlmMoeDsaForCausalLM"),
    "gpt_oss": Family("GptOssForCausalLM", _SLIDING),
    "gptsan_japanese": Family(
        "GPTSanJapaneseForConditionalGeneration",
        {"d_ff": 96, "d_ext": 96, "d_spout": 16, "num_switch_layers": 2, "num_ext_layers": 0, "num_heads": 4, "expert_capacity": 2},
        "deprecated/gptsan_japanese",
        registry=False,
        loops=(),
    ),
    "granitemoe": Family("GraniteMoeForCausalLM"),
    "granitemoe_swa": Family("GraniteMoeSWAForCausalLM"),
    "granitemoehybrid": Family(
        "GraniteMoeHybridForCausalLM",
        _HYBRID,
        old={"layer_types": ["mamba", "attention"]},
        new={"layer_types": ["linear_attention", "full_attention"]},
        loops=_FIVE,
    ),
    "granitemoeshared": Family("GraniteMoeSharedForCausalLM"),
    "hunyuan_v1_moe": Family("HunYuanMoEV1ForCausalLM"),
    "hy_v3": Family("HYV3ForCausalLM"),
    "hy_v4": Family("HYV4ForCausalLM"),
    "hy_v4_vl": Family("HYV4VLTextModel", **_rope(mrope_section=[1, 1, 2])),
    "inkling": Family("InklingForCausalLM"),
    "inkling2": Family("Inkling2ForCausalLM"),
    "inkling2_loop": Family(
        "Inkling2LoopForCausalLM",
        {"loop_layer_index_start": 1, "loop_layer_index_end": 2, "n_layers_per_attn_res_block": 1, "loop_num_passes": 2},
        layers=LAYERS + 1,
    ),
    "jamba": Family(
        "JambaForCausalLM",
        {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False, "mamba_dt_rank": 8},
        loops=_FIVE,
    ),
    "jetmoe": Family("JetMoeForCausalLM", {"kv_channels": 16}, layers=3 * LAYERS, registry=False),
    "kimi_linear": Family("KimiLinearForCausalLM"),
    "kolibri1": Family("Kolibri1ForCausalLM"),
    "laguna": Family("LagunaForCausalLM"),
    "lara_mini": Family("LaraMiniForCausalLM"),
    "lfm2_moe": Family("Lfm2MoeForCausalLM", {"layer_types": ["conv", "full_attention"]}),
    "llama4": Family("Llama4ForCausalLM", {"moe_layers": [0, 1], "layer_types": ["full_attention"] * 2}, registry=False),
    "longcat_flash": Family("LongcatFlashForCausalLM", {"zero_expert_num": 4, "head_dim": 8}, registry=False),
    "mellum": Family("MellumForCausalLM"),
    "mimo_v2_flash": Family("MiMoV2FlashForCausalLM"),
    "minimax": Family("MiniMaxForCausalLM"),
    "minimax_m2": Family("MiniMaxM2ForCausalLM"),
    "minimax_m3_vl": Family("MiniMaxM3VLForCausalLM"),
    "mistral4": Family("Mistral4ForCausalLM"),
    "mistral_large4": Family("MistralLarge4TextModel"),
    "mixtral": Family("MixtralForCausalLM"),
    "muse_spark": Family("MuseSparkTextModel", _SLIDING),
    "nemotron_h": Family("NemotronHForCausalLM", _NEMOTRON, layers=1),
    "nemotron_h_latent": Family("NemotronHForCausalLM", _NEMOTRON | {"moe_latent_size": 32}, "nemotron_h", layers=1),
    "nllb_moe": Family(
        "NllbMoeForConditionalGeneration",
        {
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_sparse_step": 1,
            "decoder_sparse_step": 1,
            "expert_capacity": 2,
            **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 96),
            **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
            **dict.fromkeys(("dropout", "activation_dropout", "moe_token_dropout", "encoder_layerdrop", "decoder_layerdrop"), 0.0),
        },
        registry=False,
        loops=("5.23",),
        inputs="pair",
        masked=True,
    ),
    "olmoe": Family("OlmoeForCausalLM"),
    "openai_privacy_filter": Family("OpenAIPrivacyFilterForTokenClassification"),
    "phimoe": Family("PhimoeForCausalLM", loops=_FIVE),
    "qwen2_moe": Family("Qwen2MoeForCausalLM"),
    "qwen3_5_moe": Family("Qwen3_5MoeForCausalLM"),
    "qwen3_moe": Family("Qwen3MoeForCausalLM"),
    "qwen3_next": Family("Qwen3NextForCausalLM", loops=_FIVE),
    "qwen3_omni_thinker": Family("Qwen3OmniMoeThinkerTextModel", folder="qwen3_omni_moe", **_MROPE),
    "qwen3_omni_talker": Family(
        "Qwen3OmniMoeTalkerModel", {"shared_expert_intermediate_size": 48}, "qwen3_omni_moe", **_MROPE, inputs="embeds"
    ),
    "qwen3_vl_moe": Family("Qwen3VLMoeTextModel", **_MROPE),
    "qwen4_exp": Family(
        "Qwen4ExpForCausalLM",
        {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 4, "indexer_compress_ratio": 2},
        loops=(),
    ),
    "solar_open": Family("SolarOpenForCausalLM"),
    "step3p7": Family("Step3p7TextModel", {"sliding_window": 8, "num_sliding_attention_heads": 4}, registry=False),
    "switch_transformers": Family(
        "SwitchTransformersForConditionalGeneration",
        _SPARSE_PAIR | {"num_heads": 4, "d_kv": 16, "d_ff": 96, "dropout_rate": 0.0, "expert_capacity": 2},
        registry=False,
        loops=("5.23",),
        inputs="pair",
        masked=True,
    ),
    "unlimited_ocr": Family("UnlimitedOcrTextModel"),
    "vitpose_backbone": Family(
        "VitPoseBackbone",
        {"image_size": (32, 32), "patch_size": (16, 16), "num_experts": 4, "part_features": 16},
        registry=False,
        inputs="images",
    ),
    "zaya": Family("ZayaForCausalLM", {"num_experts_per_tok": 1, "router_hidden_size": 32}),
}
