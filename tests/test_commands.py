"""Command lines are checked against the recorded facts before anything runs."""

from __future__ import annotations

import argparse

import pytest
from trtllm_workshop.commands import add_arguments, check_command, command, command_parser, commands, flags

LLAMA = "examples/models/core/llama/convert_checkpoint.py"
CONVERT = f"python {LLAMA} --model_dir m --output_dir c"
BUILD = "trtllm-build --checkpoint_dir c --output_dir e"


def errors(line: str) -> list[str]:
    return [str(problem) for problem in check_command(line) if problem.severity == "error"]


def only(line: str) -> str:
    """The one problem of the line, as text."""
    problems = check_command(line)
    assert len(problems) == 1, [str(problem) for problem in problems]
    return str(problems[0])


# Parsers made from the facts ------------------------------------------------------------------------------------------


def refused(capsys: pytest.CaptureFixture[str], parser: argparse.ArgumentParser, *argv: str) -> str:
    with pytest.raises(SystemExit) as stop:
        parser.parse_args(argv)
    assert stop.value.code == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith(f"{parser.prog}: error: ")
    return last


def test_a_parser_has_the_official_defaults_types_and_choices(capsys):
    parser = command_parser(LLAMA, ["--model_dir", "--dtype", "--tp_size", "--weight_only_precision"])
    values = parser.parse_args(["--tp_size", "2", "--weight_only_precision"])
    assert vars(values) == {"model_dir": None, "dtype": "auto", "tp_size": 2, "weight_only_precision": "int8"}
    assert "invalid choice: 'fp16'" in refused(capsys, parser, "--dtype", "fp16")
    assert "invalid int value: 'two'" in refused(capsys, parser, "--tp_size", "two")


def test_an_official_flag_without_implementation_is_refused_unless_it_changes_nothing(capsys):
    parser = command_parser("examples/run.py", ["max_output_len"])
    same = ["--max_output_len", "4", "--num_beams", "1", "--multi_block_mode", "true", "--kv_cache_enable_block_reuse"]
    assert vars(parser.parse_args(same)) == {"max_output_len": 4}
    for given in (
        ["--num_beams", "2"],
        ["--no-kv_cache_enable_block_reuse"],
        ["--no_prompt_template"],
        ["--streaming"],
    ):
        text = refused(capsys, parser, "--max_output_len", "4", *given)
        assert f"{given[0]}" in text and "official flag that the reference toolchain does not implement" in text


def test_a_made_up_flag_is_refused_with_the_nearest_real_one(capsys):
    parser = command_parser("trtllm-build", ["checkpoint_dir", "max_batch_size"])
    assert "--max_batchsize: did you mean --max_batch_size?" in refused(capsys, parser, "--max_batchsize", "4")
    assert "--max-batch-size=4: did you mean --max_batch_size?" in refused(capsys, parser, "--max-batch-size=4")
    assert "the nearest real one is --" in refused(capsys, parser, "--zzz")
    assert "did you mean --max_batch_size?" in refused(capsys, parser, "--max_batch", "4"), (
        "abbreviations are errors too"
    )


def test_switch_pairs_append_and_absent_defaults_behave_as_upstream():
    parser = command_parser("examples/run.py", ["max_output_len", "stop_words", "kv_cache_enable_block_reuse"])
    values = parser.parse_args(["--max_output_len", "4", "--stop_words", "a", "b", "--stop_words", "c"])
    assert values.stop_words == [["a", "b"], ["c"]] and values.kv_cache_enable_block_reuse is True
    assert not parser.parse_args(
        ["--max_output_len", "4", "--no-kv_cache_enable_block_reuse"]
    ).kv_cache_enable_block_reuse
    build = command_parser("trtllm-build", ["kv_cache_type"])
    assert vars(build.parse_args([])) == {} and build.parse_args(["--kv_cache_type", "paged"]).kv_cache_type == "paged"


def test_a_reference_command_cannot_invent_a_flag():
    with pytest.raises(KeyError, match=r"--tp_sise.*did you mean --tp_size"):
        add_arguments(argparse.ArgumentParser(), LLAMA, ["--tp_sise"])
    with pytest.raises(KeyError, match="no facts are recorded"):
        command("trtllm-make")


@pytest.mark.parametrize("name", sorted(commands()))
def test_every_recorded_command_makes_a_parser_with_help(name):
    assert "usage:" in command_parser(name, list(flags(name))).format_help()


