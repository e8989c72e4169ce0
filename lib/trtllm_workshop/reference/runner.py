"""`tensorrt_llm.runtime`: ModelRunner and ModelRunnerCpp, token ids in, token ids out."""

from __future__ import annotations

import collections
import itertools
import os
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from trtllm_workshop.checkpoint import require_kind
from trtllm_workshop.reference.configs import KvCacheConfig, official_fields, refuse_unknown
from trtllm_workshop.reference.executor import Executor
from trtllm_workshop.reference.mpi_launch import Launch, check_world, load_launched
from trtllm_workshop.reference.request import Request
from trtllm_workshop.reference.sampling_params import SamplingParams, StopRules, check_bad_words

SAMPLING_NAMES = {
    "top_k",
    "top_p",
    "temperature",
    "min_tokens",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "random_seed",
}
OPTIONS = {
    "streaming",
    "max_new_tokens",
    "end_id",
    "pad_id",
    "bad_words_list",
    "stop_words_list",
    "return_dict",
    "output_sequence_lengths",
    "output_generation_logits",
    "output_log_probs",
    "output_cum_log_probs",
    "return_all_generated_tokens",
}


class ModelRunnerCpp:
    """Runs an engine on batches of token ids. Make one with `from_dir`."""

    api_name = "ModelRunnerCpp"

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        build = executor.engine.build_config
        self.max_batch_size = executor.max_batch_size
        self.max_input_len, self.max_seq_len = build["max_input_len"], build["max_seq_len"]
        self._closing = weakref.finalize(self, executor.close)
        self._ids = itertools.count(1)  # threads may ask at the same time

    @classmethod
    def from_dir(cls, engine_dir: str, **kwargs: Any) -> ModelRunnerCpp:
        """Load an engine folder.

        Args:
            engine_dir: what trtllm-build wrote.
            kwargs: `rank` (that of the process, which must be 0), `max_batch_size`, `kv_cache_free_gpu_memory_fraction`,
                `max_tokens_in_paged_kv_cache`, `kv_cache_enable_block_reuse` and `enable_chunked_context` (both off);
                other official names are accepted at their defaults.

        Raises:
            EngineError, WrongFolderKind: for an engine that cannot be loaded here.
            ValueError: for an unknown argument, or a limit above the engine's.
        """
        implemented = {
            "rank",
            "max_batch_size",
            "max_input_len",
            "max_output_len",
            "kv_cache_free_gpu_memory_fraction",
            "max_tokens_in_paged_kv_cache",
            "kv_cache_enable_block_reuse",
            "enable_chunked_context",
        }
        owner = f"{cls.api_name}.from_dir"
        official = official_fields(owner)
        given = refuse_unknown(owner, kwargs, implemented & set(official), official)
        launch = Launch.read(os.environ)
        require_kind(engine_dir, "engine")
        check_world(engine_dir, launch)
        rank = given.get("rank", launch.rank)
        if rank != launch.rank or rank != 0:
            raise ValueError(
                f"rank={rank}, and this process is rank {launch.rank} of {launch.size}: a runner is made on rank 0 alone; in "
                "the others run.py follows its steps"
            )
        fraction = given.get("kv_cache_free_gpu_memory_fraction")
        config = KvCacheConfig(
            max_tokens=given.get("max_tokens_in_paged_kv_cache"),
            free_gpu_memory_fraction=0.9 if fraction is None else fraction,
            enable_block_reuse=bool(given.get("kv_cache_enable_block_reuse", False)),
        )
        engine, ranks = load_launched(engine_dir, launch)
        for name in ("max_batch_size", "max_input_len"):
            limit, wanted = engine.build_config[name], given.get(name)
            if wanted is not None and wanted > limit:
                raise ValueError(f"{name}={wanted} is above the engine's {limit}; build with --{name} {wanted}")
        chunked = bool(given.get("enable_chunked_context"))
        return cls(Executor(engine, config, given.get("max_batch_size"), enable_chunked_context=chunked, ranks=ranks))

    def close(self) -> None:
        """Let the other ranks end, if there are any; also done when the runner is lost, or the program ends."""
        self._closing()

    @property
    def vocab_size(self) -> int:
        return self._executor.engine.pretrained_config["vocab_size"]

    @property
    def dtype(self) -> torch.dtype:
        return self._executor.engine.dtype

    def generate(self, batch_input_ids: Sequence[torch.Tensor], **kwargs: Any) -> Any:
        """Generate for a batch.

        Args:
            batch_input_ids: one 1-D integer tensor per request.
            kwargs: `max_new_tokens` (1 unless given), `end_id`, `pad_id` (both mandatory), `streaming`, `return_dict`,
                `output_sequence_lengths`, `stop_words_list`, `bad_words_list` (token ids per request), and the sampling
                names temperature, top_k, top_p, min_tokens, the three penalties and random_seed.
                `return_all_generated_tokens` changes nothing here: streamed outputs are cumulative with and without it,
                in TensorRT-LLM as well, where it only decides what the executor sends the runner.

        Returns:
            output_ids [requests, 1, longest], prompt included, padded with end_id; with `return_dict` a dictionary with
            `output_ids` and `sequence_lengths` [requests, 1]. With `streaming` a generator of these, one per step, each
            with everything made so far.

        Raises:
            ValueError, RuntimeError: for an empty batch or prompt, lengths beyond the engine's, unknown arguments.
        """
        official = official_fields(f"{self.api_name}.generate")
        names = (OPTIONS | SAMPLING_NAMES) - ({"return_all_generated_tokens"} - set(official))
        given = refuse_unknown(f"{self.api_name}.generate", kwargs, names, official)
        for name in ("end_id", "pad_id"):
            if given.get(name) is None:
                raise ValueError(f"{name} must be given to generate; use the tokenizer's eos_token_id")
        for name in ("end_id", "pad_id", "max_new_tokens"):
            value = given.get(name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
                raise ValueError(f"{name}={value!r} must be a whole number")
        requests = self._requests(batch_input_ids, given)
        steps = self._steps(requests, given)
        if given.get("streaming"):
            return steps
        return collections.deque(steps, maxlen=1)[0]

    def _requests(self, batch: Sequence[torch.Tensor], given: dict[str, Any]) -> list[Request]:
        if not isinstance(batch, Sequence | torch.Tensor) or any(not hasattr(ids, "__len__") for ids in batch):
            raise ValueError(
                f"batch_input_ids must be a list with one 1-D tensor of token ids per prompt, not {batch!r:.60}"
            )
        if len(batch) == 0:
            raise ValueError("batch_input_ids is empty; give at least one prompt")
        if len(batch) > self.max_batch_size:
            raise RuntimeError(
                f"Input batch size ({len(batch)}) exceeds the engine or specified limit ({self.max_batch_size}); send fewer "
                f"prompts at once or build with --max_batch_size {len(batch)}"
            )
        asked = given.get("max_new_tokens")
        new, longest = 1 if asked is None else asked, max(len(ids) for ids in batch)
        if new < 1:
            raise ValueError(f"max_new_tokens={new} must be at least 1 (--max_output_len of run.py)")
        if longest > self.max_input_len:
            raise RuntimeError(
                f"Maximum input length ({longest}) exceeds the engine or specified limit ({self.max_input_len})"
            )
        if longest + new > self.max_seq_len:
            raise RuntimeError(
                f"Maximum input length ({longest}) + maximum new tokens ({new}) exceeds the engine or specified limit "
                f"({self.max_seq_len}); ask for at most {self.max_seq_len - longest} new tokens or build with a larger --max_seq_len"
            )
        requests = []
        for row, ids in enumerate(batch):
            if len(ids) == 0:
                raise ValueError(f"prompt {row} of the batch is empty; give at least one token")
            rules = StopRules(
                end_ids={given["end_id"]} if given["end_id"] >= 0 else set(),
                stop_sequences=_words("stop_words_list", given.get("stop_words_list"), row),
                bad_sequences=_words("bad_words_list", given.get("bad_words_list"), row),
                min_tokens=_per_row(given.get("min_tokens"), row) or 0,
            )
            params = _sampling_params(given, row, new)
            check_bad_words(rules, self.vocab_size)
            requests.append(Request(next(self._ids), self._whole_ids(ids, row), params, rules))
        return requests

    def _whole_ids(self, ids: Any, row: int) -> list[int]:
        values = ids.tolist() if isinstance(ids, torch.Tensor) else list(ids)
        for value in values:
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < self.vocab_size:
                raise ValueError(
                    f"prompt {row} of the batch has {value!r}, which is no token id; the vocabulary has "
                    f"{self.vocab_size} tokens"
                )
        return values

    def _steps(self, requests: list[Request], given: dict[str, Any]) -> Iterator[Any]:
        try:
            for request in requests:
                self._executor.submit(request)
            shown = -1
            # Steps of another generator of this runner serve these requests too, so what counts is what was made.
            while True:
                made, done = sum(len(r.token_ids) for r in requests), all(r.finished for r in requests)
                if made > max(shown, 0) or (done and shown < 0):
                    shown = made
                    yield self._output(requests, given)
                elif done:
                    return
                else:
                    self._executor.step()
        finally:
            # A consumer that stops early must not leave its requests in the batch.
            self._executor.abort([r for r in requests if not r.finished])

    def _output(self, requests: list[Request], given: dict[str, Any]) -> Any:
        rows = [r.prompt_token_ids + r.token_ids for r in requests]
        width = max(len(r) for r in rows)
        filler = given["end_id"] if given["end_id"] >= 0 else given["pad_id"]
        ids = torch.tensor([[row + [filler] * (width - len(row))] for row in rows], dtype=torch.int32)
        if not (given.get("return_dict") or given.get("output_sequence_lengths")):
            return ids
        result: dict[str, Any] = {
            "output_ids": ids,
            "sequence_lengths": torch.tensor([[len(r)] for r in rows], dtype=torch.int32),
        }
        if given.get("output_generation_logits"):
            result["generation_logits"] = [torch.stack(r.generation_logits) for r in requests]
        for name in ("output_log_probs", "output_cum_log_probs"):
            if given.get(name):
                values = [
                    [entry[t].logprob for entry, t in zip(r.logprobs, r.token_ids, strict=False)] for r in requests
                ]
                key = name.removeprefix("output_")
                result[key] = [[v] for v in values] if key == "log_probs" else torch.tensor([[sum(v)] for v in values])
        return result


class ModelRunner(ModelRunnerCpp):
    """The Python session's runner (`run.py --use_py_session`); fewer arguments, the same engine."""

    api_name = "ModelRunner"

    def generate(self, batch_input_ids: Sequence[torch.Tensor], **kwargs: Any) -> Any:
        """See ModelRunnerCpp.generate. Temperature 0 becomes greedy decoding, with a warning."""
        if kwargs.get("temperature") == 0.0:
            print("[TRT-LLM] [W] temperature 0.0 is replaced by temperature 1.0 with top_k 1")
            kwargs = {**kwargs, "temperature": 1.0, "top_k": 1}
        return super().generate(batch_input_ids, **kwargs)


def _per_row(value: Any, row: int) -> Any:
    """Values may be one for all or a list, one per request."""
    if not isinstance(value, list | tuple):
        return value
    if row >= len(value):
        raise ValueError(
            f"{value!r:.80} has {len(value)} entries and the batch has more requests: give one per request"
        )
    return value[row]


def _words(name: str, words: Any, row: int) -> list[list[int]]:
    """Stop or bad words of a request, each a list of token ids.

    One word ([5, 6]), words for all requests ([[5, 6], [7]]), or words for each request ([[[5, 6], [7]], []]).
    """
    if words is None:
        return []
    entry = words
    if isinstance(words, list | tuple):
        if not words or all(map(_is_id, words)):
            return [list(words)] if words else []
        parts = [part for group in words if isinstance(group, list | tuple) for part in group]
        if not parts or any(isinstance(part, list | tuple) for part in parts):
            entry = _per_row(words, row)
    if not isinstance(entry, list | tuple) or not all(
        isinstance(w, list | tuple) and all(map(_is_id, w)) for w in entry
    ):
        raise ValueError(
            f"{name} is {words!r:.80}, expected token ids: one list of them for each word, as "
            "tokenizer.encode(word, add_special_tokens=False) gives them"
        )
    return [list(word) for word in entry if word]


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _sampling_params(given: dict[str, Any], row: int, new: int) -> SamplingParams:
    values = {n: _per_row(given[n], row) for n in SAMPLING_NAMES if given.get(n) is not None and n != "random_seed"}
    if values.get("top_p") == 0.0:
        del values["top_p"]
    return SamplingParams(
        max_tokens=new,
        seed=_per_row(given.get("random_seed"), row),
        logprobs=0 if given.get("output_log_probs") or given.get("output_cum_log_probs") else None,
        return_generation_logits=bool(given.get("output_generation_logits")),
        detokenize=False,
        **values,
    )
