"""The course's data sets: loadable, distinct, and evaluated on text that calibration has not seen."""

import json
from pathlib import Path

import pytest
from trtllm_workshop.text_dataset import load_prompts, load_texts

DATASETS = Path(__file__).parents[1] / "datasets"


@pytest.mark.parametrize("name", ["calibration", "calibration-wrong", "evaluation.jsonl"])
def test_every_text_loads_and_is_there_once(name):
    texts = load_texts(DATASETS / name)
    assert len(texts) >= 16 and len(set(texts)) == len(texts)
    assert all(20 <= len(text.split()) <= 260 for text in texts)


def test_prompts_load():
    prompts = load_prompts(DATASETS / "chat_prompts.jsonl")
    assert len(prompts) == 24 == len(set(prompts))


def test_the_folders_are_what_quantize_py_wants_of_a_local_set():
    for name in ("calibration", "calibration-wrong"):
        assert [file.name for file in (DATASETS / name).iterdir()] == ["train.jsonl"]
        rows = [json.loads(line) for line in (DATASETS / name / "train.jsonl").read_text(encoding="utf-8").splitlines()]
        assert all(list(row) == ["text"] for row in rows)


def eight_grams(texts):
    for text in texts:
        words = text.lower().split()
        yield from (tuple(words[i : i + 8]) for i in range(len(words) - 7))


def test_evaluation_shares_nothing_with_calibration():
    seen = set(eight_grams(load_texts(DATASETS / "calibration")))
    assert not seen & set(eight_grams(load_texts(DATASETS / "evaluation.jsonl")))


def test_small_and_described():
    files = [file for file in DATASETS.rglob("*.jsonl")]
    assert sum(file.stat().st_size for file in files) < 300_000
    readme = (DATASETS / "README.md").read_text(encoding="utf-8")
    assert all(str(file.relative_to(DATASETS)) in readme for file in files)
