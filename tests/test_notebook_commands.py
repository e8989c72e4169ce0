"""Every command line and API call that a reader can see or run passes the check against the recorded facts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from trtllm_workshop.notebook_commands import check_markdown_commands, check_notebook_commands

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MARKDOWN = [path for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md") if path.exists()]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_every_command_and_call_of_the_notebook_is_real(path):
    assert check_notebook_commands(path) == []


@pytest.mark.parametrize("path", MARKDOWN, ids=lambda path: path.name)
def test_every_command_of_the_text_is_real(path):
    assert check_markdown_commands(path) == []


def notebook(path: Path, *cells: tuple[str, str, list[str]]) -> Path:
    entries = [{"cell_type": kind, "source": source, "metadata": {"tags": tags}} for kind, source, tags in cells]
    path.write_text(json.dumps({"cells": entries, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    return path


def test_the_check_finds_mistakes_in_every_kind_of_cell(tmp_path):
    found = check_notebook_commands(
        notebook(
            tmp_path / "bad.ipynb",
            ("markdown", "Run `trtllm-build --gemm_plug auto` now.", []),
            ("code", "x = 1\nsh(f'trtllm-build --checkpoint_dir {c} --max_output_len 8')", []),
            ("code", "!trtllm-serve {engine}", []),
            ("code", "%%toolchain\nfrom tensorrt_llm._tensorrt_engine import LLM\nllm = LLM(model='e')", []),
            ("code", "%%toolchain\nllm.generate(['x'], sampling=1)", []),
            ("code", "%%bash\ntrtllm-build --checkpoint_dir c\n  --workers 1", []),
            ("code", "sh('trtllm-build --made_up')", ["wrong-on-purpose"]),
            ("code", "%%html\n<b>", []),
            ("code", "x = = 1", []),
        )
    )
    assert [text.split(",")[0] for text in found] == [
        "cell 0",
        "cell 1",
        "cell 2",
        "cell 5",
        "cell 8",
        "toolchain cells",
    ]
    assert "cell 0, line 1: error: trtllm-build has no flag --gemm_plug -> did you mean --gemm_plugin?" in found[0]
    assert "cell 1, line 2:" in found[1] and "not valid Python" in found[4] and "sampling_params" in found[5]


def test_the_check_passes_right_cells_and_texts(tmp_path):
    good = notebook(
        tmp_path / "good.ipynb",
        ("markdown", "`trtllm-build` makes `rank0.engine`; flags such as `--max_seq_len`.", []),
        ("code", "sh(f'trtllm-build --checkpoint_dir {c} --output_dir {e}', check=False)", []),
        ("code", "%%writefile notes.txt\nnot = = Python", []),
    )
    assert check_notebook_commands(good) == []
    text = tmp_path / "text.md"
    text.write_text("```bash\npip install tensorrt_llm==1.2.1\ntrtllm-build --checkpoint_dir c --max_len 3\n```\n")
    assert len(check_markdown_commands(text)) == 1 and "--max_len" in check_markdown_commands(text)[0]
