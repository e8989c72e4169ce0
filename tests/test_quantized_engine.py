"""Quantized engines: each product recomputed in float32, sizes halved, the cache in eight bits, the refusals."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from engines import TOKENS_PER_BLOCK, divergence, forced_logits, free_running, prompt_of, quiet
from modelopt_simulation import simulated_logits
from quantized_checkpoints import KV_AMAX, dequantized, quantized_checkpoint
from safetensors.torch import load_file, save_file
from trtllm_workshop.checkpoint import verify_checkpoint
from trtllm_workshop.planner import memory_need
from trtllm_workshop.quant_mode import QuantMode
from trtllm_workshop.reference import build as build_module
from trtllm_workshop.reference.attention import dequantize_kv, quantize_kv
from trtllm_workshop.reference.build import BuildError, build_engine
from trtllm_workshop.reference.configs import BuildConfig, PluginConfig
from trtllm_workshop.reference.llm import LLM
from trtllm_workshop.reference.quant_ops import fp8_linear, pack_int4, unpack_int4

FORMATS = [
    ("FP8", None),
    ("FP8", "FP8"),
    (None, "FP8"),
    (None, "INT8"),
    ("W8A16", None),
    ("W4A16", None),
    ("W4A16_AWQ", None),
    ("W8A16", "INT8"),
]


# How far the engine may be from the simulation, as a share of what quantization costs: other sums round other values to
# other e4m3 numbers. The tensor cores' fast sums keep about 14 bits.
FP8_SHARE = 0.5 if torch.cuda.is_available() else 0.02


@dataclass
class Quantized:
    checkpoint: Path
    engine: Path
    llm: LLM


@pytest.fixture(scope="module")
def quantized(engines, tmp_path_factory):
    """quantized(quant_algo, kv, family, dtype): a checkpoint made by hand, built and loaded; each once."""
    made: dict[tuple, Quantized] = {}

    def make(algorithm, cache=None, family="qwen2", dtype="float32", paged=None) -> Quantized:
        paged = (cache is None or (algorithm, cache) == ("FP8", "FP8")) if paged is None else paged
        key = (algorithm, cache, family, dtype, paged)
        if key not in made:
            root = tmp_path_factory.mktemp("quantized")
            checkpoint = quantized_checkpoint(engines.checkpoint(family, dtype), root / "checkpoint", algorithm, cache)
            build_engine(checkpoint, limits(paged), root / "engine", log=quiet)
            llm = LLM(root / "engine", skip_tokenizer_init=True, gather_generation_logits=True)
            made[key] = Quantized(checkpoint, root / "engine", llm)
        return made[key]

    return make


def limits(paged=True):
    plugins = PluginConfig(tokens_per_block=TOKENS_PER_BLOCK, use_paged_context_fmha=paged)
    return BuildConfig(max_batch_size=8, max_seq_len=160, gather_context_logits=True, plugin_config=plugins)


def context_logits(llm, prompt):
    return llm.generate(prompt, free_running(1, return_context_logits=True)).context_logits


@pytest.mark.parametrize(("algorithm", "cache"), FORMATS)
def test_verify_knows_the_layout(quantized, algorithm, cache):
    assert verify_checkpoint(quantized(algorithm, cache).checkpoint) == []


@pytest.mark.parametrize("algorithm", ["FP8", "W8A16", "W4A16", "W4A16_AWQ"])
@pytest.mark.parametrize("family", ["qwen2", "llama-tied"])
def test_context_logits_are_those_of_an_independent_simulation(quantized, engines, algorithm, family):
    ours, prompt = quantized(algorithm, family=family), prompt_of(67)
    expected = simulated_logits(engines.hf(family), ours.checkpoint, prompt)
    found = context_logits(ours.llm, prompt)
    # A value on the border of two e4m3 numbers may fall either way, and the next layers carry that on.
    plain = engines.hf_logits(prompt, family)
    limit = FP8_SHARE if algorithm == "FP8" else 1e-3 if algorithm == "W8A16" else 1e-2
    assert divergence(expected, found) <= limit * max(divergence(plain, expected), 1e-6) + 1e-7


def test_kv_cache_quantization_shows_in_the_context_and_is_that_of_the_simulation(quantized, engines):
    ours, prompt = quantized("FP8", "FP8"), prompt_of(67)
    expected = simulated_logits(engines.hf("qwen2"), ours.checkpoint, prompt)
    found, without = context_logits(ours.llm, prompt), context_logits(quantized("FP8").llm, prompt)
    cost = divergence(engines.hf_logits(prompt, "qwen2"), expected)
    assert divergence(expected, found) < FP8_SHARE * cost
    assert divergence(without, found) > 1e-5


@pytest.mark.parametrize("cache", ["FP8", "INT8"])
def test_without_paged_context_attention_only_later_tokens_see_the_cache(quantized, engines, cache):
    """One step at a time, as the engine makes them: only from the second token on cached values are read."""
    prompt, answer = prompt_of(40), prompt_of(12, seed=1)
    ours, plain = quantized(None, cache).llm, engines.llm("qwen2")
    found, exact = forced_logits(ours, prompt, answer), forced_logits(plain, prompt, answer)
    assert torch.equal(found[:40], exact[:40])
    later = divergence(exact[40:], found[40:])
    assert 1e-7 < later < 0.05


@pytest.mark.parametrize("algorithm", ["FP8", "W8A16", "W4A16", "W4A16_AWQ"])
def test_each_linear_layer_equals_a_float32_recomputation(quantized, algorithm):
    """On fixed inputs, with the exported scales, through the operators of the loaded graph."""
    from trtllm_workshop.quant_mode import QuantMode
    from trtllm_workshop.reference.quant_linear import make_linear

    ours = quantized(algorithm)
    engine_file = load_file_of(ours.engine)
    tensors = load_file(ours.checkpoint / "rank0.safetensors")
    mode = QuantMode.from_config(json.loads((ours.checkpoint / "config.json").read_text()))
    checked = 0
    for module, weight in dequantized(ours.checkpoint).items():
        if module.endswith(("mlp.fc", "mlp.gate")) and mode.joins_fc_and_gate:
            continue  # their joined matrix is looked at in the test of the engine's tensors
        generator = torch.Generator().manual_seed(len(module))
        x = 2 * torch.randn(5, weight.shape[1], generator=generator)
        layer = make_linear(mode, module, weight.shape[1], weight.shape[0], torch.float32)
        layer.load_state_dict({n: engine_file[f"{module}.{n}"] for n, _ in layer.named_parameters()}, assign=True)
        given = x.double()
        if algorithm == "FP8":
            scale = tensors[f"{module}.activation_scaling_factor"]
            given = ((x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale).double()
        expected = given @ weight.double().T
        found = layer(x).double()
        assert float((found - expected).abs().max() / expected.abs().max()) <= 1e-5, module
        checked += 1
    assert checked >= 9


def load_file_of(engine: Path) -> dict[str, torch.Tensor]:
    from safetensors import safe_open

    with safe_open(engine / "rank0.engine", framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


@pytest.mark.skipif(torch.cuda.is_available(), reason="engines are loaded for the CUDA device here")
@pytest.mark.parametrize(("algorithm", "rows"), [("FP8", 1), ("FP8", 9), ("W8A16", 1), ("W8A16", 3), ("W8A16", 9)])
def test_what_a_processor_runs_equals_the_plain_operators(quantized, algorithm, rows):
    """The rewritten graph of the loaded engine against the plain graph, at row counts on both sides of the switch."""
    import io

    from trtllm_workshop.reference.engine import GRAPH, bind

    ours = quantized(algorithm)
    tensors = load_file_of(ours.engine)
    program = torch.export.load(io.BytesIO(tensors.pop(GRAPH).numpy().tobytes()))
    plain = bind(program, tensors)
    executor = ours.llm._executor
    ids = torch.tensor(prompt_of(rows))
    count = torch.tensor([rows], dtype=torch.int32)
    inputs = (
        ids, torch.arange(rows), torch.arange(rows), torch.zeros_like(executor.pool), torch.arange(rows),
        torch.arange(2)[None], torch.tensor([rows]), torch.zeros(1, dtype=torch.int32), count, count,
    )  # fmt: skip
    with torch.inference_mode():
        expected, found = plain(*inputs).float(), executor.engine.run(*inputs).float()
    # int8 kernels compute in bfloat16: eight bits of mantissa, over three layers
    limit = 3e-2 if algorithm == "W8A16" and rows <= 3 else 1e-4
    assert float((found - expected).abs().max() / expected.abs().max()) <= limit


def test_fp8_rounds_and_saturates_as_the_format_does():
    weight = torch.eye(4).to(torch.float8_e4m3fn)
    one = torch.ones(1)
    x = torch.tensor([[1.0625, 500.0, -1000.0, 2.0**-9]])
    assert fp8_linear(x, weight, one, one, None).tolist() == [[1.0, 448.0, -448.0, 2.0**-9]]
    assert fp8_linear(x, weight, one, 4 * one, None).tolist() == [[1.0, 512.0, -1024.0, 0.0]]


def test_four_bit_packing_is_reversible():
    values = torch.randint(-8, 8, (6, 10), dtype=torch.int8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(unpack_int4(pack_int4(values)), values)
    assert pack_int4(torch.tensor([[-8, 7]], dtype=torch.int8)).tolist() == [[0xF0]]


@pytest.mark.parametrize(("kind", "most"), [(torch.float8_e4m3fn, 448.0), (torch.int8, 127.0)])
def test_what_the_cache_stores_is_within_half_a_step(kind, most):
    kv = KV_AMAX * torch.linspace(-1, 1, 999)
    scale = torch.tensor([KV_AMAX / most])
    found = dequantize_kv(quantize_kv(kv, kind, scale), torch.float32, scale)
    step = kv.abs() / 16 + KV_AMAX / most / 512 if kind == torch.float8_e4m3fn else scale / 2 * 1.0001
    assert bool(((found - kv).abs() <= step).all())
    beyond = quantize_kv(torch.tensor([1e6, -1e6]), kind, scale).float().tolist()
    assert beyond == [most, -most - (kind == torch.int8)]


@pytest.mark.parametrize("cache", ["FP8", "INT8"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_cache_takes_exactly_half_the_bytes_per_token(quantized, engines, cache, dtype):
    ours, plain = quantized(None, cache, "llama-gqa", dtype).llm._executor.pool, engines.llm("llama-gqa", dtype)
    other = plain._executor.pool
    tokens = [pool.shape[1] * pool.shape[2] for pool in (ours, other)]
    assert 2 * ours.nbytes * tokens[1] == other.nbytes * tokens[0]


def test_an_fp8_engine_is_smaller_than_062_of_the_16_bit_engine_for_the_tinyllama_shape():
    """Counted from the layout that both engine files have; benchmarks/fp8_gpu.py builds files of this size."""
    shape = {
        "architecture": "LlamaForCausalLM", "dtype": "float16", "vocab_size": 32000, "hidden_size": 2048,
        "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_size": 64, "hidden_act": "silu", "norm_epsilon": 1e-5, "position_embedding_type": "rope_gpt_neox",
        "max_position_embeddings": 2048, "rotary_base": 10000.0, "mapping": {"world_size": 1, "tp_size": 1, "pp_size": 1},
    }  # fmt: skip
    from trtllm_workshop.reference.engine_tensors import engine_tensors

    def size(algorithm):
        config = {**shape, "quantization": {"quant_algo": algorithm, "exclude_modules": ["lm_head"]}}
        skip = ("transformer.rotary_table",)
        return sum(t.nbytes for t in _without_file(engine_tensors, config) if t.name not in skip)

    assert 2.0e9 < size(None) < 2.3e9  # 2.0 GB in a public workshop talk of 2024, and 1.2 GB in FP8
    assert size("FP8") <= 0.62 * size(None)
    assert size("W8A16") <= 0.62 * size(None)
    assert size("W4A16") <= 0.40 * size(None)


def _without_file(engine_tensors, config):
    """The plan of the engine's tensors; an empty file is enough, since no part is read."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rank0.safetensors"
        save_file({"none": torch.zeros(1)}, file)
        return list(engine_tensors(config, 0, file, 2048)())


