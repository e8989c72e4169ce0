"""Runs the requests of trtllm-bench through an executor and notes down when each token came."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from trtllm_workshop.reference.bench_dataset import InferenceRequest
from trtllm_workshop.reference.bench_records import RequestRecord
from trtllm_workshop.reference.request import Request
from trtllm_workshop.reference.sampling_params import SamplingParams, StopRules
from trtllm_workshop.reference.scheduler import Scheduler


class Steps(Protocol):
    """What a load needs of an executor."""

    def submit(self, request: Request) -> None: ...

    def abort(self, requests: Iterable[Request]) -> None: ...

    def step(self) -> list[Request]: ...

    @property
    def busy(self) -> bool: ...


def make_request(request_id: int, wanted: InferenceRequest, end_id: int) -> Request:
    """A greedy request without text; it makes all its tokens unless it meets `end_id` (-1: none)."""
    params = SamplingParams(max_tokens=wanted.output_tokens, end_id=end_id, detokenize=False)
    rules = StopRules(end_ids={end_id} if end_id >= 0 else set())
    return Request(request_id, list(wanted.input_ids), params, rules)


def check_each(scheduler: Scheduler[Request], requests: Sequence[InferenceRequest]) -> None:
    """Ask the scheduler about every request, so that a run does not end half-way.

    Raises:
        ValueError: with the scheduler's reason, for the first request that can never run.
    """
    for wanted in requests:
        try:
            scheduler.check(make_request(0, wanted, -1))
        except ValueError as error:
            raise ValueError(f"task {wanted.task_id}: {error}") from error


def run_load(
    executor: Steps,
    requests: Sequence[InferenceRequest],
    concurrency: int = -1,
    end_id: int = -1,
    clock: Callable[[], int] = time.perf_counter_ns,
) -> list[RequestRecord]:
    """Run all requests; returns their records in the order of the data set.

    Args:
        executor: whose step loop runs here, in this thread.
        requests: issued in this order.
        concurrency: most requests issued and not finished; below 1 all are issued at once.
        end_id: a token that ends an answer early; -1 for none.
        clock: nanoseconds.

    An error or Ctrl-C takes all requests out of the executor before it goes on.
    """
    waiting = deque(enumerate(requests))
    records: dict[int, RequestRecord] = {}
    running: dict[int, Request] = {}
    try:
        while waiting or running:
            while waiting and (concurrency < 1 or len(running) < concurrency):
                number, wanted = waiting.popleft()
                request = make_request(number, wanted, end_id)
                records[number] = RequestRecord(number, len(wanted.input_ids), clock())
                running[number] = request
                executor.submit(request)
            stepped = executor.step()
            now = clock()
            for request in stepped:
                record = records[request.request_id]
                if record.first_token_timestamp < 0 and request.token_ids:
                    record.first_token_timestamp = now
                if request.finished:
                    record.end_timestamp, record.tokens = now, list(request.token_ids)
                    del running[request.request_id]
        # A device may have been given one step more, before it was known that everything had ended.
        while executor.busy:
            executor.step()
    except BaseException:
        executor.abort(running.values())
        raise
    return [records[number] for number in range(len(requests))]
