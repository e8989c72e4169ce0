"""convert: the written tensors against an independent computation in torch and against NVIDIA ModelOpt's export."""

import json

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_models import FAMILIES, LLAMA3_ROPE, tiny_model
from trtllm_workshop.checkpoint import classify, verify_checkpoint
from trtllm_workshop.model_spec import ModelSpec
from trtllm_workshop.reference.convert import choose_dtype, convert_checkpoint
from trtllm_workshop.reference.convert_cast import Caster
from trtllm_workshop.reference.convert_plan import Sharding, source_tensors

TP_OF = {"llama-tied": 3}  # nine heads


def convert(source, target, tp=1, pp=1, parallel=False, dim=0, **options):
    return convert_checkpoint(source, target, sharding=Sharding(tp, pp, parallel, dim), say=lambda _: None, **options)


def hf_state(folder):
    state = {}
    for file in folder.glob("*.safetensors"):
        state.update(load_file(file))
    return state


def wanted_rank(state, config, rank, dtype):
    """What TensorRT-LLM's converter puts into rank{rank}.safetensors, computed with torch on whole tensors."""
    tp, pp = config["mapping"]["tp_size"], config["mapping"]["pp_size"]
    heads, kv, size = config["num_attention_heads"], config["num_key_value_heads"], config["head_size"]
    tp_rank, stage = rank % tp, rank // tp
    assert heads % tp == 0

    def part(name, dim):
        return state[name].chunk(tp, dim)[tp_rank]

    def pad(matrix):
        return torch.nn.functional.pad(matrix, (0, 0, 0, -matrix.shape[0] % tp))

    def key_value(name):
        tensor = state[name]
        if kv < tp:
            tensor = tensor.unflatten(0, (kv, size)).repeat_interleave(tp // kv, 0).flatten(0, 1)
        return tensor.chunk(tp, 0)[tp_rank]

    tensors = {}
    if stage == 0:
        table = state["model.embed_tokens.weight"]
        if config["use_parallel_embedding"]:
            dim = config["embedding_sharding_dim"]
            table = (pad(table) if dim == 0 else table).chunk(tp, dim)[tp_rank]
        tensors["transformer.vocab_embedding.weight"] = table
    layers = torch.tensor_split(torch.arange(config["num_hidden_layers"]), pp)[stage].tolist()
    for local, layer in enumerate(layers):
        hf, trt = f"model.layers.{layer}.", f"transformer.layers.{local}."
        tensors[trt + "input_layernorm.weight"] = state[hf + "input_layernorm.weight"]
        tensors[trt + "post_layernorm.weight"] = state[hf + "post_attention_layernorm.weight"]
        for kind in ("weight", "bias"):
            if f"{hf}self_attn.q_proj.{kind}" in state:
                sections = [part(f"{hf}self_attn.q_proj.{kind}", 0)]
                sections += [key_value(f"{hf}self_attn.{letter}_proj.{kind}") for letter in "kv"]
                tensors[f"{trt}attention.qkv.{kind}"] = torch.cat(sections)
        tensors[trt + "attention.dense.weight"] = part(hf + "self_attn.o_proj.weight", 1)
        tensors[trt + "mlp.fc.weight"] = part(hf + "mlp.gate_proj.weight", 0)
        tensors[trt + "mlp.gate.weight"] = part(hf + "mlp.up_proj.weight", 0)
        tensors[trt + "mlp.proj.weight"] = part(hf + "mlp.down_proj.weight", 1)
    if stage == pp - 1:
        tensors["transformer.ln_f.weight"] = state["model.norm.weight"]
        head = state.get("lm_head.weight", state["model.embed_tokens.weight"])
        tensors["lm_head.weight"] = pad(head).chunk(tp, 0)[tp_rank]
    return {name: tensor.to(dtype).contiguous() for name, tensor in tensors.items()}


def assert_same(found, wanted, where=""):
    assert found.keys() == wanted.keys(), where
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, (where, name)
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), (where, name)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_rank_of_every_family(tmp_path, family):
    source = tiny_model(tmp_path / "hf", family, vocab_size=515, max_shard_size="300KB")
    state, tp = hf_state(source), TP_OF.get(family, 4)
    for grid in ((1, 1), (tp, 1), (1, 2), (tp, 2)):
        for parallel, dim in ((False, 0), (True, 0), (True, 1)):
            result = convert(source, tmp_path / "checkpoint", *grid, parallel, dim, workers=3)
            assert verify_checkpoint(result.folder) == []
            for rank in range(grid[0] * grid[1]):
                found = load_file(result.folder / f"rank{rank}.safetensors")
                assert_same(found, wanted_rank(state, result.config, rank, torch.float16), (family, grid, rank))
    assert [entry.name for entry in tmp_path.iterdir() if entry.name.startswith(".")] == []


