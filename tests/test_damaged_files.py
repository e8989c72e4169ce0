"""Files that are damaged or made to mislead: refused by name, and nothing outside the model's folder is read."""

from __future__ import annotations

import fcntl
import json
import os
import struct

import pytest
import torch
from engines import quiet
from test_convert_bad_input import refused
from tiny_models import edit_config, tiny_model
from trtllm_workshop.checkpoint import BrokenWeights, classify, verify_checkpoint
from trtllm_workshop.reference import convert_cli, run_cli, trtllm_build
from trtllm_workshop.reference.build import BuildConfig, build_engine
from trtllm_workshop.reference.build_output import FILES, engine_folder, one_at_a_time
from trtllm_workshop.reference.convert import convert_checkpoint
from trtllm_workshop.reference.engine import EngineError, load_engine
from trtllm_workshop.reference.tokenizer_source import load_tokenizer, read_generation_config
from trtllm_workshop.safetensors_file import read_header

UP, GATE = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.gate_proj.weight"


@pytest.fixture
def source(tmp_path):
    return tiny_model(tmp_path / "hf", "llama-gqa")


def header_and_data(path):
    raw = path.read_bytes()
    end = 8 + struct.unpack("<Q", raw[:8])[0]
    return json.loads(raw[8:end]), raw[end:]


def write_file(path, header: bytes, data: bytes) -> None:
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)


def test_tensors_that_overlap_are_refused(source, tmp_path):
    header, data = header_and_data(source / "model.safetensors")
    header[UP]["data_offsets"] = header[GATE]["data_offsets"]
    write_file(source / "model.safetensors", json.dumps(header).encode(), data)
    refused(source, tmp_path / "out", "model.safetensors", GATE, UP, "overlap", "download it again")


def test_a_gap_between_tensors_is_refused(source, tmp_path):
    header, data = header_and_data(source / "model.safetensors")
    last = max((entry for name, entry in header.items() if name != "__metadata__"), key=lambda e: e["data_offsets"])
    last["data_offsets"] = [place + 64 for place in last["data_offsets"]]
    write_file(source / "model.safetensors", json.dumps(header).encode(), data + bytes(64))
    refused(source, tmp_path / "out", "have a gap between them", "download it again")


def test_a_tensor_that_is_named_twice_is_refused(source, tmp_path):
    header, data = header_and_data(source / "model.safetensors")
    text = json.dumps(header)[:-1] + f', "{UP}": {json.dumps(header[GATE])}}}'
    write_file(source / "model.safetensors", text.encode(), data)
    refused(source, tmp_path / "out", f"'{UP}' is there twice")


def test_nesting_without_end_is_no_crash(source, tmp_path):
    write_file(source / "model.safetensors", b"[" * 100_000, b"")
    with pytest.raises(BrokenWeights, match=r"model\.safetensors: the safetensors header cannot be read"):
        read_header(source / "model.safetensors")
    (source / "config.json").write_text("[" * 100_000)
    assert classify(source) == "unknown"
    refused(source, tmp_path / "out", "config.json is not readable JSON")


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "", ".", "a\0b", 5, None])
def test_an_index_that_names_files_elsewhere_is_refused(source, tmp_path, name):
    (source / "model.safetensors").rename(source.parent / "secret.safetensors")
    header, _ = header_and_data(source.parent / "secret.safetensors")
    index = {"weight_map": dict.fromkeys(header.keys() - {"__metadata__"}, name)}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(source, tmp_path / "out", "model.safetensors.index.json", "download it again")


