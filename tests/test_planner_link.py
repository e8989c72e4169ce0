"""The link of several ranks of this machine: worked out by hand, measured, and what happens when ranks do not come."""

from __future__ import annotations

import json
import sys

import psutil
import pytest
from trtllm_workshop.cli import main
from trtllm_workshop.planner_gpus import Gpu, PlanProblem, load_gpus
from trtllm_workshop.planner_link import LARGE, SMALL, Link, measure_link, rates
from trtllm_workshop.planner_measure import Measured
from trtllm_workshop.planner_memory import Split
from trtllm_workshop.planner_published import llama
from trtllm_workshop.planner_speed import MEASURED_RATES, Constants, seconds
from trtllm_workshop.planner_work import Engine


def test_the_rate_is_what_the_large_sum_takes_longer():
    """Two ranks in a ring send every 16-bit value once: 2 (2 - 1) / 2 x 2 bytes."""
    assert rates(0.001, 0.003, 2) == Link(0.001, pytest.approx(2 * (LARGE - SMALL) / 0.002))
    assert rates(0.002, 0.001, 2).bytes_per_second > 0  # noise must not make it negative


@pytest.mark.parametrize(
    ("split", "messages"), [(Split(), 0), (Split(tp=4), 65), (Split(pp=2), 1), (Split(tp=2, pp=2), 34)]
)
def test_ranks_wait_for_each_other_twice_a_layer_and_for_the_logits_or_the_next_stage(split, messages):
    work = Engine(llama("8B"), load_gpus()["H200"], split=split).step(answers=1)
    assert work.messages == messages
    waiting = seconds(work, Constants(message_seconds=1e-3)).link - seconds(work).link
    assert waiting == pytest.approx(messages * 1e-3)


@pytest.mark.slow
def test_two_ranks_of_this_machine_are_measured_and_leave_nothing():
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    found = measure_link(2)
    assert 1e-6 < found.message_seconds < 1
    assert 1e5 < found.bytes_per_second < 1e12
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


def test_ranks_that_do_not_come_are_told_with_their_last_words(tmp_path, monkeypatch):
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no loopback address >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    with pytest.raises(PlanProblem, match=r"2 ranks could not be connected .*no loopback address.*--tp 1"):
        measure_link(2)


def test_ranks_that_hang_are_ended_at_the_limit(tmp_path, monkeypatch):
    hanging = tmp_path / "python"
    hanging.write_text("#!/bin/sh\nexec sleep 60\n")
    hanging.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(hanging))
    monkeypatch.setattr("trtllm_workshop.planner_link.LIMIT_S", 0.1)
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with pytest.raises(PlanProblem, match="did not finish"):
        measure_link(2)
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


def test_a_measured_plan_of_several_ranks_uses_the_measured_link(tmp_path, capsys, monkeypatch):
    config = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
        "intermediate_size": 512, "vocab_size": 1000, "torch_dtype": "float32",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    machine = Gpu("here", 16e9, 10e9, {"fp32": 1e11, "fp16": 1e11}, 10e9, "pcie")
    here = Measured(machine, 0.0, MEASURED_RATES, "Measured.")
    monkeypatch.setattr("trtllm_workshop.planner_measure.measure", lambda dtype, threads: here)
    monkeypatch.setattr("trtllm_workshop.planner_link.measure_link", lambda ranks: Link(0.01 * ranks, 1e9))
    found = []
    for ranks in (1, 2):
        assert main(["plan", str(tmp_path), "--measure", "--tp", str(ranks), "--json", "--requests", "1"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    one, two = found
    assert one["communication_share"] == 0
    assert two["time_per_token_alone"] > 9 * 0.02  # four layers, two sums each, and the logits
    assert two["limit"] == "link"
    assert "2 processes add up a token's values in 20000 µs" in two["note"]