@pytest.mark.parametrize("source_type", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("dtype", ["auto", "float16", "bfloat16", "float32"])
def test_types(tmp_path, source_type, dtype):
    source = tiny_model(tmp_path / "hf", "llama-gqa", dtype=source_type)
    result = convert(source, tmp_path / "checkpoint", tp=2, dtype=dtype)
    stored = {"auto": "float16" if source_type == "float32" else source_type}.get(dtype, dtype)
    assert result.config["dtype"] == stored
    for rank in range(2):
        wanted = wanted_rank(hf_state(source), result.config, rank, getattr(torch, stored))
        assert_same(load_file(result.folder / f"rank{rank}.safetensors"), wanted)


def test_P37_column_slices_are_saved_and_join_again(tmp_path):
    source = tiny_model(tmp_path / "hf", "llama-gqa")
    convert(source, tmp_path / "checkpoint", tp=2, dtype="float32")
    ranks = [load_file(tmp_path / "checkpoint" / f"rank{rank}.safetensors") for rank in range(2)]
    for trt, hf in (("attention.dense", "self_attn.o_proj"), ("mlp.proj", "mlp.down_proj")):
        joined = torch.cat([rank[f"transformer.layers.0.{trt}.weight"] for rank in ranks], 1)
        assert torch.equal(joined, hf_state(source)[f"model.layers.0.{hf}.weight"])


def test_P42_bias_sections_with_grouped_heads(tmp_path):
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 4}
    source = tiny_model(tmp_path / "hf", "qwen2", **sizes)
    bias = "transformer.layers.0.attention.qkv.bias"
    whole = convert(source, tmp_path / "one", dtype="float32")
    state = hf_state(source)
    q, k, v = (state[f"model.layers.0.self_attn.{letter}_proj.bias"] for letter in "qkv")
    with safe_open(whole.folder / "rank0.safetensors", framework="pt") as file:
        assert torch.equal(file.get_tensor(bias), torch.cat((q, k, v))) and len(q) + len(k) + len(v) == 48
    halves = convert(source, tmp_path / "two", tp=2, dtype="float32")
    with safe_open(halves.folder / "rank1.safetensors", framework="pt") as file:
        assert torch.equal(file.get_tensor(bias), torch.cat((q[16:], k[4:], v[4:])))
    without = convert(tiny_model(tmp_path / "llama", "llama-gqa"), tmp_path / "three")
    with safe_open(without.folder / "rank0.safetensors", framework="pt") as file:
        assert not [name for name in file.keys() if name.endswith("bias")]  # noqa: SIM118