def test_an_index_without_files_is_refused(source, tmp_path):
    (source / "model.safetensors").unlink()
    (source / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    refused(source, tmp_path / "out", "names no files", "download it again")


def test_a_pickle_of_other_than_dense_tensors_is_refused(source, tmp_path):
    (source / "model.safetensors").unlink()
    for state in ({"a": torch.eye(4).to_sparse()}, {5: torch.ones(2)}, {"a": 5}):
        torch.save(state, source / "pytorch_model.bin")
        refused(source, tmp_path / "out", "no state dictionary of dense tensors", allow_pickle=True)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"mapping": "abc"}, "mapping of config.json is 'abc', expected an object"),
        ({"mapping": {"tp_size": "x"}}, "tp_size is 'x', expected a whole number"),
        ({"mapping": {"tp_size": 2**40, "world_size": 1}}, "tp_size is 1099511627776"),
        ({"quantization": [1]}, r"quantization of config.json is \[1\], expected an object"),
        ({"dtype": ...}, "says dtype None"),
    ],
)
def test_a_checkpoint_config_with_values_of_another_kind(source, tmp_path, change, said):
    checkpoint = convert_checkpoint(source, tmp_path / "ck", dtype="float32", say=quiet).folder
    edit_config(checkpoint, **change)
    with pytest.raises((ValueError, RuntimeError), match=said):
        build_engine(checkpoint, BuildConfig(), tmp_path / "engine", log=quiet)
    assert verify_checkpoint(checkpoint)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ck", "hf"]


@pytest.mark.parametrize("section", ["abc", [], 5, {}])
@pytest.mark.parametrize("name", ["pretrained_config", "build_config"])
def test_an_engine_config_with_values_of_another_kind(engines, tmp_path, name, section):
    import shutil

    engine = shutil.copytree(engines.engine(), tmp_path / "engine")
    edit_config(engine, **{name: section})
    with pytest.raises((BrokenWeights, EngineError), match=f"{name} of config.json|do not belong together"):
        load_engine(engine)


@pytest.mark.parametrize(("place", "said"), [("file/x", "a file is in the place"), ("n" * 250, "name is too long")])
def test_an_output_that_cannot_be_written_is_named_with_its_flag(engines, tmp_path, capsys, place, said):
    (tmp_path / "file").write_text("mine")
    output = str(tmp_path / place)
    convert_cli.main(convert_cli.LLAMA, ["--model_dir", str(engines.hf()), "--output_dir", output])
    trtllm_build.main(["--checkpoint_dir", str(engines.checkpoint()), "--output_dir", output])
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2
    assert all(f"--output_dir {output} cannot be written" in e and said in e for e in errors)
    assert [p.name for p in tmp_path.iterdir()] == ["file"] and (tmp_path / "file").read_text() == "mine"


def test_a_streaming_interval_of_nothing_is_refused(engines, capsys):
    flags = ["--engine_dir", str(engines.engine()), "--tokenizer_dir", str(engines.hf()), "--max_output_len", "2"]
    assert run_cli.main([*flags, "--streaming", "--streaming_interval", "0"]) == 1
    assert "--streaming_interval 0: give 1 or more" in capsys.readouterr().err


def test_only_one_build_at_a_time_puts_its_files_in_place(tmp_path, monkeypatch):
    placed, replace = [], os.replace

    def watched(source, target) -> None:
        other = os.open(tmp_path, os.O_RDONLY)  # as another process would open the folder
        try:
            with pytest.raises(BlockingIOError):
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.close(other)
        placed.append(target.name)
        replace(source, target)

    (tmp_path / "out").mkdir()
    monkeypatch.setattr(os, "replace", watched)
    with engine_folder(tmp_path / "out", 1) as work:
        for name in FILES:
            (work / name).write_text("new")
    assert placed == list(FILES)
    with one_at_a_time(tmp_path):
        pass  # free again


@pytest.mark.parametrize("name", ["tokenizer_config.json", "tokenizer.json"])
@pytest.mark.parametrize("text", ["{", "[]", ""])
def test_a_damaged_tokenizer_is_named_with_its_folder(source, name, text):
    (source / name).write_text(text)
    with pytest.raises(ValueError, match=f"the tokenizer in {source} cannot be read"):
        load_tokenizer(source)


def test_code_beside_a_tokenizer_is_never_run(source, tmp_path):
    (source / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Tok: ...\n")
    config = json.loads((source / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Tok", "auto_map": {"AutoTokenizer": ["evil.Tok", "evil.Tok"]}}
    (source / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="custom code"):
        load_tokenizer(source)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("text", ["{", "[1]", '"x"', '{"eos_token_id": "x"}', '{"eos_token_id": [1, [2]]}'])
def test_a_damaged_generation_config_is_named(source, text):
    (source / "generation_config.json").write_text(text)
    with pytest.raises(ValueError, match=r"generation_config\.json"):
        read_generation_config(source)
