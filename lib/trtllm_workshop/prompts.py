"""What goes in and what comes out of a request, in token ids: chat template, one BOS, seeds, loops, echoed prompts.

No torch and no transformers here; a tokenizer is any object with Hugging Face's methods.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

_CHAT_NAMES = re.compile(r"(?:^|[-_./])(?:instruct|chat|it|sft|dpo)(?:$|[-_./])", re.IGNORECASE)
_SPECIAL = re.compile(r"<\|[^|<>\s]+\|>|\[/?INST\]|<(?:start|end)_of_turn>|<</?SYS>>")


def writes_bos(tokenizer: Any) -> bool:
    """Whether the tokenizer puts its BOS before plain text; models whose tokenizer does not were trained without."""
    bos = tokenizer.bos_token_id
    return bos is not None and list(tokenizer.encode("a"))[:1] == [bos]


def one_bos(ids: Sequence[int], tokenizer: Any) -> list[int]:
    """The ids with exactly one BOS in front, for a tokenizer that writes one; otherwise with at most one.

    A chat template often writes the BOS as text, and encoding the text adds another. Two of them are no error anywhere,
    only slightly worse answers.
    """
    bos, rest = tokenizer.bos_token_id, list(ids)
    if bos is None:
        return rest
    start = 0
    while start < len(rest) and rest[start] == bos:
        start += 1
    return [bos] * (start > 0 or writes_bos(tokenizer)) + rest[start:]


def text_prompt_ids(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a plain text. Raises ValueError for an empty one."""
    if not text:
        raise ValueError("the prompt is an empty text: give at least one character")
    return one_bos(tokenizer.encode(text), tokenizer)


def chat_prompt_ids(tokenizer: Any, messages: str | Sequence[Mapping[str, str]]) -> list[int]:
    """Token ids of a conversation, up to where the answer begins. A text counts as one message of the user.

    Raises ValueError when the tokenizer has no chat template, or there is nothing to say.
    """
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}] if messages else []
    if not messages:
        raise ValueError("the conversation is empty: give at least one message")
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            "this tokenizer has no chat template: take an instruct model, set tokenizer.chat_template, or use a plain "
            "prompt (text_prompt_ids) with a base model"
        )
    text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    return one_bos(tokenizer.encode(text, add_special_tokens=False), tokenizer)


def missing_template_warning(model: str, prompt: str, tokenizer: Any) -> str | None:
    """A warning when a plain text goes to a model that was trained on a chat template, else None.

    A model counts as one when its name says so (Instruct, Chat, it) and its tokenizer has a template; a prompt with
    control words such as <|im_start|> or [INST] counts as formatted.
    """
    if not _CHAT_NAMES.search(model) or not getattr(tokenizer, "chat_template", None) or _SPECIAL.search(prompt):
        return None
    return (
        f"{model} was trained on conversations, and this prompt is plain text: answers may run on and repeat themselves. "
        "Use chat_prompt_ids(tokenizer, text), which applies the model's chat template"
    )


def fresh_seeds(count: int) -> list[int]:
    """Different random seeds, one per request, to be recorded with the answers.

    TensorRT-LLM's default seed is fixed: without seeds of their own, equal prompts get equal answers in every run.
    """
    if count < 0:
        raise ValueError(f"count is {count}: seeds are made for 0 or more requests")
    seeds: dict[int, None] = {}
    while len(seeds) < count:
        seeds[secrets.randbelow(2**63)] = None
    return list(seeds)


class Loop(NamedTuple):
    """A sequence that ends in repetitions: the repeated part, how often, and where the first one begins."""

    part: tuple
    times: int
    start: int


def find_loop(items: Sequence, least: int = 4, longest: int = 64) -> Loop | None:
    """The shortest part (up to `longest` items) that the sequence ends with at least `least` times in a row, or None.

    Works on token ids and on words alike. A last repetition that was cut short (max_tokens) counts as part of the loop.
    """
    items = list(items)
    for size in range(1, min(longest, len(items) // least) + 1):
        same = size  # items that equal the one `size` places before; the loop is as long as the run of these
        while same < len(items) and items[-same + size - 1] == items[-same - 1]:
            same += 1
        if same >= size * least:
            start = len(items) - same
            return Loop(tuple(items[start : start + size]), same // size, start)
    return None


def finish_note(text: str, finish_reason: str | None) -> str:
    """`looping` when an answer that ran into max_tokens ends in a loop of words, else the finish reason."""
    return "looping" if finish_reason == "length" and find_loop(text.split()) else finish_reason or "unfinished"


def new_tokens_only(output_ids: Sequence[int], prompt_length: int, sequence_length: int | None = None) -> list[int]:
    """The answer's token ids of one row of output_ids: the prompt is cut by count, and the padding at its real length.

    Cutting the prompt as text fails when decoding it does not give the typed text back (special tokens, blanks).
    Raises ValueError when the counts contradict each other.
    """
    end = len(output_ids) if sequence_length is None else int(sequence_length)
    if not 0 <= prompt_length <= end <= len(output_ids):
        raise ValueError(
            f"prompt_length {prompt_length}, sequence_length {end} and a row of {len(output_ids)} tokens contradict each "
            "other: the prompt is part of the sequence, and the sequence of the row"
        )
    return [int(token) for token in output_ids[prompt_length:end]]
