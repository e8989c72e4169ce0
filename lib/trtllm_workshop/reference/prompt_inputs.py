"""From what a caller calls a prompt to a checked request."""

from __future__ import annotations

import itertools
from typing import Any

from trtllm_workshop.reference.engine import Engine
from trtllm_workshop.reference.request import Request
from trtllm_workshop.reference.sampling_params import SamplingParams, check_bad_words, stop_rules


def prompt_text(prompt: Any) -> str | None:
    """The text of a prompt, or None for one of token ids."""
    return prompt.get("prompt") if isinstance(prompt, dict) else prompt if isinstance(prompt, str) else None


class RequestMaker:
    """Makes requests for one engine.

    Args:
        engine: whose limits count.
        tokenizer: a Hugging Face tokenizer, or None when prompts are token ids.
        generation_config: generation_config.json of the model, for its end tokens.
        gathers: whether the logits of generated tokens may be had.
    """

    def __init__(self, engine: Engine, tokenizer: Any, generation_config: dict[str, Any] | None, gathers: bool) -> None:
        self._build, self._vocabulary = engine.build_config, engine.pretrained_config["vocab_size"]
        self._tokenizer, self._generation_config, self._gathers = tokenizer, generation_config, gathers
        self._ids = itertools.count(1)  # threads may ask at the same time

    def make(self, prompt: Any, params: SamplingParams) -> Request:
        """Check one prompt against the engine's limits and make it a request.

        Raises:
            ValueError: for a prompt that is empty, too long or no prompt, or parameters that need another build.
        """
        ids = self._token_ids(prompt, params)
        self._check_lengths(ids, params)
        self._check_logits(params)
        if self._tokenizer is None and (params.stop or params.bad):
            raise ValueError("stop and bad words need a tokenizer; pass LLM(…, tokenizer=HF_FOLDER) or use *_token_ids")
        if self._tokenizer is None and params.end_id is None:
            params = params.model_copy(update={"end_id": -1})
        rules = stop_rules(params, self._tokenizer, self._generation_config)
        check_bad_words(rules, self._vocabulary)
        return Request(next(self._ids), ids, params, rules, self._tokenizer)

    def _check_lengths(self, ids: list[int], params: SamplingParams) -> None:
        longest, total = self._build["max_input_len"], self._build["max_seq_len"]
        if not ids:
            raise ValueError("the prompt is empty (no token ids); give at least one token")
        if min(ids) < 0 or max(ids) >= self._vocabulary:
            raise ValueError(
                f"token id {min(ids) if min(ids) < 0 else max(ids)} is outside the vocabulary of {self._vocabulary} tokens"
            )
        if len(ids) > longest:
            raise ValueError(
                f"Prompt length ({len(ids)}) exceeds maximum input length ({longest}) of the engine; shorten the prompt, set "
                "SamplingParams(truncate_prompt_tokens=…), or build with larger --max_seq_len and --max_num_tokens"
            )
        if len(ids) + params.max_tokens > total:
            raise ValueError(
                f"The sum of prompt length ({len(ids)}) and max_tokens ({params.max_tokens}) exceeds max_seq_len ({total}) of "
                f"the engine; ask for at most {total - len(ids)} tokens or build with a larger --max_seq_len"
            )

    def _check_logits(self, params: SamplingParams) -> None:
        if params.logprobs is not None and not self._gathers:
            raise ValueError("SamplingParams(logprobs=…) needs LLM(…, gather_generation_logits=True)")
        if params.return_generation_logits and not self._gathers:
            raise ValueError(
                "SamplingParams(return_generation_logits=True) needs LLM(…, gather_generation_logits=True)"
            )
        whole = params.prompt_logprobs is not None or params.return_context_logits
        if whole and not self._build["gather_context_logits"]:
            raise ValueError(
                "prompt_logprobs and return_context_logits need an engine built with --gather_context_logits"
            )

    def _token_ids(self, prompt: Any, params: SamplingParams) -> list[int]:
        if isinstance(prompt, dict):
            if unknown := sorted(set(prompt) - {"prompt", "prompt_token_ids"}):
                raise ValueError(
                    f"a prompt dictionary has 'prompt' or 'prompt_token_ids'; {', '.join(map(repr, unknown))} is not "
                    "implemented by the reference toolchain"
                )
            prompt = prompt.get("prompt_token_ids", prompt.get("prompt"))
        if isinstance(prompt, str):
            if not prompt:
                raise ValueError("the prompt is an empty text; give at least one character")
            if self._tokenizer is None:
                raise ValueError("a text prompt needs a tokenizer; pass LLM(…, tokenizer=HF_FOLDER), or give token ids")
            if any("\ud800" <= character <= "\udfff" for character in prompt):
                raise ValueError(f"the prompt {prompt!r:.60} has half a surrogate pair, which is no text; remove it")
            prompt = self._tokenizer.encode(prompt, add_special_tokens=params.add_special_tokens)
        if not isinstance(prompt, list | tuple) or not all(
            isinstance(t, int) and not isinstance(t, bool) for t in prompt
        ):
            raise ValueError(f"a prompt must be text or a list of token ids (whole numbers), not {prompt!r:.60}")
        ids = list(prompt)
        return ids[-params.truncate_prompt_tokens :] if params.truncate_prompt_tokens else ids
