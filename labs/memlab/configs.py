"""The labs' models as ``config.json``: sizes from each model's file on Hugging Face, written by hand.

Weights are never needed (``--load-format dummy``), so nothing is downloaded. A name that ends in ``-N-layers`` is the
first N layers of a model that is too large to start in half a minute.
"""

from memlab.errors import ShapeError

_COMMON = {"rms_norm_eps": 1e-5, "bos_token_id": 0, "eos_token_id": 1}


def _decoder(
    architecture, model_type, layers, hidden, intermediate, heads, kv_heads, head_dim, vocabulary, length, **more
) -> dict:
    """The fields that every decoder's ``config.json`` has; ``more`` are those of its kind."""
    return {
        **more,
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocabulary,
        "max_position_embeddings": length,
        "tie_word_embeddings": more.get("tie_word_embeddings", False),
        "torch_dtype": "bfloat16",
        "hidden_act": more.get("hidden_act", "silu"),
        "rope_theta": 500000.0,
        **_COMMON,
    }


def _llama(*sizes, **more) -> dict:
    return _decoder("LlamaForCausalLM", "llama", *sizes, **more)


def _qwen2(*sizes, **more) -> dict:
    return _decoder("Qwen2ForCausalLM", "qwen2", *sizes, **more)


def _gemma(architecture, model_type, *sizes, **more) -> dict:
    activation = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
    return _decoder(architecture, model_type, *sizes, tie_word_embeddings=True, **activation, **more)


def _deepseek(version: int, layers: int, hidden, intermediate, heads, vocabulary, **more) -> dict:
    latent = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    yarn = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
    yarn |= {"mscale": 0.707, "mscale_all_dim": 0.707} if version == 2 else {"mscale": 1.0, "mscale_all_dim": 1.0}
    sizes = (layers, hidden, intermediate, heads, heads, 192, vocabulary, 163840)
    name, kind = f"DeepseekV{version}ForCausalLM", f"deepseek_v{version}"
    config = _decoder(name, kind, *sizes, **latent, rope_scaling=yarn, moe_layer_freq=1, attention_bias=False, **more)
    del config["head_dim"]  # the file has none: the parts of a head are named above
    return config


_GPT_OSS_20B = _decoder(
    "GptOssForCausalLM", "gpt_oss", 24, 2880, 2880, 64, 8, 64, 201088, 131072,
    num_local_experts=32, num_experts_per_tok=4, sliding_window=128, attention_bias=True, swiglu_limit=7.0,
    rope_scaling={"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0,
                  "beta_slow": 1.0, "truncate": False},
    layer_types=["sliding_attention", "full_attention"] * 12,
)  # fmt: skip

_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm",
        "modules_to_not_convert": None}  # fmt: skip
_W8A8 = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "ignore": ["lm_head"],
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False},
            "input_activations": {
                "num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True,
            },
        }
    },
}  # fmt: skip

LAB_CONFIGS = {
    "llama-3.1-8b": _llama(32, 4096, 14336, 32, 8, 128, 128256, 131072),
    "llama-2-13b": _llama(40, 5120, 13824, 40, 40, 128, 32000, 4096),
    "llama-2-70b-rank-of-8": _llama(80, 8192, 3584, 8, 1, 128, 4000, 4096),
    "tiny-llama": _llama(4, 256, 1024, 8, 4, 32, 4096, 8192),
    "qwen2.5-0.5b": _qwen2(24, 896, 4864, 14, 2, 64, 151936, 32768, tie_word_embeddings=True),
    "mistral-7b-v0.1": _decoder(
        "MistralForCausalLM", "mistral", 32, 4096, 14336, 32, 8, 128, 32000, 32768, sliding_window=4096
    ),
    "qwen2.5-7b": _qwen2(28, 3584, 18944, 28, 4, 128, 152064, 32768),
}

