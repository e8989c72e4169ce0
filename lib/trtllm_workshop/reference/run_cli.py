"""The command line of examples/run.py: generate from an engine, token by token or all at once.

Under mpirun there is one process for each rank of the engine. Rank 0 reads the prompts, leads and prints; the others follow.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import os
import sys
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

from trtllm_workshop.commands import add_arguments
from trtllm_workshop.reference.streamed_text import Piece, StreamedRow, text_of, throttle

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
    "--enable_chunked_context",
    "--log_level",
    "--run_profiling",
)


def make_parser() -> argparse.ArgumentParser:
    """The parser with the official flags that the reference implements."""
    parser = argparse.ArgumentParser(prog="run.py", allow_abbrev=False, description=__doc__)
    add_arguments(parser, "examples/run.py", IMPLEMENTED)
    return parser


def read_prompts(args: argparse.Namespace, tokenizer: Any) -> list[list[int]]:
    """Token ids of every prompt, at most --max_input_length: the first ones of a text, the last ones of a row of ids.

    Raises:
        ValueError: for a file of an unknown kind, a cell that is no token id, or an empty prompt.
    """
    most = args.max_input_length
    if most < 1:
        raise ValueError(f"--max_input_length {most}: a prompt has at least 1 token")
    texts = list(args.input_text)
    if args.input_file:
        path = Path(args.input_file)
        lines = _lines(path)
        if path.suffix == ".csv":
            rows = [row for row in csv.reader(lines) if row]
            return [[_token_id(cell, path, number) for cell in row][-most:] for number, row in enumerate(rows, 1)]
        texts = lines
    prompts = []
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=args.add_special_tokens) if text else []
        if not ids:
            raise ValueError(f"the prompt {text!r} is empty: give at least one token")
        if len(ids) > most:
            print(f"[TRT-LLM] [W] a prompt of {len(ids)} tokens is cut to the first {most} (--max_input_length)")
        prompts.append(ids[:most])
    return prompts


def _lines(path: Path) -> list[str]:
    if path.suffix not in (".txt", ".csv"):
        raise ValueError(
            f"--input_file {path}: a .txt file (one prompt a line) or a .csv file (token ids) is read here"
        )
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line]
    except UnicodeDecodeError as error:
        raise ValueError(f"--input_file {path} is no text in UTF-8 ({error.reason}): save it as UTF-8") from error
    except OSError as error:
        raise ValueError(f"--input_file {path} cannot be read ({error.strerror}): check the path") from error
    if not lines:
        raise ValueError(f"--input_file {path} holds no prompt: write one a line")
    return lines


def _token_id(cell: str, path: Path, row: int) -> int:
    if not cell.strip().isdecimal():
        raise ValueError(
            f"--input_file {path}, row {row}: {cell!r} is no token id; each row is one prompt of token ids"
        )
    return int(cell)


def word_ids(flag: str, groups: list[list[str]] | None, tokenizer: Any, prompts: int) -> list[list[list[int]]]:
    """Stop or bad words of each prompt as token ids; each word as typed and as it is inside a text, after a blank.

    The flag given several times has one group of words for each prompt in turn; given once, it is for all of them.

    Raises:
        ValueError: for another number of groups than prompts.
    """
    groups = groups or [[]]
    if len(groups) not in (1, prompts):
        raise ValueError(f"{flag} is given {len(groups)} times for {prompts} prompts: give it once, or once per prompt")
    spellings = [sorted({s for word in group if word for s in (word, " " + word.lstrip())}) for group in groups]
    ids = [[tokenizer.encode(w, add_special_tokens=False) for w in group] for group in spellings]
    return ids * prompts if len(ids) == 1 else ids


def generate(args: argparse.Namespace) -> int:
    import torch

    from trtllm_workshop.reference.runner import ModelRunner, ModelRunnerCpp
    from trtllm_workshop.reference.sampling_params import end_of_sequence_ids
    from trtllm_workshop.reference.tokenizer_source import load_tokenizer, read_generation_config

    if args.streaming_interval < 1:
        raise ValueError(f"--streaming_interval {args.streaming_interval}: give 1 or more steps")
    source = args.tokenizer_dir or args.hf_model_dir
    if not source:
        raise ValueError("--tokenizer_dir is missing: name the Hugging Face model folder, engines carry no tokenizer")
    tokenizer, folder = load_tokenizer(source)
    prompts = read_prompts(args, tokenizer)
    ends = end_of_sequence_ids(tokenizer, read_generation_config(folder))
    end_id = args.end_id if args.end_id is not None else (ends[0] if ends else -1)
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else max(end_id, 0)
    more_ends = [[e] for e in ends if e != end_id and args.end_id is None]
    stop = [words + more_ends for words in word_ids("--stop_words", args.stop_words, tokenizer, len(prompts))]

    options: dict[str, Any] = {}
    runner_class = ModelRunner if args.use_py_session else ModelRunnerCpp
    if not args.use_py_session:
        options = {
            "max_tokens_in_paged_kv_cache": args.max_tokens_in_paged_kv_cache,
            "kv_cache_free_gpu_memory_fraction": args.kv_cache_free_gpu_memory_fraction,
            "kv_cache_enable_block_reuse": args.kv_cache_enable_block_reuse,
            "enable_chunked_context": args.enable_chunked_context,
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
        "stop_words_list": stop,
        "bad_words_list": word_ids("--bad_words", args.bad_words, tokenizer, len(prompts)),
        "return_dict": True,
        "output_sequence_lengths": True,
        **sampling,
    }
    batch = [torch.tensor(ids, dtype=torch.int32) for ids in prompts]
    started = time.perf_counter()
    with contextlib.closing(runner):
        if args.streaming:
            outputs = stream(
                runner.generate(batch, streaming=True, **call), args.streaming_interval, prompts, tokenizer
            )
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


def stream(
    steps: Generator[dict[str, Any], None, None], interval: int, prompts: list[list[int]], tokenizer: Any
) -> dict[str, Any]:
    """Print what every row gained, each `interval` steps; returns the last outputs, which hold everything."""
    rows = [StreamedRow(tokenizer, prompt) for prompt in prompts]
    outputs: dict[str, Any] = {}
    with contextlib.closing(steps):  # whatever goes wrong here, its requests leave the batch
        for outputs in throttle(steps, interval):
            for index, (row, made) in enumerate(zip(rows, answers(prompts, outputs), strict=True)):
                show_piece(index, row.update(made))
    for index, row in enumerate(rows):
        show_piece(index, row.finish())
    return outputs


def show_piece(index: int, piece: Piece) -> None:
    if piece.text:
        print(f'{"Anew" if piece.rewritten else "New"} [Text {index} Beam 0]: "{piece.text}"', flush=True)


def show(prompts: list[list[int]], outputs: dict[str, Any], tokenizer: Any) -> None:
    for index, (prompt, made) in enumerate(zip(prompts, answers(prompts, outputs), strict=True)):
        print(f'Input [Text {index}]: "{tokenizer.decode(prompt)}"')
        print(f'Output [Text {index} Beam 0]: "{text_of(tokenizer, prompt, made)}"', flush=True)


def save(args: argparse.Namespace, prompts: list[list[int]], outputs: dict[str, Any]) -> None:
    """The rows of output_ids, prompts and padding included, as TensorRT-LLM's run.py writes them."""
    rows = outputs["output_ids"].flatten(0, 1)
    for name in filter(None, (args.output_csv, args.output_npy)):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
    if args.output_csv:
        with open(args.output_csv, "w", newline="") as file:
            csv.writer(file).writerows(rows.tolist())
    if args.output_npy:
        import numpy

        numpy.save(args.output_npy, rows.numpy())


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    args = make_parser().parse_args(argv)
    from trtllm_workshop.checkpoint import BrokenWeights, WrongFolderKind, require_kind
    from trtllm_workshop.reference.version import banner

    leads = os.environ.get("OMPI_COMM_WORLD_RANK", "0") == "0"  # under mpirun one process speaks for all
    if leads:
        print(banner("run.py"), flush=True)

    def refuse(error: Exception) -> int:
        if leads:
            print(f"[TRT-LLM] [E] {error}", file=sys.stderr)
        return 1

    try:
        require_kind(args.engine_dir, "engine")  # a mixed-up folder answers at once, before the slow imports
    except WrongFolderKind as error:
        return refuse(error)
    from trtllm_workshop.reference.engine import EngineError
    from trtllm_workshop.reference.mpi_launch import Launch, check_world, follow_launched

    try:
        launch = Launch.read(os.environ)
        check_world(args.engine_dir, launch, ["python", *sys.argv] if argv is None else ())
    except (EngineError, BrokenWeights) as error:
        return refuse(error)
    if not leads:
        return follow_launched(args.engine_dir, launch)
    try:
        return generate(args)
    except KeyboardInterrupt:
        print("[TRT-LLM] [E] stopped by the keyboard: no file is written", file=sys.stderr)
        return 130
    except (EngineError, WrongFolderKind, ValueError, RuntimeError, OSError) as error:
        return refuse(error)
