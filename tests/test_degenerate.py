"""Broken text is named, text is left alone."""

import pytest
from trtllm_workshop.degenerate import degenerate_reason


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "empty"),
        (" \n ", "empty"),
        ("aaaaaaaaaaaaaaaaaaaaaaa", "'a'"),
        ("the the the the the the the the the", "loop"),
        ("I am a cat. " * 7, "loop: 'I am a cat.' 7 times"),
        ("你好吗" * 30, "30 times"),
        ("ha" * 20, "20 times"),
        ("#!?,; " * 6, "no letters"),
        ("\ufffd\ufffd\ufffd ab \ufffd", "decoded"),
        ("a b a c a d a e a f a g a h a i a j a k a l", "'a' is"),
    ],
)
def test_broken_text(text, said):
    assert said in (degenerate_reason(text) or "")


@pytest.mark.parametrize(
    "text",
    [
        "Yes.",
        "42",
        "The capital of Portugal is Lisbon, which is known for its hills, its trams and its tiles.",
        "No, no, no! That is very, very good.",
        "1. Eggs\n2. Milk\n3. Bread\n4. Salt\n5. Soap",
        "def f(x):\n    # ----------------------------\n    return x + x + x + x",
        "| a | b |\n|---|---|\n| 1 | 2 |\n| 3 | 4 |",
        "| a | b |\n|---|---|\n" + "\n".join(f"| {n} | {n * n} |" for n in range(8)),
        "10000000000000000 is ten quadrillion, 0x00000000000000000001 is one.",
        "\u250c" + "\u2500" * 30 + "\u2510 a box",
        "今日は天気がいいですね。散歩に行きましょう。",
    ],
)
def test_text(text):
    assert degenerate_reason(text) is None


def test_the_courses_own_texts_pass():
    from pathlib import Path

    from trtllm_workshop.text_dataset import load_texts

    datasets = Path(__file__).parents[1] / "datasets"
    assert not any(map(degenerate_reason, load_texts(datasets / "evaluation.jsonl")))
    assert all(map(degenerate_reason, load_texts(datasets / "calibration-wrong")))
