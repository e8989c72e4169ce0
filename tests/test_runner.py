"""ModelRunner and ModelRunnerCpp: token ids in, token ids out, all at once or step by step."""

from __future__ import annotations

import pytest
import torch
from engines import free_running, prompt_of
from trtllm_workshop.checkpoint import WrongFolderKind
from trtllm_workshop.reference.runner import ModelRunner, ModelRunnerCpp

NEW = 12
PROMPTS = [prompt_of(9, 1), prompt_of(4, 2), prompt_of(17, 3)]
CALL = {"max_new_tokens": NEW, "end_id": -1, "pad_id": 0, "return_dict": True}


@pytest.fixture(scope="module")
def runner(engines):
    return ModelRunnerCpp.from_dir(str(engines.engine()))


@pytest.fixture(scope="module")
def expected(engines):
    return [output.outputs[0].token_ids for output in engines.llm().generate(PROMPTS, free_running(NEW))]


def tensors(prompts):
    return [torch.tensor(ids, dtype=torch.int32) for ids in prompts]


def rows(outputs):
    ids, lengths = outputs["output_ids"][:, 0].tolist(), outputs["sequence_lengths"][:, 0].tolist()
    return [row[:length] for row, length in zip(ids, lengths, strict=True)]


def used_blocks(runner):
    return runner._executor.kv_cache.stats().usedNumBlocks


@pytest.mark.parametrize("kind", [ModelRunner, ModelRunnerCpp])
def test_both_runners_give_the_llms_tokens(engines, expected, kind):
    runner = kind.from_dir(str(engines.engine()))
    outputs = runner.generate(tensors(PROMPTS), **CALL)
    assert rows(outputs) == [p + e for p, e in zip(PROMPTS, expected, strict=True)]
    assert outputs["output_ids"].shape == (3, 1, 17 + NEW) and outputs["output_ids"].dtype == torch.int32
    plain = runner.generate(tensors(PROMPTS[:1]), **{**CALL, "return_dict": False})
    assert plain.tolist() == [[PROMPTS[0] + expected[0]]]
    assert runner.vocab_size == 512 and runner.dtype == torch.float32 and runner.max_seq_len == 160


def test_streaming_is_cumulative_and_ends_as_without(runner, expected):
    steps = [rows(outputs) for outputs in runner.generate(tensors(PROMPTS), **CALL, streaming=True)]
    assert len(steps) == NEW
    for count, step in enumerate(steps, 1):
        assert step == [p + e[:count] for p, e in zip(PROMPTS, expected, strict=True)]


def test_a_stream_that_is_abandoned_early_frees_its_blocks(runner, expected):
    stream = runner.generate(tensors(PROMPTS), **CALL, streaming=True)
    next(stream)
    assert used_blocks(runner) > 0
    stream.close()
    assert used_blocks(runner) == 0 and not runner._executor.busy
    assert rows(runner.generate(tensors(PROMPTS[:1]), **CALL)) == [PROMPTS[0] + expected[0]]
    for _ in runner.generate(tensors(PROMPTS), **CALL, streaming=True):
        break  # dropped without being closed: Python closes it
    assert used_blocks(runner) == 0


def test_a_stream_that_is_never_started_reserves_nothing(runner):
    runner.generate(tensors(PROMPTS), **CALL, streaming=True)
    assert used_blocks(runner) == 0 and not runner._executor.busy


def test_two_streams_of_one_runner_side_by_side(runner, expected):
    streams = [runner.generate(tensors([p]), **CALL, streaming=True) for p in PROMPTS[:2]]
    last = [None, None]
    for number in (0, 1, 0, 0, 1):
        last[number] = next(streams[number])
    for number, stream in enumerate(streams):
        for outputs in stream:
            last[number] = outputs
    assert [rows(outputs)[0] for outputs in last] == [p + e for p, e in zip(PROMPTS[:2], expected[:2], strict=True)]


def test_sampling_values_for_all_or_one_for_each(runner):
    one = runner.generate(tensors([PROMPTS[0]] * 2), **CALL, top_k=50, temperature=2.0, random_seed=[3, 4])
    same = runner.generate(tensors([PROMPTS[0]] * 2), **CALL, top_k=50, temperature=2.0, random_seed=3)
    assert rows(one)[0] != rows(one)[1] and rows(same)[0] == rows(same)[1] == rows(one)[0]
    with pytest.raises(ValueError, match=r"\[3, 4\] has 2 entries and the batch has more requests"):
        runner.generate(tensors(PROMPTS), **CALL, random_seed=[3, 4], top_k=50)


