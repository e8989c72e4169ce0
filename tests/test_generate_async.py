"""generate_async: streams, several requests at once, cancelling, failures; and that nothing is left running."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import time

import pytest
from engines import free_running, prompt_of
from trtllm_workshop.reference.configs import KvCacheConfig
from trtllm_workshop.reference.iteration_stats import IterationStats
from trtllm_workshop.reference.llm import LLM
from trtllm_workshop.reference.sampling_params import SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")

TEXT = "The capital of France is"


@pytest.fixture(scope="module")
def llm(engines):
    return engines.llm()


def used_blocks(llm):
    return llm._executor.kv_cache.stats().usedNumBlocks


def wait_until_idle(llm, seconds=20.0):
    end = time.monotonic() + seconds
    while llm._executor.busy and time.monotonic() < end:
        time.sleep(0.005)
    assert not llm._executor.busy and used_blocks(llm) == 0


def test_result_and_await_give_what_generate_gives(llm):
    plain = llm.generate(TEXT, free_running(9)).outputs[0]
    output = llm.generate_async(TEXT, free_running(9))
    assert output.result() is output and output.finished and output.prompt == TEXT
    awaited = asyncio.run(_await(llm.generate_async(TEXT, free_running(9))))
    for one in (output, awaited):
        done = one.outputs[0]
        assert (done.text, done.token_ids, done.finish_reason) == (plain.text, plain.token_ids, "length")
    wait_until_idle(llm)


async def _await(output):
    return await output


def test_a_stream_gives_a_token_a_step_and_the_parts_make_the_whole(llm):
    plain = llm.generate(TEXT, free_running(12)).outputs[0]
    tokens, pieces, reasons = [], [], []
    for output in llm.generate_async(TEXT, free_running(12), streaming=True):
        part = output.outputs[0]
        assert len(part.token_ids_diff) == 1 and part.text.endswith(part.text_diff)
        tokens += part.token_ids_diff
        pieces.append(part.text_diff)
        assert part.token_ids == tokens and part.text == "".join(pieces) and part.length == len(tokens)
        reasons.append(part.finish_reason)
    assert tokens == plain.token_ids and "".join(pieces) == plain.text
    assert reasons == [None] * 11 + ["length"]


def test_a_slow_reader_still_gets_every_step(llm):
    output = llm.generate_async(TEXT, free_running(6), streaming=True)
    wait_until_idle(llm)
    assert [len(o.outputs[0].token_ids) for o in output] == [1, 2, 3, 4, 5, 6]


def test_many_streams_in_one_event_loop_run_in_the_same_steps(llm):
    prompts = [prompt_of(length, 3) for length in (3, 17, 40, 9)]
    alone = [llm.generate(prompt, free_running(15)).outputs[0].token_ids for prompt in prompts]
    llm.get_stats()

    async def read(prompt):
        tokens = []
        async for output in llm.generate_async(prompt, free_running(15), streaming=True):
            tokens += output.outputs[0].token_ids_diff
        return tokens

    async def read_all():
        return await asyncio.gather(*map(read, prompts))

    assert asyncio.run(read_all()) == alone
    assert max(s["inflightBatchingStats"]["numScheduledRequests"] for s in llm.get_stats()) > 1


def test_generate_and_generate_async_at_the_same_time(llm):
    alone = llm.generate(prompt_of(20), free_running(30)).outputs[0].token_ids
    background = llm.generate_async(prompt_of(20), free_running(30))
    together = llm.generate([prompt_of(20), prompt_of(20)], free_running(30))
    assert [o.outputs[0].token_ids for o in (*together, background.result(30))] == [alone] * 3


def test_logprobs_of_a_stream(llm):
    whole = llm.generate(TEXT, free_running(5, logprobs=2)).outputs[0]
    parts = []
    for output in llm.generate_async(TEXT, free_running(5, logprobs=2), streaming=True):
        parts += output.outputs[0].logprobs_diff
    assert parts == whole.logprobs and output.outputs[0].cumulative_logprob == whole.cumulative_logprob


def test_abort_ends_the_request_and_gives_its_blocks_back(llm):
    output = llm.generate_async(prompt_of(20), free_running(120), streaming=True)
    next(iter(output))
    assert used_blocks(llm) > 0
    output.abort()
    rest = output.result(timeout=20)
    assert rest.aborted() and rest.outputs[0].finish_reason == "cancelled" and 1 <= rest.outputs[0].length < 120
    wait_until_idle(llm)
    output.abort()
    assert output.finished, "aborting twice is harmless"


def test_abort_of_one_request_leaves_the_others_alone(llm):
    alone = llm.generate(prompt_of(12, 1), free_running(40)).outputs[0].token_ids
    kept = llm.generate_async(prompt_of(12, 1), free_running(40))
    dropped = llm.generate_async(prompt_of(12, 2), free_running(140))
    dropped.abort()
    assert kept.result(30).outputs[0].token_ids == alone and dropped.result(30).aborted()
    wait_until_idle(llm)


def test_a_waiting_request_can_be_aborted_before_it_ran(engines):
    llm = engines.llm(batch=1)
    running = llm.generate_async(prompt_of(5), free_running(60))
    waiting = llm.generate_async(prompt_of(6), free_running(60))
    waiting.abort()
    assert waiting.result(20).outputs[0].token_ids == [] and running.result(30).outputs[0].length == 60
    wait_until_idle(llm)


def test_a_stream_nobody_holds_any_more_is_cancelled(llm):
    for output in llm.generate_async(prompt_of(20), free_running(130), streaming=True):
        if output.outputs[0].length == 2:
            break
    del output
    gc.collect()
    wait_until_idle(llm)


def test_ctrl_c_while_waiting_cancels_the_request(llm, monkeypatch):
    output = llm.generate_async(prompt_of(20), free_running(130), streaming=True)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(output._news, "get", lambda timeout: (_ for _ in ()).throw(KeyboardInterrupt))
        for _ in output:
            pass
    wait_until_idle(llm)
    assert output._request.finish_reason == "cancelled"


def test_a_cancelled_task_cancels_its_request(llm):
    async def impatient():
        output = llm.generate_async(prompt_of(20), free_running(130))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(output.aresult(), 0.01)
        return output

    output = asyncio.run(impatient())
    wait_until_idle(llm)
    assert output._request.finish_reason in ("cancelled", "length")


def test_a_timeout_does_not_end_the_request(llm):
    output = llm.generate_async(prompt_of(20), free_running(60))
    with pytest.raises(TimeoutError, match="nothing new within 0 s"):
        output.result(timeout=0)
    assert output.result(timeout=30).outputs[0].length == 60


def test_a_listener_that_fails_ends_its_own_request_only(llm):
    kept = llm.generate_async(prompt_of(9), free_running(20))
    broken = llm.generate_async(prompt_of(10), free_running(140))

    def fail(request):
        raise ZeroDivisionError

    broken._request.listener = fail
    assert kept.result(30).outputs[0].length == 20
    wait_until_idle(llm)
    assert isinstance(broken._request.error, ZeroDivisionError) and broken._request.finish_reason == "cancelled"


def test_an_engine_that_fails_tells_everybody_who_waits(llm, monkeypatch):
    run = llm._executor.engine.run

    def broken(*arguments):
        raise RuntimeError("no more memory")

    with monkeypatch.context() as patch:
        patch.setattr(llm._executor.engine, "run", broken)
        waiting = [llm.generate_async(prompt_of(5, n), free_running(5)) for n in range(3)]
        for output in waiting:
            with pytest.raises(RuntimeError, match="no more memory"):
                output.result(20)
    assert llm._executor.engine.run is run
    wait_until_idle(llm)
    assert llm.generate(TEXT, free_running(3)).outputs[0].length == 3, "the engine goes on"


def test_shutdown_ends_the_thread_and_what_still_runs(engines):
    llm = LLM(engines.engine(), tokenizer=str(engines.hf()), kv_cache_config=KvCacheConfig(max_tokens=400))
    output = llm.generate_async(prompt_of(20), free_running(130))
    executor, thread = llm._executor, llm._loop._thread
    assert thread in threading.enumerate()
    llm.shutdown()
    assert thread not in threading.enumerate() and executor.kv_cache.stats().usedNumBlocks == 0
    assert output.result(5).aborted()
    with pytest.raises(RuntimeError, match="shut down"):
        llm.generate_async(TEXT)
    llm.shutdown()


def test_shutdown_from_the_thread_that_runs_the_steps(engines):
    """A callback that shuts everything down must not wait for itself."""
    llm = LLM(engines.engine(), tokenizer=str(engines.hf()), kv_cache_config=KvCacheConfig(max_tokens=400))
    output = llm.generate_async(prompt_of(20), free_running(130), streaming=True)
    executor, thread, listener = llm._executor, llm._loop._thread, output._request.listener

    def last(request):
        listener(request)
        if len(request.token_ids) == 5:
            llm.shutdown()

    output._request.listener = last
    assert output.result(20).aborted()
    thread.join(10)
    assert not thread.is_alive() and not executor.busy and executor.kv_cache.stats().usedNumBlocks == 0


def test_generate_does_not_pass_off_a_part_as_the_answer(engines):
    """Shut down by another thread meanwhile: that is an error, where a stream would say `cancelled`."""
    llm = LLM(engines.engine(), tokenizer=str(engines.hf()), kv_cache_config=KvCacheConfig(max_tokens=400))
    executor = llm._executor
    step, steps = executor.step, []

    def slow():
        steps.append(1)
        if len(steps) == 3:
            threading.Thread(target=llm.shutdown).start()
            time.sleep(0.2)
        return step()

    executor.step = slow
    with pytest.raises(RuntimeError, match="shut down while it generated"):
        llm.generate(prompt_of(20), free_running(100))


def test_taking_statistics_from_two_threads_at_once(llm):
    stats, taken = IterationStats(1), []
    blocks = llm._executor.kv_cache.stats()

    def take():
        while len(taken) < 2000:
            taken.extend(entry["iter"] for entry in stats.take())

    threads = [threading.Thread(target=take) for _ in range(2)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for _ in range(2000):
            stats.add(0.1, 1, 0, 0, blocks, 0, 0, 1, 0)
            while len(stats._kept) > 900:
                time.sleep(0.001)
        for thread in threads:
            thread.join(20)
    finally:
        sys.setswitchinterval(before)
    assert sorted(taken) == list(range(1, 2001))


def test_a_forgotten_llm_ends_its_thread(engines):
    llm = LLM(engines.engine(), tokenizer=str(engines.hf()), kv_cache_config=KvCacheConfig(max_tokens=400))
    llm.generate_async(prompt_of(5), free_running(3)).result(20)
    thread = llm._loop._thread
    assert thread in threading.enumerate()
    del llm
    gc.collect()
    assert thread not in threading.enumerate()


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        (["a", "b"], "takes one prompt, not a list of 2"),
        ("", "empty text"),
        ([5, 512], "token id 512"),
        (prompt_of(160), "160"),
    ],
)
def test_prompts_that_are_refused_at_once(llm, prompt, said):
    with pytest.raises(ValueError, match=said):
        llm.generate_async(prompt, free_running(4))
    wait_until_idle(llm)


def test_a_request_that_can_never_fit_is_refused_at_once_with_the_numbers(engines):
    llm = engines.llm(pool=64)
    with pytest.raises(ValueError, match=r"need 80 tokens of KV cache, the whole pool holds 64"):
        llm.generate_async(prompt_of(60), free_running(20))
    wait_until_idle(llm)


def test_iterating_needs_streaming(llm):
    output = llm.generate_async(TEXT, free_running(2))
    with pytest.raises(RuntimeError, match="streaming=True"):
        iter(output)
    assert output.result(20).finished


def test_a_stop_string_never_leaks_into_a_stream(llm):
    """The answer of a random model, stopped at a piece of itself that spans tokens."""
    text = llm.generate(TEXT, free_running(40)).outputs[0].text
    stop = text[10:14]
    pieces = []
    for output in llm.generate_async(TEXT, free_running(40, stop=stop), streaming=True):
        pieces.append(output.outputs[0].text_diff)
        assert stop not in "".join(pieces)
    assert "".join(pieces) == text[: text.index(stop)] == output.outputs[0].text
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", stop)


def test_stats_follow_the_requests(llm):
    wait_until_idle(llm)
    llm.get_stats()
    llm.generate_async(prompt_of(30), SamplingParams(max_tokens=10, ignore_eos=True)).result(20)
    stats = llm.get_stats()
    assert len(stats) == 10 and [s["iter"] for s in stats] == list(range(stats[0]["iter"], stats[0]["iter"] + 10))
    first, last = stats[0], stats[-1]
    assert first["inflightBatchingStats"]["numContextRequests"] == 1
    assert first["inflightBatchingStats"]["numCtxTokens"] in range(1, 31), "less when a prefix was found"
    assert all(s["inflightBatchingStats"]["numGenRequests"] == 1 for s in stats[1:])
    assert first["numActiveRequests"] == 1 and last["numActiveRequests"] == 0 and last["numCompletedRequests"] == 1
    blocks = [s["kvCacheStats"]["usedNumBlocks"] for s in stats]
    ahead = int(llm._executor._runner.runs_ahead)  # then the next step has taken its block already
    assert blocks == [*(-(-(n + ahead) // 8) for n in range(30, 39)), 0]
    assert all(s["kvCacheStats"]["usedNumBlocks"] + s["kvCacheStats"]["freeNumBlocks"] == 160 for s in stats)
    assert all(s["iterLatencyMS"] > 0 for s in stats) and llm.get_stats(timeout=0) == []


def test_stats_come_one_by_one_in_an_event_loop(llm):
    llm.get_stats()

    async def read():
        output = llm.generate_async(prompt_of(12), free_running(6))
        seen = [entry["iter"] async for entry in llm.get_stats_async(timeout=0.3)]
        return seen, await output

    seen, output = asyncio.run(read())
    assert len(seen) == 6 and output.finished
