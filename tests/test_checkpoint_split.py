"""Rank files joined again to the original, bit by bit, and equal to those of NVIDIA ModelOpt's own exporter.

The joiner here knows the format's text (which dimension is split, which tensors are whole on every rank) and none of the
converter's code: it counts heads from the Hugging Face config and takes files apart with torch alone.
"""

import json
import math
import warnings

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from test_convert import assert_same, convert, hf_state
from tiny_models import FAMILIES, tiny_model
from trtllm_workshop.checkpoint import verify_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")

WHOLE = {"input_layernorm": "input_layernorm", "post_layernorm": "post_attention_layernorm"}
SPLIT = {  # TensorRT-LLM's name -> Hugging Face's, and the dimension in which the ranks' parts lie side by side
    "attention.dense": ("self_attn.o_proj", 1),
    "mlp.fc": ("mlp.gate_proj", 0),
    "mlp.gate": ("mlp.up_proj", 0),
    "mlp.proj": ("mlp.down_proj", 1),
}


def the_same_on_all(parts):
    for part in parts[1:]:
        assert torch.equal(parts[0].view(torch.uint8), part.view(torch.uint8)), "copies differ"
    return parts[0]


def cut_padding(table, rows):
    assert not table[rows:].any(), "padding is not zero"
    return table[:rows]


