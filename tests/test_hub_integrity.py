"""verify_model_folder: each kind of broken folder is named with the file and the fix; whole ones pass."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_model
from trtllm_workshop.hub_files import HubFile, choose
from trtllm_workshop.hub_integrity import damaged_files, sha256, verify_model_folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("whole") / "m", max_shard_size="300KB")


@pytest.fixture
def folder(whole, tmp_path) -> Path:
    shutil.copytree(whole, tmp_path / "m")
    return tmp_path / "m"


def problems(folder: Path) -> str:
    report = verify_model_folder(folder)
    assert not report.ok and report.weights == ()
    return "\n".join(report.problems)


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("model-*.safetensors"))


def test_a_complete_folder_passes_and_its_weights_are_named(folder):
    report = verify_model_folder(folder)
    assert report.ok, report.problems
    assert report.weights == tuple(path.name for path in shards(folder))
    assert report.bytes == sum(path.stat().st_size for path in folder.iterdir())


def test_P17_lfs_pointers_are_named_with_the_bytes_they_stand_for(folder):
    pointed = shards(folder)[:4]
    for number, path in enumerate(pointed):
        path.write_text(
            f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize {1_000_000 + number}\n"
        )
    text = problems(folder)
    total = sum(1_000_000 + number for number in range(len(pointed)))
    assert f"these are LFS pointers, {total:,} bytes expected" in text
    assert all(path.name in text for path in pointed) and "git lfs pull" in text


def test_P17_a_pointer_for_the_tokenizer_is_found_too(folder):
    (folder / "tokenizer.json").write_text(
        f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 99\n"
    )
    assert "tokenizer.json" in problems(folder)


@pytest.mark.parametrize("size", [0, 5, 100, -1])
def test_a_truncated_shard_is_named(folder, size):
    path = shards(folder)[0]
    os.truncate(path, size if size >= 0 else path.stat().st_size - 1)
    assert path.name in problems(folder)


def test_a_shard_that_the_index_lists_is_missing(folder):
    gone = shards(folder)[0]
    gone.unlink()
    assert gone.name in problems(folder) and "missing" in problems(folder)


def test_an_index_of_other_shards_is_found(folder):
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    names = list(content["weight_map"])
    content["weight_map"][names[0]] = next(s.name for s in shards(folder) if s.name != content["weight_map"][names[0]])
    index.write_text(json.dumps(content))
    assert "do not belong together" in problems(folder)


def test_a_missing_tokenizer_is_named(folder):
    (folder / "tokenizer.json").unlink()
    assert "has no tokenizer" in problems(folder)
    (folder / "vocab.json").write_text("{}")
    assert "has no tokenizer" in problems(folder)
    (folder / "merges.txt").write_text("")
    assert verify_model_folder(folder).ok


def test_a_config_that_is_cut_or_missing_is_named(folder):
    (folder / "config.json").write_text('{"architectures": [')
    assert "config.json" in problems(folder)
    (folder / "config.json").unlink()
    assert str(folder) in problems(folder)


def test_missing_and_empty_folders(tmp_path):
    assert "not there" in problems(tmp_path / "absent")
    assert "empty" in problems(tmp_path)


def test_P40_of_two_sets_the_one_that_will_be_read_is_named(folder):
    torch.save({"w": torch.zeros(2)}, folder / "pytorch_model.bin")
    report = verify_model_folder(folder)
    assert report.ok and report.weights == tuple(path.name for path in shards(folder))
    assert any("two weight sets" in note and "pytorch_model.bin" in note for note in report.notes)


def test_P40_only_pickles_pass_with_a_note_and_a_cut_one_is_named(folder):
    for path in [*shards(folder), folder / "model.safetensors.index.json"]:
        path.unlink()
    assert "no weights" in problems(folder)
    pickle = folder / "pytorch_model.bin"
    torch.save({"w": torch.zeros(1000)}, pickle)
    report = verify_model_folder(folder)
    assert report.ok and report.weights == ("pytorch_model.bin",) and "consent" in report.notes[0]
    os.truncate(pickle, 2000)
    assert "pytorch_model.bin is truncated" in problems(folder)
    pickle.write_text("<html>not found</html>")
    assert "no PyTorch file" in problems(folder)


def test_damaged_files_compares_size_and_content(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    good = sha256(tmp_path / "a")
    assert good == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # FIPS 180-2, example B.1
    assert damaged_files(tmp_path, [HubFile("a", 3, good), HubFile("a", 3)]) == {}
    wrong = damaged_files(tmp_path, [HubFile("a", 4), HubFile("b", 1)])
    assert "3 bytes" in wrong["a"] and wrong["b"] == "is missing"
    assert "sha256" in damaged_files(tmp_path, [HubFile("a", 3, "0" * 64)])["a"]


def test_P40_choice_prefers_safetensors_and_leaves_subfolders_alone():
    names = [
        "config.json", "tokenizer.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
        "model.safetensors.index.json", "pytorch_model.bin", "consolidated.safetensors", "original/model.safetensors",
        "modeling_custom.py", "README.md", "LICENSE",
    ]  # fmt: skip
    choice = choose({name: HubFile(name, 10) for name in names})
    taken = {file.name for file in choice.files}
    assert taken == {*names[:5], "LICENSE"}
    assert choice.weights == tuple(names[2:4])
    assert "pytorch_model*.bin left out" in choice.notes[0]
    assert choose({"README.md": HubFile("README.md", 1)}) is None
