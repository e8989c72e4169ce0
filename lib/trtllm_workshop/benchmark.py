"""Load on an OpenAI-compatible server, and what it shows: latencies, throughput, goodput.

Closed loop (`concurrency`): that many requests are in flight all the time; the next one is sent when one has ended. Open loop
(`rate` or `trace`): requests are sent when they are due, whether the server keeps up or not, as people do.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trtllm_workshop.load_arrivals import Arrival, poisson, read_trace
from trtllm_workshop.load_client import Target, open_session, send
from trtllm_workshop.load_echo import client_overhead_ms
from trtllm_workshop.load_metrics import RequestRecord, Slo
from trtllm_workshop.load_problem import LoadProblem
from trtllm_workshop.load_prompts import Prompt, distinct_prompts, token_counter
from trtllm_workshop.load_report import LoadResult

__all__ = ["LoadProblem", "LoadResult", "Slo", "async_run_load", "run_load", "served_model", "sweep"]


def served_model(url: str, api_key: str | None = None, timeout_s: float = 10.0) -> str:
    """The name of the first model that the server lists.

    Raises:
        LoadProblem: when it does not answer, or lists none.
    """
    address = url.rstrip("/").removesuffix("/v1") + "/v1/models"
    request = urllib.request.Request(address, headers={"Authorization": f"Bearer {api_key}"} if api_key else {})
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            found = json.load(answer)["data"][0]["id"]
            return str(found)
    except (OSError, ValueError, KeyError, IndexError, TypeError) as problem:
        raise LoadProblem(
            f"{address} does not name a model ({type(problem).__name__}: {problem}); is the server up, and is this its "
            "address? Otherwise name the model yourself (model=…)"
        ) from None


def run_load(url: str, **options: Any) -> LoadResult:
    """`async_run_load` for code without `await`; works inside a notebook's running loop too, on a thread of its own."""
    return _in_thread(lambda: async_run_load(url, **options))


def sweep(url: str, concurrencies: Sequence[int], **options: Any) -> list[LoadResult]:
    """One closed loop for each concurrency, in that order. `requests` may be a function of the concurrency."""
    if not concurrencies:
        raise LoadProblem("no concurrency to run: name at least one, for example [1, 2, 4]")
    asked, seed = options.pop("requests", None), options.pop("seed", 0)
    results = []
    for place, concurrency in enumerate(concurrencies):
        count = asked(concurrency) if callable(asked) else asked
        more = {} if count is None else {"requests": count}
        # Another seed each: a prompt that came before might still lie in the server's cache.
        results.append(run_load(url, concurrency=concurrency, seed=seed + 7919 * place, **more, **options))
    return results


async def async_run_load(
    url: str,
    *,
    tokenizer: Any,
    input_tokens: int = 128,
    output_tokens: int = 64,
    concurrency: int | None = None,
    rate: float | None = None,
    trace: str | Path | Sequence[Arrival] | None = None,
    requests: int | None = None,
    seconds: float | None = None,
    warm_up: int | None = None,
    endpoint: str = "completions",
    model: str | None = None,
    server: str = "trtllm",
    seed: int = 0,
    slo: Slo | None = None,
    extra_body: Mapping[str, Any] | None = None,
    api_key: str | None = None,
    timeout_s: float = 600.0,
    measure_overhead: bool = True,
    on_record: Callable[[RequestRecord], None] | None = None,
) -> LoadResult:
    """Send one load and measure it.

    Args:
        url: of the server, for example `http://127.0.0.1:8000`.
        tokenizer: of the served model, as transformers loads it: prompts are made to exact length with it.
        input_tokens, output_tokens: lengths in tokens. Answers are kept from ending early (`ignore_eos`) where the server can.
        concurrency: closed loop with so many requests in flight. Exactly one of concurrency, rate and trace.
        rate: open loop, requests a second, Poisson arrivals.
        trace: open loop, a file of JSON lines (see `load_arrivals.read_trace`) or a list of arrivals.
        requests: how many are measured; by default four for each one in flight, 32 in an open loop, all of a trace.
        seconds: stop sending after so long.
        warm_up: requests before, not measured; by default as many as are in flight at once, at most 8.
        endpoint: `completions` or `chat`.
        model: the served name; asked from the server by default.
        server: kind of server (`load_client.SERVER_FIELDS`).
        seed: of prompts and arrivals.
        slo: limits for goodput.
        extra_body: further fields of each request.
        timeout_s: limit of one request.
        measure_overhead: time the client against a server that needs no time, and report it.
        on_record: called for each request that ended.

    Raises:
        LoadProblem: for a load that makes no sense, or a server that does not answer. Errors of single requests are counted.
    """
    if sum(given is not None for given in (concurrency, rate, trace)) != 1:
        raise LoadProblem("say how requests arrive: exactly one of concurrency=…, rate=… and trace=…")
    for name, value in {
        "input_tokens": input_tokens,
        "output_tokens": output_tokens,
        "concurrency": concurrency,
    }.items():
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise LoadProblem(f"{name} is {value!r}, expected a whole number from 1 on")
    if seconds is not None and not seconds > 0:
        raise LoadProblem(f"seconds is {seconds!r}, expected more than 0")
    try:
        arrivals = _arrivals(rate, trace, requests, seed)
        count = len(arrivals) if arrivals else requests if requests is not None else 4 * (concurrency or 1)
        if count < 1:
            raise ValueError(f"requests is {count}, expected at least 1")
        warm = min(concurrency or 2, 8) if warm_up is None else warm_up
        lengths = [a.input_tokens or input_tokens for a in arrivals] if arrivals else [input_tokens] * count
        prompts = distinct_prompts(tokenizer, [input_tokens] * warm + lengths, endpoint=endpoint, seed=seed)
        counter = token_counter(tokenizer, "completions")
        name = model or served_model(url, api_key)
        target = Target(url, endpoint, name, server, dict(extra_body or {}), api_key, timeout_s, counter)
    except LoadProblem:
        raise
    except (ValueError, OSError) as problem:
        raise LoadProblem(str(problem)) from None
    overhead = await client_overhead_ms(target, prompts[-1].text, output_tokens) if measure_overhead else None
    async with open_session() as session:
        heads = [send(session, target, prompt.text, output_tokens) for prompt in prompts[:warm]]
        cold = [record for record in await asyncio.gather(*heads) if record.error]
        if warm and len(cold) == warm:
            raise LoadProblem(f"no request of the warm-up was answered: {cold[0].error}")
        measured, note = prompts[warm:], on_record or (lambda record: None)
        started = time.perf_counter()
        if arrivals:
            records = await _open_loop(session, target, measured, arrivals, output_tokens, seconds, note)
        else:
            records = await _closed_loop(session, target, measured, output_tokens, concurrency or 1, seconds, note)
        wall = time.perf_counter() - started
    config = {
        "url": url, "endpoint": endpoint, "model": name, "server": server, "concurrency": concurrency, "rate": rate,
        "trace": str(trace) if isinstance(trace, str | Path) else None, "input_tokens": input_tokens,
        "output_tokens": output_tokens, "requests": count, "warm_up": warm, "seed": seed,
        "extra_body": dict(extra_body or {}),
    }  # fmt: skip
    return LoadResult(config, records, slo, overhead, wall)


