"""checkpoint and safetensors_file: folder kinds, headers, names and shapes per rank, verification."""

import json
import os
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from trtllm_workshop.checkpoint import (
    BrokenWeights,
    RankMapping,
    WrongFolderKind,
    classify,
    expected_tensors,
    read_config,
    read_tensor,
    require_kind,
    summarise_names,
    tensor_index,
    verify_checkpoint,
)
from trtllm_workshop.safetensors_file import read_header, write_header

CONFIG = {
    "architecture": "LlamaForCausalLM",
    "dtype": "float16",
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
    "mapping": {"world_size": 1, "tp_size": 1, "pp_size": 1},
}


def make_checkpoint(folder, **changes):
    """A complete checkpoint of zeros for CONFIG with these changes."""
    config = {**CONFIG, **changes}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    for rank in range(config["mapping"]["world_size"]):
        shapes = expected_tensors(config, rank)
        dtype = getattr(torch, config["dtype"])
        save_file(
            {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()},
            folder / f"rank{rank}.safetensors",
        )
    return folder


def test_P43_kinds_of_folders(tmp_path):
    kinds = {
        "hf": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
        "checkpoint": CONFIG,
        "engine": {"version": "1.2.1", "pretrained_config": CONFIG, "build_config": {}},
        "unknown": {"name": "no model"},
    }
    for kind, config in kinds.items():
        (tmp_path / kind).mkdir()
        (tmp_path / kind / "config.json").write_text(json.dumps(config))
        assert classify(tmp_path / kind) == kind
    (tmp_path / "empty").mkdir()
    assert classify(tmp_path / "empty") == "empty"
    assert classify(tmp_path / "nowhere") == "missing"
    assert classify(tmp_path / "hf" / "config.json") == "unknown"
    (tmp_path / "empty" / "rank0.engine").write_bytes(b"x")
    assert classify(tmp_path / "empty") == "engine"
    assert require_kind(tmp_path / "hf", "hf") == tmp_path / "hf"


@pytest.mark.parametrize(
    ("found", "wanted", "advice"),
    [
        ("hf", "checkpoint", "run conversion first: convert_checkpoint.py --model_dir"),
        ("hf", "engine", "run conversion first"),
        ("checkpoint", "engine", "trtllm-build --checkpoint_dir"),
        ("checkpoint", "hf", "converted already"),
        ("engine", "checkpoint", "run.py --engine_dir"),
        ("engine", "hf", "built already"),
        ("missing", "checkpoint", "make it with convert_checkpoint.py"),
    ],
)
def test_P43_a_folder_of_another_kind_is_named_with_the_next_step(tmp_path, found, wanted, advice):
    configs = {"hf": {"architectures": ["X"]}, "checkpoint": CONFIG, "engine": {"pretrained_config": {}}}
    folder = tmp_path / "folder"
    if found in configs:
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(configs[found]))
    with pytest.raises(WrongFolderKind) as error:
        require_kind(folder, wanted)
    assert str(folder) in str(error.value) and advice in str(error.value)