def test_engine_file_sizes_on_disk(quantized, engines):
    plain = (engines.engine("qwen2", "bfloat16") / "rank0.engine").stat().st_size
    assert (quantized("FP8", dtype="bfloat16").engine / "rank0.engine").stat().st_size < plain


def refused(checkpoint, tmp_path, *parts, paged=True, capability=None, monkeypatch=None):
    if monkeypatch is not None:
        monkeypatch.setattr(build_module, "cuda_capability", lambda: capability)
    with pytest.raises(BuildError) as caught:
        build_engine(checkpoint, limits(paged), tmp_path / "out", log=quiet)
    assert all(part in str(caught.value) for part in parts), caught.value
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 6)])
def test_P67_fp8_needs_a_gpu_with_fp8(quantized, tmp_path, monkeypatch, capability):
    refused(
        quantized("FP8").checkpoint, tmp_path, "hardware with FP8 support", "{}.{}".format(*capability), "int8_wo",
        capability=capability, monkeypatch=monkeypatch,
    )  # fmt: skip


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (12, 0)])
def test_P67_ada_and_hopper_build_fp8_and_ampere_the_other_formats(quantized, tmp_path, monkeypatch, capability):
    monkeypatch.setattr(build_module, "cuda_capability", lambda: capability)
    build_engine(quantized("FP8").checkpoint, limits(), tmp_path / "fp8", log=quiet)
    monkeypatch.setattr(build_module, "cuda_capability", lambda: (8, 0))
    build_engine(quantized("W8A16", "INT8").checkpoint, limits(False), tmp_path / "int8", log=quiet)


