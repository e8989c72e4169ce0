"""Does the reference engine generate faster than Hugging Face `generate` on this machine?

Both sides run the same weights on the same prompts, greedy, with a fixed number of new tokens, alternating in one run.
Prefill is the time of one new token; decode is the rate of all further ones. Each figure is the median over the rounds.
`*_best` compares each side in its own best float type, which is what a user would choose; `*_16bit` compares bfloat16
with bfloat16. Above 1 means the reference is faster.

    .venv/bin/python benchmarks/generate.py [--model FOLDER] [--rounds 3] [--new-tokens 48]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from trtllm_workshop.reference.build import build_engine
from trtllm_workshop.reference.configs import BuildConfig
from trtllm_workshop.reference.convert import convert_checkpoint
from trtllm_workshop.reference.llm import LLM
from trtllm_workshop.reference.sampling_params import SamplingParams

TYPES = ("float32", "bfloat16")
Generate = Callable[[list[list[int]], int], Any]


def hugging_face(folder: Path, dtype: str) -> Generate:
    """Hugging Face generate with its own defaults, greedy."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    model.generation_config.eos_token_id = None
    pad = 0

    def run(prompts: list[list[int]], new: int) -> Any:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            return model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new,
                min_new_tokens=new,
                do_sample=False,
                pad_token_id=pad,
            )

    return run


def reference(folder: Path, dtype: str, scratch: Path, batch: int, longest: int) -> Generate:
    """The reference engine: converted, built, loaded."""
    checkpoint, engine = scratch / f"checkpoint-{dtype}", scratch / f"engine-{dtype}"
    convert_checkpoint(folder, checkpoint, dtype=dtype, say=lambda *_: None)
    build_engine(checkpoint, BuildConfig(max_batch_size=batch, max_seq_len=longest), engine, log=lambda *_: None)
    llm = LLM(str(engine), skip_tokenizer_init=True)

    def run(prompts: list[list[int]], new: int) -> Any:
        return llm.generate(prompts, SamplingParams(max_tokens=new, end_id=-1, ignore_eos=True))

    return run


def seconds(run: Generate, prompts: list[list[int]], new: int) -> float:
    started = time.perf_counter()
    run(prompts, new)
    return time.perf_counter() - started


def median_figures(samples: list[tuple[float, float]], batch: int, new: int) -> dict[str, float]:
    """Medians of prefill seconds and decode tokens/s from (one-token, all-token) timings."""
    return {
        "prefill_s": statistics.median(one for one, _ in samples),
        "decode_tokens_per_s": statistics.median((new - 1) * batch / max(full - one, 1e-9) for one, full in samples),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("work/models/HuggingFaceTB--SmolLM2-135M-Instruct"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=48)
    args = parser.parse_args()
    if not args.model.is_dir():
        print(f"{args.model} does not exist: run `workshop run 01` first, or name a Hugging Face folder with --model")
        return 2
    generator = torch.Generator().manual_seed(0)
    vocabulary = json.loads((args.model / "config.json").read_text())["vocab_size"]
    prompts = torch.randint(0, vocabulary, (8, args.prompt_tokens), generator=generator).tolist()
    samples: dict[tuple[str, str, int], list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        sides: dict[tuple[str, str], Generate] = {}
        for dtype in TYPES:
            sides["hf", dtype] = hugging_face(args.model, dtype)
            longest = args.prompt_tokens + args.new_tokens
            sides["reference", dtype] = reference(args.model, dtype, Path(scratch), 8, longest)
        for run in sides.values():
            for batch in (1, 8):
                run(prompts[:batch], 3)
        for _ in range(args.rounds):
            for batch in (1, 8):
                for (side, dtype), run in sides.items():
                    some = prompts[:batch]
                    pair = (seconds(run, some, 1), seconds(run, some, args.new_tokens))
                    samples.setdefault((side, dtype, batch), []).append(pair)
    figures = {key: median_figures(value, key[2], args.new_tokens) for key, value in samples.items()}
    print(f"{'side':<10} {'type':<9} {'batch':>5} {'prefill ms':>11} {'decode tokens/s':>16}")
    for (side, dtype, batch), value in sorted(figures.items(), key=lambda item: (item[0][2], item[0][1], item[0][0])):
        print(
            f"{side:<10} {dtype:<9} {batch:>5} {value['prefill_s'] * 1e3:>11.1f} {value['decode_tokens_per_s']:>16.1f}"
        )

    def decode(side: str, batch: int, *types: str) -> float:
        return max(figures[side, t, batch]["decode_tokens_per_s"] for t in types)

    def prefill(side: str, batch: int, *types: str) -> float:
        return min(figures[side, t, batch]["prefill_s"] for t in types)

    result = {
        "decode_best_b1": decode("reference", 1, *TYPES) / decode("hf", 1, *TYPES),
        "decode_best_b8": decode("reference", 8, *TYPES) / decode("hf", 8, *TYPES),
        "prefill_best": prefill("hf", 8, *TYPES) / prefill("reference", 8, *TYPES),
        "prefill_best_b1": prefill("hf", 1, *TYPES) / prefill("reference", 1, *TYPES),
        "decode_16bit_b1": decode("reference", 1, "bfloat16") / decode("hf", 1, "bfloat16"),
        "decode_16bit_b8": decode("reference", 8, "bfloat16") / decode("hf", 8, "bfloat16"),
        "prefill_16bit": prefill("hf", 8, "bfloat16") / prefill("reference", 8, "bfloat16"),
    }
    machine = {"processor": platform.processor() or platform.machine(), "threads": torch.get_num_threads()}
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    print(json.dumps({k: round(v, 3) for k, v in result.items()} | {"machine": machine, "versions": versions}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
