"""The calibration texts of quantize.py: cut for real, counted honestly, from this machine only, every fault named."""

import pytest
import torch
from quantized_models import calibration_set, ranks, refused, run
from tiny_models import tiny_model, tiny_tokenizer
from trtllm_workshop.reference import quantize_data
from trtllm_workshop.reference.quantize_data import find_dataset, load_calibration
from trtllm_workshop.reference.quantize_formats import QuantizeError

pytest.importorskip("modelopt")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return calibration_set(tmp_path_factory.mktemp("calibration"))


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("source") / "hf", "llama-gqa", dtype="bfloat16")


def words(count):
    return " ".join(["the"] * count)


def test_P76_the_limit_cuts_and_the_average_is_the_real_one(tmp_path):
    """Three texts of 10, 600 and 1195 tokens and the limit 512."""
    tokenizer = tiny_tokenizer()
    texts = []
    for tokens in (10, 600, 1195):
        text = words(tokens)
        while len(tokenizer(text)["input_ids"]) > tokens:
            text = text.rsplit(" ", 1)[0]
        texts.append(text)
    lengths = [len(tokenizer(text)["input_ids"]) for text in texts]
    assert lengths[0] <= 10 and 512 < lengths[1] <= 600 < lengths[2] <= 1195
    said = []
    found = load_calibration(calibration_set(tmp_path / "set", texts), tokenizer, 512, 512, 3, said.append)
    ids, mask = found.batch(0)
    assert [len(row) for row in ids] == [512] * 3 and [sum(row) for row in mask] == [lengths[0], 512, 512]
    assert ids[1] == tokenizer(texts[1])["input_ids"][:512]
    average = (lengths[0] + 512 + 512) / 3
    text = "\n".join(said)
    assert f"average {average:.1f}" in text and text.count("512 tokens") == 1
    assert "2 of 3 texts are longer than 512 tokens and were cut" in text
    assert f"1 batch with {512 - lengths[0]} padding tokens" in text and found.tokens == lengths[0] + 1024
    assert "is little" not in text


def test_P76_the_model_sees_no_more_than_the_limit(source, data, tmp_path, monkeypatch):
    from transformers import LlamaForCausalLM

    widths, forward = [], LlamaForCausalLM.forward

    def watched(self, input_ids=None, **rest):
        widths.append(input_ids.shape[1])
        return forward(self, input_ids=input_ids, **rest)

    monkeypatch.setattr(LlamaForCausalLM, "forward", watched)
    run(source, tmp_path / "out", data, calib_max_seq_length=9, batch_size=4)
    assert widths == [9, 9, 9]


@pytest.mark.parametrize("flag", ["calib_size", "calib_max_seq_length", "batch_size"])
def test_zero_of_anything_measures_nothing(source, data, tmp_path, flag):
    refused(source, tmp_path / "out", data, f"--{flag} is 0", **{flag: 0})


def test_fewer_texts_than_asked_for(source, data, tmp_path):
    result, said = run(source, tmp_path / "out", data, calib_size=100)
    assert len(result.data.samples) == 12 and "--calib_size 100" in said and "all 12 texts" in said


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "no rows"),
        ('{"title": "x"}\n', "'title'"),
        ('{"text": "a"}\n{"text": \n', "line 2"),
        ('{"text": " "}\n', "empty"),
    ],
)
def test_broken_sets_are_named(source, tmp_path, content, said):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.jsonl").write_text(content)
    refused(source, tmp_path / "out", tmp_path / "set", "--calib_dataset", said)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ('{"id": "7", "body": "a letter"}\n', ("'id', 'body'", "rename the column with the texts to 'text'")),
        ('{"text": 12}\n', ("line 1: the text is 12", "rename the column")),
        ('{"text": "a"}\n{"body": "b"}\n', ("line 2 has no column 'text'", "rename the column")),
    ],
)
def test_the_advice_on_columns_is_one_that_the_command_line_can_follow(source, tmp_path, rows, said):
    (tmp_path / "train.jsonl").write_text(rows)
    refused(source, tmp_path / "out", tmp_path, *said)
    with pytest.raises(QuantizeError) as error:
        load_calibration(tmp_path, tiny_tokenizer(), 8, 64, 1, print)
    assert "field" not in str(error.value)


def said_about(path, name=None):
    lines = []
    load_calibration(path, tiny_tokenizer(), 1, 64, 1, lines.append)
    assert lines[0].startswith("calibration texts: ")
    return lines[0], [line for line in lines if "own quantize.py" in line]