# Shapes of every kind that the planner counts: its predictions are held to records of them.
PLANNER_CONFIGS = {
    "llama-2-7b": _llama(32, 4096, 11008, 32, 32, 128, 32000, 4096),
    "llama-3.1-8b-fp8": _llama(32, 4096, 14336, 32, 8, 128, 128256, 131072, quantization_config=_W8A8),
    "qwen2.5-7b-awq": _qwen2(28, 3584, 18944, 28, 4, 128, 152064, 32768, quantization_config=_AWQ),
    "qwen2.5-7b-gptq": _qwen2(
        28, 3584, 18944, 28, 4, 128, 152064, 32768,
        quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True,
                             "damp_percent": 0.01, "static_groups": False, "true_sequential": True},
    ),
    "qwen3-4b": _decoder(
        "Qwen3ForCausalLM", "qwen3", 36, 2560, 9728, 32, 8, 128, 151936, 40960, tie_word_embeddings=True,
        attention_bias=False,
    ),
    "granite-3.1-2b": _decoder(
        "GraniteForCausalLM", "granite", 40, 2048, 8192, 32, 8, 64, 49155, 131072, tie_word_embeddings=True,
        attention_multiplier=0.015625, embedding_multiplier=12.0, logits_scaling=8.0, residual_multiplier=0.22,
        attention_bias=False, mlp_bias=False,
    ),
    "gemma-2-9b": _gemma(
        "Gemma2ForCausalLM", "gemma2", 42, 3584, 14336, 16, 8, 256, 256000, 8192, sliding_window=4096,
        query_pre_attn_scalar=256, attn_logit_softcapping=50.0, final_logit_softcapping=30.0,
    ),
    "gemma-3-1b": _gemma(
        "Gemma3ForCausalLM", "gemma3_text", 26, 1152, 6912, 4, 1, 256, 262144, 32768, sliding_window=512,
        sliding_window_pattern=6, rope_local_base_freq=10000, query_pre_attn_scalar=256,
    ),
    "gemma-3-12b-text": _gemma(
        "Gemma3ForCausalLM", "gemma3_text", 48, 3840, 15360, 16, 8, 256, 262208, 131072, sliding_window=1024,
        sliding_window_pattern=6, rope_local_base_freq=10000, query_pre_attn_scalar=256,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    ),
    "mixtral-8x7b-4-layers": _decoder(
        "MixtralForCausalLM", "mixtral", 4, 4096, 14336, 32, 8, 128, 32000, 32768, num_local_experts=8,
        num_experts_per_tok=2, sliding_window=None, router_aux_loss_coef=0.02,
    ),
    "qwen1.5-moe-a2.7b-12-layers": _decoder(
        "Qwen2MoeForCausalLM", "qwen2_moe", 12, 2048, 5632, 16, 16, 128, 151936, 8192, num_experts=60,
        num_experts_per_tok=4, moe_intermediate_size=1408, shared_expert_intermediate_size=5632,
        decoder_sparse_step=1, mlp_only_layers=[], norm_topk_prob=False, use_sliding_window=False,
    ),
    "qwen3-30b-a3b-12-layers": _decoder(
        "Qwen3MoeForCausalLM", "qwen3_moe", 12, 2048, 6144, 32, 4, 128, 151936, 40960, num_experts=128,
        num_experts_per_tok=8, moe_intermediate_size=768, decoder_sparse_step=1, mlp_only_layers=[],
        norm_topk_prob=True, attention_bias=False,
    ),
    "gpt-oss-20b-12-layers": _GPT_OSS_20B | {
        "num_hidden_layers": 12, "layer_types": ["sliding_attention", "full_attention"] * 6,
    },
    "gpt-oss-20b": _GPT_OSS_20B | {
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens",
                                       "lm_head"],
        },
    },
    "llama-4-scout-4-layers": _decoder(
        "Llama4ForCausalLM", "llama4_text", 4, 5120, 8192, 40, 8, 128, 202048, 131072, intermediate_size_mlp=16384,
        num_local_experts=16, num_experts_per_tok=1, interleave_moe_layer_step=1, attention_chunk_size=8192,
        no_rope_layers=[1, 1, 1, 0], use_qk_norm=True, attention_bias=False, attn_temperature_tuning=False,
    ),
    "deepseek-v2-lite-12-layers": _deepseek(
        2, 12, 2048, 10944, 16, 102400, q_lora_rank=None, n_routed_experts=64, n_shared_experts=2,
        num_experts_per_tok=6, moe_intermediate_size=1408, first_k_dense_replace=1, n_group=1, topk_group=1,
        topk_method="greedy", scoring_func="softmax", norm_topk_prob=False, routed_scaling_factor=1.0,
    ),
    "deepseek-v3-4-layers": _deepseek(
        3, 4, 7168, 18432, 128, 129280, q_lora_rank=1536, n_routed_experts=256, n_shared_experts=1,
        num_experts_per_tok=8, moe_intermediate_size=2048, first_k_dense_replace=3, n_group=8, topk_group=4,
        topk_method="noaux_tc", scoring_func="sigmoid", norm_topk_prob=True, routed_scaling_factor=2.5,
    ),
}  # fmt: skip