# Whole command lines --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        CONVERT + " --dtype bfloat16 --tp_size {tp}",
        "python3 $TRTLLM_EXAMPLES/models/core/llama/convert_checkpoint.py --model_dir $MODEL --dtype {dtype}",
        BUILD + " --gemm_plugin auto --kv_cache_type paged | tee build.log  # keep the log",
        "CUDA_VISIBLE_DEVICES=0,1 mpirun -n 2 --allow-run-as-root -x A=1 --mca btl self "
        "python examples/run.py --engine_dir e --tokenizer_dir m --max_output_len 16 --input_text 'Hello there'",
        "trtllm-serve {engine} --backend tensorrt --port 8001",
        "trtllm-serve serve {engine} --backend trt",
        "trtllm-serve TinyLlama/TinyLlama-1.1B-Chat-v1.0",
        "trtllm-serve disaggregated -c config.yaml",
        "trtllm-bench --model m -w /tmp/w throughput --engine_dir e --backend tensorrt --dataset d --disable_chunked_context",
        "trtllm-bench --model m prepare-dataset --output o token-norm-dist --num-requests 3 --input-mean 64 "
        "--input-stdev 0 --output-mean 8 --output-stdev 0",
        "workshop exec --toolchain reference -- " + BUILD,
        BUILD + " {extra_flags}",
        "trtllm-build --help",
        "trtllm-refit --whatever 3",
        "nvidia-smi --query-gpu=name --format=csv > gpus.csv && ls -la | grep --color x",
        "python make_data.py --whatever 3",
        "curl -s http://localhost:8000/v1/models | jq '.data",
    ],
)
def test_good_lines_and_foreign_programs_give_no_problem(line):
    assert check_command(line) == []


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (BUILD + " --max_batch 3", ["no flag --max_batch", "did you mean --max_batch_size?"]),
        (BUILD + " --gemm_plugin on", ["--gemm_plugin on", "choose from auto, float16"]),
        (BUILD + " --workers two", ["--workers two", "whole number"]),
        (BUILD + " --max_batch_size", ["--max_batch_size needs a value"]),
        (BUILD + " --dry_run=yes", ["--dry_run takes no value"]),
        (BUILD + " engine", ["no argument 'engine' without a flag"]),
        (BUILD + " --checkpoint_dir d", ["given twice, c and d"]),
        ("trtllm-build --output_dir e", ["needs one of --checkpoint_dir or --model_config"]),
        (BUILD + " --paged_kv_cache enable", ["deprecated", "--kv_cache_type"]),
        (BUILD + " --max_input_len 512 --max_seq_len 512", ["no room for an answer"]),
        (BUILD + " --multiple_profiles enable --opt_num_tokens 8", ["leave out --opt_num_tokens"]),
        (BUILD + " --streamingllm enable --output_timing_cache x", ["deprecated"]),
        (BUILD + " --checkpoint_dir 'c", ["cannot be split", "close the quotes"]),
        (CONVERT + " --weight_only_precision int4", ["no effect", "add --use_weight_only"]),
        ("python examples/run.py --engine_dir e", ["run.py needs --max_output_len"]),
        ("python examples/run.py --max_output_len 8 --top_p 100", ["top_p", "between 0 and 1"]),
        ("trtllm-serve m --kv_cache_dtype fp8", ["later releases"]),
        ("trtllm-serve", ["needs MODEL"]),
        ("trtllm-bench --model m thruput --dataset d", ["no sub-command thruput", "throughput"]),
        ("trtllm-bench throughput --dataset d", ["needs --model"]),
        ("trtllm-bench --model m build", ["--max_seq_len is needed"]),
        ("trtllm-bench --model m build --max_seq_len 9 --tp_size 4 --pp_size 4", ["above 8"]),
        ("trtllm-buid --checkpoint_dir c", ["no program trtllm-buid", "trtllm-build"]),
        ("python examples/models/core/gpt/convert_checkpoint.py --model_dir m", ["no flags are recorded", LLAMA]),
    ],
)
def test_bad_lines_are_named_with_the_remedy(line, words):
    text = only(line) if "--streamingllm" not in line else "\n".join(map(str, check_command(line)))
    for word in words:
        assert word in text


def test_fragments_need_not_be_complete_but_must_be_right():
    assert check_command("trtllm-build --gemm_plugin auto", partial=True) == []
    assert check_command("trtllm-build --gemm_plugin maybe", partial=True) != []


