"""Do NVIDIA's aiperf and this project's client measure the same? One server, one load, both tools in turn.

A is aiperf, B is `benchmark.run_load`; each round is A, B, B, A. Both send streaming completions with the same concurrency, prompt and
answer lengths, `ignore_eos`, warm-up, and distinct prompts, and both take the number of tokens from the server's usage. What aiperf calls
inter-token latency is (end to end - first token) / (tokens - 1) of each request; that is compared with the same quantity here (TPOT).

    .venv/bin/python benchmarks/aiperf_agreement.py --engine FOLDER --tokenizer FOLDER [--venv FOLDER] [--rounds 2] [--json FILE]

aiperf's packages do not go with the course's: it lives in an environment of its own, which this script makes (1.2 GB). The last line is
one JSON object: ttft_diff, itl_diff, throughput_diff (ours / aiperf's - 1, medians over the runs), and for each whether it is within
5 % or twice the larger spread of one tool's own runs (half of highest minus lowest, over the median).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer
from trtllm_workshop.benchmark import run_load, served_model
from trtllm_workshop.load_report import client_machine, versions
from trtllm_workshop.server_process import start_server
from trtllm_workshop.toolchain import choose

VERSION = "0.13.*"
NAMES = ("ttft", "itl", "throughput")  # s, s, output tokens/s


def own_environment(folder: Path) -> Path:
    """The program `aiperf` in an environment of its own, made when it is not there."""
    program = folder / "bin" / "aiperf"
    if not program.is_file():
        print(f"installing aiperf {VERSION} into {folder}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([str(folder / "bin" / "pip"), "install", "-q", f"aiperf=={VERSION}"], check=True)
    return program


def with_aiperf(
    program: Path, url: str, model: str, tokenizer: Path, load: dict[str, int], seed: int, out: Path
) -> dict[str, float]:
    """Medians of one run of aiperf."""
    words = [
        str(program), "profile", "--model", model, "--url", url, "--endpoint-type", "completions", "--streaming",
        "--tokenizer", str(tokenizer), "--use-server-token-count", "--concurrency", str(load["concurrency"]),
        "--request-count", str(load["requests"]), "--warmup-request-count", str(load["concurrency"]),
        "--synthetic-input-tokens-mean", str(load["input_tokens"]), "--synthetic-input-tokens-stddev", "0",
        "--output-tokens-mean", str(load["output_tokens"]), "--output-tokens-stddev", "0",
        "--extra-inputs", "ignore_eos:true", "--extra-inputs", "temperature:0",
        "--num-dataset-entries", str(load["requests"] + load["concurrency"]),
        "--random-seed", str(seed), "--workers-max", "1", "--record-processors", "1", "--ui", "none", "--output-artifact-dir", str(out),
    ]  # fmt: skip
    done = subprocess.run(words, capture_output=True, text=True, timeout=600)
    files = sorted(out.rglob("profile_export_aiperf.json"))
    if done.returncode or not files:
        raise RuntimeError(f"aiperf ended with status {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")
    found = json.loads(files[0].read_text(encoding="utf-8"))
    return {
        "ttft": found["time_to_first_token"]["p50"] / 1e3,
        "itl": found["inter_token_latency"]["p50"] / 1e3,
        "throughput": found["output_token_throughput"]["avg"],
        "input_tokens": found["input_sequence_length"]["avg"],
        "output_tokens": found["output_sequence_length"]["avg"],
    }


def with_ours(url: str, tokenizer: Any, load: dict[str, int], seed: int) -> dict[str, float]:
    """Medians of one run of this project's client."""
    result = run_load(url, tokenizer=tokenizer, warm_up=load["concurrency"], measure_overhead=False, seed=seed, **load)
    if result.errors:
        raise RuntimeError(f"the load had errors: {result.warnings}")
    return {
        "ttft": result.ttft.p50 or 0.0,
        "itl": result.tpot.p50 or 0.0,
        "throughput": result.output_tokens_per_s or 0.0,
        "input_tokens": result.input_tokens or 0.0,
        "output_tokens": result.output_tokens.mean if result.output_tokens else 0.0,
    }


def spread(values: Sequence[float]) -> float:
    """Half of highest minus lowest, over the median."""
    return (max(values) - min(values)) / 2 / statistics.median(values)


def compare(runs: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Differences of the medians, and whether each is small enough."""
    found: dict[str, Any] = {}
    for name in NAMES:
        theirs, ours = ([run[name] for run in runs[tool]] for tool in ("aiperf", "ours"))
        difference = statistics.median(ours) / statistics.median(theirs) - 1
        allowed = max(0.05, 2 * max(spread(theirs), spread(ours)))
        found[f"{name}_diff"] = round(difference, 4)
        found[f"{name}_spreads"] = [round(spread(theirs), 4), round(spread(ours), 4)]
        found[f"{name}_agrees"] = abs(difference) <= allowed
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--engine", type=Path, required=True, help="folder that trtllm-build made")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder of the model's tokenizer")
    parser.add_argument("--venv", type=Path, default=Path("work/aiperf-venv"), help="environment for aiperf")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--input-tokens", type=int, default=32)
    parser.add_argument("--output-tokens", type=int, default=16)
    parser.add_argument("--json", type=Path, help="write everything here, too")
    given = parser.parse_args()
    program, tokenizer = own_environment(given.venv.resolve()), given.tokenizer.resolve()
    ours = AutoTokenizer.from_pretrained(tokenizer)
    load = {name: getattr(given, name) for name in ("concurrency", "requests", "input_tokens", "output_tokens")}
    command = f"trtllm-serve '{given.engine.resolve()}' --backend tensorrt --tokenizer '{tokenizer}' --port {{port}}"
    runs: dict[str, list[dict[str, float]]] = {"aiperf": [], "ours": []}
    # On a CPU the server leaves one core to the client: aiperf is a dozen processes, which would slow down what they measure.
    env = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 2) - 1))}
    with (
        tempfile.TemporaryDirectory() as folder,
        start_server(choose("auto", quiet=True), command, log=f"{folder}/log", quiet=True, env=env) as server,
    ):
        model = served_model(server.url)
        for number in range(4 * given.rounds):
            tool = ("aiperf", "ours", "ours", "aiperf")[number % 4]
            if tool == "ours":
                runs[tool].append(with_ours(server.url, ours, load, 100 + number))
            else:
                out = Path(folder) / f"run{number}"
                runs[tool].append(with_aiperf(program, server.url, model, tokenizer, load, 100 + number, out))
            print(tool, json.dumps({name: round(value, 4) for name, value in runs[tool][-1].items()}), flush=True)
    found = compare(runs)
    print("| | aiperf | ours | difference | spreads | agree |\n|---|---|---|---|---|---|")
    for name in NAMES:
        theirs, own = (statistics.median(run[name] for run in runs[tool]) for tool in ("aiperf", "ours"))
        low, high = found[f"{name}_spreads"]
        yes = "yes" if found[f"{name}_agrees"] else "NO"
        print(f"| {name} | {theirs:.4g} | {own:.4g} | {found[f'{name}_diff']:+.1%} | {low:.1%}, {high:.1%} | {yes} |")
    if given.json:
        kept = {
            **found,
            "load": load,
            "runs": runs,
            "aiperf": VERSION,
            "machine": client_machine(),
            "versions": versions(),
        }
        given.json.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found))
    return 0 if all(found[f"{name}_agrees"] for name in NAMES) else 1


if __name__ == "__main__":
    sys.exit(main())