def join_layer(parts, heads, kv, size):
    """One layer's Hugging Face tensors (names without the layer) from the ranks' tensors, which are used up."""
    tp, joined = len(parts), {}
    copies = max(1, tp // kv)  # ranks that hold the same KV head
    for mine, theirs in WHOLE.items():
        joined[f"{theirs}.weight"] = the_same_on_all([part.pop(f"{mine}.weight") for part in parts])
    for mine, (theirs, dim) in SPLIT.items():
        joined[f"{theirs}.weight"] = torch.cat([part.pop(f"{mine}.weight") for part in parts], dim)
    for kind in ("weight", "bias"):
        if f"attention.qkv.{kind}" not in parts[0]:
            continue
        queries, keys, values = [], [], []
        for part in parts:
            q, k, v = part.pop(f"attention.qkv.{kind}").split([heads // tp * size, *[max(1, kv // tp) * size] * 2])
            queries.append(q)
            keys.append(k)
            values.append(v)
        joined[f"self_attn.q_proj.{kind}"] = torch.cat(queries)
        for letter, pieces in (("k", keys), ("v", values)):
            groups = [the_same_on_all(pieces[first : first + copies]) for first in range(0, tp, copies)]
            joined[f"self_attn.{letter}_proj.{kind}"] = torch.cat(groups)
    return joined


def join(folder, hf, tp, pp, dim=None):
    """The Hugging Face tensors of a checkpoint folder; `dim` is how the embedding is split, None for not at all.

    Every tensor of every file is used exactly once: one that nobody asked for is left over and fails the test.
    """
    files = [load_file(folder / f"rank{rank}.safetensors") for rank in range(tp * pp)]
    heads, kv = hf["num_attention_heads"], hf["num_key_value_heads"]
    size = hf.get("head_dim") or hf["hidden_size"] // heads
    state, layer = {}, 0
    for stage in range(pp):
        ranks = files[stage * tp : (stage + 1) * tp]
        if stage == 0:
            tables = [rank.pop("transformer.vocab_embedding.weight") for rank in ranks]
            whole = dim is None or tp == 1
            table = the_same_on_all(tables) if whole else torch.cat(tables, dim)
            state["model.embed_tokens.weight"] = cut_padding(table, hf["vocab_size"])
        count = hf["num_hidden_layers"] // pp + (stage < hf["num_hidden_layers"] % pp)
        for local in range(count):
            start = f"transformer.layers.{local}."
            parts = []
            for rank in ranks:
                mine = [name for name in rank if name.startswith(start)]
                parts.append({name.removeprefix(start): rank.pop(name) for name in mine})
            joined = join_layer(parts, heads, kv, size)
            assert not any(parts), parts
            state |= {f"model.layers.{layer}.{name}": tensor for name, tensor in joined.items()}
            layer += 1
        if stage == pp - 1:
            state["model.norm.weight"] = the_same_on_all([rank.pop("transformer.ln_f.weight") for rank in ranks])
            head = torch.cat([rank.pop("lm_head.weight") for rank in ranks])
            assert len(head) % tp == 0 and len(head) - hf["vocab_size"] < tp
            state["lm_head.weight"] = cut_padding(head, hf["vocab_size"])
        assert not any(ranks), [list(rank) for rank in ranks]
    return state


@st.composite
def models(draw):
    """(Hugging Face config, tp, pp, embedding dimension): every size is one that the split allows."""
    tp, pp = draw(st.sampled_from([1, 2, 3, 4, 8])), draw(st.sampled_from([1, 2, 3]))
    kv = draw(st.sampled_from([n for n in (1, 2, 3, 4, 6, 8, 16) if n % tp == 0 or tp % n == 0]))
    dim = draw(st.sampled_from([None, 0, 1]))
    hidden = draw(st.integers(1, 20))
    config = {
        "architectures": [draw(st.sampled_from(["LlamaForCausalLM", "Qwen2ForCausalLM", "MistralForCausalLM"]))],
        "hidden_size": hidden * tp if dim == 1 else hidden,
        "num_attention_heads": math.lcm(kv, tp) * draw(st.integers(1, 2)),
        "num_key_value_heads": kv,
        "head_dim": draw(st.sampled_from([2, 4, 6])),
        "num_hidden_layers": pp + draw(st.integers(0, 3)),
        "intermediate_size": tp * draw(st.integers(1, 5)),
        "vocab_size": draw(st.integers(1, 40)),
        "tie_word_embeddings": draw(st.booleans()),
        "torch_dtype": draw(st.sampled_from(["bfloat16", "float16", "float32"])),
    }
    return config, tp, pp, dim


def random_weights(config, seed):
    """Hugging Face tensors for the config, shapes written down from the model's architecture."""
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    width, kv_width = (config[f"num_{who}_heads"] * config["head_dim"] for who in ("attention", "key_value"))
    shapes = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    for layer in range(config["num_hidden_layers"]):
        start = f"model.layers.{layer}."
        for name, rows in (("q", width), ("k", kv_width), ("v", kv_width)):
            shapes[f"{start}self_attn.{name}_proj.weight"] = (rows, hidden)
            if config["architectures"] == ["Qwen2ForCausalLM"]:
                shapes[f"{start}self_attn.{name}_proj.bias"] = (rows,)
        shapes[start + "self_attn.o_proj.weight"] = (hidden, width)
        shapes[start + "mlp.down_proj.weight"] = (hidden, inner)
        shapes |= {start + f"mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
        shapes |= {start + f"{name}.weight": (hidden,) for name in WHOLE.values()}
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, config["torch_dtype"])
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(model=models(), seed=st.integers(0, 2**31))
def test_any_split_joins_to_the_original(tmp_path_factory, model, seed):
    config, tp, pp, dim = model
    source = tmp_path_factory.mktemp("split")
    (source / "config.json").write_text(json.dumps(config))
    state = random_weights(config, seed)
    save_file(state, source / "model.safetensors")
    result = convert(source, source / "out", tp, pp, dim is not None, dim or 0, dtype=config["torch_dtype"])
    assert verify_checkpoint(result.folder) == []
    joined = join(result.folder, config, tp, pp, dim)
    if config["tie_word_embeddings"]:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    assert_same(joined, state, (config, tp, pp, dim))


@pytest.mark.parametrize("tp", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("pp", [1, 2, 3])
def test_P28_every_grid_joins_with_kv_heads_that_are_shared_and_copied(tmp_path, tp, pp):
    """24 heads: two KV heads are copied for 4 and 8 ranks, three for 3; five layers make uneven stages."""
    kv = 3 if tp == 3 else 2
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": 24,
        "num_attention_heads": 24,
        "num_key_value_heads": kv,
        "head_dim": 4,
        "num_hidden_layers": 5,
        "intermediate_size": 48,
        "vocab_size": 29,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    state = random_weights(config, tp * 10 + pp)
    save_file(state, tmp_path / "model.safetensors")
    for dim in (None, 0, 1):
        folder = convert(tmp_path, tmp_path / "out", tp, pp, dim is not None, dim or 0).folder
        assert_same(join(folder, config, tp, pp, dim), state, (tp, pp, dim))
    copied = load_file(folder / "rank0.safetensors")["transformer.layers.0.attention.qkv.bias"]
    assert len(copied) == (24 // tp + 2 * max(1, kv // tp)) * 4


def test_the_joiner_sees_what_a_wrong_split_does(tmp_path):
    """Rows of the fused matrix handed out in one piece, as a naive splitter does it: the first rank gets only queries."""
    source = tiny_model(tmp_path / "hf", "llama-gqa", dtype="bfloat16")
    folder, config = convert(source, tmp_path / "out", 2).folder, json.loads((source / "config.json").read_text())
    assert_same(join(folder, config, 2, 1), hf_state(source))
    whole = torch.cat([hf_state(source)[f"model.layers.1.self_attn.{letter}_proj.weight"] for letter in "qkv"])
    for rank, rows in enumerate(whole.chunk(2)):
        file = folder / f"rank{rank}.safetensors"
        save_file({**load_file(file), "transformer.layers.1.attention.qkv.weight": rows.clone()}, file)
    joined, state = join(folder, config, 2, 1), hf_state(source)
    wrong = {name for name in state if not torch.equal(joined[name], state[name])}
    assert wrong == {f"model.layers.1.self_attn.{letter}_proj.weight" for letter in "qkv"}


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "pp"), [(3, 1), (1, 4), (3, 2)])
def test_smollm2_joins_too(smollm2, tmp_path, tp, pp):
    """30 layers on four stages are 8, 8, 7, 7. Two ranks cannot share nine heads, nine not the 1536 inner channels."""
    for ranks, reason in ((2, "9 attention heads cannot be shared by 2"), (9, "1536 cannot be shared by 9 ranks")):
        with pytest.raises(ValueError, match=reason):
            convert(smollm2, tmp_path / "out", ranks)
    folder = convert(smollm2, tmp_path / "out", tp, pp, dtype="bfloat16").folder
    config, state = json.loads((smollm2 / "config.json").read_text()), hf_state(smollm2)
    joined = join(folder, config, tp, pp)
    assert_same(joined, state | {"lm_head.weight": state["model.embed_tokens.weight"]}, (tp, pp))


# Against NVIDIA ModelOpt 0.37, which TensorRT-LLM 1.2.1 pins ------------------------------------------------------------


def modelopt_export(source, folder, tp, pp=1, quantized=False):
    """ModelOpt's exporter on the model, which may be quantized to FP8 with made-up input ranges before."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import modelopt.torch.quantization as mtq
        from modelopt.torch.export import export_tensorrt_llm_checkpoint
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
        if quantized:
            ids = torch.arange(3, 35).unsqueeze(0)
            rules = {name: {"num_bits": (4, 3), "axis": None} for name in ("*weight_quantizer", "*input_quantizer")}
            rules |= {"*lm_head*": {"enable": False}, "*output_quantizer": {"enable": False}}
            config = {"quant_cfg": rules | {"default": {"enable": False}}, "algorithm": "max"}
            mtq.quantize(model, config, lambda quantizing: quantizing(ids))
        export_tensorrt_llm_checkpoint(
            model,
            "llama",
            torch.bfloat16,
            folder,
            inference_tensor_parallel=tp,
            inference_pipeline_parallel=pp,
        )
    return [load_file(folder / f"rank{rank}.safetensors") for rank in range(tp * pp)]


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "llama-tied"])
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (4, 1), (2, 2), (4, 2)])
def test_every_rank_equals_modelopts(tmp_path, family, tp, pp):
    """Two KV heads on four ranks, biases, a vocabulary that is padded; layers that the stages divide, as ModelOpt needs."""
    pytest.importorskip("modelopt")
    source = tiny_model(tmp_path / "hf", family, dtype="bfloat16", vocab_size=515, num_hidden_layers=2)
    theirs = modelopt_export(source, tmp_path / "modelopt", tp, pp)
    ours = convert(source, tmp_path / "ours", tp, pp, parallel=True)
    for rank, tensors in enumerate(theirs):
        assert_same(load_file(ours.folder / f"rank{rank}.safetensors"), tensors, (family, tp, pp, rank))
    config = json.loads((source / "config.json").read_text())
    state = hf_state(source)
    assert_same(join(tmp_path / "modelopt", config, tp, pp, 0), state, "ModelOpt's files in the joiner")


@pytest.mark.parametrize("tp", [2, 4])
def test_what_fp8_leaves_alone_equals_modelopts(tmp_path, tp):
    """In a quantized export both write norms, biases, embedding and head."""
    pytest.importorskip("modelopt")
    source = tiny_model(tmp_path / "hf", "qwen2", dtype="bfloat16", vocab_size=515)
    theirs = modelopt_export(source, tmp_path / "modelopt", tp, quantized=True)
    ours = convert(source, tmp_path / "ours", tp, parallel=True)
    for rank, tensors in enumerate(theirs):
        mine = load_file(ours.folder / f"rank{rank}.safetensors")
        both = {name for name in mine if name in tensors and tensors[name].dtype == torch.bfloat16}
        assert_same({name: mine[name] for name in both}, {name: tensors[name] for name in both}, (tp, rank))
        quantized = {name for name in mine if tensors[name].dtype == torch.float8_e4m3fn}
        assert len(quantized) == 3 * 5 and both | quantized == set(mine)
        assert {name.rsplit(".", 1)[1] for name in tensors.keys() - mine.keys()} == {
            "weights_scaling_factor",
            "activation_scaling_factor",
        }
