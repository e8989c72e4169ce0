"""Streamed text: throttled, new text only, whole characters; and several streams of one runner side by side."""

from __future__ import annotations

import json
import random
import re
import shutil

import pytest
import torch
from engines import prompt_of
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import tiny_tokenizer
from trtllm_workshop.reference import run_cli
from trtllm_workshop.reference.runner import ModelRunner, ModelRunnerCpp
from trtllm_workshop.reference.streamed_text import Piece, StreamedRow, text_of, throttle

TOKENIZER = tiny_tokenizer()
HARD = ["A family: 👨‍👩‍👧‍👦, done", "日本語のテキスト", "naïve café", "👍🏽", "two  blanks  "]


def ids_of(text):
    return TOKENIZER.encode(text, add_special_tokens=False)


# Throttling -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "interval", "shown"),
    [
        (11, 5, [0, 5, 10]),
        (12, 5, [0, 5, 10, 11]),
        (3, 1, [0, 1, 2]),
        (3, 99, [0, 2]),
        (1, 5, [0]),
        (0, 5, []),
    ],
)
def test_the_first_step_every_nth_and_the_last(steps, interval, shown):
    assert list(throttle(range(steps), interval)) == shown
    with pytest.raises(ValueError, match="interval of 0"):
        list(throttle(range(steps), 0))


def test_throttling_waits_for_no_step_that_it_does_not_need():
    made = []
    stream = throttle((made.append(n) or n for n in range(9)), 3)
    assert next(stream) == 0 and made == [0], "the first text appears at once"
    assert next(stream) == 3 and made == [0, 1, 2, 3]


# Pieces ---------------------------------------------------------------------------------------------------------------


@given(text=st.text(max_size=30), interval=st.integers(1, 9))
def test_P83_pieces_are_whole_characters_and_join_to_the_text(text, interval):
    ids = ids_of(text)
    row = StreamedRow(TOKENIZER, ids_of("Say it: "))
    pieces = [row.update(ids[:count]) for count in throttle(range(1, len(ids) + 1), interval)]
    shown = "".join(piece.text for piece in pieces)
    full = TOKENIZER.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert full.startswith(shown) and not any(piece.rewritten for piece in pieces)
    assert shown + row.finish().text == full == row.text == text_of(TOKENIZER, ids_of("Say it: "), ids)
    if "\ufffd" not in full:
        assert "\ufffd" not in shown


@pytest.mark.parametrize("text", HARD)
@pytest.mark.parametrize("interval", [1, 2, 8])
def test_P83_characters_of_several_tokens(text, interval):
    ids = ids_of(text)
    assert any("\ufffd" in TOKENIZER.decode([t]) for t in ids) or text.isascii(), "the trap: a token is no character"
    row = StreamedRow(TOKENIZER, [])
    pieces = [row.update(ids[:count]).text for count in throttle(range(1, len(ids) + 1), interval)]
    assert "".join(pieces) == text and not any("\ufffd" in piece for piece in pieces)


def test_P83_an_answer_that_breaks_off_inside_a_character_shows_it_once():
    ids = ids_of("ok 👍")[:-1]
    row = StreamedRow(TOKENIZER, [])
    assert row.update(ids).text == "ok "
    assert row.finish().text.startswith("\ufffd") and row.finish().text == ""


def test_P81_a_row_that_is_rewritten_starts_again():
    first, second = ids_of("The cat sat there"), ids_of("The dog")
    row = StreamedRow(TOKENIZER, [])
    assert row.update(first) == Piece("The cat sat there")
    assert row.update(second) == Piece("The dog", rewritten=True), "shorter than what was shown: no negative slice"
    assert row.update(second + ids_of(" ran")) == Piece(" ran") and row.text == "The dog ran"


# run.py ---------------------------------------------------------------------------------------------------------------


def outputs_of(prompts, rows, counts, filler=0):
    """What a runner yields at a step: row i with counts[i] tokens of its answer, padded to the longest."""
    whole = [prompt + row[:count] for prompt, row, count in zip(prompts, rows, counts, strict=True)]
    width = max(map(len, whole))
    padded = [[row + [filler] * (width - len(row))] for row in whole]
    return {"output_ids": torch.tensor(padded), "sequence_lengths": torch.tensor([[len(row)] for row in whole])}


