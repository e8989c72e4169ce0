"""trtllm-bench of the reference: official flags, data sets in and out, runs, and errors in one line."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import trtllm_workshop.reference
from engines import prompt_of
from trtllm_workshop.commands import check_command, flags
from trtllm_workshop.reference import bench_cli
from trtllm_workshop.reference.bench_cli import IMPLEMENTED, main, make_parser
from trtllm_workshop.reference.bench_dataset import InferenceRequest, to_line

SCRIPT = Path(trtllm_workshop.reference.__file__).parent / "bin" / "trtllm-bench"
LENGTHS = [(12, 3), (30, 9), (5, 1), (20, 6), (8, 4)]


@pytest.fixture(scope="module")
def requests():
    return [InferenceRequest(n, prompt_of(prompt, n), new) for n, (prompt, new) in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def dataset(requests, tmp_path_factory):
    path = tmp_path_factory.mktemp("bench") / "requests.json"
    path.write_text("\n".join(map(to_line, requests)) + "\n")
    return path


@pytest.fixture
def bench(capsys):
    """Runs the command in this process: (exit code, standard output, standard error)."""

    def call(*words):
        code = main([str(word) for word in words])
        return (code, *capsys.readouterr())

    return call


@pytest.fixture
def run(engines, bench, dataset):
    """A sub-command on the tiny engine."""

    def call(kind, *words, data=None, model="tiny/model"):
        common = ("--engine_dir", engines.engine(), "--backend", "tensorrt", "--dataset", data or dataset)
        return bench("--model", model, "--model_path", engines.hf(), kind, *common, "--warmup", 0, *words)

    return call


# Flags ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(IMPLEMENTED))
def test_every_accepted_flag_is_official_with_the_same_form(name):
    table, accepted = flags(name), 0
    for action in make_parser(name)._actions:
        if isinstance(action, argparse._HelpAction):
            continue
        official = table[action.option_strings[0]]
        assert tuple(action.option_strings) == official.spellings
        if type(action).__name__ == "_Refuse":
            continue
        accepted += 1
        assert (action.required, action.default) == (official.required, official.default)
        assert (action.nargs == 0) == official.is_switch and list(action.choices or []) == list(official.choices or [])
        if not official.is_switch:
            assert action.type("3") == {"int": 3, "float": 3.0}.get(official.type, "3")
    assert accepted == len(IMPLEMENTED[name]) > 0
    assert {s for f in table.values() for s in f.spellings} <= set(make_parser(name)._option_string_actions)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--model m", "the sub-command is missing: choose from throughput, latency, prepare-dataset"),
        ("--model m thruput", "no sub-command thruput: did you mean throughput?"),
        ("--model m build --max_seq_len 9", "build is an official sub-command that the reference toolchain does not"),
        ("throughput --dataset d", "required: --model"),
        ("--dataset d throughput", "--dataset: it belongs to another command"),
        ("--model m throughput --data_set d", "--data_set: did you mean --dataset?"),
        ("--model m throughput --tp 2", "--tp 2 is an official flag that the reference toolchain does not implement"),
        ("--model m throughput --beam_width 4", "--beam_width 4 is an official flag"),
        ("--model m latency --num_requests many", "--num_requests: invalid int value: 'many'"),
        ("--model m prepare-dataset", "the sub-command is missing: choose from token-norm-dist, token-unif-dist"),
        ("--model m prepare-dataset token-norm-dist --num-requests 3", "required: --input-mean"),
        ("--model m prepare-dataset --lora-dir l token-norm-dist", "--lora-dir l is an official flag"),
    ],
)
def test_wrong_command_lines_are_refused_by_name(words, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(words.split())
    assert stopped.value.code == 2 and said in capsys.readouterr().err


def test_flags_of_all_levels_and_values_that_look_like_words():
    line = "-m throughput --model_path=latency -w /tmp/w throughput --dataset latency --tp 1 --concurrency -1"
    name, args = bench_cli.parse(line.split())
    assert name == "trtllm-bench throughput"
    assert (args.model, args.model_path, args.dataset, args.concurrency) == ("throughput", "latency", "latency", -1)
    assert (args.num_requests, args.warmup, args.kv_cache_free_gpu_mem_fraction) == (0, 2, 0.9), "official defaults"


# Data sets ------------------------------------------------------------------------------------------------------------


def lines_of(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def prepare(bench, engines, output, kind, *words, seed=420):
    level = ("--output", output, "--random-seed", seed)
    return bench("--model", "tiny/model", "--model_path", engines.hf(), "prepare-dataset", *level, kind, *words)


NORMAL = ("--num-requests", 40, "--input-mean", 30, "--input-stdev", 20, "--output-mean", 12, "--output-stdev", 0)
UNIFORM = ("--num-requests", 40, "--input-min", 3, "--input-max", 5, "--output-min", 2, "--output-max", 2)


def test_a_normal_data_set_has_the_lengths_that_were_asked_for(bench, engines, tmp_path):
    path = tmp_path / "new" / "set.json"
    code, out, err = prepare(bench, engines, path, "token-norm-dist", *NORMAL)
    assert code == 0 and err == "" and "trtllm-bench prepare-dataset token-norm-dist" in out.splitlines()[0]
    entries = lines_of(path)
    numpy.random.seed(420)  # lengths as numpy's old global generator draws them
    expected = [max(1, int(-(-value // 1))) for value in numpy.random.normal(30, 20, 40)]
    assert [len(e["input_ids"]) for e in entries] == expected and min(expected) >= 1
    assert [e["task_id"] for e in entries] == list(range(40)) and {e["output_tokens"] for e in entries} == {12}
    special = set(engines.llm().tokenizer.all_special_ids)
    tokens = {t for e in entries for t in e["input_ids"]}
    assert not tokens & special and max(tokens) < 512 and len(tokens) > 100


def test_a_uniform_data_set_keeps_to_its_limits_and_its_seed(bench, engines, tmp_path):
    made = []
    for number, seed in enumerate((1, 1, 2)):
        path = tmp_path / f"{number}.json"
        assert prepare(bench, engines, path, "token-unif-dist", *UNIFORM, seed=seed)[0] == 0
        made.append(lines_of(path))
    assert made[0] == made[1] != made[2]
    assert {len(e["input_ids"]) for e in made[0]} == {3, 4, 5} and {e["output_tokens"] for e in made[0]} == {2}


@pytest.mark.parametrize(
    ("kind", "change", "said"),
    [
        ("token-norm-dist", ("--num-requests", 0), "--num-requests 0: give 1 or more"),
        ("token-norm-dist", ("--input-mean", 0), "--input-mean 0: give 1 token or more"),
        ("token-norm-dist", ("--output-stdev", -1), "--output-stdev -1: give 0 or more"),
        ("token-unif-dist", ("--input-max", 2), "--input-max 2 is below --input-min 3"),
    ],
)
def test_lengths_that_make_no_sense_are_refused(bench, engines, tmp_path, kind, change, said):
    path = tmp_path / "set.json"
    words = NORMAL if kind == "token-norm-dist" else UNIFORM
    code, _, err = prepare(bench, engines, path, kind, *words, *change)
    assert code == 1 and said in err and err.count("\n") == 1 and not path.exists()


def test_a_data_set_that_cannot_be_written(bench, engines, tmp_path):
    (tmp_path / "file").write_text("mine")
    code, _, err = prepare(bench, engines, tmp_path / "file" / "set.json", "token-unif-dist", *UNIFORM)
    assert code == 1 and "--output" in err and "a file is in the place of a folder" in err


# Runs -----------------------------------------------------------------------------------------------------------------


def test_throughput_runs_every_request_and_writes_its_reports(engines, run, requests, tmp_path):
    report, details, texts = (tmp_path / name for name in ("report.json", "requests.json", "texts.json"))
    code, out, err = run(
        "throughput", "--streaming", "--report_json", report, "--request_json", details, "--output_json", texts
    )
    assert code == 0 and err == "" and "reference toolchain, trtllm-bench throughput" in out.splitlines()[0]
    found = json.loads(report.read_text())
    assert set(found) == {
        "engine", "machine", "world_info", "request_info", "performance", "streaming_metrics", "dataset"
    }  # fmt: skip
    prompts, answers = (sum(column) for column in zip(*LENGTHS, strict=True))
    info, figures = found["request_info"], found["performance"]
    assert info["num_requests"] == 5
    assert (info["avg_input_length"], info["avg_output_length"]) == (prompts / 5, answers / 5)
    seconds = figures["total_latency_ms"] / 1000
    assert figures["system_output_throughput_tok_s"] == pytest.approx(answers / seconds)
    assert found["engine"]["backend"] == "TRT" and found["engine"]["engine_dir"] == str(engines.engine())
    assert f"Total Output Throughput (tokens/sec):             {answers / seconds:.4f}" in out
    entries = json.loads(details.read_text())
    assert [(e["num_input_tokens"], e["output_tokens"]) for e in entries] == LENGTHS
    llm = engines.llm()
    from engines import free_running

    expected = [llm.generate(r.input_ids, free_running(r.output_tokens)).outputs[0].token_ids for r in requests]
    assert list(json.loads(texts.read_text()).values()) == [llm.tokenizer.decode(ids) for ids in expected]


def test_latency_runs_one_request_after_the_other(run, tmp_path):
    report = tmp_path / "report.json"
    code, out, _ = run("latency", "--num_requests", 3, "--report_json", report)
    found = json.loads(report.read_text())
    assert code == 0 and found["request_info"]["num_requests"] == 3 and found["world_info"]["max_batch_size"] == 1
    assert 0.5 < found["request_info"]["avg_num_concurrent_requests"] <= 1, "never two at once"
    assert "streaming_metrics" in found and "Average time-per-output-token [TPOT] (ms):" in out


def test_warmup_requests_are_not_counted(run, tmp_path):
    report = tmp_path / "report.json"
    code, out, _ = run("throughput", "--num_requests", 2, "--warmup", 3, "--report_json", report)
    assert code == 0 and "Running warmup: 3 requests" in out
    assert json.loads(report.read_text())["request_info"]["num_requests"] == 2


def test_fewer_requests_than_asked_for_are_said(run):
    code, out, _ = run("latency", "--num_requests", 50)
    assert code == 0 and "--num_requests 50: the data set has 5, all of them are run" in out


def test_text_prompts_and_the_older_name_of_token_ids(engines, run, tmp_path):
    path, details = tmp_path / "set.json", tmp_path / "r.json"
    text = "The capital of France is"
    path.write_text(
        json.dumps({"task_id": 0, "prompt": text, "output_tokens": 2})
        + "\n\n"
        + json.dumps({"task_id": 1, "logits": [5, 6, 7], "output_tokens": 2})
    )
    assert run("throughput", "--request_json", details, data=path)[0] == 0
    counts = [entry["num_input_tokens"] for entry in json.loads(details.read_text())]
    assert counts == [len(engines.llm().tokenizer.encode(text)), 3]


def test_the_iteration_log_counts_every_token_of_the_run(run, tmp_path):
    log, report = tmp_path / "log", tmp_path / "r.json"
    words = ("--iteration_log", log, "--report_json", report, "--scheduler_policy", "max_utilization", "--warmup", 2)
    code, out, _ = run("throughput", *words, "--max_batch_size", 3, "--max_num_tokens", 16)
    assert code == 0 and "Scheduling Policy:      MAX_UTILIZATION" in out
    iterations = [json.loads(line) for line in log.read_text().splitlines()]
    batching = [entry["inflightBatchingStats"] for entry in iterations]
    prompts, answers = (sum(column) for column in zip(*LENGTHS, strict=True))
    assert sum(b["numCtxTokens"] for b in batching) == prompts, (
        "each prompt once: no block is reused, no warmup counted"
    )
    assert sum(b["numGenRequests"] for b in batching) == answers - len(LENGTHS), (
        "the context phase makes the first token"
    )
    assert max(b["numScheduledRequests"] for b in batching) == 3
    assert all(b["numCtxTokens"] + b["numGenRequests"] <= 16 for b in batching), "longer prompts came in chunks"
    assert sum(entry["numCompletedRequests"] for entry in iterations) == len(LENGTHS)
    world = json.loads(report.read_text())["world_info"]
    assert (world["max_batch_size"], world["max_num_tokens"]) == (3, 16)


def test_without_chunks_a_prompt_must_fit_into_a_step(run):
    code, _, err = run("throughput", "--max_num_tokens", 16, "--disable_chunked_context")
    assert code == 1 and "task 1: prompt of 30 tokens exceeds max_num_tokens (16)" in err


def test_chunks_need_an_engine_that_reads_cached_tokens_back(engines, run):
    engine = engines.engine(plugin_config={"use_paged_context_fmha": False})
    code, _, err = run("throughput", "--engine_dir", engine)
    assert code == 1 and "give --disable_chunked_context" in err
    assert run("throughput", "--engine_dir", engine, "--disable_chunked_context")[0] == 0


def test_a_line_ends_with_a_line_end_only(engines, run, tmp_path):
    path, details = tmp_path / "set.json", tmp_path / "r.json"
    text = "one\u2028two\x85three"
    entry = {"task_id": 0, "prompt": text, "output_tokens": 2}
    path.write_text(json.dumps(entry, ensure_ascii=False) + "\r\n", encoding="utf-8")
    assert run("throughput", "--request_json", details, data=path)[0] == 0
    assert json.loads(details.read_text())[0]["num_input_tokens"] == len(engines.llm().tokenizer.encode(text))


def test_limits_above_the_engines_are_said(run, tmp_path):
    report = tmp_path / "r.json"
    code, out, _ = run("throughput", "--max_batch_size", 99, "--report_json", report)
    assert code == 0 and "--max_batch_size 99 is above what the engine was built for: 8 counts" in out
    assert json.loads(report.read_text())["world_info"]["max_batch_size"] == 8


def test_a_run_that_is_stopped_says_so_and_reports_nothing(run, tmp_path, monkeypatch):
    from trtllm_workshop.reference import bench_run

    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_run, "run_load", stopped)
    code, _, err = run("throughput", "--report_json", tmp_path / "r.json")
    assert code == 130 and "stopped by the keyboard: nothing is reported" in err and not list(tmp_path.iterdir())


def test_a_tokenizer_that_cannot_be_had_by_name(bench, monkeypatch, tmp_path):
    from trtllm_workshop.reference import tokenizer_source

    def missing(name):
        raise FileNotFoundError(f"tokenizer {name!r} could not be had: pass the Hugging Face model folder")

    monkeypatch.setattr(tokenizer_source, "load_tokenizer", missing)
    words = ("prepare-dataset", "--output", tmp_path / "set.json", "token-unif-dist", *UNIFORM)
    code, _, err = bench("--model", "org/model", *words)
    assert code == 1 and "--model org/model: " in err and "--model_path FOLDER" in err and err.count("\n") == 1


def test_an_end_token_shortens_answers(engines, run, requests, tmp_path):
    from engines import free_running

    details = tmp_path / "r.json"
    answer = engines.llm().generate(requests[1].input_ids, free_running(9)).outputs[0].token_ids
    assert run("throughput", "--eos_id", answer[2], "--request_json", details)[0] == 0
    made = [entry["output_tokens"] for entry in json.loads(details.read_text())]
    assert made[1] == answer.index(answer[2]) + 1 < 9


def test_the_real_command_and_the_checker_agree(engines, dataset, toolchain, tmp_path):
    report = tmp_path / "report.json"
    line = (
        f"trtllm-bench --model tiny/model --model_path {engines.hf()} throughput --engine_dir {engines.engine()} "
        f"--backend tensorrt --dataset {dataset} --num_requests 2 --warmup 0 --report_json {report}"
    )
    assert check_command(line) == []
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    argv = toolchain.resolve(line)
    assert argv[1] == str(SCRIPT)
    done = subprocess.run(argv, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(report.read_text())["request_info"]["num_requests"] == 2


# Bad input ------------------------------------------------------------------------------------------------------------

GOOD = {"task_id": 0, "input_ids": [5, 6], "output_tokens": 2}


def without(name):
    return {key: value for key, value in GOOD.items() if key != name}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "has no requests; make one with"),
        ("\n \n", "has no requests"),
        (json.dumps(GOOD) + "\n{'task_id': 1}", "line 2 is not JSON"),
        ("[1, 2]", "line 1 is [1, 2], expected an object"),
        (json.dumps(without("task_id")), "line 1 has no 'task_id'"),
        (json.dumps(without("output_tokens")), "line 1 has no 'output_tokens'"),
        (json.dumps(without("input_ids")), "line 1 has neither 'input_ids' nor a 'prompt'"),
        (json.dumps(without("input_ids") | {"prompt": "half \ud83d"}), "line 1: the prompt has half a surrogate pair"),
        (json.dumps(GOOD | {"output_tokens": 0}), "output_tokens is 0, expected a whole number from 1 on"),
        (json.dumps(GOOD | {"output_tokens": "9"}), "output_tokens is '9'"),
        (json.dumps(GOOD | {"task_id": True}), "task_id is True"),
        (json.dumps(GOOD | {"input_ids": []}), "line 1: the prompt has no tokens"),
        (json.dumps(GOOD | {"input_ids": [5, -1]}), "input_ids is [5, -1], expected a list of token ids"),
        (json.dumps(GOOD | {"input_ids": [5, 512]}), "token id 512 is outside the engine's vocabulary of 512"),
        (json.dumps(GOOD | {"task_id": 7, "input_ids": [5] * 160}), "task 7: a prompt of 160 tokens exceeds"),
        (json.dumps(GOOD | {"task_id": 7, "output_tokens": 159}), "max sequence of 160; task 7 has 2 + 159 = 161"),
    ],
)
def test_broken_data_sets_are_named_with_their_line(run, tmp_path, content, said):
    path = tmp_path / "set.json"
    path.write_text(content)
    code, _, err = run("throughput", data=path)
    assert code == 1 and said in err and err.startswith("[TRT-LLM] [E] ") and err.count("\n") == 1


def test_a_data_set_that_is_missing_or_no_text(run, tmp_path):
    code, _, err = run("throughput", data=tmp_path / "nowhere.json")
    assert code == 1 and "nowhere.json cannot be read: No such file" in err
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x80")
    assert "is no text file" in run("throughput", data=tmp_path / "binary")[2]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--backend", "pytorch"), "--backend pytorch: the reference toolchain measures engines"),
        (("--num_requests", "-1"), "--num_requests -1: give 0 or more"),
        (("--warmup", "-1"), "--warmup -1: give 0 or more"),
        (("--kv_cache_free_gpu_mem_fraction", "1.5"), "free_gpu_memory_fraction=1.5"),
        (("--max_batch_size", "0"), "--max_batch_size 0: give 1 or more"),
        (("--max_num_tokens", "0"), "--max_num_tokens 0: give 1 or more"),
        (("--dataset", ""), "--dataset is missing"),
    ],
)
def test_values_that_make_no_sense(run, words, said):
    code, _, err = run("throughput", *words)
    assert code == 1 and said in err and err.count("\n") == 1


@pytest.mark.parametrize("concurrency", [0, -5])
def test_no_limit_of_concurrency(run, tmp_path, concurrency):
    report = tmp_path / "r.json"
    assert run("throughput", "--concurrency", concurrency, "--report_json", report)[0] == 0
    assert json.loads(report.read_text())["request_info"]["avg_num_concurrent_requests"] > 1


@pytest.mark.parametrize("flag", ["--report_json", "--request_json", "--output_json", "--iteration_log"])
def test_an_output_that_cannot_be_written_is_found_before_the_run(run, tmp_path, monkeypatch, flag):
    from trtllm_workshop.reference import engine

    monkeypatch.setattr(engine, "load_engine", lambda *_: pytest.fail("the engine was loaded"))
    (tmp_path / "file").write_text("mine")
    for place, reason in (
        ("file/r.json", "in the place of a folder"),
        ("nowhere/r.json", "does not exist"),
        (".", "a folder"),
    ):
        code, out, err = run("throughput", flag, tmp_path / place)
        assert code == 1 and f"{flag} {tmp_path / place} cannot be written: " in err and reason in err
        assert "DATASET DETAILS" not in out and err.count("\n") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_an_old_report_is_kept_when_the_run_fails_and_no_empty_one_is_left(run, tmp_path):
    old, new, data = tmp_path / "old.json", tmp_path / "new.json", tmp_path / "empty"
    old.write_text("old")
    data.write_text("")
    assert run("throughput", "--report_json", old, data=data)[0] == 1 and old.read_text() == "old"
    assert run("throughput", "--report_json", new, data=data)[0] == 1 and not new.exists()


def test_models_and_engines_that_are_something_else(engines, bench, run, dataset):
    code, _, err = run("throughput", model=engines.hf())
    assert code == 1 and "is a file or directory, please provide a model name" in err and "--model_path" in err
    words = ("--engine_dir", engines.checkpoint(), "--backend", "tensorrt", "--dataset", dataset)
    assert "build it first" in bench("--model", "tiny/model", "throughput", *words)[2]
    code, _, err = bench("--model", "m", "--model_path", "nowhere", "throughput", *words)
    assert code == 1 and "--model_path nowhere is no folder" in err
