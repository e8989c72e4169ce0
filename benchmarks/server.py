"""What does the way through HTTP cost? Streams from `trtllm-serve` against the engine's own `generate_async`.

Both sides hold the same engine and answer the same prompts, 8 at once, every token streamed, answers of equal length. The side
`engine` is a process with an `LLM` and 8 readers in one event loop; `server` is `trtllm-serve`, read by this project's measuring
client on the same machine, so the client's own time counts as cost. The sides run in the order A, B, B, A in every round, while the
other one idles.

    .venv/bin/python benchmarks/server.py --engine FOLDER --tokenizer FOLDER [--rounds 4] [--json FILE]

The last line is one JSON object: `server_cost` is 1 - (output tokens/s through the server) / (those of the engine), the median over
the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer
from trtllm_workshop.benchmark import run_load
from trtllm_workshop.load_prompts import distinct_prompts
from trtllm_workshop.load_report import client_machine, versions
from trtllm_workshop.server_process import Server, start_server
from trtllm_workshop.toolchain import Toolchain, choose

TOGETHER = 8


def engine_side(engine: str, tokenizer_folder: str) -> None:
    """The child: for each line of JSON with prompts and a length, the seconds that the engine needs; one line each."""
    from tensorrt_llm import SamplingParams
    from tensorrt_llm._tensorrt_engine import LLM

    llm = LLM(model=engine, tokenizer=tokenizer_folder)

    async def run(prompts: list[str], tokens: int) -> tuple[float, int]:
        waiting, made = iter(prompts), 0

        async def reader() -> None:
            nonlocal made
            for prompt in waiting:
                wanted = SamplingParams(max_tokens=tokens, ignore_eos=True)
                async for output in llm.generate_async(prompt, wanted, streaming=True):
                    last = output
                made += last.outputs[0].length

        started = time.perf_counter()
        await asyncio.gather(*(reader() for _ in range(TOGETHER)))
        return time.perf_counter() - started, made

    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(asyncio.run(run(asked["prompts"], asked["tokens"]))), flush=True)
    llm.shutdown()


class EngineSide:
    """The child from outside."""

    def __init__(self, toolchain: Toolchain, engine: Path, tokenizer: Path) -> None:
        words = toolchain.resolve(["python", __file__, "--engine-side", str(engine), str(tokenizer)])
        self._process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=toolchain.environment({})
        )
        self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                return json.loads(line)
            except ValueError:
                print(line, end="")  # what the engine says while it starts
        raise RuntimeError(f"the engine's process ended with status {self._process.wait()}; its last lines are above")

    def rate(self, prompts: list[str], tokens: int) -> float:
        """Output tokens a second."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "tokens": tokens}) + "\n")
        self._process.stdin.flush()
        seconds, made = self._answer()
        if made != len(prompts) * tokens:
            raise RuntimeError(f"the engine made {made} tokens, asked were {len(prompts) * tokens}")
        return float(made / seconds)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()


def through_server(server: Server, tokenizer: Any, load: dict[str, int], seed: int) -> float:
    """Output tokens a second of streams over HTTP."""
    result = run_load(
        server.url, tokenizer=tokenizer, concurrency=TOGETHER, warm_up=0, measure_overhead=False, seed=seed, **load
    )
    lengths = result.output_tokens
    if result.errors or lengths is None or lengths.min != lengths.max:
        raise RuntimeError(f"this is no comparison of the same work: {result.warnings}")
    return result.output_tokens_per_s or 0.0


def measure(toolchain: Toolchain, engine: Path, folder: Path, load: dict[str, int], rounds: int) -> dict[str, Any]:
    """Rates of both sides by round, and the cost."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    alone = EngineSide(toolchain, engine, folder)
    command = f"trtllm-serve '{engine}' --backend tensorrt --tokenizer '{folder}' --port {{port}}"
    rates: dict[str, list[list[float]]] = {"engine": [], "server": []}
    try:
        with (
            tempfile.TemporaryDirectory() as logs,
            start_server(toolchain, command, log=f"{logs}/log", quiet=True) as server,
        ):

            def one(side: str, seed: int) -> float:
                if side == "server":
                    return through_server(server, tokenizer, load, seed)
                prompts = distinct_prompts(tokenizer, [load["input_tokens"]] * load["requests"], seed=seed)
                return alone.rate([prompt.text for prompt in prompts], load["output_tokens"])

            for side in rates:
                one(side, 10_000)  # not measured
            for number in range(rounds):
                found: dict[str, list[float]] = {"engine": [], "server": []}
                for place, side in enumerate(("engine", "server", "server", "engine")):
                    # The second half of a round has the prompts of the first: the same work on both sides.
                    found[side].append(one(side, 4 * number + place // 2))
                for side, values in found.items():
                    rates[side].append(values)
                print(
                    f"round {number + 1}: " + ", ".join(f"{k} {v[0]:.1f} {v[1]:.1f}" for k, v in found.items()),
                    flush=True,
                )
    finally:
        alone.close()
    pairs = zip(rates["server"], rates["engine"], strict=True)
    costs = [1 - sum(served) / sum(direct) for served, direct in pairs]
    return {"server_cost": statistics.median(costs), "costs": costs, "output_tokens_per_s": rates}


def main() -> None:
    if sys.argv[1:2] == ["--engine-side"]:
        engine_side(*sys.argv[2:4])
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--engine", type=Path, required=True, help="folder that trtllm-build made, of max_batch_size 8 or more"
    )
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder of the model's tokenizer")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--input-tokens", type=int, default=32)
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--requests", type=int, default=16, help="requests of one run")
    parser.add_argument("--json", type=Path, help="write the result here, too")
    given = parser.parse_args()
    toolchain = choose("auto", quiet=True)
    load = {"input_tokens": given.input_tokens, "output_tokens": given.output_tokens, "requests": given.requests}
    found = measure(toolchain, given.engine.resolve(), given.tokenizer.resolve(), load, given.rounds)
    found |= {"load": {**load, "concurrency": TOGETHER}, "rounds": given.rounds, "toolchain": toolchain.version}
    found |= {"machine": client_machine(), "versions": versions()}
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({"server_cost": round(found["server_cost"], 4)}))


if __name__ == "__main__":
    main()