@pytest.mark.parametrize(
    ("algorithm", "cache", "words"),
    [
        (None, "INT8", "Paged Context FMHA is disabled because it doesn't work with int8 kv cache currently."),
        (None, "FP8", "FP8 Paged Context FMHA is disabled because FP8 context FMHA is disabled."),
        ("W8A16", "FP8", "FP8 Context FMHA is disabled because it must be used together with the fp8 quantization"),
    ],
)
def test_P69_paged_context_attention_is_off_with_caches_that_it_cannot_read(
    quantized, tmp_path, algorithm, cache, words
):
    said = []
    build_engine(quantized(algorithm, cache).checkpoint, limits(), tmp_path / "out", log=said.append)
    assert any("[W]" in line and words in line for line in said), said
    built = json.loads((tmp_path / "out" / "config.json").read_text())["build_config"]["plugin_config"]
    assert built["use_paged_context_fmha"] is False


def test_P69_paged_context_attention_stays_on_otherwise(quantized, tmp_path):
    for cache, warnings in (("FP8", 0), (None, 1)):
        said = []
        build_engine(quantized("FP8", cache).checkpoint, limits(), tmp_path / f"out{cache}", log=said.append)
        built = json.loads((tmp_path / f"out{cache}" / "config.json").read_text())["build_config"]["plugin_config"]
        assert built["use_paged_context_fmha"] is True and sum("[W]" in line for line in said) == warnings, said


