"""Memory predicted from a model's description, against numbers worked out by hand and against real files."""

from __future__ import annotations

import pytest
from trtllm_workshop.checkpoint import tensor_index
from trtllm_workshop.model_spec import ModelSpec
from trtllm_workshop.planner import memory_need, verdict

LLAMA_3_8B = ModelSpec(
    architecture="LlamaForCausalLM",
    hidden_size=4096,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_size=128,
    intermediate_size=14336,
    vocab_size=128256,
    max_position_embeddings=8192,
)


def test_P52_llama_3_8b_takes_131072_bytes_of_kv_cache_per_token():
    need = memory_need(LLAMA_3_8B, "float16", tokens=8192)
    assert need.kv_per_token == 131072 == 2 * 32 * 8 * 128 * 2
    assert need.kv_cache == 2**30
    assert need.weights == 2 * 8_030_261_248  # the parameter count that the model's files have
    assert need.total == need.weights + need.kv_cache


def test_P52_an_8b_model_in_float16_does_not_fit_on_12_gb():
    said = verdict(memory_need(LLAMA_3_8B, "float16"), 12e9)
    assert said.startswith("the weights alone do not fit: 16.1 GB into 12.0 GB")
    assert verdict(memory_need(LLAMA_3_8B, "fp8"), 12e9).startswith("fits: 9.1 GB of 12.0 GB")


def test_P52_the_kv_cache_is_told_apart_from_the_weights():
    need = memory_need(LLAMA_3_8B, "float16", tokens=256 * 8192)  # 256 requests of 8192 tokens: TensorRT-LLM's defaults
    said = verdict(need, 24e9)
    left = int((24e9 - need.weights) // 131072)
    assert (
        "the KV cache does not" in said and "2097152 tokens need 274.9 GB" in said and f"{left} tokens are left" in said
    )


def test_quantized_weights_leave_embedding_head_and_norms_in_16_bits():
    """Worked out by hand for Llama 3 8B: 218,103,808 values in the matrices of each of 32 layers."""
    matrices = 32 * (6144 * 4096 + 4096 * 4096 + 3 * 14336 * 4096)
    rest = 2 * (2 * 128256 * 4096 + (2 * 32 + 1) * 4096)
    outputs = 32 * (6144 + 4096 + 2 * 14336 + 4096)
    groups = 32 * (6144 * 32 + 4096 * 32 + 2 * 14336 * 32 + 4096 * 112)
    inputs = 32 * (4 * 4096 + 14336)
    assert matrices == 32 * 218_103_808
    assert memory_need(LLAMA_3_8B, "fp8").weights == matrices + rest + 32 * 5 * 8
    assert memory_need(LLAMA_3_8B, "int8").weights == matrices + rest + 2 * outputs
    assert memory_need(LLAMA_3_8B, "int4").weights == matrices // 2 + rest + 2 * outputs
    assert memory_need(LLAMA_3_8B, "int4_awq").weights == matrices // 2 + rest + 2 * groups + 2 * inputs


@pytest.mark.parametrize("family", ["llama-gqa", "llama-tied", "qwen2"])
def test_fp8_weights_are_those_of_a_quantized_checkpoint(tmp_path, family):
    """The file's KV scales apart, which an engine keeps as well but which are not weights: 3 x 4 bytes a layer."""
    pytest.importorskip("modelopt")
    from quantized_models import calibration_set, run
    from tiny_models import tiny_model

    source = tiny_model(tmp_path / "hf", family, dtype="float16")
    run(source, tmp_path / "out", calibration_set(tmp_path / "set"), kv_cache_dtype="fp8", calib_size=1)
    spec = ModelSpec.from_hf(source)
    stored = sum(info.nbytes for info in tensor_index(tmp_path / "out").values())
    assert memory_need(spec, "fp8").weights == stored - 12 * spec.num_hidden_layers


def test_the_type_of_the_kv_cache():
    assert memory_need(LLAMA_3_8B, "int4").kv_per_token == 131072, "quantized weights leave the cache in 16 bit"
    assert memory_need(LLAMA_3_8B, "float16", kv_dtype="fp8").kv_per_token == 65536
    with pytest.raises(ValueError, match=r"'fp16' is no type .* float16"):
        memory_need(LLAMA_3_8B, "fp16")


@pytest.mark.parametrize("family", ["llama-gqa", "llama-tied", "qwen2"])
def test_weights_are_those_of_a_real_checkpoint(engines, family):
    spec = ModelSpec.from_hf(engines.hf(family))
    stored = sum(info.nbytes for info in tensor_index(engines.checkpoint(family)).values())
    assert memory_need(spec, "float32").weights == stored
