"""What does text cost per token? The table of token bytes against two decodes a token, and against decode of each token alone.

Two tokenizers are trained on the course's evaluation texts, one byte-level BPE and one with blank marks and byte fallback; a
real one is measured as well when its folder is given. The texts are English, and a mix with emoji and CJK, where most tokens
are part of a character. Each figure is microseconds of processor time, the median over the rounds, which alternate.
The last line is one JSON object; per tokenizer and text:

    table           IncrementalDetokenizer.add, with the table (what a request gets)
    stop_filter     StopTextFilter.add with two stop strings, on the pieces of the text
    window          IncrementalDetokenizer.add for a tokenizer that only has decode: two decodes a token
    decode_each     tokenizer.decode([token]): wrong text, as a measure of what one call costs
    new_request     making an IncrementalDetokenizer for a prompt of 1,000 tokens, once the table is there
    table_made_ms   making the table, once per tokenizer (milliseconds, one sample)

    .venv/bin/python benchmarks/detokenizer.py [--tokenizer work/models/HuggingFaceTB--SmolLM2-135M-Instruct] [--rounds 5]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trtllm_workshop.reference.detokenizer import IncrementalDetokenizer
from trtllm_workshop.reference.stop_text import StopTextFilter
from trtllm_workshop.reference.token_bytes import TokenBytes

TEXTS = Path(__file__).parents[1] / "datasets" / "evaluation.jsonl"
MIXED = " \U0001f600 caf\u00e9 \u65e5\u672c\u8a9e\u306e\u6587\u7ae0 \U0001f468\u200d\U0001f469\u200d\U0001f467 and"
STOPS = ["\n\nUser:", "</answer>"]


class DecodeOnly:
    """A tokenizer that shows nothing of its inside."""

    def __init__(self, tokenizer: Any) -> None:
        self.decode = tokenizer.decode


def trained(kind: str, lines: list[str]) -> Any:
    """A fast Hugging Face tokenizer of 2,000 tokens, its kind "byte_level" or "byte_fallback"."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    options: dict[str, Any] = {"vocab_size": 2000, "show_progress": False}
    if kind == "byte_level":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        options["initial_alphabet"] = pre_tokenizers.ByteLevel.alphabet()
    else:
        tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
        tokenizer.pre_tokenizer = pre_tokenizers.Split("\u2581", behavior="merged_with_next")
        replace, strip = decoders.Replace("\u2581", " "), decoders.Strip(" ", 1, 0)
        tokenizer.decoder = decoders.Sequence([replace, decoders.ByteFallback(), decoders.Fuse(), strip])
        options["special_tokens"] = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer.train_from_iterator(lines, trainers.BpeTrainer(**options))
    parts = json.loads(tokenizer.to_str())
    parts["added_tokens"] = []  # a trainer marks the bytes as special tokens, which they are in no real model
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(parts)), clean_up_tokenization_spaces=False
    )


def microseconds(run: Callable[[], object], calls: int) -> float:
    """Processor time per call of something that makes `calls` calls."""
    start = time.thread_time()
    run()
    return (time.thread_time() - start) * 1e6 / calls


def measure(tokenizer: Any, text: str, rounds: int) -> dict[str, float]:
    """Median microseconds per token of every way, for one text."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    ids = (ids * (1 + 3000 // len(ids)))[:3000]
    prompt, answer = ids[:1000], ids[1000:]
    some = answer[:500]
    hidden = DecodeOnly(tokenizer)

    def stream(tested: Any, tokens: list[int]) -> list[str]:
        detokenizer = IncrementalDetokenizer(tested, prompt)
        return [*map(detokenizer.add, tokens), detokenizer.flush()]

    pieces = stream(tokenizer, answer)

    def filtered() -> list[str]:
        sieve = StopTextFilter(STOPS, False)
        return [sieve.add(piece) for piece in pieces]

    if "".join(filtered()) != "".join(pieces) or "".join(stream(hidden, some)) != "".join(stream(tokenizer, some)):
        raise SystemExit("the ways that are compared do not make the same text")
    ways: dict[str, tuple[Callable[[], object], int]] = {
        "table": (lambda: stream(tokenizer, answer), len(answer)),
        "stop_filter": (filtered, len(pieces)),
        "window": (lambda: stream(hidden, some), len(some)),
        "decode_each": (lambda: [tokenizer.decode([token]) for token in some], len(some)),
        "new_request": (lambda: [IncrementalDetokenizer(tokenizer, prompt) for _ in range(100)], 100),
    }
    samples: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, (run, calls) in ways.items():
            samples[way].append(microseconds(run, calls))
    return {way: statistics.median(values) for way, values in samples.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, help="a folder with a Hugging Face tokenizer, measured as well")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    if args.tokenizer is not None and not args.tokenizer.is_dir():
        print(f"{args.tokenizer} does not exist: name a folder with a tokenizer.json, or leave --tokenizer out")
        return 2
    lines = [json.loads(line)["text"] for line in TEXTS.read_text(encoding="utf-8").splitlines()]
    tokenizers = {kind: trained(kind, lines) for kind in ("byte_level", "byte_fallback")}
    if args.tokenizer is not None:
        from transformers import AutoTokenizer

        tokenizers[args.tokenizer.name] = AutoTokenizer.from_pretrained(args.tokenizer)
    figures: dict[str, dict[str, Any]] = {}
    for name, tokenizer in tokenizers.items():
        start = time.thread_time()
        if TokenBytes.of(tokenizer) is None:
            print(f"{name}: this tokenizer's decoder is of a kind without a table; `table` below is the window")
        figures[name] = {"table_made_ms": (time.thread_time() - start) * 1e3}
        for label, text in (("english", " ".join(lines)), ("mixed", MIXED * 20)):
            figures[name][label] = measure(tokenizer, text, args.rounds)
    ways = list(figures["byte_level"]["english"])
    print(f"{'microseconds per token':<38}" + "".join(f"{way:>13}" for way in ways))
    for name, entries in figures.items():
        for text in ("english", "mixed"):
            print(f"{name[:28]:<29} {text:<8}" + "".join(f"{entries[text][way]:>13.2f}" for way in ways))
    machine = platform.processor() or platform.machine()
    result = {"microseconds_per_token": figures, "machine": machine, "python": platform.python_version()}
    print(json.dumps(json.loads(json.dumps(result), parse_float=lambda value: round(float(value), 3))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