def test_P67_integer_formats_are_refused_on_blackwell_servers(quantized, tmp_path, monkeypatch):
    refused(
        quantized("W8A16", "INT8").checkpoint, tmp_path, "SM>=100", "10.0", "W8A16+INT8-KV", "--qformat fp8",
        capability=(10, 0), monkeypatch=monkeypatch,
    )  # fmt: skip


def odd_spec(**sizes):
    from trtllm_workshop.model_spec import ModelSpec

    good = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_size": 16}
    more = {"num_hidden_layers": 2, "intermediate_size": 96, "vocab_size": 100, "max_position_embeddings": 64}
    return ModelSpec("LlamaForCausalLM", **(good | more | sizes))


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        (
            {"hidden_size": 72},
            (
                "attention.qkv [128, 72]",
                "attention.dense [72, 64]",
                "mlp.fc and mlp.gate [192, 72]",
                "mlp.proj [72, 96]",
            ),
        ),
        ({"head_size": 10}, ("attention.dense [64, 40]",)),  # 80 rows of q, k and v are a multiple
        ({"intermediate_size": 100}, ("mlp.fc and mlp.gate [200, 64]", "mlp.proj [64, 100]")),
    ],
)
def test_fp8_layers_of_a_gpu_need_multiples_of_16(sizes, named):
    from trtllm_workshop.reference.build_precision import check_widths

    spec, fp8 = odd_spec(**sizes), QuantMode("FP8", "FP8")
    with pytest.raises(BuildError) as caught:
        check_widths(spec, fp8, (9, 0))
    assert all(name in str(caught.value) for name in named) and "int8_wo" in str(caught.value)
    assert str(caught.value).count(" [") == 1 + len(named), "only what does not fit is named"
    check_widths(spec, fp8, None)  # a processor multiplies any size
    check_widths(spec, QuantMode("W8A16"), (9, 0))


