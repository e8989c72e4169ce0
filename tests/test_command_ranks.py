"""mpirun lines: what stands before the program is understood, and N is compared with the ranks of the engine."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from tiny_models import tiny_model
from trtllm_workshop.command_find import find_call
from trtllm_workshop.command_ranks import WorldSizes, read_launcher
from trtllm_workshop.commands import check_command
from trtllm_workshop.notebook_commands import check_notebook_commands
from trtllm_workshop.reference.convert import convert_checkpoint
from trtllm_workshop.reference.convert_plan import Sharding
from trtllm_workshop.shell import CommandRefused
from trtllm_workshop.toolchain import choose

RUN = "python examples/run.py --engine_dir {folder} --tokenizer_dir m --max_output_len 8"
CONVERT = "python examples/models/core/llama/convert_checkpoint.py --model_dir m --output_dir {folder}"


def messages(text: str, **options) -> list[str]:
    return [f"{problem.message} -> {problem.fix}" for problem in check_command(text, **options)]


def engine(folder: Path, tp: int, pp: int = 1) -> Path:
    """Only what an engine folder says about its ranks."""
    folder.mkdir()
    mapping = {"world_size": tp * pp, "tp_size": tp, "pp_size": pp}
    (folder / "config.json").write_text(json.dumps({"pretrained_config": {"mapping": mapping}}))
    return folder


@pytest.mark.parametrize(
    ("line", "ranks"),
    [
        ("mpirun -n 3 python x.py", 3),
        ("mpirun --allow-run-as-root -n 2 python x.py", 2),
        ("mpirun -n 2 --allow-run-as-root --oversubscribe python x.py", 2),
        ("mpirun --oversubscribe -np 4 --mca btl self,tcp -x A=1 -x B python x.py", 4),
        ("/opt/bin/mpiexec --np=8 --bind-to none --map-by :OVERSUBSCRIBE python x.py", 8),
        ("srun --ntasks 2 --mpi pmix python x.py", 2),
        ("mpirun -n {ranks} python x.py", None),
    ],
)
def test_options_of_the_launcher_are_not_taken_for_the_program(line, ranks):
    words = line.split()
    launch = read_launcher(words)
    assert (words[launch.words :], launch.ranks, launch.problems) == (["python", "x.py"], ranks, ())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("", "without -n"),
        ("--oversubscribe", "without -n"),
        ("-n two", "-n two"),
        ("-n 0", "-n 0"),
        ("-np -1", "-n -1"),
    ],
)
def test_a_number_of_ranks_that_is_missing_or_none(options, said):
    line = f"mpirun {options} " + RUN.format(folder="e")
    (found,) = messages(line)
    assert said in found and "tp x pp" in found
    assert messages(line, partial=True) == []


def test_the_launcher_stays_with_the_call():
    call = find_call(("CUDA_VISIBLE_DEVICES=0,1 mpirun -n 2 " + RUN.format(folder="e")).split())
    assert call is not None and call.launch is not None and call.launch.ranks == 2
    plain = find_call(RUN.format(folder="e").split())
    assert plain is not None and plain.launch is None


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (3, 1), (2, 2)])
@pytest.mark.parametrize("started", [None, 1, 2, 3, 4])
def test_P63_ranks_against_the_engine_on_the_disk(tmp_path, tp, pp, started):
    folder = engine(tmp_path / "engine", tp, pp)
    front = "" if started is None else f"mpirun --allow-run-as-root -n {started} "
    found = messages(front + RUN.format(folder=folder))
    if (started or 1) == tp * pp:
        assert found == []
    else:
        (text,) = found
        assert f"an engine for {tp * pp} rank" in text and f"starts {started or 1}" in text
        assert (f"mpirun -n {tp * pp}" if tp * pp > 1 else "leave mpirun out") in text


def test_a_checkpoint_on_the_disk_counts_too(tmp_path):
    """The converter's own config.json, handed on by a build in the same text."""
    source = tiny_model(tmp_path / "hf", "llama-tied")
    made = convert_checkpoint(source, tmp_path / "split", sharding=Sharding(3), say=lambda _: None)
    assert WorldSizes().of(str(made.folder)) == 3
    text = f"trtllm-build --checkpoint_dir {made.folder} --output_dir e3\nmpirun -n 2 " + RUN.format(folder="e3")
    (found,) = messages(text)
    assert "engine for 3 ranks" in found and "starts 2" in found