def test_what_was_read_is_said_and_what_the_official_script_would_read(tmp_path):
    """tensorrt_llm/quantization/quantize_by_modelopt.py: a folder's train split, column text; article for cnn_dailymail."""
    plain = calibration_set(tmp_path / "plain", ["hello"])
    assert said_about(plain) == (f"calibration texts: {plain / 'train.jsonl'}, column 'text'", [])
    origin, (warning,) = said_about(plain / "train.jsonl")
    assert "column 'text'" in origin and "takes a folder, not a file" in warning
    other = tmp_path / "other"
    other.mkdir()
    (other / "train.jsonl").write_text('{"content": "first", "prompt": "second"}\n')
    origin, (warning,) = said_about(other)
    assert origin.endswith("column 'content'") and "reads the column 'text', not 'content'" in warning
    news = calibration_set(tmp_path / "cnn_dailymail", ["hello"])
    assert "reads the column 'article' of a path with cnn_dailymail" in said_about(news)[1][0]
    (news / "train.jsonl").write_text('{"article": "hello"}\n')
    assert said_about(news)[1] == []
    (other / "train.jsonl").write_text('"bare"\n')
    assert "these rows have no columns" in said_about(other)[1][0]
    (other / "train.jsonl").unlink()
    (other / "train.txt").write_text("one line\nanother\n")
    assert said_about(other) == (f"calibration texts: {other / 'train.txt'}, one text a line", [])


def test_little_text_is_said(tmp_path):
    few = calibration_set(tmp_path / "few", ["hello"])
    said = []
    data = load_calibration(few, tiny_tokenizer(), 1, 64, 1, said.append)
    assert any(f"{data.tokens} token" in line and "is little" in line for line in said)
    many = calibration_set(tmp_path / "many", [words(400)] * 4)
    load_calibration(many, tiny_tokenizer(), 4, 400, 1, said.append)
    assert sum("is little" in line for line in said) == 1


@pytest.mark.parametrize("name", ["cnn_dailymail", "abisee/cnn_dailymail", "/nowhere/texts"])
def test_P70_names_that_are_nothing_here(source, tmp_path, monkeypatch, name):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    refused(source, tmp_path / "out", name, f"--calib_dataset {name}", "local file or folder")


def test_P70_offline_the_courses_own_texts_replace_the_default_only(tmp_path, monkeypatch):
    bundled = calibration_set(tmp_path / "calibration")
    monkeypatch.setattr(quantize_data, "_BUNDLED", bundled)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    said = []
    assert find_dataset("cnn_dailymail", said.append) == bundled
    assert len(said) == 1 and "replaced" in said[0] and str(bundled) in said[0]
    with pytest.raises(QuantizeError, match="openwebtext"):
        find_dataset("openwebtext", said.append)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    with pytest.raises(QuantizeError, match=f"for example --calib_dataset {bundled}"):
        find_dataset("cnn_dailymail", said.append)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(quantize_data, "_BUNDLED", tmp_path / "absent")
    with pytest.raises(QuantizeError, match="with train"):
        find_dataset("cnn_dailymail", said.append)


def test_P70_a_run_opens_no_connection(source, data, tmp_path, monkeypatch):
    import socket

    def refuse(*_, **__):
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    run(source, tmp_path / "out", data, kv_cache_dtype="fp8")


def test_padding_needs_a_token(tmp_path):
    texts = calibration_set(tmp_path / "set", ["one two three", "one"])
    tokenizer, said = tiny_tokenizer(), []
    tokenizer.pad_token = None
    found = load_calibration(texts, tokenizer, 2, 64, 2, said.append)
    assert found.pad_token == tokenizer.eos_token_id and "'<|im_end|>' fills the batches" in "\n".join(said)
    tokenizer.eos_token = None
    with pytest.raises(QuantizeError, match=r"--batch_size 2 needs padding.*--batch_size 1"):
        load_calibration(texts, tokenizer, 2, 64, 2, said.append)
    assert load_calibration(texts, tokenizer, 2, 64, 1, said.append).batches == 2


def test_batches_measure_what_single_texts_measure(source, data, tmp_path):
    """With equal lengths there is no padding, and four texts a batch measure the same scales as one a batch."""
    one, _ = run(source, tmp_path / "one", data, kv_cache_dtype="int8", calib_max_seq_length=9)
    four, said = run(source, tmp_path / "four", data, kv_cache_dtype="int8", calib_max_seq_length=9, batch_size=4)
    assert "batch 3 of 3" in said and " 0 padding tokens" in said
    for name, tensor in ranks(one.folder)[0].items():
        if name.endswith("scaling_factor"):
            torch.testing.assert_close(ranks(four.folder)[0][name], tensor, rtol=1e-4, atol=0)


def test_padding_is_measured_too_and_that_is_said(source, tmp_path):
    texts = calibration_set(tmp_path / "set", ["the cat sat on the mat", "the"])
    _, said = run(source, tmp_path / "out", texts, batch_size=2)
    assert "padding tokens are measured like real ones" in said and "--batch_size 1" in said
