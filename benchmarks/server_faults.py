"""What a running `trtllm-serve` does under load and under attack, each with its figures and whether it held.

* `disconnects`: many concurrent streams for a while, of which a share closes the connection at a random place. Afterwards no
  KV-cache block is in use, and threads, file handles and memory of the server (both processes) are where they were at the middle
  of the load: a leak would go on growing. (A few threads come with the first load and stay.)
* `sigterm`: SIGTERM under load. What was accepted ends as asked, new requests get 503, and the server is gone within its limit.
* `killed_engine`: kill -9 of the engine process under load. Every stream ends with an error event, the server says unhealthy.
* `bodies`: random and mutated request bodies. None is answered by 5xx, each refusal has a message, the server is healthy after.

    .venv/bin/python benchmarks/server_faults.py --engine FOLDER --tokenizer FOLDER [--seconds 60] [--json FILE]

The last line is one JSON object with the figures of all four; the exit status is 1 when one did not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from trtllm_workshop.benchmark import served_model
from trtllm_workshop.load_report import client_machine, versions
from trtllm_workshop.server_process import Server, start_server
from trtllm_workshop.toolchain import choose

GRACE_S = 60
MB = 1e6


def start(engine: Path, tokenizer: Path, log: Path) -> Server:
    """The server with a stated limit for its end, and a queue that the load does not fill."""
    command = f"trtllm-serve '{engine}' --backend tensorrt --tokenizer '{tokenizer}' --port {{port}}"
    limits = {"TRTLLM_SERVE_GRACE_S": GRACE_S, "TRTLLM_SERVE_MAX_QUEUE": 1000}
    return start_server(
        choose("reference", quiet=True), command, log=log, quiet=True, env={k: str(v) for k, v in limits.items()}
    )


def open_session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=300), read_bufsize=2**20
    )


def processes(server: Server) -> list[psutil.Process]:
    """The HTTP process and the engine process."""
    front = psutil.Process(server.pid)
    return [front, *front.children(recursive=True)]


def holdings(server: Server) -> dict[str, float]:
    """Threads, file handles and memory (MB, without what is shared) of the server."""
    found = processes(server)
    return {
        "threads": sum(process.num_threads() for process in found),
        "handles": sum(process.num_fds() for process in found),
        "memory_mb": round(sum(process.memory_full_info().uss for process in found) / MB, 1),
    }


async def used_blocks(session: aiohttp.ClientSession, server: Server) -> float:
    """KV-cache blocks in use, as the Prometheus metrics say; -1 when they do not."""
    async with session.get(server.url + "/prometheus/metrics") as answer:
        for line in (await answer.text()).splitlines():
            if line.startswith("trtllm_kv_blocks_used"):
                return float(line.rsplit(" ", 1)[1])
    return -1.0


async def stream(
    session: aiohttp.ClientSession, server: Server, model: str, tokens: int, leave_after: int | None = None
) -> tuple[str, int]:
    """How a stream ended (a finish reason, `left`, or `error: …`) and how many events it brought."""
    body = {
        "model": model,
        "prompt": f"Story {random.random()}:",
        "max_tokens": tokens,
        "stream": True,
        "ignore_eos": True,
    }
    reason, events = "no end", 0
    try:
        async with session.post(server.url + "/v1/completions", json=body) as answer:
            if answer.status != 200:
                return f"status {answer.status}", 0
            async for line in answer.content:
                if not line.startswith(b"data: "):
                    continue
                events += 1
                if leave_after is not None and events >= leave_after:
                    answer.close()
                    return "left", events
                if line.startswith(b"data: [DONE]"):
                    break
                data = json.loads(line[6:])
                if "error" in data:
                    return f"error: {data['error'].get('code')}", events
                if data["choices"]:
                    reason = data["choices"][0]["finish_reason"] or reason
    except (aiohttp.ClientError, asyncio.TimeoutError) as problem:
        return f"{type(problem).__name__}", events
    return reason, events


def count(ends: list[str]) -> dict[str, int]:
    return {end: ends.count(end) for end in sorted(set(ends))}


async def disconnects(server: Server, readers: int, seconds: float, tokens: int) -> dict[str, Any]:
    """See the module. A share of 0.4 of the streams leaves, half of those before the first event could come."""
    model, chance, ends = served_model(server.url), random.Random(0), list[str]()
    end = time.monotonic() + seconds
    samples: list[dict[str, float]] = []
    async with open_session() as session:

        async def reader() -> None:
            while time.monotonic() < end:
                wanted, leaves = chance.randint(1, tokens), chance.random() < 0.4
                one = stream(
                    session, server, model, wanted, chance.randint(1, wanted) if leaves and wanted > 1 else None
                )
                if leaves and chance.random() < 0.5:
                    try:
                        ends.append((await asyncio.wait_for(one, chance.random() * 2))[0])
                    except asyncio.TimeoutError:
                        ends.append("left early")
                else:
                    ends.append((await one)[0])

        async def watch() -> None:
            while time.monotonic() < end:
                samples.append(await asyncio.to_thread(holdings, server))
                await asyncio.sleep(max(seconds / 30, 0.2))

        before = holdings(server)
        await asyncio.gather(watch(), *(reader() for _ in range(readers)))
        await asyncio.sleep(2)
        blocks = await used_blocks(session, server)
    await asyncio.sleep(1)
    after, middle = holdings(server), samples[len(samples) // 2]
    leftover = {name: round(after[name] - before[name], 1) for name in after}
    growth = round(max(sample["memory_mb"] for sample in samples[len(samples) // 2 :]) - middle["memory_mb"], 1)
    failed = [end for end in ends if end not in ("length", "left", "left early")]
    held = blocks == 0 and after["threads"] <= middle["threads"] and leftover["handles"] <= 4 and not failed
    held = held and growth <= max(30.0, 0.03 * middle["memory_mb"])
    return {
        "held": held, "readers": readers, "seconds": seconds, "ends": count(ends), "used_blocks_after": blocks,
        "before": before, "middle": middle, "last": samples[-1], "after": after, "memory_growth_2nd_half_mb": growth,
    }  # fmt: skip


async def sigterm(server: Server, readers: int, tokens: int) -> dict[str, Any]:
    """See the module."""
    model, pid = served_model(server.url), server.pid or 0
    async with open_session() as session:
        running = [asyncio.create_task(stream(session, server, model, tokens)) for _ in range(readers)]
        await asyncio.sleep(1)
        os.kill(pid, signal.SIGTERM)
        started, statuses = time.monotonic(), list[Any]()
        while await asyncio.to_thread(server.health_status) == 200:
            await asyncio.sleep(0.05)
        for _ in range(5):
            try:
                body = {"model": model, "prompt": "late", "max_tokens": 1}
                async with session.post(server.url + "/v1/completions", json=body) as answer:
                    statuses.append(answer.status)
            except aiohttp.ClientError as problem:
                statuses.append(type(problem).__name__)
        ends = [end for end, _ in await asyncio.gather(*running)]
    code = await asyncio.to_thread(server.wait, GRACE_S + 10)
    seconds = round(time.monotonic() - started, 2)
    held = set(ends) == {"length"} and set(statuses) == {503} and code == 0 and seconds <= GRACE_S
    return {
        "held": held,
        "ends": count(ends),
        "new_requests": statuses,
        "exit": code,
        "seconds": seconds,
        "limit_s": GRACE_S,
    }


async def killed_engine(server: Server, readers: int, tokens: int) -> dict[str, Any]:
    """See the module."""
    model = served_model(server.url)
    async with open_session() as session:
        running = [asyncio.create_task(stream(session, server, model, tokens)) for _ in range(readers)]
        await asyncio.sleep(1)
        started = time.monotonic()
        psutil.Process(server.pid).children()[0].kill()
        ends = [end for end, _ in await asyncio.gather(*running)]
        seconds = round(time.monotonic() - started, 2)
    health = server.health_status()
    held = all(end in ("error: engine_gone", "status 503") for end in ends) and health == 503
    return {"held": held, "ends": count(ends), "seconds_until_all_knew": seconds, "health": health}


def bad_body(chance: random.Random, model: str) -> bytes:
    """A random or mutated body: bytes, JSON of another shape, or a good request with a field or a byte changed."""
    good: dict[str, Any] = {
        "model": model,
        "prompt": "Hello",
        "max_tokens": 1,
        "temperature": 0.5,
        "n": 1,
        "stream": False,
    }
    odd = [
        None,
        True,
        -1,
        0,
        1e308,
        -1e-9,
        10**40,
        "",
        "x" * 5000,
        [],
        [[]],
        {},
        {"a": []},
        "\ud800",
        "\x00",
        [1, "a"],
        [-5],
    ]
    kind = chance.randrange(5)
    if kind == 0:
        return chance.randbytes(chance.randrange(200))
    if kind == 1:
        return json.dumps(chance.choice(odd)).encode()
    names = [
        *good,
        "stop",
        "logprobs",
        "top_p",
        "top_k",
        "seed",
        "stream_options",
        "logit_bias",
        "echo",
        "best_of",
        "unknown",
    ]
    for _ in range(chance.randint(1, 3)):
        good[chance.choice(names)] = chance.choice(odd)
    if kind == 2:
        good.pop(chance.choice(list(good)))
    text = json.dumps(good).encode()
    if kind == 3:
        place = chance.randrange(len(text))
        return text[:place] + chance.randbytes(1) + text[place + 1 :]
    return text


async def bodies(server: Server, number: int) -> dict[str, Any]:
    """See the module."""
    model, chance, statuses, wrong = served_model(server.url), random.Random(1), list[str](), list[str]()
    async with open_session() as session:

        async def worker(share: int) -> None:
            for _ in range(share):
                path = chance.choice(["/v1/completions", "/v1/chat/completions"])
                body = bad_body(chance, model)
                headers = {"Content-Type": "application/json"}
                async with session.post(server.url + path, data=body, headers=headers) as answer:
                    text = await answer.text()
                statuses.append(str(answer.status))
                if answer.status == 200:
                    continue
                try:
                    message = json.loads(text)["error"]["message"]
                except (ValueError, KeyError, TypeError):
                    message = ""
                if answer.status >= 500 or not message:
                    wrong.append(f"{answer.status} for {body[:200]!r}: {text[:200]}")

        await asyncio.gather(*(worker(number // 8) for _ in range(8)))
    held = not wrong and server.healthy()
    return {"held": held, "statuses": count(statuses), "wrong": wrong[:5], "healthy": server.healthy()}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--engine", type=Path, required=True, help="folder that trtllm-build made")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder of the model's tokenizer")
    parser.add_argument("--seconds", type=float, default=60, help="of the load with disconnects")
    parser.add_argument("--readers", type=int, default=200, help="concurrent streams of that load")
    parser.add_argument("--tokens", type=int, default=24, help="longest answer in that load")
    parser.add_argument(
        "--long-tokens", type=int, default=64, help="answers while the server is ended or its engine killed"
    )
    parser.add_argument("--bodies", type=int, default=1000)
    parser.add_argument("--json", type=Path, help="write the result here, too")
    given = parser.parse_args()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:

        def run(name: str, work: Any) -> None:
            with start(given.engine.resolve(), given.tokenizer.resolve(), Path(folder) / f"{name}.log") as server:
                found[name] = asyncio.run(work(server))
                tail = server.tail(60)
            if "Traceback" in tail:
                found[name] |= {"held": False, "log": tail[-2000:]}
            print(f"{'held  ' if found[name]['held'] else 'FAILED'} {name}: {json.dumps(found[name])}", flush=True)

        run("bodies", lambda server: bodies(server, given.bodies))
        run("disconnects", lambda server: disconnects(server, given.readers, given.seconds, given.tokens))
        run("sigterm", lambda server: sigterm(server, min(24, given.readers), given.long_tokens))
        run("killed_engine", lambda server: killed_engine(server, min(24, given.readers), given.long_tokens))
    found |= {"machine": client_machine(), "versions": versions()}
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({name: found[name]["held"] for name in ("bodies", "disconnects", "sigterm", "killed_engine")}))
    return 0 if all(part["held"] for part in found.values() if "held" in part) else 1


if __name__ == "__main__":
    sys.exit(main())
