"""benchmarks/batching.py: the load is what it says, both sides do the same work, and the last line is the result."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
import batching


def test_the_mixed_load_is_long_tailed_and_only_its_order_depends_on_the_seed():
    loads = [batching.mixed_load(64, 256, 1000, seed) for seed in (0, 0, 1)]
    lengths = [[r.output_tokens for r in load] for load in loads]
    assert loads[0] == loads[1] and lengths[0] != lengths[2] and sorted(lengths[0]) == sorted(lengths[2])
    ordered = sorted(lengths[0])
    # Of a log-normal distribution the share below median x exp(sigma) is that of a normal one below one deviation.
    below = sum(length <= 16 * math.exp(1.4) for length in ordered) / 64
    assert 0.82 <= below <= 0.86 and ordered[31] <= 16 <= ordered[32] and ordered[0] == 4 and ordered[-1] == 256
    assert all(16 <= len(r.input_ids) <= 64 and max(r.input_ids) < 1000 for r in loads[0])


def test_sides_with_other_tokens_are_no_comparison():
    def run(tokens):
        return lambda _: batching.Run([tokens], 1.0, 1)

    same = batching.rounds_of({"a": run([1, 2]), "b": run([1, 2])}, 3, True)
    assert len(same["a"]) == len(same["b"]) == 3
    with pytest.raises(RuntimeError, match="a and b gave different tokens"):
        batching.rounds_of({"a": run([1]), "b": run([2])}, 1, True)
    assert batching.rounds_of({"a": run([1]), "b": run([2])}, 1, False)


def test_the_ratio_is_the_median_of_the_rounds():
    fast = [batching.Run([[1] * 6], seconds, 1) for seconds in (1.0, 2.0, 1.0)]
    slow = [batching.Run([[1] * 6], seconds, 1) for seconds in (2.0, 2.0, 5.0)]
    assert batching.ratio(fast, slow) == pytest.approx(2.0)


def test_a_small_run_ends_with_its_result(engines, capsys):
    sizes = ("--rounds", "1", "--requests", "10", "--batch", "4", "--longest", "24", "--new-tokens", "4")
    assert batching.main(["--model", str(engines.hf()), *sizes]) == 0
    lines = capsys.readouterr().out.splitlines()
    result = json.loads(lines[-1])
    assert result["inflight_over_static"] > 0 and result["c8_over_sequential"] > 0 and 0 < result["overhead_share"] < 1
    rows = {
        line.split("  ")[0]: line.split() for line in lines if line.startswith(("in-flight", "static", "8 at", "one"))
    }
    steps = {name: int(row[-3]) for name, row in rows.items()}
    assert steps["in-flight"] < steps["static"], "fewer steps for the same tokens, whatever the clock says"
    assert steps["one by one"] == 8 * steps["8 at once"] == 32


def test_a_model_that_is_not_there(tmp_path, capsys):
    assert batching.main(["--model", str(tmp_path / "nowhere")]) == 2
    assert "workshop run 01" in capsys.readouterr().out
