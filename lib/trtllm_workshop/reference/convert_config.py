"""The config.json that convert_checkpoint.py of TensorRT-LLM 1.2.1 writes, key by key and in its order.

Read from tensorrt_llm/models/llama/config.py, tensorrt_llm/models/qwen/config.py (own keys first),
tensorrt_llm/models/modeling_utils.py (common keys) and the two scripts (mapping: attn_* are set to -1 before saving).
"""

from __future__ import annotations

from typing import Any

from trtllm_workshop.model_spec import ModelSpec
from trtllm_workshop.reference.convert_plan import Sharding


def checkpoint_config(spec: ModelSpec, dtype: str, sharding: Sharding, quant_algo: str | None = None) -> dict[str, Any]:
    """The checkpoint's config for a spec: `dtype` is the stored type, spec.dtype (the source's) is not used.

    `quant_algo` W8A16 or W4A16 asks trtllm-build to quantize the 16-bit weights.
    """
    qwen = spec.architecture == "Qwen2ForCausalLM"
    rotary = {"rotary_base": spec.rotary_base, "rotary_scaling": spec.rotary_scaling}
    biases = {"mlp_bias": False, "attn_bias": spec.attn_bias}
    if qwen:
        own = {**biases, **rotary, "disable_weight_only_quant_plugin": False, "num_labels": 1, "use_logn_attn": False}
        own["moe"] = _moe(normalization_mode=0)
        extra = {
            "seq_length": 8192,
            "qwen_type": "qwen2",
            "moe_intermediate_size": 0,
            "moe_shared_expert_intermediate_size": 0,
        }
    else:
        own = {**biases, **rotary, "residual_mlp": False, "disable_weight_only_quant_plugin": False}
        own["moe"] = _moe(normalization_mode=None)
        own |= {
            "remove_duplicated_kv_heads": False,
            "fc_after_embed": False,
            "use_input_layernorm_in_first_layer": True,
            "use_last_layernorm": True,
            "layer_idx_offset": 0,
            "embedding_multiplier": 1.0,
            "attention_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "output_multiplier_scale": 1.0,
        }
        extra = {}
    return {
        **own,
        **_common(spec, dtype, sharding, quant_algo),
        **extra,
        "tie_word_embeddings": spec.tie_word_embeddings,
    }


def _common(spec: ModelSpec, dtype: str, sharding: Sharding, quant_algo: str | None) -> dict[str, Any]:
    return {
        "architecture": spec.architecture,
        "dtype": dtype,
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "num_hidden_layers": spec.num_hidden_layers,
        "num_attention_heads": spec.num_attention_heads,
        "hidden_act": spec.hidden_act,
        "logits_dtype": "float32",
        "norm_epsilon": spec.norm_epsilon,
        "runtime_defaults": None,
        "position_embedding_type": "rope_gpt_neox",
        "num_key_value_heads": spec.num_key_value_heads,
        "intermediate_size": spec.intermediate_size,
        "max_position_embeddings": spec.max_position_embeddings,
        "mapping": _mapping(sharding),
        "quantization": {
            "quant_algo": quant_algo,
            "kv_cache_quant_algo": None,
            "group_size": 128,
            "smoothquant_val": 0.5,
            "clamp_val": None,
            "use_meta_recipe": False,
            "has_zero_point": False,
            "pre_quant_scale": False,
            "exclude_modules": None,
        },
        "use_parallel_embedding": sharding.use_parallel_embedding,
        "embedding_sharding_dim": sharding.embedding_sharding_dim,
        "head_size": spec.head_size,
        "qk_layernorm": False,
        "rotary_embedding_dim": spec.head_size,
    }


def _mapping(sharding: Sharding) -> dict[str, int]:
    return {
        "world_size": sharding.tp_size * sharding.pp_size,
        "gpus_per_node": 8,
        "cp_size": 1,
        "tp_size": sharding.tp_size,
        "pp_size": sharding.pp_size,
        "moe_tp_size": sharding.tp_size,
        "moe_cluster_size": 1,
        "moe_ep_size": 1,
        "attn_tp_size": -1,
        "attn_cp_size": -1,
    }


def _moe(normalization_mode: int | None) -> dict[str, Any]:
    return {
        "num_experts": 0,
        "shared_expert_intermediate_size": 0,
        "top_k": 0,
        "normalization_mode": normalization_mode,
        "sparse_mixer_epsilon": 0.01,
        "tp_mode": 0,
        "device_limited_n_group": 0,
        "device_limited_topk_group": 0,
        "device_limited_routed_scaling_factor": 1.0,
    }
