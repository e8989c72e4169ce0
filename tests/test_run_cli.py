"""examples/run.py: prompts from the command line or a file, output as text, csv or npy, and errors in one line."""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import trtllm_workshop.reference
from engines import free_running
from trtllm_workshop.reference.run_cli import main

TEXTS = ["The capital of France is", "One cat and"]
NEW = 8
SCRIPT = Path(trtllm_workshop.reference.__file__).parent / "examples" / "run.py"


@pytest.fixture(scope="module")
def expected(engines):
    """(prompt ids, answer ids) of each text; no end token is met in these few."""
    outputs = engines.llm().generate(TEXTS, free_running(NEW))
    return [(output.prompt_token_ids, output.outputs[0].token_ids) for output in outputs]


@pytest.fixture
def run(engines, capsys):
    """Runs the command in this process: (exit code, standard output, standard error)."""

    def call(*flags, engine=None, end_id=-1):
        common = ("--engine_dir", engine or engines.engine(), "--tokenizer_dir", engines.hf(), "--max_output_len", NEW)
        ends = () if end_id is None else ("--end_id", end_id)
        code = main([str(part) for part in (*common, *ends, *flags)])
        return (code, *capsys.readouterr())

    return call


def answers_of(out):
    return re.findall(r'^Output \[Text (\d+) Beam 0\]: "(.*?)"$', out, re.MULTILINE | re.DOTALL)


def test_texts_in_and_texts_out(engines, run, expected):
    code, out, err = run("--input_text", *TEXTS)
    tokenizer = engines.llm().tokenizer
    assert code == 0 and err == "" and "reference toolchain" in out.splitlines()[0]
    for number, (text, (_, ids)) in enumerate(zip(TEXTS, expected, strict=True)):
        assert f'Input [Text {number}]: "{text}"' in out
        assert f'Output [Text {number} Beam 0]: "{tokenizer.decode(ids, skip_special_tokens=True)}"' in out


def test_the_real_command(engines):
    flags = (
        "--engine_dir",
        engines.engine(),
        "--tokenizer_dir",
        engines.hf(),
        "--max_output_len",
        "2",
        "--run_profiling",
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    argv = [sys.executable, str(SCRIPT), *map(str, flags)]
    done = subprocess.run(argv, capture_output=True, text=True, env=environment, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "Output [Text 0 Beam 0]" in done.stdout and re.search(r"output tokens: [12], latency: ", done.stdout)


def test_streaming_shows_what_is_new_every_few_steps(engines, run, expected):
    code, out, _ = run("--input_text", TEXTS[0], "--streaming", "--streaming_interval", 3)
    shown = re.findall(r'^New \[Text 0 Beam 0\]: "(.*?)"$', out, re.MULTILINE | re.DOTALL)
    tokenizer, ids = engines.llm().tokenizer, expected[0][1]
    full = [tokenizer.decode(ids[:count], skip_special_tokens=True).rstrip("\ufffd") for count in (1, 4, 7)]
    assert code == 0 and answers_of(out) == [("0", tokenizer.decode(ids, skip_special_tokens=True))]
    assert len(shown) <= 5 and "".join(shown) == answers_of(out)[0][1]
    assert all("".join(shown).startswith(text) for text in full) and shown[0] == full[0]


@pytest.mark.parametrize("session", [(), ("--use_py_session",)])
def test_prompts_from_a_text_file_and_output_as_csv_and_npy(run, expected, tmp_path, session):
    (tmp_path / "prompts.txt").write_text("\n".join(TEXTS) + "\n\n")
    csv_file, npy_file = tmp_path / "new" / "out.csv", tmp_path / "out.npy"
    code, _, _ = run(
        "--input_file", tmp_path / "prompts.txt", "--output_csv", csv_file, "--output_npy", npy_file, *session
    )
    assert code == 0
    with csv_file.open() as file:
        rows = [[int(cell) for cell in row] for row in csv.reader(file)]
    assert rows == numpy.load(npy_file).tolist(), "both hold output_ids: prompt, answer, padding"
    for row, (prompt, answer) in zip(rows, expected, strict=True):
        assert row[: len(prompt) + NEW] == prompt + answer


def test_prompts_from_a_file_of_token_ids_are_cut_from_the_left(engines, run, tmp_path):
    (tmp_path / "ids.csv").write_text("5,6,7,8\n9, 10\n")
    code, _, _ = run("--input_file", tmp_path / "ids.csv", "--max_input_length", 3, "--output_npy", tmp_path / "o.npy")
    rows = numpy.load(tmp_path / "o.npy").tolist()
    assert code == 0 and rows[0][:3] == [6, 7, 8] and rows[1][:2] == [9, 10]
    assert rows[1][2 : 2 + NEW] == engines.llm().generate([9, 10], free_running(NEW)).outputs[0].token_ids


def test_long_texts_are_cut_and_it_is_said(run, expected, tmp_path):
    code, out, _ = run("--input_text", TEXTS[0], "--max_input_length", 2, "--output_npy", tmp_path / "o.npy")
    prompt = expected[0][0]
    assert code == 0 and f"a prompt of {len(prompt)} tokens is cut to the first 2 (--max_input_length)" in out
    assert numpy.load(tmp_path / "o.npy")[0, :2].tolist() == prompt[:2]


def test_P89_stop_and_bad_words_for_all_prompts_or_each(engines, run, expected):
    tokenizer = engines.llm().tokenizer
    answer = expected[0][1]
    at = next(i for i in range(2, NEW) if answer[i] not in answer[:i] and tokenizer.decode(answer[i]).strip().isascii())
    word = tokenizer.decode(answer[at])
    whole = [tokenizer.decode(ids, skip_special_tokens=True) for _, ids in expected]
    cut = tokenizer.decode(answer[: at + 1], skip_special_tokens=True)
    _, out, _ = run("--input_text", *TEXTS, "--stop_words", word, "--stop_words", "never said")
    assert [text for _, text in answers_of(out)] == [cut, whole[1]]
    _, out, _ = run("--input_text", TEXTS[0], "--stop_words", "never said", word)
    assert [text for _, text in answers_of(out)] == [cut]
    _, out, _ = run("--input_text", TEXTS[0], "--bad_words", word)
    ((_, text),) = answers_of(out)
    assert text != whole[0] and text.startswith(tokenizer.decode(answer[:at], skip_special_tokens=True))
    code, _, err = run("--input_text", *TEXTS, "--stop_words", "a", "--stop_words", "b", "--stop_words", "c")
    assert code == 1 and "--stop_words is given 3 times for 2 prompts" in err


def test_P87_all_ends_that_the_model_declares_count(engines, run, expected, tmp_path):
    import json
    import shutil

    folder = shutil.copytree(engines.hf(), tmp_path / "hf")
    answer = expected[0][1]
    at = next(i for i in range(2, NEW) if answer[i] not in answer[:i])
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [511, answer[at]]}))
    flags = ("--input_text", TEXTS[0], "--output_npy", tmp_path / "o.npy", "--tokenizer_dir", folder)
    assert run(*flags, end_id=None)[0] == 0
    assert numpy.load(tmp_path / "o.npy")[0].tolist() == expected[0][0] + answer[: at + 1]


