"""Ctrl-C while the engine steps: it takes effect between two steps, and nobody else's request suffers."""

from __future__ import annotations

import contextlib
import signal
import threading

import pytest
from engines import free_running, prompt_of
from trtllm_workshop.reference.interrupts import interrupts_held

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def python_handles_ctrl_c():
    """A shell may start the tests with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_waits_for_the_end_of_the_block():
    done = []
    with pytest.raises(KeyboardInterrupt), interrupts_held():
        signal.raise_signal(signal.SIGINT)
        done.append("the rest of the block")
    assert done and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_second_ctrl_c_does_not_wait():
    done = []
    with pytest.raises(KeyboardInterrupt), interrupts_held():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        done.append("never")
    assert not done and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_exception_of_the_block_is_not_lost_sight_of():
    with pytest.raises(KeyboardInterrupt) as caught, interrupts_held():
        signal.raise_signal(signal.SIGINT)
        raise ZeroDivisionError
    assert isinstance(caught.value.__context__, ZeroDivisionError)


def test_other_threads_and_ignored_signals_are_left_alone():
    seen = []

    def elsewhere():
        with interrupts_held():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with interrupts_held():
        seen.append(signal.getsignal(signal.SIGINT))
        signal.raise_signal(signal.SIGINT)
    assert seen == [signal.default_int_handler, signal.SIG_IGN]


@pytest.mark.parametrize("at", [1, 2, 9])
def test_ctrl_c_inside_a_step_leaves_the_books_right(engines, monkeypatch, at):
    """The signal comes while the scheduler and the pool are at work; a request of somebody else goes on."""
    llm = engines.llm()
    alone = llm.generate(prompt_of(12, 3), free_running(40)).outputs[0].token_ids
    reserve, calls = llm._executor.kv_cache.reserve, 0

    def interrupted(*arguments):
        nonlocal calls
        calls += 1
        # In the thread that runs this step, which is that of the test or the one in the background.
        if calls == at and threading.current_thread() is threading.main_thread():
            signal.raise_signal(signal.SIGINT)
        return reserve(*arguments)

    other = llm.generate_async(prompt_of(12, 3), free_running(40))
    monkeypatch.setattr(llm._executor.kv_cache, "reserve", interrupted)
    with contextlib.suppress(KeyboardInterrupt):  # the background thread may have run the step in question
        llm.generate([prompt_of(20, n) for n in range(3)], free_running(100))
    assert other.result(30).outputs[0].token_ids == alone
    assert not llm._executor.busy and llm._executor.kv_cache.stats().usedNumBlocks == 0
    assert llm.generate(prompt_of(12, 3), free_running(40)).outputs[0].token_ids == alone