def test_folders_made_in_the_same_text_are_remembered():
    text = "\n".join(
        [
            CONVERT.format(folder="{checkpoint}") + " --tp_size 2 --pp_size 2",
            "trtllm-build --checkpoint_dir {checkpoint} --output_dir {engine}",
        ]
    )
    assert messages(f"{text}\nmpirun -n 4 " + RUN.format(folder="{engine}")) == []
    (found,) = messages(f"{text}\nmpirun -n 2 " + RUN.format(folder="{engine}"))
    assert "engine for 4 ranks" in found
    (alone,) = messages(f"{text}\n" + RUN.format(folder="{engine}"))
    assert "starts 1" in alone and "mpirun -n 4" in alone
    quantized = "python examples/quantization/quantize.py --model_dir m --qformat fp8 --tp_size 3 --output_dir c"
    (found,) = messages(f"{quantized}\ntrtllm-build --checkpoint_dir c --output_dir e\n" + RUN.format(folder="e"))
    assert "engine for 3 ranks" in found


@pytest.mark.parametrize("size", ["{tp}", "$TP"])
def test_what_is_not_known_is_not_judged(size):
    text = CONVERT.format(folder="c") + f" --tp_size {size}\ntrtllm-build --checkpoint_dir c --output_dir e\n"
    assert messages(text + "mpirun -n 5 " + RUN.format(folder="e")) == []
    assert messages("mpirun -n 5 " + RUN.format(folder="elsewhere")) == []
    known = text.replace(size, "2")
    assert messages(known + "mpirun -n {n} " + RUN.format(folder="e")) == []


def test_a_broken_config_is_left_to_the_command(tmp_path):
    (tmp_path / "config.json").write_text('{"pretrained_config": {"mapping": {"tp_size": 2, "world_size": 3}}}')
    assert WorldSizes().of(str(tmp_path)) is None and messages("mpirun -n 5 " + RUN.format(folder=tmp_path)) == []


def test_cells_of_a_notebook_belong_together(tmp_path):
    def write(ranks: str) -> Path:
        sources = [
            f"sh(f'{CONVERT.format(folder='{c}')} --tp_size 3')",
            "sh(f'trtllm-build --checkpoint_dir {c} --output_dir {e}')",
            f"sh(f'{ranks}{RUN.format(folder='{e}')}')",
        ]
        cells = [{"cell_type": "code", "source": source, "metadata": {}} for source in sources]
        path = tmp_path / "lesson.ipynb"
        path.write_text(json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
        return path

    assert check_notebook_commands(write("mpirun -n 3 --allow-run-as-root --oversubscribe ")) == []
    (found,) = check_notebook_commands(write("mpirun -n 2 "))
    assert found.startswith("cell 2, line 1: error: {e} is an engine for 3 ranks, and this line starts 2")


def test_sh_refuses_a_wrong_number_before_anything_starts(tmp_path):
    folder = engine(tmp_path / "engine", 2)
    with pytest.raises(CommandRefused, match=r"engine for 2 ranks, and this line starts 1\n  fix: write mpirun -n 2"):
        choose("reference", quiet=True).sh(RUN.format(folder=folder))


def test_sh_finds_mpirun_beside_the_toolchains_python(tmp_path):
    """Its interpreter is what every rank runs, and one word of the line decides how many."""
    toolchain = choose("reference", quiet=True)
    launcher = tmp_path / "bin" / "mpirun"
    launcher.parent.mkdir()
    launcher.write_text("#!/bin/sh\nfor word; do printf '%s ' \"$word\"; done\n")
    launcher.chmod(0o755)
    toolchain.bin_dirs = (*toolchain.bin_dirs, launcher.parent)
    result = toolchain.sh("mpirun -n 2 --allow-run-as-root python examples/run.py --help", quiet=True)
    wanted = ["-n", "2", "--allow-run-as-root", sys.executable, str(toolchain.examples / "run.py"), "--help"]
    assert result.output.split() == wanted


@pytest.mark.skipif(
    not shutil.which("mpirun", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"),
    reason="no mpirun",
)
def test_sh_runs_two_ranks_with_the_real_mpirun(tmp_path):
    script = tmp_path / "rank.py"
    script.write_text(
        "import os, sys\nprint(os.environ['OMPI_COMM_WORLD_RANK'], os.environ['OMPI_COMM_WORLD_SIZE'], sys.executable)"
    )
    line = f"mpirun --allow-run-as-root --oversubscribe -n 3 python {script}"
    result = choose("reference", quiet=True).sh(line, quiet=True, timeout=120)
    assert sorted(result.output.splitlines()) == [f"{rank} 3 {sys.executable}" for rank in range(3)]
