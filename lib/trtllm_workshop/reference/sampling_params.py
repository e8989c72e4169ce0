"""SamplingParams, and what it means for one request once the tokenizer is known."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from pydantic import model_validator

from trtllm_workshop.reference.configs import OfficialConfig


class SamplingParams(OfficialConfig):
    """How tokens are chosen and when a request ends. Official names and defaults; `max_tokens` is 32 unless given.

    Greedy unless `top_k` or `top_p` is set: a temperature alone changes nothing.

    Raises:
        ValueError: for a value out of range, naming it and the range.
    """

    n: int = 1
    max_tokens: int = 32
    min_tokens: int | None = None
    end_id: int | None = None
    pad_id: int | None = None
    seed: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    bad: str | list[str] | None = None
    bad_token_ids: list[int] | None = None
    ignore_eos: bool = False
    detokenize: bool = True
    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    return_context_logits: bool = False
    return_generation_logits: bool = False
    exclude_input_from_output: bool = True

    @model_validator(mode="after")
    def _ranges(self) -> SamplingParams:
        def need(ok: bool, name: str, rule: str) -> None:
            if not ok:
                raise ValueError(f"{name}={getattr(self, name)} is out of range: {rule}")

        need(
            self.n == 1,
            "n",
            "the reference toolchain makes one answer a request; send the prompt several times with other seeds",
        )
        need(self.max_tokens >= 1, "max_tokens", "at least 1")
        need(
            self.temperature is None or 0 <= self.temperature < math.inf,
            "temperature",
            "0 or more and finite; 0 means greedy",
        )
        need(
            self.top_p is None or 0 <= self.top_p <= 1,
            "top_p",
            "between 0 and 1 (a share of probability, not a percentage)",
        )
        need(self.top_k is None or self.top_k >= 0, "top_k", "0 or more; 0 turns the limit off, 1 is greedy")
        need(
            self.repetition_penalty is None or 0 < self.repetition_penalty < math.inf,
            "repetition_penalty",
            "above 0 and finite; 1 changes nothing",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            need(math.isfinite(getattr(self, name) or 0), name, "a finite number; 0 changes nothing")
        need(self.seed is None or 0 <= self.seed < 2**64, "seed", "a whole number from 0 to 2**64 - 1")
        need(
            self.min_tokens is None or self.min_tokens <= self.max_tokens,
            "min_tokens",
            f"at most max_tokens ({self.max_tokens})",
        )
        need(self.min_tokens is None or self.min_tokens >= 0, "min_tokens", "0 or more")
        need(
            self.truncate_prompt_tokens is None or self.truncate_prompt_tokens >= 1,
            "truncate_prompt_tokens",
            "at least 1",
        )
        need(self.logprobs is None or self.logprobs >= 0, "logprobs", "0 or more")
        need(self.prompt_logprobs is None or self.prompt_logprobs >= 0, "prompt_logprobs", "0 or more")
        return self

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken: temperature 0, top_k 1, or neither top_k nor top_p set."""
        return self.temperature == 0 or self.top_k == 1 or (not self.top_k and not self.top_p)


def as_list(value: str | list[str] | None) -> list[str]:
    """One string and a list of strings mean the same."""
    return [value] if isinstance(value, str) else list(value or [])


@dataclass
class StopRules:
    """When one request ends, in token ids and text.

    Attributes:
        end_ids: tokens that end the answer (end of sequence).
        stop_ids: further token ids that end it, named by the user or the model's generation_config.json.
        stop_texts: strings that end it; the text is cut before them.
        stop_sequences: token sequences that end it.
        bad_sequences: token sequences that must not appear.
    """

    end_ids: set[int] = field(default_factory=set)
    stop_ids: set[int] = field(default_factory=set)
    stop_texts: list[str] = field(default_factory=list)
    stop_sequences: list[list[int]] = field(default_factory=list)
    bad_sequences: list[list[int]] = field(default_factory=list)
    min_tokens: int = 0


def end_of_sequence_ids(tokenizer: Any, generation_config: dict[str, Any] | None) -> list[int]:
    """Every token id that ends an answer, the tokenizer's own first.

    Chat models often have more than one: the tokenizer names one, generation_config.json a list. All of them count.
    """
    found: list[int] = []
    declared = (generation_config or {}).get("eos_token_id")
    for value in (getattr(tokenizer, "eos_token_id", None), declared):
        for token in value if isinstance(value, list | tuple) else [value]:
            if token is not None and token not in found:
                found.append(int(token))
    return found


def stop_rules(params: SamplingParams, tokenizer: Any, generation_config: dict[str, Any] | None) -> StopRules:
    """Turn SamplingParams into StopRules for one request.

    `bad` words are banned in both spellings that occur inside a text: with and without a blank before them.
    """
    ends = [] if tokenizer is None else end_of_sequence_ids(tokenizer, generation_config)
    if params.end_id is not None:
        ends = [params.end_id, *ends[1:]]
    bad = [[t] for t in params.bad_token_ids or []]
    for word in filter(None, as_list(params.bad)):
        for spelling in {word, " " + word.lstrip()}:
            ids = tokenizer.encode(spelling, add_special_tokens=False)
            if ids:
                bad.append(list(ids))
    return StopRules(
        end_ids=set() if params.ignore_eos else {e for e in ends if e >= 0},
        stop_ids=set(params.stop_token_ids or []),
        stop_texts=as_list(params.stop),
        bad_sequences=bad,
        min_tokens=params.min_tokens or 0,
    )


def check_bad_words(rules: StopRules, vocabulary: int) -> None:
    """Raises ValueError when a bad word names a token that does not exist, or when no token is left to choose."""
    for token in (t for sequence in rules.bad_sequences for t in sequence):
        if not 0 <= token < vocabulary:
            raise ValueError(
                f"bad token id {token} is outside the vocabulary of {vocabulary} tokens; take the ids from the tokenizer"
            )
    never = {s[0] for s in rules.bad_sequences if len(s) == 1}
    early = {t for t in rules.end_ids | rules.stop_ids if 0 <= t < vocabulary} if rules.min_tokens else set()
    if len(never | early) >= vocabulary:
        raise ValueError(
            f"bad words (and min_tokens, which bans the end tokens at first) exclude all {vocabulary} tokens of the "
            "vocabulary; allow at least one"
        )