def new_text(out, row):
    return re.findall(rf'^New \[Text {row} Beam 0\]: "(.*?)"$', out, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("interval", [1, 2, 5])
def test_P81_every_row_of_a_batch_shows_only_what_is_new(capsys, interval):
    prompts = [ids_of("Say: "), ids_of("A longer prompt, then ")]
    rows = [ids_of(HARD[0]), ids_of(HARD[1] + " and much more text after it, so that this row is the longer one")]
    steps = [outputs_of(prompts, rows, [min(n, len(row)) for row in rows]) for n in range(1, max(map(len, rows)) + 1)]
    last = run_cli.stream((step for step in steps), interval, prompts, TOKENIZER)
    out = capsys.readouterr().out
    assert last is steps[-1]
    for number, row in enumerate(rows):
        pieces = new_text(out, number)
        assert "".join(pieces) == TOKENIZER.decode(row) and all(pieces) and "\ufffd" not in "".join(pieces)
    assert len(new_text(out, 1)) > 1 and len(new_text(out, 1)) <= -(-len(steps) // interval) + 1
    assert "Say:" not in out and "prompt" not in out


@pytest.fixture
def run(engines, capsys):
    def call(*flags, tokenizer=None, new=8):
        common = ("--engine_dir", engines.engine(), "--tokenizer_dir", tokenizer or engines.hf())
        code = run_cli.main([str(w) for w in (*common, "--max_output_len", new, "--end_id", -1, *flags)])
        return (code, *capsys.readouterr())

    return call


def final_text(out, row):
    return re.findall(rf'^Output \[Text {row} Beam 0\]: "(.*?)"$', out, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("session", [(), ("--use_py_session",)])
def test_P81_streaming_ends_with_the_text_that_there_is_without(run, session):
    texts = ("--input_text", "The capital of France is", "One cat and")
    _, plain, _ = run(*texts, *session, new=21)
    code, out, err = run(*texts, *session, "--streaming", new=21)
    assert code == 0 and err == ""
    for row in (0, 1):
        assert final_text(out, row) == final_text(plain, row) != [""]
        pieces = new_text(out, row)
        assert "".join(pieces) == final_text(out, row)[0], "nothing twice, nothing lost"
        assert 2 <= len(pieces) <= 6, "steps 1, 6, 11, 16, 21 and what was held back"


def test_P79_the_answer_never_begins_with_the_prompt(engines, run, tmp_path):
    from tokenizers.processors import TemplateProcessing

    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    folder = shutil.copytree(engines.hf(), tmp_path / "hf")
    tokenizer.save_pretrained(folder)
    for typed in ("Hello  there", " leading blank"):
        code, out, _ = run("--input_text", typed, "--output_csv", tmp_path / "o.csv", tokenizer=folder)
        row = [int(cell) for cell in (tmp_path / "o.csv").read_text().split(",")]
        prompt = tokenizer.encode(typed)
        assert prompt[0] == 0 and row[: len(prompt)] == prompt, "the echo is there, one token longer than typed"
        assert not tokenizer.decode(row).startswith(typed), "the trap: taking the typed text away takes nothing away"
        assert code == 0 and final_text(out, 0) == [tokenizer.decode(row[len(prompt) :], skip_special_tokens=True)]


# The runner -----------------------------------------------------------------------------------------------------------

CALL = {"end_id": -1, "pad_id": 0, "return_dict": True, "streaming": True}


@pytest.fixture(scope="module")
def runner(engines):
    return ModelRunnerCpp.from_dir(str(engines.engine()))


def rows_of(outputs):
    ids, lengths = outputs["output_ids"][:, 0].tolist(), outputs["sequence_lengths"][:, 0].tolist()
    return [row[:length] for row, length in zip(ids, lengths, strict=True)]


def used_blocks(runner):
    return runner._executor.kv_cache.stats().usedNumBlocks


@pytest.mark.parametrize("pad_is_end", [True, False])
def test_P86_a_row_that_ended_is_padding_while_the_others_go_on(runner, pad_is_end):
    prompts = [torch.tensor(prompt_of(9, 1)), torch.tensor(prompt_of(4, 2))]
    call = CALL | {"max_new_tokens": 32, "streaming": False}
    plain = [row[len(p) :] for row, p in zip(rows_of(runner.generate(prompts, **call)), prompts, strict=True)]
    ends = [t for t in plain[0][4:16] if t not in plain[1] and t not in plain[0][: plain[0].index(t)]]
    end = ends[0]
    at = plain[0].index(end)
    call = CALL | {"max_new_tokens": 32, "end_id": end, "pad_id": end if pad_is_end else 0}
    for step, outputs in enumerate(runner.generate(prompts, **call), 1):
        made = [row[len(p) :] for row, p in zip(rows_of(outputs), prompts, strict=True)]
        assert made == [plain[0][: min(step, at + 1)], plain[1][:step]]
        padding = outputs["output_ids"][0, 0, len(prompts[0]) + min(step, at + 1) :].tolist()
        assert set(padding) <= {end}, "looks like an answer that never stops; the length says that it did"
    assert step == 32 and used_blocks(runner) == 0


@pytest.mark.parametrize("pad_is_end", [True, False])
def test_P86_an_answer_is_as_long_as_it_is_and_says_why_it_ended(engines, pad_is_end):
    from trtllm_workshop.reference.sampling_params import SamplingParams

    llm, prompts = engines.llm(), [prompt_of(9, 1), prompt_of(4, 2)]
    free = SamplingParams(max_tokens=64, ignore_eos=True)
    plain = [output.outputs[0].token_ids for output in llm.generate(prompts, free)]
    at = next(n for n in range(6, 63) if plain[0][n] not in [*plain[0][:n], *plain[1]])
    end = plain[0][at]
    params = SamplingParams(max_tokens=64, end_id=end, pad_id=end if pad_is_end else 0)
    first, second = (output.outputs[0] for output in llm.generate(prompts, params))
    assert first.token_ids == plain[0][: at + 1] and (first.length, first.finish_reason) == (at + 1, "stop")
    assert second.token_ids == plain[1] and (second.length, second.finish_reason) == (64, "length")


def test_return_all_generated_tokens_changes_nothing(runner):
    prompt = [torch.tensor(prompt_of(9, 1))]
    call = CALL | {"max_new_tokens": 5}
    both = [[rows_of(o) for o in runner.generate(prompt, **call, return_all_generated_tokens=on)] for on in (0, 1)]
    assert both[0] == both[1] and [len(step[0]) for step in both[0]] == [10, 11, 12, 13, 14]
    with pytest.raises(ValueError, match="return_all_generated_tokens"):
        ModelRunner(runner._executor).generate(prompt, **call, return_all_generated_tokens=True)


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_streams_side_by_side_some_of_them_dropped(runner, seed):
    chance = random.Random(seed)
    prompts = [[prompt_of(chance.randint(1, 30), chance.randint(0, 99)) for _ in range(2)] for _ in range(3)]
    new = [chance.randint(1, 12) for _ in prompts]
    alone = []
    for batch, count in zip(prompts, new, strict=True):
        call = CALL | {"max_new_tokens": count, "streaming": False}
        alone.append(rows_of(runner.generate([torch.tensor(p) for p in batch], **call)))
    streams = {
        number: runner.generate([torch.tensor(p) for p in batch], **CALL | {"max_new_tokens": count})
        for number, (batch, count) in enumerate(zip(prompts, new, strict=True))
    }
    last = {}
    while streams:
        number = chance.choice(sorted(streams))
        if chance.random() < 0.08:
            streams.pop(number).close()
            last.pop(number, None)
            continue
        outputs = next(streams[number], None)
        if outputs is None:
            del streams[number]
            assert last[number] == alone[number]
        else:
            last[number] = rows_of(outputs)
            for made, whole in zip(last[number], alone[number], strict=True):
                assert made == whole[: len(made)]
    assert used_blocks(runner) == 0 and not runner._executor.busy


def test_an_error_in_the_reader_frees_the_stream(engines, runner, capsys, monkeypatch):
    """run.py's loop over a real stream, with a printing that fails."""

    def broken(*_):
        raise BrokenPipeError("nobody reads")

    prompts = [prompt_of(9, 1)]
    monkeypatch.setattr(run_cli, "show_piece", broken)
    stream = runner.generate([torch.tensor(prompts[0])], **CALL | {"max_new_tokens": 12})
    with pytest.raises(BrokenPipeError):
        run_cli.stream(stream, 1, prompts, engines.llm().tokenizer)
    assert used_blocks(runner) == 0 and not runner._executor.busy
    assert next(stream, None) is None, "closed, not only forgotten"


def test_P87_ends_of_the_model_end_a_streamed_answer(engines, run, tmp_path, capsys):
    folder = shutil.copytree(engines.hf(), tmp_path / "hf")
    flags = ("--input_text", "The capital of France is", "--output_csv", tmp_path / "o.csv")
    assert run(*flags)[0] == 0
    answer = [int(cell) for cell in (tmp_path / "o.csv").read_text().split(",")][-8:]
    at = next(n for n in range(2, 8) if answer[n] not in answer[:n])
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [511, answer[at]]}))
    common = ("--engine_dir", engines.engine(), "--tokenizer_dir", folder, "--max_output_len", 8, "--streaming")
    assert run_cli.main([str(word) for word in (*common, *flags)]) == 0
    assert [int(c) for c in (tmp_path / "o.csv").read_text().split(",")][-at - 1 :] == answer[: at + 1]
    capsys.readouterr()
