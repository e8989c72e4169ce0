"""model_spec: one config.json -> sizes, for every supported family, with the traps that lose facts on the way."""

import json

import pytest
from tiny_models import FAMILIES, LLAMA3_ROPE, tiny_model
from trtllm_workshop.model_spec import ModelSpec, UnsupportedModel

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 5120,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "num_hidden_layers": 2,
    "intermediate_size": 13824,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_parameter_count_is_that_of_transformers(tmp_path, family):
    from transformers import AutoModelForCausalLM

    folder = tiny_model(tmp_path / "model", family)
    model = AutoModelForCausalLM.from_pretrained(folder)
    spec = ModelSpec.from_hf(folder)
    assert spec.parameter_count() == sum(parameter.numel() for parameter in model.parameters())
    assert spec.dtype == "float32"
    assert spec.attn_bias == (family == "qwen2")


def test_known_model_sizes():
    tinyllama = ModelSpec.from_hf(
        {
            **LLAMA,
            "hidden_size": 2048,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "num_hidden_layers": 22,
            "intermediate_size": 5632,
        }
    )
    assert tinyllama.parameter_count() == 1_100_048_384  # as the model's page says: 1.1 B
    assert tinyllama.kv_bytes_per_token(2) == 2 * 22 * 4 * 64 * 2
    assert tinyllama.kv_bytes_per_token(1) * 2 == tinyllama.kv_bytes_per_token(2)


def test_P31_head_dim_given_missing_and_null():
    given = ModelSpec.from_hf({**LLAMA, "head_dim": 128})
    assert (given.head_size, given.qkv_rows) == (128, 10240)
    for config in (LLAMA, {**LLAMA, "head_dim": None}):
        spec = ModelSpec.from_hf(config)
        assert (spec.head_size, spec.qkv_rows) == (80, 6400)


@pytest.mark.parametrize(
    "scaling",
    [
        LLAMA3_ROPE,
        {"type": "linear", "factor": 4.0},
        {"rope_type": "linear", "type": "linear", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
        None,
    ],
)
def test_P35_rope_scaling_is_carried_unchanged(scaling):
    assert ModelSpec.from_hf({**LLAMA, "rope_scaling": scaling}).rotary_scaling == scaling


@pytest.mark.parametrize(
    ("scaling", "named"),
    [
        ({"rope_type": "wavelets", "factor": 2.0}, "wavelets"),
        ({"factor": 2.0}, "neither"),
        ({"rope_type": "linear", "type": "dynamic", "factor": 2.0}, "dynamic"),
        (4.0, "4.0"),
    ],
)
def test_P35_unknown_rope_scaling_is_refused_by_name(scaling, named):
    with pytest.raises(UnsupportedModel, match=named):
        ModelSpec.from_hf({**LLAMA, "rope_scaling": scaling})


def test_rope_parameters_of_newer_files():
    spec = ModelSpec.from_hf({**LLAMA, "rope_parameters": {**LLAMA3_ROPE, "rope_theta": 500000.0}})
    assert (spec.rotary_base, spec.rotary_scaling) == (500000.0, LLAMA3_ROPE)
    plain = ModelSpec.from_hf({**LLAMA, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}})
    assert (plain.rotary_base, plain.rotary_scaling) == (1e6, None)


def test_P43_unknown_architecture_is_named_with_the_supported_and_the_nearest():
    with pytest.raises(UnsupportedModel) as error:
        ModelSpec.from_hf({**LLAMA, "architectures": ["MixtralForCausalLM"]})
    text = str(error.value)
    assert "MixtralForCausalLM" in text and "nearest by name is MistralForCausalLM" in text
    assert all(name in text for name in ("LlamaForCausalLM", "Qwen2ForCausalLM"))


def test_P43_the_two_config_kinds_are_told_apart():
    checkpoint = {"architecture": "LlamaForCausalLM", "num_attention_heads": 4}
    with pytest.raises(UnsupportedModel, match="checkpoint config, not a Hugging Face one"):
        ModelSpec.from_hf(checkpoint)
    with pytest.raises(UnsupportedModel, match=r"run convert_checkpoint\.py first"):
        ModelSpec.from_checkpoint_config(LLAMA)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"vocab_size": "32000"}, "'32000'"),
        ({"num_key_value_heads": 7}, "64.*7"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"num_attention_heads": 60, "num_key_value_heads": 60}, "5120.*60"),
        ({"head_dim": 81}, "81"),
        ({"attention_bias": True}, "attention_bias"),
        ({"architectures": None}, "names no architecture"),
        ({"architectures": "LlamaForCausalLM"}, "expected a list"),
    ],
)
def test_contradictions_are_named(change, named):
    with pytest.raises(UnsupportedModel, match=named):
        ModelSpec.from_hf({**LLAMA, **change})


def test_missing_and_broken_files(tmp_path):
    with pytest.raises(UnsupportedModel, match=r"config\.json does not exist"):
        ModelSpec.from_hf(tmp_path)
    (tmp_path / "config.json").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(UnsupportedModel, match="not readable JSON"):
        ModelSpec.from_hf(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps([1]))
    with pytest.raises(UnsupportedModel, match="list"):
        ModelSpec.from_hf(tmp_path)


def test_family_defaults():
    mistral = {**LLAMA, "architectures": ["MistralForCausalLM"]}
    assert ModelSpec.from_hf(mistral).sliding_window == 4096  # transformers' default when the key is missing
    assert ModelSpec.from_hf({**mistral, "sliding_window": None}).sliding_window is None
    qwen = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "sliding_window": 1024}
    assert ModelSpec.from_hf(qwen).sliding_window is None
    assert ModelSpec.from_hf({**qwen, "use_sliding_window": True}).sliding_window == 1024
    assert ModelSpec.from_hf({**LLAMA, "architectures": None, "model_type": "llama"}).architecture == "LlamaForCausalLM"
    without = {key: value for key, value in LLAMA.items() if key not in ("num_key_value_heads", "torch_dtype")}
    assert ModelSpec.from_hf(without).num_key_value_heads == 64
    assert ModelSpec.from_hf(without).dtype == "float16"
    assert ModelSpec.from_hf({**without, "dtype": "bfloat16"}).dtype == "bfloat16"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", 10**30),
        ("num_attention_heads", 2**40),
        ("max_position_embeddings", 10**30),
        ("rms_norm_eps", "abc"),
        ("rms_norm_eps", [1e-5]),
        ("rms_norm_eps", float("nan")),
        ("rope_theta", float("inf")),
        ("rope_theta", 0),
        ("rope_theta", {"a": 1}),
        ("tie_word_embeddings", "false"),
        ("sliding_window", "abc"),
        ("sliding_window", -1),
        ("partial_rotary_factor", 0.5),
    ],
)
def test_damaged_value_is_named_and_refused_at_once(key, value):
    with pytest.raises(UnsupportedModel, match=f"{key} is "):
        ModelSpec.from_hf({**LLAMA, "architectures": ["MistralForCausalLM"], key: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [("norm_epsilon", None), ("rotary_base", None), ("tie_word_embeddings", None), ("sliding_window", None)],
)
def test_null_in_a_checkpoint_config_means_the_default(key, value):
    config = {**LLAMA, "architecture": "LlamaForCausalLM", "head_size": 80}
    assert ModelSpec.from_checkpoint_config({**config, key: value}) == ModelSpec.from_checkpoint_config(config)
