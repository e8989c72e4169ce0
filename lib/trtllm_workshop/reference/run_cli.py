"""The command line of examples/run.py: generate from an engine, token by token or all at once."""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trtllm_workshop.commands import add_arguments

IMPLEMENTED = (
    "--max_input_length",
    "--max_output_len",
    "--engine_dir",
    "--tokenizer_dir",
    "--hf_model_dir",
    "--input_text",
    "--input_file",
    "--output_csv",
    "--output_npy",
    "--temperature",
    "--top_k",
    "--top_p",
    "--random_seed",
    "--repetition_penalty",
    "--presence_penalty",
    "--frequency_penalty",
    "--end_id",
    "--stop_words",
    "--bad_words",
    "--num_beams",
    "--streaming",
    "--streaming_interval",
    "--use_py_session",
    "--no_add_special_tokens",
    "--no_prompt_template",
    "--max_tokens_in_paged_kv_cache",
    "--kv_cache_free_gpu_memory_fraction",
    "--kv_cache_enable_block_reuse",
    "--log_level",
    "--run_profiling",
)


def make_parser() -> argparse.ArgumentParser:
    """The parser with the official flags that the reference implements."""
    parser = argparse.ArgumentParser(prog="run.py", allow_abbrev=False, description=__doc__)
    add_arguments(parser, "examples/run.py", IMPLEMENTED)
    return parser


def read_prompts(args: argparse.Namespace, tokenizer: Any) -> list[list[int]]:
    """Token ids of every prompt, cut to --max_input_length from the left.

    Raises:
        ValueError: for a file of an unknown kind, or an empty prompt.
    """
    texts = list(args.input_text)
    if args.input_file:
        path = Path(args.input_file)
        if path.suffix == ".csv":
            return [[int(t) for t in row] for row in csv.reader(path.open())]
        if path.suffix != ".txt":
            raise ValueError(
                f"--input_file {path}: a .txt file (one prompt a line) or a .csv file (token ids) is read here"
            )
        texts = [line for line in path.read_text().splitlines() if line]
    prompts = [tokenizer.encode(t, add_special_tokens=args.add_special_tokens)[: args.max_input_length] for t in texts]
    for text, ids in zip(texts, prompts, strict=True):
        if not ids:
            raise ValueError(f"the prompt {text!r} is empty: give at least one token")
    return prompts


def word_ids(groups: list[list[str]] | None, tokenizer: Any) -> list[list[int]] | None:
    """Stop or bad words as token ids; each word as typed and as it is inside a text, after a blank."""
    if not groups:
        return None
    words = {spelling for group in groups for word in group for spelling in (word, " " + word.lstrip())}
    return [tokenizer.encode(w, add_special_tokens=False) for w in sorted(words)]


def generate(args: argparse.Namespace) -> int:
    import torch

    from trtllm_workshop.reference.llm import load_tokenizer, read_generation_config
    from trtllm_workshop.reference.runner import ModelRunner, ModelRunnerCpp
    from trtllm_workshop.reference.sampling_params import end_of_sequence_ids

    source = args.tokenizer_dir or args.hf_model_dir
    if not source:
        raise ValueError("--tokenizer_dir is missing: name the Hugging Face model folder, engines carry no tokenizer")
    tokenizer, folder = load_tokenizer(source)
    prompts = read_prompts(args, tokenizer)
    ends = end_of_sequence_ids(tokenizer, read_generation_config(folder))
    end_id = args.end_id if args.end_id is not None else (ends[0] if ends else -1)
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else max(end_id, 0)
    stop = (word_ids(args.stop_words, tokenizer) or []) + [[e] for e in ends if e != end_id and args.end_id is None]

    options: dict[str, Any] = {}
    runner_class = ModelRunner if args.use_py_session else ModelRunnerCpp
    if not args.use_py_session:
        options = {
            "max_tokens_in_paged_kv_cache": args.max_tokens_in_paged_kv_cache,
            "kv_cache_free_gpu_memory_fraction": args.kv_cache_free_gpu_memory_fraction,
            "kv_cache_enable_block_reuse": args.kv_cache_enable_block_reuse,
        }
    runner = runner_class.from_dir(args.engine_dir, **options)
    sampling = {
        "temperature": args.temperature,
        "top_k": args.top_k,
        "top_p": args.top_p,
        "repetition_penalty": args.repetition_penalty,
        "presence_penalty": args.presence_penalty,
        "frequency_penalty": args.frequency_penalty,
        "random_seed": args.random_seed,
    }
    call = {
        "max_new_tokens": args.max_output_len,
        "end_id": end_id,
        "pad_id": pad_id,
        "stop_words_list": stop or None,
        "bad_words_list": word_ids(args.bad_words, tokenizer),
        "return_dict": True,
        "output_sequence_lengths": True,
        **sampling,
    }
    batch = [torch.tensor(ids, dtype=torch.int32) for ids in prompts]
    started = time.perf_counter()
    if args.streaming:
        outputs: dict[str, Any] = {}
        for step, outputs in enumerate(runner.generate(batch, streaming=True, **call)):
            if step % args.streaming_interval == 0:
                show(prompts, outputs, tokenizer, partial=True)
    else:
        outputs = runner.generate(batch, **call)
    elapsed = time.perf_counter() - started
    show(prompts, outputs, tokenizer)
    save(args, prompts, outputs)
    if args.run_profiling:
        made = int(sum(outputs["sequence_lengths"].flatten().tolist()) - sum(map(len, prompts)))
        print(
            f"batch_size: {len(prompts)}, output tokens: {made}, latency: {elapsed:.3f} s, {made / elapsed:.1f} tokens/s"
        )
    return 0


def answers(prompts: list[list[int]], outputs: dict[str, Any]) -> list[list[int]]:
    """New token ids of every request: cut by count, so that an echoed prompt or padding never shows."""
    rows, lengths = outputs["output_ids"][:, 0].tolist(), outputs["sequence_lengths"][:, 0].tolist()
    return [row[len(p) : n] for row, p, n in zip(rows, prompts, lengths, strict=True)]


def show(prompts: list[list[int]], outputs: dict[str, Any], tokenizer: Any, partial: bool = False) -> None:
    for index, (prompt, made) in enumerate(zip(prompts, answers(prompts, outputs), strict=True)):
        if not partial:
            print(f'Input [Text {index}]: "{tokenizer.decode(prompt)}"')
        text = tokenizer.decode(made, skip_special_tokens=True)
        print(f'Output [Text {index} Beam 0]: "{text}"', flush=True)


def save(args: argparse.Namespace, prompts: list[list[int]], outputs: dict[str, Any]) -> None:
    if args.output_csv:
        with open(args.output_csv, "w", newline="") as file:
            csv.writer(file).writerows(answers(prompts, outputs))
    if args.output_npy:
        import numpy

        numpy.save(args.output_npy, outputs["output_ids"].numpy())


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    args = make_parser().parse_args(argv)
    from trtllm_workshop.checkpoint import WrongFolderKind, require_kind
    from trtllm_workshop.reference.version import banner

    print(banner("run.py"), flush=True)
    try:
        require_kind(args.engine_dir, "engine")  # a mixed-up folder answers at once, before the slow imports
    except WrongFolderKind as error:
        print(f"[TRT-LLM] [E] {error}", file=sys.stderr)
        return 1
    from trtllm_workshop.reference.engine import EngineError

    try:
        return generate(args)
    except (EngineError, WrongFolderKind, ValueError, RuntimeError, OSError) as error:
        print(f"[TRT-LLM] [E] {error}", file=sys.stderr)
        return 1
