"""A thread that steps the executor while there is work, so that callers can do something else meanwhile."""

from __future__ import annotations

import contextlib
import threading

from trtllm_workshop.reference.executor import Executor
from trtllm_workshop.reference.request import Request

# A thread without work ends after this many seconds; the next request starts another.
IDLE_SECONDS = 5.0


class ExecutorLoop:
    """Steps an executor in the background. The thread exists only while it is needed.

    Args:
        executor: may be stepped by other threads too.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, request: Request) -> None:
        """Queue a request and see to it that it runs; its listener hears of every token.

        Raises:
            ValueError: when it can never run on this engine or pool.
            RuntimeError: after `shutdown`.
        """
        with self._changed:
            if self._closed:
                raise RuntimeError("this engine was shut down; make a new LLM to generate again")
            self._executor.submit(request)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="executor-loop", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._executor.busy and not self._closed:
                    self._changed.wait_for(lambda: self._executor.busy or self._closed, IDLE_SECONDS)
                if self._closed or not self._executor.busy:
                    self._thread = None
                    return
            # A step that fails has told those who wait for its requests; there is nobody else to raise to here.
            with contextlib.suppress(Exception):
                self._executor.step()

    def shutdown(self) -> None:
        """End the thread after the step it is in, and every request that is not finished. Safe to call twice."""
        with self._changed:
            self._closed = True
            thread = self._thread
            self._changed.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        self._executor.abort_all()