def _arrivals(
    rate: float | None, trace: str | Path | Sequence[Arrival] | None, requests: int | None, seed: int
) -> list[Arrival]:
    if rate is not None:
        return poisson(rate, 32 if requests is None else requests, seed)
    if trace is None:
        return []
    found = read_trace(trace) if isinstance(trace, str | Path) else list(trace)
    if not found:
        raise ValueError("the trace holds no request")
    return found[:requests]


Note = Callable[[RequestRecord], None]


async def _closed_loop(
    session: Any,
    target: Target,
    prompts: list[Prompt],
    tokens: int,
    concurrency: int,
    seconds: float | None,
    note: Note,
) -> list[RequestRecord]:
    """`concurrency` workers, each of which sends its next prompt when its last answer has ended."""
    records: list[RequestRecord] = []
    waiting: Iterator[Prompt] = iter(prompts)
    end = None if seconds is None else time.perf_counter() + seconds

    async def work() -> None:
        for prompt in waiting:
            if end is not None and time.perf_counter() >= end:
                return
            record = await send(session, target, prompt.text, tokens)
            records.append(record)
            note(record)

    await asyncio.gather(*(work() for _ in range(min(concurrency, len(prompts)))))
    return records


async def _open_loop(
    session: Any,
    target: Target,
    prompts: list[Prompt],
    arrivals: list[Arrival],
    tokens: int,
    seconds: float | None,
    note: Note,
) -> list[RequestRecord]:
    """Each request at its time, however many are under way."""
    start = time.perf_counter()

    async def one(prompt: Prompt, arrival: Arrival) -> RequestRecord:
        due = start + arrival.at_s
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        record = await send(session, target, prompt.text, arrival.output_tokens or tokens, due)
        note(record)
        return record

    pairs = [p for p in zip(prompts, arrivals, strict=True) if seconds is None or p[1].at_s < seconds]
    return list(await asyncio.gather(*(one(prompt, arrival) for prompt, arrival in pairs)))


def _in_thread(work: Callable[[], Coroutine[Any, Any, LoadResult]]) -> LoadResult:
    """Run a coroutine to its end on a thread with a loop of its own, so that a loop that runs here is not in the way."""
    outcome: list[Any] = []
    loop_ready: list[asyncio.AbstractEventLoop] = []

    async def main() -> LoadResult:
        loop_ready.append(asyncio.get_running_loop())
        task = asyncio.ensure_future(work())
        loop_ready.append(task)  # type: ignore[arg-type]
        return await task

    def run() -> None:
        try:
            outcome.append((asyncio.run(main()), None))
        except BaseException as problem:
            outcome.append((None, problem))

    thread = threading.Thread(target=run, name="load", daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(0.2)
    except KeyboardInterrupt:
        if len(loop_ready) == 2:
            loop_ready[0].call_soon_threadsafe(loop_ready[1].cancel)  # type: ignore[attr-defined]
            thread.join(10)
        raise
    result, problem = outcome[0]
    if problem is not None:
        raise problem
    return result