def test_P89_stop_and_bad_words_for_all_or_for_each_request(runner, expected):
    first, second = expected[0][4:6], expected[1][2:3]
    outputs = runner.generate(tensors(PROMPTS), **CALL, stop_words_list=[[first], [], []])
    made = [row[len(p) :] for row, p in zip(rows(outputs), PROMPTS, strict=True)]
    assert made[0][-2:] == first and len(made[0]) <= 6 and made[1:] == expected[1:]
    shared = rows(runner.generate(tensors(PROMPTS[:2]), **CALL, stop_words_list=[first, second]))
    assert shared[0] == PROMPTS[0] + made[0] and shared[1][-1:] == second
    outputs = runner.generate(tensors(PROMPTS[:2]), **CALL, bad_words_list=[[], [[second[0]]]])
    assert rows(outputs)[0] == PROMPTS[0] + expected[0] and second[0] not in rows(outputs)[1][len(PROMPTS[1]) :]


def test_P89_one_word_one_list_of_words_or_one_for_each_request_mean_the_same(runner, expected):
    word = expected[0][4:6]
    forms = (word, [word], [[word]])
    made = [rows(runner.generate(tensors(PROMPTS[:1]), **CALL, stop_words_list=form)) for form in forms]
    assert made[0] == made[1] == made[2] and made[0][0][-2:] == word and len(made[0][0]) < len(PROMPTS[0]) + NEW
    for wrong in ("STOP", ["STOP"], [["STOP"]], [word, "STOP"], [[word], "STOP"], [[1.5]], 7):
        with pytest.raises(ValueError, match=r"stop_words_list is .*, expected token ids.*tokenizer\.encode"):
            runner.generate(tensors(PROMPTS[:2]), **CALL, stop_words_list=wrong)
    assert not runner._executor.busy


def test_temperature_zero_is_greedy(engines, runner, expected, capsys):
    assert rows(runner.generate(tensors(PROMPTS), **CALL, temperature=0.0, top_k=40))[0] == PROMPTS[0] + expected[0]
    python = ModelRunner.from_dir(str(engines.engine()))
    assert rows(python.generate(tensors(PROMPTS[:1]), **CALL, temperature=0.0))[0] == PROMPTS[0] + expected[0]
    assert "temperature 0.0 is replaced" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("batch", "change", "said"),
    [
        ([[5]] * 9, {}, r"batch size \(9\) exceeds the engine or specified limit \(8\).*--max_batch_size 9"),
        ([prompt_of(160)], {}, r"input length \(160\) exceeds the engine or specified limit \(159\)"),
        ([prompt_of(150)], {}, r"length \(150\) \+ maximum new tokens \(12\) exceeds .*\(160\); ask for at most 10"),
        ([], {}, "batch_input_ids is empty"),
        ([[5], []], {}, "prompt 1 of the batch is empty"),
        ([[5]], {"temperature": -1.0}, "temperature=-1.0 is out of range"),
        ([[5]], {"top_p": 100.0}, "top_p=100.0 is out of range"),
        ([[5]], {"end_id": None}, "end_id must be given"),
        ([[5]], {"pad_id": None}, "pad_id must be given"),
        ([[5]], {"max_output_len": 5}, "invalid argument: max_output_len"),
        ([[5]], {"num_beams": 4}, "num_beams=4 is an official argument|num_beams=4"),
    ],
)
def test_calls_that_are_refused(runner, batch, change, said):
    with pytest.raises((ValueError, RuntimeError), match=said):
        runner.generate(tensors(batch), **{**CALL, **change})
    assert used_blocks(runner) == 0 and not runner._executor.busy


def test_engines_and_limits_that_are_refused(engines):
    with pytest.raises(ValueError, match=r"max_batch_size=99 is above the engine's 8; build with --max_batch_size 99"):
        ModelRunnerCpp.from_dir(str(engines.engine()), max_batch_size=99)
    with pytest.raises(ValueError, match="rank=1"):
        ModelRunner.from_dir(str(engines.engine()), rank=1)
    with pytest.raises(WrongFolderKind, match="build it first"):
        ModelRunnerCpp.from_dir(str(engines.checkpoint()))
    with pytest.raises(ValueError, match=r"free_gpu_memory_fraction=1\.5"):
        ModelRunnerCpp.from_dir(str(engines.engine()), kv_cache_free_gpu_memory_fraction=1.5)


def test_limits_that_are_taken(engines):
    runner = ModelRunnerCpp.from_dir(str(engines.engine()), max_batch_size=2, max_tokens_in_paged_kv_cache=64)
    assert runner._executor.kv_cache.stats().maxNumBlocks == 8
    with pytest.raises(RuntimeError, match=r"batch size \(3\) exceeds .*\(2\)"):
        runner.generate(tensors(PROMPTS), **CALL)
