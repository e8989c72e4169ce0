"""benchmarks/tensor_parallel_gpu.py on a processor: its weights, its judgement of tokens, its prediction, its limits of time."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

pytest.importorskip("torch")
sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
import parallel_prediction
import same_tokens
import tensor_parallel_gpu
import torch
from random_checkpoint import checkpoint_config
from safetensors.torch import load_file
from split_checkpoint import write_split_checkpoint
from trtllm_workshop.model_spec import ModelSpec

pytestmark = pytest.mark.usefixtures("one_thread")


def run_script(*arguments):
    command = [sys.executable, tensor_parallel_gpu.__file__, "--tiny", "--requests", "4", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    return done.returncode, json.loads(done.stdout.splitlines()[-1]), done.stdout + done.stderr


@pytest.mark.slow
def test_two_ranks_are_checked_and_measured(tmp_path):
    record = tmp_path / "record.json"
    code, last, said = run_script("--record", str(record))
    assert code == 0, said
    assert last["figures"]["tinyllama_tp2_tokens_equal"] is True and not last["failed_phases"]
    found = json.loads(record.read_text())
    assert {"machine", "versions", "commit", "command", "date"} <= set(found)
    kinds = [(row["tp"], row["what"]) for row in found["rows"]]
    timed = ["generation step", "generation step", "load"]
    assert kinds == [(1, what) for what in timed] + [(2, what) for what in ("tokens", *timed)]
    assert all(row["communication_milliseconds"] > 0 for row in found["rows"][4:6])


@pytest.mark.slow
def test_shared_gpu_mode_claims_no_time():
    code, last, said = run_script("--one-gpu")
    assert code == 0, said
    assert last["figures"] == {"tinyllama_tp2_tokens_equal": True}


def test_a_phase_ends_with_its_time():
    code, last, said = run_script("--budget", "0.5")
    assert code == 1 and last["failed_phases"] == ["tinyllama"] and "--budget" in said


@pytest.mark.parametrize("precision", ["bf16", "fp8-kv8"])
def test_weights_are_the_same_however_they_are_split(tmp_path, precision):
    config = checkpoint_config("smoke", None, precision)
    amax = defaultdict(lambda: 20.0)
    for tp in (1, 2):
        write_split_checkpoint(tmp_path / str(tp), config, tp, 3, torch.device("cpu"), amax)
    whole = load_file(tmp_path / "1" / "rank0.safetensors")
    ranks = [load_file(tmp_path / "2" / f"rank{rank}.safetensors") for rank in range(2)]

    def raw(tensor):
        return tensor.view(torch.uint8)

    for name, tensor in whole.items():
        parts = [rank[name] for rank in ranks]
        if parts[0].shape == tensor.shape:
            joined = [parts[0], parts[1]]
        elif ".qkv." in name:  # 2 of 4 query heads and 1 of 2 KV heads of 16 rows on each rank
            sections = [part.view(torch.uint8).split((32, 16, 16)) for part in parts]
            joined = [torch.cat([section[at] for at in range(3) for section in sections])]
        else:
            joined = [torch.cat([raw(part) for part in parts], int(parts[0].shape[0] == tensor.shape[0]))]
        assert all(torch.equal(raw(piece), raw(tensor)) for piece in joined), name


def test_only_rounding_excuses_another_token():
    logits = torch.tensor([[[0.0, 1.0, 0.95], [3.0, 0.0, 1.0]]])
    one = same_tokens.Told([[7]], [[1, 0]], logits, noise=0.1)
    near, far = logits.clone(), logits.clone()
    near[0, 0, 2], far[0, 1, 2] = 1.02, 3.5
    assert same_tokens.compare(one, [[2, 5]], near)["tokens_equal"]  # after a close call anything may follow
    assert same_tokens.compare(one, [[1, 0]], far)["other_top1_unexplained"] == 1
    assert same_tokens.compare(one, [[1, 2]], logits)["answers_that_part_unexplained"] == 1
    broken = torch.full_like(logits, float("nan"))
    assert not same_tokens.compare(one, [[1, 0]], broken)["tokens_equal"]


def test_prediction_is_found_by_the_drivers_name():
    gpu = parallel_prediction.table_gpu("NVIDIA H200")
    assert gpu is not None and gpu.name == "H200" and parallel_prediction.table_gpu("Apple M9") is None
    spec = ModelSpec.from_checkpoint_config(checkpoint_config("llama-3-8b", None, "bf16"))
    one, two = (parallel_prediction.predicted(spec, gpu, "bf16", tp) for tp in (1, 2))
    # 15 GB of matrices at 4.8 TB/s: no step can be faster, and two ranks read half of them each.
    assert 15.0e9 / 4.8e12 * 1e3 < one.step(1, 1000)["predicted_milliseconds"] < 8
    assert two.step(1, 1000)["predicted_milliseconds"] < one.step(1, 1000)["predicted_milliseconds"]
    assert one.load(64, 1000, 1000)["predicted_communication_share"] == 0
    assert two.load(64, 1000, 1000)["predicted_communication_share"] > 0


def test_ranks_that_the_model_cannot_have_are_left_out(capsys):
    spec = ModelSpec.from_checkpoint_config(checkpoint_config("smoke", None, "bf16"))
    assert tensor_parallel_gpu.rank_counts(spec, 8) == [1, 2, 4]
    assert "tp 8 is left out" in capsys.readouterr().out