def test_read_config_names_what_is_wrong(tmp_path):
    with pytest.raises(WrongFolderKind, match="empty folder"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(BrokenWeights, match="not readable JSON"):
        read_config(tmp_path)


def test_headers_agree_with_the_safetensors_library(tmp_path):
    tensors = {
        "a": torch.randn(3, 5),
        "b": torch.randn(7).to(torch.bfloat16),
        "c": torch.arange(4, dtype=torch.int8),
        "empty": torch.zeros(0, 3),
    }
    path = tmp_path / "x.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    index, metadata = read_header(path)
    assert metadata == {"format": "pt"}
    for name, tensor in tensors.items():
        assert index[name].dtype == str(tensor.dtype).removeprefix("torch.")
        assert index[name].shape == tuple(tensor.shape) and index[name].nbytes == tensor.nbytes
        assert torch.equal(read_tensor(path, name), tensor)
    with pytest.raises(KeyError, match="a, b, c"):
        read_tensor(path, "d")


def test_written_headers_are_read_by_the_safetensors_library(tmp_path):
    path = tmp_path / "x.safetensors"
    tensors = {"one": torch.randn(3, 3).half(), "two": torch.randn(5).to(torch.bfloat16), "three": torch.randn(2, 1)}
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    described = [(name, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in tensors.items()]
    for name, offset in write_header(fd, described, {"key": "value"}).items():
        os.pwrite(fd, tensors[name].view(torch.uint8).numpy().tobytes(), offset)
    os.close(fd)
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"key": "value"}
        assert all(torch.equal(file.get_tensor(name), tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("cut", [0, 4, 100, -1])
def test_truncated_file_is_named(tmp_path, cut):
    path = tmp_path / "rank0.safetensors"
    save_file({"a": torch.randn(100, 3)}, path)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(BrokenWeights, match=re.escape(str(path))):
        read_header(path)


def test_trailing_bytes_bad_offsets_and_garbage(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.randn(4)}, path)
    whole = path.read_bytes()
    path.write_bytes(whole + b"12345678")
    with pytest.raises(BrokenWeights, match="8 bytes after"):
        read_header(path)
    path.write_bytes(whole.replace(b"[4]", b"[5]"))
    with pytest.raises(BrokenWeights, match=r"16 bytes do not fit dtype F32 and shape \[5\]"):
        read_header(path)
    path.write_bytes(os.urandom(64))
    with pytest.raises(BrokenWeights, match="no complete safetensors file"):
        read_header(path)


def test_P17_lfs_pointer_is_named(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'a' * 64}\nsize 4938985352\n")
    with pytest.raises(BrokenWeights, match=r"Git LFS pointer of \d+ bytes, the weights have 4938985352 bytes"):
        tensor_index(tmp_path)


def test_index_of_a_folder_with_a_name_in_two_files(tmp_path):
    save_file({"a": torch.zeros(1)}, tmp_path / "one.safetensors")
    save_file({"b": torch.zeros(1)}, tmp_path / "two.safetensors")
    assert sorted(tensor_index(tmp_path)) == ["a", "b"]
    save_file({"b": torch.zeros(1)}, tmp_path / "three.safetensors")
    with pytest.raises(BrokenWeights, match=r"b is in three\.safetensors and in two\.safetensors"):
        tensor_index(tmp_path)


@given(st.integers(1, 60), st.integers(1, 8), st.integers(1, 4))
def test_ranks_and_pipeline_stages(layers, pp, tp):
    places = [RankMapping(tp, pp, rank) for rank in range(tp * pp)]
    for place in places:
        assert place.rank == place.pp_rank * tp + place.tp_rank
    if pp <= layers:
        stages = [list(place.layers(layers)) for place in places if place.tp_rank == 0]
        assert stages == [part.tolist() for part in torch.tensor_split(torch.arange(layers), pp)]
    assert [place.rank for place in places if place.is_first_stage] == list(range(tp))
    assert [place.rank for place in places if place.is_last_stage] == list(range(tp * (pp - 1), tp * pp))


def test_expected_tensors_of_one_rank():
    shapes = expected_tensors(CONFIG)
    assert len(shapes) == 3 * 7 + 3
    assert shapes["transformer.layers.2.attention.qkv.weight"] == ((4 + 2 * 2) * 4, 16)
    assert shapes["lm_head.weight"] == shapes["transformer.vocab_embedding.weight"] == (50, 16)
    assert not any(name.endswith(".bias") for name in shapes)


def test_expected_tensors_of_many_ranks():
    config = {**CONFIG, "vocab_size": 49, "mapping": {"world_size": 8, "tp_size": 4, "pp_size": 2}}
    first, last = expected_tensors(config, 0), expected_tensors(config, 7)
    assert "transformer.layers.1.mlp.fc.weight" in first and "transformer.layers.1.mlp.fc.weight" not in last
    assert first["transformer.layers.0.attention.qkv.weight"] == ((1 + 2 * 1) * 4, 16)  # a copy of one KV head
    assert first["transformer.vocab_embedding.weight"] == (49, 16) and "lm_head.weight" not in first
    assert last["lm_head.weight"] == (13, 16) and "transformer.vocab_embedding.weight" not in last
    split = {**config, "use_parallel_embedding": True}
    assert expected_tensors(split)["transformer.vocab_embedding.weight"] == (13, 16)
    by_hidden = {**split, "embedding_sharding_dim": 1}
    assert expected_tensors(by_hidden)["transformer.vocab_embedding.weight"] == (49, 4)


def test_mapping_that_contradicts_itself():
    with pytest.raises(BrokenWeights, match="world_size 3 is not tp_size 2"):
        expected_tensors({**CONFIG, "mapping": {"world_size": 3, "tp_size": 2, "pp_size": 1}})
    with pytest.raises(BrokenWeights, match="rank 1 does not exist"):
        expected_tensors(CONFIG, 1)


def test_P39_names_are_summarised_as_patterns():
    names = [f"transformer.layers.{i}.{kind}.per_channel_scale" for i in range(80) for kind in ("a", "b", "c")]
    text = summarise_names([*names, "lm_head.per_channel_scale"])
    assert text.startswith("3 patterns x 80 layers: transformer.layers.*.a.per_channel_scale, ")
    assert "lm_head.per_channel_scale" in text and len(text) < 220
    assert summarise_names([]) == "no names"


def test_P39_missing_and_extra_names_are_found(tmp_path):
    folder = make_checkpoint(tmp_path / "c")
    assert verify_checkpoint(folder) == []
    path = folder / "rank0.safetensors"
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for layer in range(3):
        tensors.pop(f"transformer.layers.{layer}.mlp.fc.weight")
        tensors[f"transformer.layers.{layer}.mlp.fc.per_channel_scale"] = torch.zeros(24).half()
    save_file(tensors, path)
    missing, extra = verify_checkpoint(folder)
    assert "required but not provided: 1 pattern x 3 layers: transformer.layers.*.mlp.fc.weight" in missing
    assert "provided but not required" in extra and "per_channel_scale" in extra


def test_verify_finds_shapes_types_files_and_ranks(tmp_path):
    folder = make_checkpoint(tmp_path / "c", mapping={"world_size": 2, "tp_size": 2, "pp_size": 1})
    assert verify_checkpoint(folder) == []
    (folder / "rank1.safetensors").rename(folder / "rank2.safetensors")
    problems = "\n".join(verify_checkpoint(folder))
    assert "rank2.safetensors belong to no rank" in problems and "rank1.safetensors does not exist" in problems
    wider = make_checkpoint(tmp_path / "d")
    config = {**CONFIG, "head_size": 8, "dtype": "bfloat16"}
    (wider / "config.json").write_text(json.dumps(config))
    problems = "\n".join(verify_checkpoint(wider))
    assert "attention.qkv.weight has shape (32, 16), the config makes it (64, 16)" in problems
    assert "is float16, config.json says dtype bfloat16" in problems
    (tmp_path / "empty").mkdir()
    assert "is an empty folder" in verify_checkpoint(tmp_path / "empty")[0]


def test_import_needs_no_torch():
    import subprocess
    import sys

    code = (
        "import sys, trtllm_workshop.checkpoint, trtllm_workshop.reference.convert_cli; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