def test_P46_max_output_len_becomes_max_seq_len():
    assert "write --max_seq_len 4096 (2048 + 2048)" in only(BUILD + " --max_input_len 2048 --max_output_len 2048")
    assert "longest prompt you expect + 256" in only(BUILD + " --max_output_len 256")
    wrong = only(BUILD + " --max_input_len 2048 --max_output_len 2048 --max_seq_len 2048")
    assert "2048 + 2048 = 4096, but --max_seq_len 2048 is given" in wrong and wrong.startswith("error")
    assert "does not even hold" in only(BUILD + " --max_output_len 2048 --max_seq_len 2048")
    assert "write --max_seq_len 4096 " in only(BUILD + " --max_input_len=2048 --max_output_len=2048")


def test_P46_the_parser_gives_the_same_number(capsys):
    parser = command_parser("trtllm-build", ["checkpoint_dir", "max_input_len", "max_seq_len"])
    text = refused(capsys, parser, "--max_input_len", "100", "--max_output_len", "28")
    assert text.startswith("trtllm-build: error: unrecognized arguments: --max_output_len")
    assert "--max_seq_len 128 (100 + 28)" in text


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("trtllm-build --checkpoint_dir c \\ \n  --max_seq_len 64", "line 1 has blanks after its backslash"),
        ("trtllm-build --checkpoint_dir c \\\t\n  --max_seq_len 64", "line 1 has blanks after its backslash"),
        ("trtllm-build --checkpoint_dir c\n  --max_seq_len 64", "line 2 starts with --max_seq_len"),
        ("trtllm-build --checkpoint_dir c \\\n --output_dir e\n --max_seq_len 64", "line 3 starts with --max_seq_len"),
        ("trtllm-build --checkpoint_dir c \\", "not complete"),
    ],
)
def test_P48_a_broken_continuation_is_found(text, line):
    assert line in only(text)


def test_P48_a_right_continuation_passes_and_the_rest_of_a_broken_line_is_still_checked():
    assert check_command("trtllm-build \\\n  --checkpoint_dir c \\\n  --max_seq_len 64\n\n# done\nls -l") == []
    problems = errors("trtllm-build --checkpoint_dir c\n  --max_seq_length 64")
    assert len(problems) == 2 and "did you mean --max_seq_len?" in problems[1]


def test_P56_options_of_the_old_build_script_are_sent_to_their_stage():
    old = (
        " --remove_input_padding --use_gpt_attention_plugin float16 --use_gemm_plugin float16 --use_rmsnorm_plugin float16"
        " --enable_context_fmha --world_size 8 --use_inflight_batching --max_input_len 4096 --max_output_len 1024"
        " --max_batch_size 8 --paged_kv_cache"
    )
    found = errors(CONVERT + old)
    assert len(found) == 11
    text = "\n".join(found)
    for flag in ("--remove_input_padding", "--max_input_len", "--max_batch_size", "--paged_kv_cache"):
        assert f"no flag {flag} -> it belongs to another command: give this to trtllm-build" in text
    assert "--gpt_attention_plugin to trtllm-build" in text and "--max_seq_len 5120 (4096 + 1024)" in text
    assert "give --tp_size and --pp_size to convert_checkpoint.py" in text


def test_P56_the_table_works_in_the_other_direction():
    assert "give --tp_size to convert_checkpoint.py" in only(BUILD + " --tp_size 2")
    assert f"give this to {LLAMA}" in only(BUILD + " --dtype float16")
    assert "give this to examples/quantization/quantize.py" in only(BUILD + " --qformat fp8")
    assert "give this to examples/run.py" in only(CONVERT + " --engine_dir e")


def test_P58_an_engine_needs_the_tensorrt_backend(tmp_path):
    for line in ("trtllm-serve {engine}", "trtllm-serve serve work/engines/m/float16-tp1 --port 80"):
        text = only(line)
        assert "default backend is PyTorch" in text and "add --backend tensorrt" in text
    assert "add --backend tensorrt" in only("trtllm-bench --model m throughput --engine_dir e --dataset d")
    folder = tmp_path / "engine_of_growth"  # a Hugging Face folder with an unlucky name
    folder.mkdir()
    assert check_command(f"trtllm-serve {folder}") == []
    (folder / "rank0.engine").touch()
    assert "add --backend tensorrt" in only(f"trtllm-serve {folder}")