def test_a_head_in_fp8_counts_and_one_in_16_bits_does_not():
    from trtllm_workshop.reference.build_precision import check_widths

    check_widths(odd_spec(), QuantMode("FP8"), (9, 0))  # a vocabulary of 100, excluded
    with pytest.raises(BuildError, match=r"lm_head \[100, 64\]"):
        check_widths(odd_spec(), QuantMode("FP8", exclude_modules=()), (9, 0))


def test_an_fp8_build_for_a_gpu_stops_at_odd_widths(quantized, tmp_path, monkeypatch):
    from trtllm_workshop.reference import build_precision

    checkpoint = quantized("FP8").checkpoint  # made, with its engine, before the sizes become odd
    monkeypatch.setattr(build_precision, "FP8_MULTIPLE", 1024)  # in the place of a model with odd sizes
    refused(
        checkpoint, tmp_path, "multiples of 1024", "attention.qkv [", "in 16 bits",
        capability=(8, 9), monkeypatch=monkeypatch,
    )  # fmt: skip


def test_joined_layers_with_different_scales_are_refused(quantized, tmp_path):
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text((quantized("FP8").checkpoint / "config.json").read_text())
    tensors = load_file(quantized("FP8").checkpoint / "rank0.safetensors")
    tensors["transformer.layers.1.mlp.gate.weights_scaling_factor"] *= 2
    save_file(tensors, checkpoint / "rank0.safetensors")
    refused(checkpoint, tmp_path, "layers.1.mlp.fc.weights_scaling_factor", "mlp.gate", "quantize.py")


def test_an_engine_and_a_config_of_another_precision_do_not_go_together(quantized, tmp_path):
    import shutil

    from trtllm_workshop.reference.engine import EngineError, load_engine

    folder = shutil.copytree(quantized("FP8").engine, tmp_path / "engine")
    config = json.loads((folder / "config.json").read_text())
    config["pretrained_config"]["quantization"]["quant_algo"] = None
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(EngineError, match=r"built for float32 FP8, and config.json beside it says float32"):
        load_engine(folder)


def test_the_planner_and_the_engine_agree_about_the_cache(quantized):
    from trtllm_workshop.model_spec import ModelSpec

    ours = quantized("FP8", "FP8")
    spec = ModelSpec.from_checkpoint_config(json.loads((ours.checkpoint / "config.json").read_text()))
    pool = ours.llm._executor.pool
    per_token = memory_need(spec, "float16", 1, kv_dtype="fp8").kv_cache
    assert pool.nbytes == per_token * pool.shape[1] * pool.shape[2]
