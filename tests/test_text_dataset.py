"""Texts and prompts from local files: found by content, every fault named."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trtllm_workshop.text_dataset import TextDatasetError, WrongColumn, load_prompts, load_texts, read_texts


def jsonl(path: Path, rows: list) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "4"},
]


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"text": "plain"}, "plain"),
        ({"id": 1, "article": "news", "highlights": "short"}, "news"),
        ({"document": "a document"}, "a document"),
        ({"content": "some content"}, "some content"),
        ({"prompt": "a prompt"}, "a prompt"),
        ({"messages": CHAT}, "Be brief.\n\nWhat is 2 + 2?\n\n4"),
        ({"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]}, "hi\n\nhello"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "in parts"}]}]}, "in parts"),
        ({"prompt": "behind", "text": "first"}, "first"),
        ("a bare string", "a bare string"),
    ],
)
def test_the_column_is_found_by_content(tmp_path, row, text):
    assert load_texts(jsonl(tmp_path / "any.jsonl", [row])) == [text]


def test_P71_the_folder_name_does_not_matter(tmp_path):
    rows = [{"article": "one", "id": 1}, {"article": "two", "id": 2}]
    jsonl(tmp_path / "cnn_dailymail" / "train.jsonl", rows)
    jsonl(tmp_path / "pile-like xsum" / "train.jsonl", rows)
    assert load_texts(tmp_path / "cnn_dailymail") == load_texts(tmp_path / "pile-like xsum") == ["one", "two"]


def test_P71_unknown_columns_are_listed_and_the_field_asked_for(tmp_path):
    file = jsonl(tmp_path / "x.jsonl", [{"Frage": "one", "Antwort": "two"}])
    with pytest.raises(TextDatasetError, match=r"line 1.*'Frage', 'Antwort'.*field=\"Frage\""):
        load_texts(file)
    assert load_texts(file, field="Antwort") == ["two"]
    with pytest.raises(TextDatasetError, match="no column 'answer'; its columns are 'Frage', 'Antwort'"):
        load_texts(file, field="answer")


def test_the_column_that_is_proposed_is_the_longest_text(tmp_path):
    file = jsonl(tmp_path / "x.jsonl", [{"id": "0017", "body": "a whole letter", "year": 2024}])
    with pytest.raises(WrongColumn, match=r'field="body"') as error:
        load_texts(file)
    assert "'id', 'body', 'year'" in error.value.problem and "field" not in error.value.problem


def test_the_origin_of_the_texts(tmp_path):
    found = read_texts(jsonl(tmp_path / "a.jsonl", [{"text": "t", "prompt": "p"}]))
    assert (found.texts, found.column, found.origin) == (["t"], "text", f"{tmp_path / 'a.jsonl'}, column 'text'")
    assert read_texts(tmp_path / "a.jsonl", field="prompt").origin.endswith("column 'prompt'")
    (tmp_path / "b.txt").write_text("one\ntwo\n")
    assert read_texts(tmp_path / "b.txt").origin == f"{tmp_path / 'b.txt'}, one text a line"
    jsonl(tmp_path / "train" / "a.jsonl", ["x"] * 3)
    jsonl(tmp_path / "train" / "b.jsonl", ["y"])
    (tmp_path / "a.jsonl").unlink(), (tmp_path / "b.txt").unlink()
    both = read_texts(tmp_path)
    assert both.column is None and both.origin == f"{tmp_path / 'train' / 'a.jsonl'} and 1 more file, one text a row"
    assert read_texts(tmp_path, limit=3).files == (tmp_path / "train" / "a.jsonl",), "the second file was not needed"


def test_a_broken_line_has_one_line_number(tmp_path):
    file = jsonl(tmp_path / "x.jsonl", [{"text": "a"}])
    file.write_text(file.read_text() + '{"text": "b')
    with pytest.raises(TextDatasetError) as error:
        load_texts(file)
    assert "line 2 is not JSON (Unterminated string starting at column 10)" in str(error.value)
    assert "line 1" not in str(error.value), "json's own line number, that of a file with one line"


def test_prompts(tmp_path):
    assert load_prompts(jsonl(tmp_path / "a.jsonl", [{"text": "t", "prompt": "p"}])) == ["p"]
    assert load_prompts(jsonl(tmp_path / "b.jsonl", [{"messages": CHAT}])) == ["What is 2 + 2?"]
    with pytest.raises(TextDatasetError, match="no message has the role user"):
        load_prompts(jsonl(tmp_path / "c.jsonl", [{"messages": CHAT[:1]}]))


def test_limit_takes_the_first_rows_and_reads_no_further(tmp_path):
    file = jsonl(tmp_path / "x.jsonl", [{"text": f"text {i}"} for i in range(5)] + [{"other": 1}])
    assert load_texts(file, limit=2) == ["text 0", "text 1"]
    assert len(load_texts(file, limit=5)) == 5
    with pytest.raises(TextDatasetError, match="line 6 has no column 'text'"):
        load_texts(file)
    for limit in (0, -1, True, 2.5):
        with pytest.raises(TextDatasetError, match="limit is"):
            load_texts(file, limit=limit)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no rows"),
        (b"\n \n", "holds no rows"),
        (b'{"text": "a"}\n{"text": "b"\n', r"line 2 is not JSON.*mend"),
        (b'{"text": "a"}\n{"text": " \\n"}\n', "line 2: the text is empty"),
        (b'{"text": "a"}\n\n{"text": 7}\n', "line 3: the text is 7, expected a string"),
        (b'{"text": null}\n', "line 1: the text is None"),
        (b'{"text": "a"}\n[1]\n', r"line 2 is \[1\], expected an object"),
        (b'{"text": "caf\xe9"}\n', "line 1 is not UTF-8.*0xe9"),
        (b'{"text": "\\ud83d"}\n', "line 1: .*surrogate"),
        (b'{"messages": [{"role": "user"}]}\n', "line 1: .*no chat message"),
        (b'{"messages": ["x"]}\n', "line 1: 'x' is no chat message"),
        (b'{"messages": []}\n', "line 1: the text is empty"),
        (b"{}\n", r"line 1: none of the columns \(none\)"),
        (b"[" * 200_000 + b"\n", "line 1 is not JSON"),
        (b"version https://git-lfs.github.com/spec/v1\nsize 9\n", "Git LFS pointer"),
    ],
)
def test_every_fault_of_a_file_is_named_with_its_place(tmp_path, content, message):
    file = tmp_path / "broken.jsonl"
    file.write_bytes(content)
    with pytest.raises(TextDatasetError, match=message) as error:
        load_texts(file)
    assert "broken.jsonl" in str(error.value)
    assert isinstance(error.value, ValueError)


def test_separators_inside_a_string_do_not_cut_a_line(tmp_path):
    texts = ["a\u2028b", "c\u0085d", "e\x0bf", "g\nh"]
    assert load_texts(jsonl(tmp_path / "x.jsonl", [{"text": text} for text in texts])) == texts


@given(st.lists(st.text(min_size=1).filter(str.strip), min_size=1, max_size=5))
def test_what_was_written_is_read(tmp_path_factory, texts):
    file = tmp_path_factory.mktemp("texts") / "x.jsonl"
    assert load_texts(jsonl(file, [{"text": text} for text in texts])) == texts
    as_list = file.with_suffix(".json")
    as_list.write_text(json.dumps(texts), encoding="utf-8")
    assert load_texts(as_list) == texts


def test_json_txt_and_a_byte_order_mark(tmp_path):
    (tmp_path / "a.json").write_text('{"train": [{"text": "one"}, {"text": "two"}]}', encoding="utf-8-sig")
    assert load_texts(tmp_path / "a.json") == ["one", "two"]
    (tmp_path / "b.txt").write_bytes(b"erste Zeile\r\n\r\nzweite Zeile\r\n")
    assert load_texts(tmp_path / "b.txt") == ["erste Zeile", "zweite Zeile"]
    (tmp_path / "c.json").write_text('{"text": "a"}\n{"text": "b"}\n')
    with pytest.raises(TextDatasetError, match=r"belongs in a file named \.jsonl"):
        load_texts(tmp_path / "c.json")
    (tmp_path / "d.json").write_text('{"version": 1}')
    with pytest.raises(TextDatasetError, match="holds a dict"):
        load_texts(tmp_path / "d.json")


@pytest.mark.parametrize(
    ("names", "texts"),
    [
        (["train.jsonl", "validation.jsonl"], ["train.jsonl"]),
        (["train/a.jsonl", "train/b.jsonl", "test/c.jsonl"], ["train/a.jsonl", "train/b.jsonl"]),
        (["data/train-00000-of-00001.jsonl", "data/test-00000-of-00001.jsonl"], ["data/train-00000-of-00001.jsonl"]),
        (["one.txt", "two.txt"], ["one.txt", "two.txt"]),
        (["latest.jsonl", "contest.jsonl"], ["contest.jsonl", "latest.jsonl"]),
        (["my-train.json", "dataset_info.json"], ["my-train.json"]),
    ],
)
def test_the_train_split_of_a_folder(tmp_path, names, texts):
    for name in names:
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps([name] if name.endswith(".json") else name).strip('"'), encoding="utf-8")
        if name.endswith(".jsonl"):
            jsonl(file, [{"text": name}])
    assert load_texts(tmp_path) == texts


def test_folders_without_training_texts(tmp_path):
    with pytest.raises(TextDatasetError, match=r"neither a file nor a folder.*train\.jsonl"):
        load_texts("cnn_dailymail")
    with pytest.raises(TextDatasetError, match=r"it has nothing\): put a train\.jsonl"):
        load_texts(tmp_path)
    jsonl(tmp_path / "validation.jsonl", [{"text": "x"}])
    with pytest.raises(TextDatasetError, match=r"validation\.jsonl"):
        load_texts(tmp_path)
    (tmp_path / "train.parquet").write_bytes(b"PAR1")
    with pytest.raises(TextDatasetError, match=r"write them as train\.jsonl first"):
        load_texts(tmp_path)
    with pytest.raises(TextDatasetError, match=r"\.jsonl, \.json, \.txt"):
        load_texts(tmp_path / "train.parquet")


def test_nothing_heavy_is_imported():
    code = "import sys, trtllm_workshop.text_dataset; print(sorted({'torch', 'numpy', 'huggingface_hub'} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
