"""Does INT8 weight-only generate faster than the 16- and 32-bit engines on this processor, and from how many requests not?

The same weights as float32, bfloat16 and INT8 weight-only engines, greedy, a fixed number of new tokens, alternating in one
run. Decode is the rate after the first token; figures are medians over the rounds. `int8_best_bN` compares INT8 with the
better float engine at N requests; above 1 means that INT8 is faster.

    .venv/bin/python benchmarks/quantized.py [--model FOLDER] [--rounds 3] [--new-tokens 32]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from trtllm_workshop.reference.build import build_engine
from trtllm_workshop.reference.configs import BuildConfig
from trtllm_workshop.reference.convert import convert_checkpoint
from trtllm_workshop.reference.llm import LLM
from trtllm_workshop.reference.sampling_params import SamplingParams

BATCHES = (1, 2, 3, 4, 8)
SIDES = {"float32": ("float32", None), "bfloat16": ("bfloat16", None), "int8": ("bfloat16", "W8A16")}


def make(model: Path, root: Path, dtype: str, algorithm: str | None, longest: int) -> tuple[LLM, int]:
    """The loaded engine and its bytes on disk."""
    plain = {"dtype": dtype, "quant_algo": algorithm, "say": lambda *_: None}
    checkpoint = convert_checkpoint(model, root / "checkpoint", **plain).folder
    limits = BuildConfig(max_batch_size=max(BATCHES), max_seq_len=longest)
    engine = build_engine(checkpoint, limits, root / "engine", log=lambda *_: None)
    return LLM(str(engine), skip_tokenizer_init=True), (engine / "rank0.engine").stat().st_size


def seconds(llm: LLM, prompts: list[list[int]], new: int) -> float:
    started = time.perf_counter()
    llm.generate(prompts, SamplingParams(max_tokens=new, end_id=-1, ignore_eos=True))
    return time.perf_counter() - started


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("work/models/HuggingFaceTB--SmolLM2-135M-Instruct"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=32)
    args = parser.parse_args()
    if not args.model.is_dir():
        print(f"{args.model} does not exist: run `workshop run 01` first, or name a Hugging Face folder with --model")
        return 2
    vocabulary = json.loads((args.model / "config.json").read_text())["vocab_size"]
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, vocabulary, (max(BATCHES), args.prompt_tokens), generator=generator).tolist()
    samples: dict[tuple[str, int], list[float]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        longest = args.prompt_tokens + args.new_tokens
        made = {name: make(args.model, Path(scratch) / name, *side, longest) for name, side in SIDES.items()}
        for llm, _ in made.values():
            seconds(llm, prompts, 3)
        for _ in range(args.rounds):
            for batch in BATCHES:
                for name, (llm, _) in made.items():
                    some = prompts[:batch]
                    spent = seconds(llm, some, args.new_tokens) - seconds(llm, some, 1)
                    samples.setdefault((name, batch), []).append((args.new_tokens - 1) * batch / spent)
    rates = {key: statistics.median(values) for key, values in samples.items()}
    print(f"{'engine':<9} {'MB':>6} " + " ".join(f"{f'b{batch} tok/s':>10}" for batch in BATCHES))
    for name, (_, size) in made.items():
        print(f"{name:<9} {size / 1e6:>6.0f} " + " ".join(f"{rates[name, batch]:>10.1f}" for batch in BATCHES))
    result = {
        f"int8_best_b{batch}": round(rates["int8", batch] / max(rates["float32", batch], rates["bfloat16", batch]), 3)
        for batch in BATCHES
    }
    machine = {"processor": platform.processor() or platform.machine(), "threads": torch.get_num_threads()}
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    print(json.dumps(result | {"machine": machine, "versions": versions}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
