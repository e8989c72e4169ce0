"""The benchmarks of the server run to their end on a tiny engine: same work on both sides, and every fault check holds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from engines import Engines

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


def run(script: str, engines: Engines, *more: str) -> tuple[int, Any, str]:
    """Exit status, the last line as JSON, and all output of a benchmark."""
    engine = engines.engine(max_seq_len=1000, max_num_tokens=2048)
    words = [sys.executable, str(BENCHMARKS / script), "--engine", str(engine), "--tokenizer", str(engines.hf()), *more]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    found = subprocess.run(words, capture_output=True, text=True, timeout=240, env=environment)
    assert found.stdout.strip(), found.stderr
    return found.returncode, json.loads(found.stdout.splitlines()[-1]), found.stdout + found.stderr


@pytest.mark.slow
def test_the_cost_of_http_is_measured_on_the_same_work(engines: Engines, tmp_path: Path) -> None:
    file = tmp_path / "cost.json"
    load = ("--rounds", "1", "--requests", "8", "--output-tokens", "4", "--json", str(file))
    code, last, said = run("server.py", engines, *load)
    assert code == 0 and last["server_cost"] < 1, said
    kept = json.loads(file.read_text())
    assert kept["load"]["concurrency"] == 8 and all(
        len(rates[0]) == 2 for rates in kept["output_tokens_per_s"].values()
    )


@pytest.mark.slow
def test_the_server_stands_disconnects_signals_a_lost_engine_and_bad_bodies(engines: Engines) -> None:
    load = ("--seconds", "3", "--readers", "30", "--bodies", "160", "--tokens", "40", "--long-tokens", "900")
    code, last, said = run("server_faults.py", engines, *load)
    assert code == 0 and last == dict.fromkeys(("bodies", "disconnects", "sigterm", "killed_engine"), True), said
