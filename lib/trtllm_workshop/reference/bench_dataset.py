"""The data set of trtllm-bench: one request a line, as JSON. Read, checked against an engine, and made synthetically.

A line has `task_id`, `output_tokens`, and the prompt either as `input_ids` (older files: `logits`) or as text in
`prompt`. Names from TensorRT-LLM's `tensorrt_llm/bench/utils/data.py` and `bench/dataset/`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class DatasetError(ValueError):
    """A data set that cannot be run; the text names the file, the line and what to change."""


@dataclass(frozen=True)
class InferenceRequest:
    """One request: its number in the data set, the prompt's token ids, and how many tokens to generate."""

    task_id: int
    input_ids: list[int]
    output_tokens: int


def read_dataset(path: Path, load_tokenizer: Callable[[], Any], limit: int = 0) -> list[InferenceRequest]:
    """The requests of a data set.

    Args:
        path: the file.
        load_tokenizer: called once, and only when a line has text instead of token ids.
        limit: read no more than so many requests; 0 means all.

    Raises:
        DatasetError: for a file that is missing, empty or no text, and for a line that is no request.
    """
    try:
        # JSON may hold characters inside a line that splitlines() takes for line ends.
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError:
        raise DatasetError(f"--dataset {path} is no text file: give one with one JSON request a line") from None
    except OSError as error:
        raise DatasetError(f"--dataset {path} cannot be read: {error.strerror}") from None
    tokenizer: Any = None
    requests: list[InferenceRequest] = []
    for number, line in enumerate(lines, 1):
        if limit and len(requests) == limit:
            break
        if not line.strip():
            continue
        where = f"--dataset {path}, line {number}"
        entry = _parse(line, where)
        ids = entry.get("input_ids", entry.get("logits"))
        if ids is None:
            tokenizer = tokenizer or load_tokenizer()
            ids = tokenizer.encode(entry["prompt"])
        if not ids:
            raise DatasetError(f"{where}: the prompt has no tokens; give at least one")
        requests.append(InferenceRequest(entry["task_id"], list(ids), entry["output_tokens"]))
    if not requests:
        raise DatasetError(
            f"--dataset {path} has no requests; make one with trtllm-bench --model NAME prepare-dataset token-norm-dist …"
        )
    return requests


def _is_whole(value: Any, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _parse(line: str, where: str) -> dict[str, Any]:
    """A line as a dictionary whose fields have the right types."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DatasetError(f"{where} is not JSON ({error}): each line is one whole request") from None
    if not isinstance(entry, dict):
        raise DatasetError(f"{where} is {line.strip():.40}, expected an object with task_id, input_ids, output_tokens")
    for name, least in (("task_id", 0), ("output_tokens", 1)):
        if name not in entry:
            raise DatasetError(f"{where} has no {name!r}")
        if not _is_whole(entry[name], least):
            raise DatasetError(f"{where}: {name} is {entry[name]!r:.40}, expected a whole number from {least} on")
    ids = entry.get("input_ids", entry.get("logits"))
    if ids is not None and not (isinstance(ids, list) and all(map(_is_whole, ids))):
        raise DatasetError(f"{where}: input_ids is {ids!r:.40}, expected a list of token ids")
    prompt = entry.get("prompt")
    if ids is None and (not isinstance(prompt, str) or not prompt):
        raise DatasetError(f"{where} has neither 'input_ids' nor a 'prompt' with text")
    if ids is None and any("\ud800" <= character <= "\udfff" for character in str(prompt)):
        raise DatasetError(f"{where}: the prompt has half a surrogate pair, which is no text; remove it")
    return entry


def check_limits(requests: Sequence[InferenceRequest], build_config: dict[str, Any], vocabulary: int) -> None:
    """Compare every request with the limits an engine was built for, so that a run does not end half-way.

    Raises:
        DatasetError: naming the first request that does not fit, both numbers and the remedy.
    """
    longest, total = build_config["max_input_len"], build_config["max_seq_len"]
    for request in requests:
        prompt, new = len(request.input_ids), request.output_tokens
        if prompt > longest:
            raise DatasetError(
                f"task {request.task_id}: a prompt of {prompt} tokens exceeds the engine's longest prompt ({longest}); "
                "shorten the requests, or build with larger --max_seq_len and --max_num_tokens"
            )
        if prompt + new > total:
            raise DatasetError(
                f"Engine supports a max sequence of {total}; task {request.task_id} has {prompt} + {new} = {prompt + new} "
                f"tokens. Build with --max_seq_len {prompt + new} or more, or make a data set of shorter requests"
            )
        if max(request.input_ids) >= vocabulary:
            raise DatasetError(
                f"task {request.task_id}: token id {max(request.input_ids)} is outside the engine's vocabulary of "
                f"{vocabulary} tokens; the data set was made for another model"
            )


# Synthetic data sets --------------------------------------------------------------------------------------------------


def normal_lengths(mean: int, stdev: int, count: int, seed: int) -> list[int]:
    """`count` lengths from a normal distribution, rounded up, at least 1."""
    import numpy

    drawn = numpy.random.RandomState(seed).normal(mean, stdev, count)
    return [max(1, int(numpy.ceil(value))) for value in drawn]


def uniform_lengths(least: int, most: int, count: int, seed: int) -> list[int]:
    """`count` lengths from `least` to `most`, both included."""
    import numpy

    return [int(value) for value in numpy.random.default_rng(seed).integers(least, most + 1, count)]


def synthetic(
    inputs: Sequence[int], outputs: Sequence[int], vocabulary: int, never: set[int], seed: int
) -> Iterator[InferenceRequest]:
    """Requests of random token ids with these lengths; ids in `never` (end tokens and their like) do not occur."""
    allowed = [token for token in range(vocabulary) if token not in never]
    generator = random.Random(seed)
    for task_id, (prompt, new) in enumerate(zip(inputs, outputs, strict=True)):
        yield InferenceRequest(task_id, generator.choices(allowed, k=prompt), new)


def to_line(request: InferenceRequest) -> str:
    """The request as a line of a data set, without the line end."""
    entry = {"task_id": request.task_id, "input_ids": request.input_ids, "output_tokens": request.output_tokens}
    return json.dumps(entry, separators=(",", ":"))