def test_sampling_flags(run):
    drawn = []
    for seed in (1, 1, 2):
        _, out, _ = run("--input_text", TEXTS[0], "--top_k", 50, "--temperature", 2.0, "--random_seed", seed)
        drawn.append(answers_of(out))
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--input_text", ""), "the prompt '' is empty"),
        (("--temperature", "-1"), "temperature=-1.0 is out of range"),
        (("--top_p", "100"), "top_p=100.0 is out of range"),
        (("--max_output_len", "400"), "exceeds the engine or specified limit (160)"),
        (("--input_file", "prompts.docx"), "--input_file prompts.docx: a .txt file"),
        (
            ("--input_file", "nowhere.txt"),
            "--input_file nowhere.txt cannot be read (No such file or directory): check the path",
        ),
        (("--max_output_len", "0"), "max_new_tokens=0 must be at least 1"),
        (("--kv_cache_free_gpu_memory_fraction", "0"), "free_gpu_memory_fraction=0.0 must be above 0"),
        (("--max_input_length", "0"), "--max_input_length 0"),
        (("--tokenizer_dir", ""), "--tokenizer_dir is missing"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_1(run, flags, said):
    code, _, err = run(*flags)
    assert code == 1 and said in err and err.startswith("[TRT-LLM] [E] ") and err.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "said"), [(b"\xff\xfe", "is no text in UTF-8"), (b"", "holds no prompt"), (b"\n\n", "holds no prompt")]
)
@pytest.mark.parametrize("name", ["prompts.txt", "ids.csv"])
def test_input_files_without_prompts(run, tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    code, _, err = run("--input_file", tmp_path / name)
    assert code == 1 and len(err.splitlines()) == 1 and f"--input_file {tmp_path / name} {said}" in err


def test_ctrl_c_is_one_line_and_exit_code_130(run, monkeypatch):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("trtllm_workshop.reference.runner.ModelRunnerCpp.generate", interrupted)
    code, _, err = run("--input_text", "a")
    assert code == 130 and err == "[TRT-LLM] [E] stopped by the keyboard: no file is written\n"


def test_a_csv_cell_that_is_no_token_id(run, tmp_path):
    (tmp_path / "ids.csv").write_text("5,6\n7,cat\n")
    code, _, err = run("--input_file", tmp_path / "ids.csv")
    assert code == 1 and "ids.csv, row 2: 'cat' is no token id" in err


def test_P66_a_checkpoint_folder_as_engine(engines, run):
    code, _, err = run(engine=engines.checkpoint())
    assert code == 1 and "build it first: trtllm-build --checkpoint_dir" in err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--top_kk", "3"), "unrecognized arguments: --top_kk: did you mean --top_k?"),
        (("--lora_dir", "x"), "official flag that the reference toolchain does not implement: leave it out"),
    ],
)
def test_flags_are_refused_by_name(run, flags, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        run(*flags)
    assert stopped.value.code == 2 and said in capsys.readouterr().err
