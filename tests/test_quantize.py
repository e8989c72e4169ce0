"""quantize.py: the FP8 checkpoint recomputed from the Hugging Face weights, without ModelOpt, for one and more ranks."""

import json

import pytest
import torch
from quantized_models import calibration_set, hf_tensors, ranks, run, scale_rows
from tiny_models import tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from trtllm_workshop.checkpoint import classify

pytest.importorskip("modelopt")

FP8_MAX = 448.0
LINEARS = {
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.dense": ("self_attn.o_proj",),
    "mlp.fc": ("mlp.gate_proj",),
    "mlp.gate": ("mlp.up_proj",),
    "mlp.proj": ("mlp.down_proj",),
}
MERGED = {"mlp.fc": ("mlp.gate_proj", "mlp.up_proj"), "mlp.gate": ("mlp.gate_proj", "mlp.up_proj")}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return calibration_set(tmp_path_factory.mktemp("calibration"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("llama") / "hf", "llama-gqa", dtype="bfloat16")


def rows_of(state, layer, part, config, rank, tp):
    """The rows (or columns) of one Hugging Face matrix that belong to a rank; KV heads are repeated when too few."""
    weight = state[f"model.layers.{layer}.{part}.weight"]
    if part in ("self_attn.o_proj", "mlp.down_proj"):
        return weight.chunk(tp, 1)[rank]
    kv = config["num_key_value_heads"]
    if part in ("self_attn.k_proj", "self_attn.v_proj") and kv < tp:
        weight = weight.unflatten(0, (kv, -1)).repeat_interleave(tp // kv, 0).flatten(0, 1)
    return weight.chunk(tp, 0)[rank]


def assert_fp8_recomputed(source, folder):
    """Every linear of every rank: bytes, scale, and the error of what the bytes stand for."""
    state, config = hf_tensors(source), json.loads((folder / "config.json").read_text())
    tp, checked = config["mapping"]["tp_size"], 0
    for rank, tensors in enumerate(ranks(folder)):
        for layer in range(config["num_hidden_layers"]):
            for name, parts in LINEARS.items():
                together = MERGED.get(name, parts)
                amax = max(state[f"model.layers.{layer}.{part}.weight"].abs().max() for part in together)
                wanted = torch.cat([rows_of(state, layer, part, config, rank, tp) for part in parts])
                prefix = f"transformer.layers.{layer}.{name}."
                scale = tensors[prefix + "weights_scaling_factor"]
                assert scale.dtype == torch.float32 and scale.shape == (1,)
                torch.testing.assert_close(scale[0], amax / FP8_MAX, rtol=1e-6, atol=0)
                written = tensors[prefix + "weight"]
                assert written.dtype == torch.float8_e4m3fn and written.shape == wanted.shape
                quotient = wanted / scale
                assert written.view(torch.uint8).equal(quotient.to(torch.float8_e4m3fn).view(torch.uint8)), prefix
                step = torch.exp2(torch.floor(torch.log2(quotient.abs().clamp_min(2.0**-6))) - 3)
                assert bool(((written.float() - quotient).abs() <= step / 2 * (1 + 1e-5)).all()), prefix
                assert float(tensors[prefix + "activation_scaling_factor"]) > 0
                checked += 1
    assert checked == len(LINEARS) * config["num_hidden_layers"] * tp


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_fp8_weights_are_recomputed_from_the_source(llama, data, tmp_path, tp):
    """Four ranks and two KV heads: each head is on two ranks."""
    run(llama, tmp_path / "out", data, kv_cache_dtype="fp8", tp_size=tp)
    assert_fp8_recomputed(llama, tmp_path / "out")


@pytest.mark.parametrize("family", ["qwen2", "mistral", "llama3", "llama-mha", "llama-tied"])
def test_fp8_of_every_family(data, tmp_path, family):
    source = tiny_model(tmp_path / "hf", family, dtype="float16")
    tp = 3 if family == "llama-tied" else 2
    result, _ = run(source, tmp_path / "out", data, kv_cache_dtype="fp8", tp_size=tp)
    assert_fp8_recomputed(source, tmp_path / "out")
    assert result.config["architecture"] == json.loads((source / "config.json").read_text())["architectures"][0]
    assert result.config["dtype"] == "float16" and classify(tmp_path / "out") == "checkpoint"
    state = hf_tensors(source)
    biased = [name for name in ranks(tmp_path / "out")[0] if name.endswith("qkv.bias")]
    assert len(biased) == (result.config["num_hidden_layers"] if family == "qwen2" else 0)
    for name in biased:
        q, k, v = (
            state[name.replace("transformer", "model").replace("attention.qkv", f"self_attn.{x}_proj")] for x in "qkv"
        )
        for rank, tensors in enumerate(ranks(tmp_path / "out")):
            wanted = torch.cat([bias.chunk(tp)[rank] for bias in (q, k, v)])
            assert tensors[name].float().equal(wanted)


def test_everything_else_stays_in_16_bits_and_joins_again(data, tmp_path):
    """A vocabulary that the ranks do not divide: table and head are padded with zero rows; the tied head is written."""
    source = tiny_model(tmp_path / "hf", "llama-tied", dtype="bfloat16", vocab_size=515)
    run(source, tmp_path / "out", data, tp_size=3)
    state, parts = hf_tensors(source), ranks(tmp_path / "out")
    table = state["model.embed_tokens.weight"]
    for name in ("transformer.vocab_embedding.weight", "lm_head.weight"):
        joined = torch.cat([part[name] for part in parts])
        assert joined.dtype == torch.bfloat16 and joined.shape == (516, 144)
        assert joined[:515].float().equal(table) and not joined[515:].any()
    for part in parts:
        assert part["transformer.ln_f.weight"].float().equal(state["model.norm.weight"])
        norm = part["transformer.layers.1.post_layernorm.weight"]
        assert norm.float().equal(state["model.layers.1.post_attention_layernorm.weight"])


def cache_peaks(source, data, cut):
    """Per layer the largest |key| and |value| that the model itself puts into its cache, over the calibration texts."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(source)
    peaks = torch.zeros(model.config.num_hidden_layers, 2)
    for line in (data / "train.jsonl").read_text().splitlines():
        ids = torch.tensor([tokenizer(json.loads(line)["text"])["input_ids"][:cut]])
        with torch.no_grad():
            cache = model(ids, use_cache=True).past_key_values
        for layer in range(len(peaks)):
            found = torch.stack(
                [tensor.abs().max() for tensor in (cache.layers[layer].keys, cache.layers[layer].values)]
            )
            peaks[layer] = torch.maximum(peaks[layer], found)
    return peaks


@pytest.mark.parametrize(("kv", "most"), [("fp8", 448.0), ("int8", 127.0)])
@pytest.mark.parametrize("qformat", ["fp8", "int8_wo", "int4_wo", "full_prec"])
def test_kv_scales_are_what_the_cache_holds(data, tmp_path, kv, most, qformat):
    """Keys of layer 1 and values of layer 2 reach far beyond 448; layer 0 stays below and gets FP8's least scale 1.0."""
    source = tiny_model(tmp_path / "hf", "llama-gqa", dtype="float32")
    scale_rows(
        source,
        {"model.layers.1.self_attn.k_proj.weight": 700.0, "model.layers.2.self_attn.v_proj.weight": 300.0},
    )
    _, said = run(source, tmp_path / "out", data, qformat, kv_cache_dtype=kv, calib_max_seq_length=40, dtype="bfloat16")
    # The weights as they are written, so that rounding to bfloat16 is on both sides.
    rounded = tmp_path / "rounded"
    AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).save_pretrained(rounded)
    AutoTokenizer.from_pretrained(source).save_pretrained(rounded)
    peaks = cache_peaks(rounded, data, 40)
    assert (peaks.max(1).values > 448).tolist() == [False, True, True]
    tensors = ranks(tmp_path / "out")[0]
    for layer, (key, value) in enumerate((peaks / most).tolist()):
        prefix = f"transformer.layers.{layer}.attention."
        wanted = [max(scale, 1.0) if kv == "fp8" else scale for scale in (max(key, value), key, value)]
        found = [float(tensors[f"{prefix}{name}cache_scaling_factor"]) for name in ("kv_", "k_", "v_")]
        assert found == pytest.approx(wanted, rel=1e-5), layer
    assert ("1 of 3 layers below 1.0, written as 1.0" in said) == (kv == "fp8")
    assert (
        json.loads((tmp_path / "out" / "config.json").read_text())["quantization"]["kv_cache_quant_algo"] == kv.upper()
    )


@pytest.mark.parametrize(("qformat", "algorithm"), [("int8_wo", "W8A16"), ("int4_wo", "W4A16"), ("full_prec", None)])
def test_formats_without_calibration_need_no_data_and_stay_16_bit(llama, tmp_path, qformat, algorithm):
    result, said = run(llama, tmp_path / "out", None, qformat)
    assert "no calibration" in said and result.data is None
    assert result.config["quantization"]["quant_algo"] == algorithm
    (tensors,) = ranks(tmp_path / "out")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    state = hf_tensors(llama)
    qkv = torch.cat([state[f"model.layers.0.self_attn.{letter}_proj.weight"] for letter in "qkv"])
    assert tensors["transformer.layers.0.attention.qkv.weight"].float().equal(qkv)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["config.json", "rank0.safetensors"]


@pytest.mark.parametrize("tp", [1, 2])
def test_awq_stands_for_the_weights_times_the_smoothing(data, tmp_path, tp):
    """(nibble - sign) x scale / smoothing comes back to the weight within half a step of its group."""
    source = tiny_model(tmp_path / "hf", "llama-gqa", dtype="bfloat16", intermediate_size=128)
    result, said = run(source, tmp_path / "out", data, "int4_awq", awq_block_size=16, tp_size=tp)
    assert result.config["quantization"]["group_size"] == 16 and "pass 2" in said
    state, config = hf_tensors(source), result.config
    for rank, tensors in enumerate(ranks(tmp_path / "out")):
        for name, parts in LINEARS.items():
            prefix = f"transformer.layers.1.{name}."
            wanted = torch.cat([rows_of(state, 1, part, config, rank, tp) for part in parts])
            packed = tensors[prefix + "weight"]
            assert packed.dtype == torch.int8 and packed.shape == (wanted.shape[0] // 2, wanted.shape[1])
            bits = packed.view(torch.uint8).int()
            nibbles = torch.stack([bits & 15, bits >> 4], 1).flatten(0, 1)
            values = torch.where(nibbles > 7, nibbles - 16, nibbles).float()
            scales = tensors[prefix + "weights_scaling_factor"].float().repeat_interleave(16, 1)
            smoothing = tensors[prefix + "prequant_scaling_factor"].float()
            # The input is multiplied by the smoothing, so the stored weight is the real one divided by it.
            error = (values * scales - wanted / smoothing).abs()
            assert bool((error <= scales * 0.52 + 0.01 * (wanted / smoothing).abs()).all()), (name, rank)


def test_lm_head_is_quantized_only_when_asked(data, tmp_path):
    source = tiny_model(tmp_path / "hf", "llama-gqa", dtype="bfloat16")
    result, _ = run(source, tmp_path / "out", data, quantize_lm_head=True)
    tensors = ranks(tmp_path / "out")[0]
    assert tensors["lm_head.weight"].dtype == torch.float8_e4m3fn
    assert result.config["quantization"].get("exclude_modules") in ([], None)


def test_the_same_run_gives_the_same_bytes(llama, data, tmp_path):
    for name in ("a", "b"):
        run(llama, tmp_path / name, data, kv_cache_dtype="fp8")
    assert (tmp_path / "a" / "rank0.safetensors").read_bytes() == (tmp_path / "b" / "rank0.safetensors").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 3])
def test_smollm2(smollm2, data, tmp_path, tp):
    run(smollm2, tmp_path / "out", data, kv_cache_dtype="fp8", tp_size=tp, calib_size=2)
    assert_fp8_recomputed(smollm2, tmp_path / "out")
