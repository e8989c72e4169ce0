"""quantize.py for several ranks: the files join to those of one rank, with scales split or repeated as the format says."""

import json

import pytest
import torch
from quantized_models import calibration_set, ranks, refused, run
from tiny_models import tiny_model
from trtllm_workshop.checkpoint import verify_checkpoint

pytest.importorskip("modelopt")
pytestmark = pytest.mark.usefixtures("one_thread")

# The dimension in which the ranks' parts of a row-parallel layer's tensors lie; None: the same on every rank.
ROW = {"weight": 1, "weights_scaling_factor": 1, "prequant_scaling_factor": 0, "activation_scaling_factor": None}
COLUMN = {"weight": 0, "weights_scaling_factor": 0, "prequant_scaling_factor": None, "activation_scaling_factor": None}
SIZES = {"num_hidden_layers": 2, "intermediate_size": 128}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return calibration_set(tmp_path_factory.mktemp("calibration"))


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Qwen2: biases, head size 32, four heads and two KV heads."""
    return tiny_model(tmp_path_factory.mktemp("source") / "hf", "qwen2", dtype="bfloat16", **SIZES)


def identical(parts, name):
    for part in parts[1:]:
        assert torch.equal(parts[0].view(torch.uint8), part.view(torch.uint8)), f"{name} differs between the ranks"
    return parts[0]


def join_qkv(parts, config, rows):
    """q, k and v each joined for itself: `rows` of the tensor stand for one head (half of them when two are packed)."""
    tp = len(parts)
    heads, kv = config["num_attention_heads"] // tp, max(1, config["num_key_value_heads"] // tp)
    sections = [part.split([heads * rows, kv * rows, kv * rows]) for part in parts]
    return torch.cat([torch.cat([part[number] for part in sections]) for number in range(3)])


def joined(parts, config, name):
    """One tensor of the model from what the ranks of a stage have of it."""
    tensors = [part[name] for part in parts]
    module, _, kind = name.rpartition(".")
    if tensors[0].numel() == 1 or module.endswith("norm") or name == "transformer.ln_f.weight":
        return identical(tensors, name)
    if ".layers." not in name:  # embedding and head, both split by vocabulary
        return torch.cat(tensors)
    if module.endswith("attention.qkv") and kind != "prequant_scaling_factor":
        # Packed weights hold two output channels in a byte, so a head takes half as many rows.
        fused = (config["num_attention_heads"] + 2 * config["num_key_value_heads"]) * config["head_size"]
        packed = 2 if len(tensors[0]) * len(parts) * 2 == fused else 1
        return join_qkv(tensors, config, config["head_size"] // packed)
    dim = (ROW if module.endswith(("attention.dense", "mlp.proj")) else COLUMN)[kind]
    return identical(tensors, name) if dim is None else torch.cat(tensors, dim)


def assert_joins_to(folder, whole):
    """Every stage and rank of `folder` against the one rank of `whole`, byte for byte."""
    assert verify_checkpoint(folder) == []
    config = json.loads((folder / "config.json").read_text())
    tp, pp = config["mapping"]["tp_size"], config["mapping"]["pp_size"]
    (wanted,), files, seen = ranks(whole), ranks(folder), set()
    assert len(files) == tp * pp
    each = config["num_hidden_layers"] // pp
    for stage in range(pp):
        parts = files[stage * tp : (stage + 1) * tp]
        assert all(part.keys() == parts[0].keys() for part in parts)
        for name in parts[0]:
            words = name.split(".")
            if words[1] == "layers":
                words[2] = str(int(words[2]) + stage * each)
            there = ".".join(words)
            found = joined(parts, config, name)
            assert found.dtype == wanted[there].dtype and found.shape == wanted[there].shape, there
            assert torch.equal(found.view(torch.uint8), wanted[there].view(torch.uint8)), there
            assert there not in seen
            seen.add(there)
    assert seen == wanted.keys()
    return config


@pytest.mark.parametrize(
    ("qformat", "kv", "algorithm"),
    [("fp8", "fp8", "FP8"), ("int8_wo", None, "W8A16"), ("int8_wo", "int8", "W8A16"), ("int4_awq", None, "W4A16_AWQ")],
)
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (2, 2), (1, 2)])
def test_ranks_join_to_the_checkpoint_of_one(source, data, tmp_path, qformat, kv, algorithm, tp, pp):
    options = {"kv_cache_dtype": kv} | ({"awq_block_size": 32} if qformat == "int4_awq" else {})
    run(source, tmp_path / "one", data, qformat, **options)
    run(source, tmp_path / "several", data, qformat, tp_size=tp, pp_size=pp, **options)
    config = assert_joins_to(tmp_path / "several", tmp_path / "one")
    assert config["mapping"]["world_size"] == tp * pp
    assert config["quantization"]["quant_algo"] == algorithm
    assert config["quantization"]["kv_cache_quant_algo"] == (kv and kv.upper())
    names = {name for part in ranks(tmp_path / "several") for name in part}
    scales = {name.rpartition(".")[2] for name in names if name.endswith("scaling_factor")}
    wanted = {"fp8": {"weights_scaling_factor", "activation_scaling_factor"}, "int8_wo": set()}
    wanted["int4_awq"] = {"weights_scaling_factor", "prequant_scaling_factor"}
    assert scales == wanted[qformat] | (
        {"kv_cache_scaling_factor"} | {f"{x}_cache_scaling_factor" for x in "kv"} if kv else set()
    )


def test_a_scale_that_was_not_split_is_seen(source, data, tmp_path):
    """The comparison fails for AWQ scales of a row-parallel layer that lie on the wrong rank."""
    from safetensors.torch import load_file, save_file

    run(source, tmp_path / "one", data, "int4_awq", awq_block_size=32)
    run(source, tmp_path / "two", data, "int4_awq", awq_block_size=32, tp_size=2)
    assert_joins_to(tmp_path / "two", tmp_path / "one")
    name = "transformer.layers.1.mlp.proj.weights_scaling_factor"
    first, second = (load_file(tmp_path / "two" / f"rank{rank}.safetensors") for rank in range(2))
    save_file({**first, name: second[name].clone()}, tmp_path / "two" / "rank0.safetensors")
    with pytest.raises(AssertionError, match=name):
        assert_joins_to(tmp_path / "two", tmp_path / "one")


def test_P28_ranks_and_heads_that_do_not_fit_are_refused_with_both_numbers(source, data, tmp_path):
    target = tmp_path / "out"
    refused(source, target, data, "--tp_size 3", "4 attention heads", "3 ranks", "Possible are 1, 2, 4", tp_size=3)
    twelve = tiny_model(tmp_path / "twelve", "qwen2", num_attention_heads=12, intermediate_size=96)
    refused(twelve, target, data, "--tp_size 3", "2 KV heads", "3 ranks", qformat="int8_wo", tp_size=3)
    refused(source, target, data, "--pp_size 3", "2 layers", qformat="int4_awq", pp_size=3)
    odd = tiny_model(tmp_path / "odd", "qwen2", dtype="bfloat16", intermediate_size=130)
    refused(odd, target, data, "--tp_size 4", "intermediate size 130", "4 ranks", tp_size=4)


def test_awq_groups_must_fit_into_the_part_of_a_rank(source, data, tmp_path):
    """128 inner channels hold groups of 128; the 64 of each of two ranks do not."""
    words = "--awq_block_size 128", "64"
    refused(source, tmp_path / "out", data, *words, qformat="int4_awq", awq_block_size=128, tp_size=2)
