"""run.py under a real mpirun: one process a rank, the text of one rank, and refusals with both numbers."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import trtllm_workshop.reference
from engines import TOKENS_PER_BLOCK, quiet
from trtllm_workshop.reference.build import build_engine
from trtllm_workshop.reference.configs import BuildConfig, PluginConfig
from trtllm_workshop.reference.convert import convert_checkpoint
from trtllm_workshop.reference.convert_plan import Sharding
from trtllm_workshop.reference.engine import EngineError
from trtllm_workshop.reference.mpi_launch import Launch, check_world

SCRIPT = Path(trtllm_workshop.reference.__file__).parent / "examples" / "run.py"
MPIRUN = shutil.which("mpirun", path=os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", ""))))
TEXTS = ["The capital of France is", "One cat and"]


@pytest.fixture(scope="module")
def two_ranks(engines):
    place = engines.root / "mpi"
    checkpoint = convert_checkpoint(
        engines.hf("llama-gqa", "float32"), place / "checkpoint", dtype="float32", sharding=Sharding(2, 1), say=quiet
    ).folder
    plugins = PluginConfig(tokens_per_block=TOKENS_PER_BLOCK)
    config = BuildConfig(max_batch_size=8, max_seq_len=160, plugin_config=plugins)
    return build_engine(checkpoint, config, place / "engine", log=quiet)


def run_py(engines, engine, *before):
    flags = ("--tokenizer_dir", engines.hf(), "--max_output_len", 8, "--end_id", -1, "--input_text", *TEXTS)
    command = [*before, sys.executable, SCRIPT, "--engine_dir", engine, *flags]
    library = str(Path(trtllm_workshop.reference.__file__).parents[2])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": library}
    return subprocess.run(
        [str(part) for part in command], env=environment, capture_output=True, text=True, timeout=180, check=False
    )


@pytest.mark.slow
@pytest.mark.skipif(MPIRUN is None, reason="no mpirun here: install the mpi extra")
def test_two_processes_say_what_one_says(engines, two_ranks):
    start = [MPIRUN, "--allow-run-as-root", "--oversubscribe", "-n"]
    together = run_py(engines, two_ranks, *start, 2)
    alone = run_py(engines, engines.engine("llama-gqa", "float32"))
    assert together.returncode == alone.returncode == 0, together.stderr + alone.stderr
    answers = [re.findall(r'^Output \[Text \d+ Beam 0\]: ".*?"$', o.stdout, re.M | re.S) for o in (together, alone)]
    assert answers[0] == answers[1] and len(answers[0]) == 2, "and only one of the processes prints"

    wrong = run_py(engines, two_ranks, *start, 3)
    assert wrong.returncode != 0 and "Engine world size (2) != Runtime world size (3)" in wrong.stdout + wrong.stderr


def test_run_py_alone_says_how_to_start_two(engines, two_ranks):
    alone = run_py(engines, two_ranks)
    assert alone.returncode == 1 and "Engine world size (2) != Runtime world size (1)" in alone.stderr
    assert "mpirun -n 2 python" in alone.stderr


def test_what_mpirun_tells_a_process():
    told = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
    launch = Launch.read(told | {"PMIX_NAMESPACE": "prterun-a@1"})
    assert (launch.rank, launch.size, launch.job) == (1, 4, "prterun-a@1")
    assert Launch.read({}) == Launch()
    with pytest.raises(EngineError, match="4 ranks were started and 2 of them on this host"):
        Launch.read(told | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"})


def test_runs_do_not_meet_each_other():
    one, other = Launch(0, 2, "prterun-a@1"), Launch(0, 2, "prterun-a@2")
    assert one.meeting == Launch(1, 2, "prterun-a@1").meeting != other.meeting


def test_one_engine_needs_as_many_processes_as_ranks(engines, two_ranks):
    check_world(two_ranks, Launch(0, 2))
    with pytest.raises(EngineError, match=r"world size \(2\) != Runtime world size \(3\).*mpirun -n 2 python run.py"):
        check_world(two_ranks, Launch(0, 3))
    with pytest.raises(
        EngineError, match=r"world size \(1\) != Runtime world size \(2\).*Start it with: python run.py"
    ):
        check_world(engines.engine(), Launch(0, 2))
