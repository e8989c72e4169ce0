"""Command lines are found in notebook cells and in Markdown."""

from __future__ import annotations

from trtllm_workshop.commands import check_command, extract_commands


def test_commands_are_found_in_code_cells():
    source = (
        "engine = lesson.engine_dir()\n"
        "sh(f'trtllm-build --checkpoint_dir {ckpt} --output_dir {lesson.engine_dir(precision=1)} --workers {n:d}')\n"
        "!nvidia-smi \\\n  -q\n"
        "base = f'trtllm-serve {engine}'\n"
        "lesson.sh(base + ' --backend tensorrt', check=False)\n"
        "print('trtllm-build --nothing')\n"
    )
    found = extract_commands(source)
    assert [command.line for command in found] == [2, 3, 6]
    assert found[0].text.startswith("trtllm-build --checkpoint_dir {ckpt} --output_dir {lesson_engine_dir_precision_1}")
    assert found[1].text == "nvidia-smi \\\n  -q"
    assert found[2].text == "trtllm-serve {engine} --backend tensorrt"
    assert all(check_command(command.text) == [] for command in found)


def test_a_shell_cell_is_one_script():
    (found,) = extract_commands("%%bash\ntrtllm-build --checkpoint_dir c \\\n  --max_batch 3\nls")
    assert found.line == 2 and "did you mean --max_batch_size?" in str(check_command(found.text)[0])


def test_commands_are_found_in_markdown():
    text = (
        "# Build\n\nUse `trtllm-build --gemm_plugin auto`, not `trtllm-build: error: x`.\n\n"
        "```console\n$ trtllm-build --checkpoint_dir c \\\n    --output_dir e\nTotal time: 3 s --not a flag\n```\n\n"
        "```python\nsh('trtllm-serve {model}')\n```\n\n```text\ntrtllm-build --out x\n```\n"
    )
    found = extract_commands(text, markdown=True)
    assert [(command.line, command.partial) for command in found] == [(3, True), (6, False), (12, False)]
    assert "Total" not in found[1].text and all(check_command(c.text, c.partial) == [] for c in found)
