"""Prompts for a load: each different, each of exactly the asked number of tokens."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from trtllm_workshop.prompts import chat_prompt_ids

# Common words that most tokenizers know as one token, with their leading blank.
_WORDS = """
the of and to in is that for it as was with be by on not he this are or his from at which but have an had they you were
their one all we can her has there been if more when will would who so no out up into them then she him some time only
could new other our two like most may first very after now such work over even life good before how many any great
water long way day year place world hand part old house light river city road tree book line green small large night
sun wind stone field sea bird horse door food music letter summer winter music market story number question answer
"""
_TRIES = 400


class Prompt(NamedTuple):
    """One prompt and how many tokens the server reads for it."""

    text: str
    tokens: int


def token_counter(tokenizer: Any, endpoint: str) -> Callable[[str], int]:
    """How many tokens a server of this model reads for a text: special tokens included, for `chat` the template too."""
    if endpoint == "chat":
        return lambda text: len(chat_prompt_ids(tokenizer, text))
    return lambda text: len(tokenizer.encode(text))


def distinct_prompts(
    tokenizer: Any,
    lengths: Sequence[int] | int,
    count: int | None = None,
    *,
    endpoint: str = "completions",
    seed: int = 0,
) -> list[Prompt]:
    """`count` different texts of exactly the asked length; with a list of lengths, one for each.

    They differ from the first word on, so that a server which keeps cached prefixes gains nothing from one for the next.

    Raises:
        ValueError: for a length that the tokenizer cannot meet (below 1, or shorter than an empty chat).
    """
    wanted = [lengths] * (1 if count is None else count) if isinstance(lengths, int) else list(lengths)
    tokens = token_counter(tokenizer, endpoint)
    words = _single_token_words(tokens)
    chance = random.Random(seed)
    made: list[Prompt] = []
    seen: set[str] = set()
    for length in wanted:
        for text in _texts(words, length, tokens, chance):
            if text not in seen:
                break
        else:
            least = tokens(words[0])
            raise ValueError(
                f"no further prompt of exactly {length} tokens can be made for this tokenizer"
                + (f": the shortest has {least} (template and special tokens count)" if length < least else "")
            )
        seen.add(text)
        made.append(Prompt(text, length))
    return made


def _single_token_words(tokens: Callable[[str], int]) -> list[str]:
    base = tokens("the")
    found = [word for word in dict.fromkeys(_WORDS.split()) if tokens(f"the {word}") == base + 1]
    return found or list(dict.fromkeys(_WORDS.split()))


def _texts(words: list[str], length: int, tokens: Callable[[str], int], chance: random.Random) -> Iterator[str]:
    """Texts of exactly `length` tokens; ends without one when words cannot be put together to that length."""
    for _ in range(_TRIES):
        chosen = [chance.choice(words) for _ in range(max(1, length))]
        chosen[0] = chance.choice(words).capitalize() if chance.random() < 0.5 else chosen[0]
        # Special tokens and words of several tokens make it longer than it has words: take the excess away, look again.
        for _ in range(8):
            excess = tokens(" ".join(chosen)) - length
            if excess == 0:
                yield " ".join(chosen)
                break
            if excess > 0:
                del chosen[max(1, len(chosen) - excess) :]
            else:
                chosen += [chance.choice(words) for _ in range(-excess)]
            if excess > 0 and len(chosen) == 1 and tokens(chosen[0]) > length:
                break
