"""Checks sampling parameters before a request is sent: what is wrong, and what would have no effect.

TensorRT-LLM is greedy by default: with top_k 1 or unset, and top_p unset or 0, temperature changes nothing.
The names checked are those of `SamplingParams` as recorded in ``data/trtllm_api.json``.
"""

from __future__ import annotations

from typing import Any

from trtllm_workshop.api_facts import api
from trtllm_workshop.problem import Problem, error, warning

# Names that other front ends use for the same thing.
OTHER_NAMES = {
    "runtime_top_k": "top_k",
    "runtime_top_p": "top_p",
    "max_new_tokens": "max_tokens",
    "max_output_len": "max_tokens",
    "request_output_len": "max_tokens",
    "random_seed": "seed",
    "stop_words": "stop",
    "stop_words_list": "stop",
    "bad_words": "bad",
    "bad_words_list": "bad",
    "num_beams": "n, with use_beam_search=True",
    "beam_width": "n, with use_beam_search=True",
}
INTEGERS = {"top_k": 0, "max_tokens": 1, "min_tokens": 0, "n": 1, "best_of": 1, "seed": 0, "no_repeat_ngram_size": 1}
SHARES = ("top_p", "min_p", "top_p_min", "top_p_decay")


def is_greedy(temperature: float | None = None, top_k: int | None = None, top_p: float | None = None) -> bool:
    """True when these values always pick the most likely token, so that temperature has no effect.

    Temperature 0 counts as greedy too; nothing is ever divided by it.
    """
    return temperature == 0 or top_k == 1 or (not top_k and not top_p)


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_value(name: str, value: Any) -> Problem | None:
    if name in INTEGERS:
        smallest = INTEGERS[name]
        if not isinstance(value, int) or isinstance(value, bool):
            return error(f"{name}={value!r} is not a whole number", f"give a whole number from {smallest} on")
        if name == "top_k" and value == -1:
            return error("top_k=-1 means 'off' elsewhere, not here", "use top_k=0 to switch the limit off")
        if value < smallest:
            return error(f"{name}={value} is too small", f"the smallest value is {smallest}")
    elif name in SHARES:
        if not _number(value) or not 0 <= value <= 1:
            percent = f"; {value} percent is {value / 100:g}" if _number(value) and 1 < value <= 100 else ""
            return error(f"{name}={value!r} is not a share between 0 and 1", f"give a number from 0 to 1{percent}")
    elif name == "temperature":
        if not _number(value) or value != value or value in (float("inf"), float("-inf")):
            return error(f"temperature={value!r} is not a number", "give a number above 0, or 0 for greedy")
        if value < 0:
            return error(f"temperature={value} is below 0", "give a number above 0, or 0 for greedy")
    elif name == "repetition_penalty" and not (_number(value) and value > 0):
        return error(f"repetition_penalty={value!r} is not above 0", "1.0 switches it off")
    return None


def check_sampling(**parameters: Any) -> list[Problem]:
    """Problems of a set of `SamplingParams` keywords; a value of None counts as not given.

    Errors: unknown names (with the right one), values out of range, min_tokens above max_tokens, best_of below n.
    Warnings: a temperature, top_p or seed that has no effect because decoding is greedy.
    """
    known = api("SamplingParams")
    found: list[Problem] = []
    given = {name: value for name, value in parameters.items() if value is not None}
    for name, value in given.items():
        if name not in known.parameters:
            fix = f"use {OTHER_NAMES.get(name) or known.nearest(name)}"
            found.append(error(f"{name} is not a sampling parameter", fix))
        elif problem := _check_value(name, value):
            found.append(problem)
    if found:
        return found
    if given.get("min_tokens", 0) > given.get("max_tokens", 32):
        text = f"min_tokens={given['min_tokens']} is above max_tokens={given.get('max_tokens', 32)}"
        found.append(error(text, "raise max_tokens"))
    if given.get("best_of", given.get("n", 1)) < given.get("n", 1):
        found.append(error(f"best_of={given['best_of']} is below n={given['n']}", "raise best_of or leave it out"))
    temperature, top_k, top_p = given.get("temperature"), given.get("top_k"), given.get("top_p")
    if is_greedy(temperature, top_k, top_p) and not given.get("use_beam_search"):
        fix = "set top_k above 1 or top_p above 0 to sample"
        if temperature not in (None, 0, 1):
            why = "top_k=1 always takes the most likely token" if top_k == 1 else "decoding is greedy by default"
            found.append(warning(f"temperature={temperature} has no effect: {why}", fix))
        elif "seed" in given:
            found.append(warning("seed has no effect: decoding is greedy", fix))
    return found