def rejoin(ranks, config):
    """The Hugging Face tensors back from all ranks of one pipeline stage (tp only)."""
    tp, size = config["mapping"]["tp_size"], config["head_size"]
    queries = config["num_attention_heads"] // tp * size
    copies = max(1, tp // config["num_key_value_heads"])
    state = {"model.embed_tokens.weight": ranks[0]["transformer.vocab_embedding.weight"]}
    state["lm_head.weight"] = torch.cat([rank["lm_head.weight"] for rank in ranks])[: config["vocab_size"]]
    state["model.norm.weight"] = ranks[-1]["transformer.ln_f.weight"]
    for layer in range(config["num_hidden_layers"]):
        trt, hf = f"transformer.layers.{layer}.", f"model.layers.{layer}."
        state[hf + "input_layernorm.weight"] = ranks[-1][trt + "input_layernorm.weight"]
        state[hf + "post_attention_layernorm.weight"] = ranks[-1][trt + "post_layernorm.weight"]
        for kind in ("weight", "bias"):
            if f"{trt}attention.qkv.{kind}" not in ranks[0]:
                continue
            fused = [rank[f"{trt}attention.qkv.{kind}"] for rank in ranks]
            keys = (fused[0].shape[0] - queries) // 2
            state[f"{hf}self_attn.q_proj.{kind}"] = torch.cat([f[:queries] for f in fused])
            state[f"{hf}self_attn.k_proj.{kind}"] = torch.cat([f[queries : queries + keys] for f in fused[::copies]])
            state[f"{hf}self_attn.v_proj.{kind}"] = torch.cat([f[queries + keys :] for f in fused[::copies]])
        for mine, theirs, dim in (
            ("attention.dense", "self_attn.o_proj", 1),
            ("mlp.fc", "mlp.gate_proj", 0),
            ("mlp.gate", "mlp.up_proj", 0),
            ("mlp.proj", "mlp.down_proj", 1),
        ):
            state[f"{hf}{theirs}.weight"] = torch.cat([rank[f"{trt}{mine}.weight"] for rank in ranks], dim)
    return state


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    tp=st.sampled_from([1, 2, 3, 4]),
    kv=st.sampled_from([1, 2, 3, 4, 6]),
    group=st.integers(1, 4),
    size=st.sampled_from([2, 4, 6]),
    inner=st.integers(1, 5),
    hidden=st.integers(1, 30),
    vocab=st.integers(1, 40),
    family=st.sampled_from(["LlamaForCausalLM", "Qwen2ForCausalLM"]),
)
def test_splitting_and_joining_gives_the_model_back(
    tmp_path_factory, tp, kv, group, size, inner, hidden, vocab, family
):
    if (kv * group) % tp or (kv % tp and tp % kv):
        return
    folder = tmp_path_factory.mktemp("split")
    config = {
        "architectures": [family],
        "hidden_size": hidden,
        "num_attention_heads": kv * group,
        "num_key_value_heads": kv,
        "head_dim": size,
        "num_hidden_layers": 2,
        "intermediate_size": inner * tp,
        "vocab_size": vocab,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    shapes = source_tensors(ModelSpec.from_hf(config))
    generator = torch.Generator().manual_seed(hidden)
    state = {name: torch.randn(shape, generator=generator).to(torch.bfloat16) for name, shape in shapes.items()}
    save_file(state, folder / "model.safetensors")
    result = convert(folder, folder / "out", tp=tp)
    ranks = [load_file(result.folder / f"rank{rank}.safetensors") for rank in range(tp)]
    assert_same(rejoin(ranks, result.config), state)


@pytest.fixture(scope="module")
def modelopt_export():
    from modelopt.torch.export import export_tensorrt_llm_checkpoint

    return export_tensorrt_llm_checkpoint


@pytest.mark.parametrize("family", FAMILIES)
def test_equal_to_modelopt_bit_by_bit(tmp_path, family, modelopt_export):
    """ModelOpt 0.37 is what TensorRT-LLM 1.2.1 pins. Every tensor that both write is equal; the differences are:

    * the embedding table: ModelOpt always splits it by vocabulary, convert_checkpoint.py only with
      --use_parallel_embedding, so that flag is given here;
    * Qwen2: ModelOpt exports it only when it is told that the decoder is a Llama (its Qwen layout is refused);
    * config.json: ModelOpt writes logits_dtype float16 for bfloat16 weights and its own extra keys, and leaves out
      those that have defaults in TensorRT-LLM.
    """
    from transformers import AutoModelForCausalLM

    source = tiny_model(tmp_path / "hf", family, dtype="bfloat16")
    for tp in (1, TP_OF.get(family, 2)):
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
        modelopt_export(model, "llama", torch.bfloat16, tmp_path / f"modelopt{tp}", inference_tensor_parallel=tp)
        ours = convert(source, tmp_path / f"ours{tp}", tp=tp, parallel=True)
        for rank in range(tp):
            theirs = load_file(tmp_path / f"modelopt{tp}" / f"rank{rank}.safetensors")
            assert_same(load_file(ours.folder / f"rank{rank}.safetensors"), theirs, (family, tp, rank))
    config = json.loads((tmp_path / "modelopt1" / "config.json").read_text())
    differing = {key for key in config.keys() & ours.config.keys() if config[key] != ours.config[key]}
    assert differing <= {"logits_dtype", "mapping", "quantization"}
    assert verify_checkpoint(tmp_path / "modelopt1") == []


def test_config_json_of_a_llama(tmp_path):
    source = tiny_model(tmp_path / "hf", "llama3")
    convert(source, tmp_path / "checkpoint", tp=2, pp=2)
    config = json.loads((tmp_path / "checkpoint" / "config.json").read_text())
    assert list(config)[:4] == ["mlp_bias", "attn_bias", "rotary_base", "rotary_scaling"]
    assert (config["rotary_base"], config["rotary_scaling"]) == (500000.0, LLAMA3_ROPE)
    assert config["mapping"]["world_size"] == 4 and config["mapping"]["moe_tp_size"] == 2
    assert "rank" not in config["mapping"]
    assert config["moe"]["normalization_mode"] is None and config["moe"]["num_experts"] == 0
    assert config["quantization"]["quant_algo"] is None and config["quantization"]["group_size"] == 128
    assert (config["logits_dtype"], config["position_embedding_type"]) == ("float32", "rope_gpt_neox")
    assert config["head_size"] == config["rotary_embedding_dim"] == 8
    assert "qwen_type" not in config and "producer" not in config
    spec, back = ModelSpec.from_hf(source), ModelSpec.from_checkpoint_config(config)
    assert back == ModelSpec(**{**vars(spec), "dtype": "float16"})


def test_config_json_of_a_qwen(tmp_path):
    source = tiny_model(tmp_path / "hf", "qwen2", dtype="bfloat16")
    config = convert(source, tmp_path / "checkpoint").config
    assert (config["qwen_type"], config["seq_length"], config["num_labels"]) == ("qwen2", 8192, 1)
    assert config["attn_bias"] is True and config["moe"]["normalization_mode"] == 0
    assert "residual_mlp" not in config and "layer_idx_offset" not in config
    back = ModelSpec.from_checkpoint_config(config)
    assert back == ModelSpec.from_hf(source)


def test_save_config_only(tmp_path):
    source = tiny_model(tmp_path / "hf", "mistral")
    result = convert(source, tmp_path / "checkpoint", save_config_only=True)
    assert [entry.name for entry in result.folder.iterdir()] == ["config.json"]
    assert classify(result.folder) == "checkpoint"
    assert convert(source, tmp_path / "checkpoint").config == result.config  # and it may be replaced


def test_auto_follows_the_source():
    assert choose_dtype("auto", "float32") == "float16"
    assert choose_dtype("auto", "bfloat16") == "bfloat16"
    assert choose_dtype("float32", "bfloat16") == "float32"
    with pytest.raises(ValueError, match="int8"):
        choose_dtype("auto", "int8")


def bits_of(array, dtype):
    return torch.from_numpy(np.array(array)).view(dtype)


@pytest.mark.parametrize("target", ["float16", "bfloat16", "float32"])
def test_casting_all_sixteen_bit_patterns_is_torchs(target):
    patterns = np.arange(1 << 16, dtype=np.uint16)
    for source in ("float16", "bfloat16"):
        if source == target:
            continue
        found, _ = Caster(1 << 16).cast(patterns.view(np.uint8), source, target)
        wanted = torch.from_numpy(patterns.view(np.int16)).view(getattr(torch, source)).to(getattr(torch, target))
        found = bits_of(found, getattr(torch, target))
        finite = ~wanted.isnan()
        assert torch.equal(found.isnan(), wanted.isnan())
        assert torch.equal(found[finite], wanted[finite])


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50), st.sampled_from(["float16", "bfloat16"]))
def test_casting_float32_is_torchs(patterns, target):
    raw = np.array(patterns, dtype=np.uint32)
    values = torch.from_numpy(raw.view(np.float32).copy())
    found, beyond = Caster(len(raw)).cast(raw.view(np.uint8), "float32", target)
    found, wanted = bits_of(found, getattr(torch, target)), values.to(getattr(torch, target))
    assert torch.equal(found.nan_to_num(1.5), wanted.nan_to_num(1.5)) and torch.equal(found.isnan(), wanted.isnan())
    assert beyond == (int((values.abs() > 65504).sum()) if target == "float16" else 0)


def test_rows_longer_than_the_buffer(tmp_path, monkeypatch):
    from trtllm_workshop.reference import convert_write

    monkeypatch.setattr(convert_write, "BUFFER_BYTES", 64)
    source = tiny_model(tmp_path / "hf", "qwen2")
    result = convert(source, tmp_path / "checkpoint", tp=2)
    for rank in range(2):
        wanted = wanted_rank(hf_state(source), result.config, rank, torch.float16)
        assert_same(load_file(result.folder / f"rank{rank}.safetensors"), wanted)


def test_without_the_kernels_copy(tmp_path, monkeypatch):
    import errno
    import os

    def refuse(*_):
        raise OSError(errno.EXDEV, "another file system")

    monkeypatch.setattr(os, "copy_file_range", refuse, raising=False)
    source = tiny_model(tmp_path / "hf", "llama-mha", dtype="bfloat16")
    result = convert(source, tmp_path / "checkpoint")
    wanted = wanted_rank(hf_state(source), result.config, 0, torch.bfloat16)
    assert_same(load_file(result.folder / "rank0.safetensors"), wanted)