# Shapes that take several cards.
LARGE_CONFIGS = {
    "qwen2.5-14b": _qwen2(48, 5120, 13824, 40, 8, 128, 152064, 32768),
    "qwen2.5-32b-awq": _qwen2(64, 5120, 27648, 40, 8, 128, 152064, 32768, quantization_config=_AWQ),
    "llama-2-70b": _llama(80, 8192, 28672, 64, 8, 128, 32000, 4096),
}

# What the page "Plan your memory" offers, by the repository on Hugging Face whose config.json has these sizes.
PRESET_CONFIGS = {
    "Qwen/Qwen2.5-0.5B-Instruct": LAB_CONFIGS["qwen2.5-0.5b"],
    "google/gemma-3-1b-it": PLANNER_CONFIGS["gemma-3-1b"],
    "Qwen/Qwen3-4B": PLANNER_CONFIGS["qwen3-4b"],
    "mistralai/Mistral-7B-v0.1": LAB_CONFIGS["mistral-7b-v0.1"],
    "Qwen/Qwen2.5-7B-Instruct": LAB_CONFIGS["qwen2.5-7b"],
    "Qwen/Qwen2.5-7B-Instruct-AWQ": PLANNER_CONFIGS["qwen2.5-7b-awq"],
    "meta-llama/Llama-3.1-8B-Instruct": LAB_CONFIGS["llama-3.1-8b"],
    "RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8-dynamic": PLANNER_CONFIGS["llama-3.1-8b-fp8"],
    "Qwen/Qwen3-8B": _decoder("Qwen3ForCausalLM", "qwen3", 36, 4096, 12288, 32, 8, 128, 151936, 40960),
    "google/gemma-2-9b-it": PLANNER_CONFIGS["gemma-2-9b"],
    "deepseek-ai/DeepSeek-V2-Lite-Chat": PLANNER_CONFIGS["deepseek-v2-lite-12-layers"] | {"num_hidden_layers": 27},
    "openai/gpt-oss-20b": PLANNER_CONFIGS["gpt-oss-20b"],
    "Qwen/Qwen2.5-14B-Instruct": LARGE_CONFIGS["qwen2.5-14b"],
    "mistralai/Mistral-Small-24B-Instruct-2501": _decoder(
        "MistralForCausalLM", "mistral", 40, 5120, 32768, 32, 8, 128, 131072, 32768, sliding_window=None
    ),
    "google/gemma-3-27b-it": {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "torch_dtype": "bfloat16",
        "mm_tokens_per_image": 256,
        "text_config": {
            "model_type": "gemma3_text", "num_hidden_layers": 62, "hidden_size": 5376, "intermediate_size": 21504,
            "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128, "vocab_size": 262208,
            "max_position_embeddings": 131072, "sliding_window": 1024,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
        "vision_config": {
            "model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304,
            "num_hidden_layers": 27, "num_attention_heads": 16, "image_size": 896, "patch_size": 14,
        },
    },
    "Qwen/Qwen3-30B-A3B": PLANNER_CONFIGS["qwen3-30b-a3b-12-layers"] | {"num_hidden_layers": 48},
    "Qwen/Qwen3-32B": _decoder("Qwen3ForCausalLM", "qwen3", 64, 5120, 25600, 64, 8, 128, 151936, 40960),
    "Qwen/Qwen2.5-32B-Instruct-AWQ": LARGE_CONFIGS["qwen2.5-32b-awq"],
    "mistralai/Mixtral-8x7B-Instruct-v0.1": PLANNER_CONFIGS["mixtral-8x7b-4-layers"] | {"num_hidden_layers": 32},
    "meta-llama/Llama-2-70b-chat-hf": LARGE_CONFIGS["llama-2-70b"],
    "meta-llama/Llama-3.3-70B-Instruct": _llama(80, 8192, 28672, 64, 8, 128, 128256, 131072),
    "RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic": _llama(
        80, 8192, 28672, 64, 8, 128, 128256, 131072, quantization_config=_W8A8
    ),
    "openai/gpt-oss-120b": PLANNER_CONFIGS["gpt-oss-20b"] | {
        "num_hidden_layers": 36, "num_local_experts": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 18,
    },
    "deepseek-ai/DeepSeek-V3": PLANNER_CONFIGS["deepseek-v3-4-layers"] | {
        "num_hidden_layers": 61,
        "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                                "weight_block_size": [128, 128]},
    },
}  # fmt: skip


def preset(name: str) -> dict:
    """The ``config.json`` of a model of ``PRESET_CONFIGS``.

    Raises:
        ShapeError: for another name.
    """
    if name not in PRESET_CONFIGS:
        raise ShapeError(
            f"{name!r:.80} is no model that memlab knows: give its config.json, or one of {', '.join(PRESET_CONFIGS)}"
        )
    return PRESET_CONFIGS[name]
