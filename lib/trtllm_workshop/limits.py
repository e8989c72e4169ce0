"""The length limits of an engine: where each came from, and what is left for the answer.

No torch here: the planner, the notebooks and the reference engine share these few rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from trtllm_workshop.command_facts import Flag, flags

# trtllm-build stretches the model's own limit by the rotary factor, except where the factor is already part of it.
UNSTRETCHED_ROPE = ("su", "longrope", "llama3")
MAX_SEQ_LEN_WITHOUT_MODEL = 2048


@dataclass(frozen=True)
class Limit:
    """One limit of a build: its value, and who decided it."""

    name: str
    value: int
    origin: Literal["default", "model", "user"]
    note: str = ""


class NewTokens(NamedTuple):
    """How many tokens a request may generate, and what to tell the user when that is fewer than asked."""

    allowed: int
    clamped: bool
    message: str


class PromptTooLong(ValueError):
    """The prompt leaves no room for an answer."""


def effective_new_tokens(prompt_len: int, max_tokens: int, max_seq_len: int) -> NewTokens:
    """Tokens (all lengths in tokens) that a request gets: at most `max_seq_len - prompt_len`.

    The rule of this course: max_seq_len counts prompt and answer together, and an answer has at least one token. So a
    prompt as long as max_seq_len is refused like a longer one, although an engine could still run one step for it.
    Raises PromptTooLong with both numbers, and ValueError for an empty prompt or max_tokens below 1.
    """
    if prompt_len < 1:
        raise ValueError("the prompt is empty: give at least one token")
    if max_tokens < 1:
        raise ValueError(f"max_tokens is {max_tokens}: ask for at least 1 token")
    room = max_seq_len - prompt_len
    if room < 1:
        raise PromptTooLong(
            f"the prompt has {prompt_len} tokens, and max_seq_len is {max_seq_len} for prompt and answer together: "
            f"shorten the prompt to {max_seq_len - 1} tokens or build with --max_seq_len {prompt_len + max_tokens}"
        )
    if max_tokens <= room:
        return NewTokens(max_tokens, False, "")
    return NewTokens(
        room,
        True,
        f"asked for {max_tokens} new tokens, but {prompt_len} prompt tokens leave {room} of max_seq_len {max_seq_len}: "
        f"the answer stops after {room} tokens (build with --max_seq_len {prompt_len + max_tokens} for all)",
    )


def _model_max_seq_len(config: Mapping[str, Any]) -> Limit:
    positions = config.get("max_position_embeddings")
    if not positions:
        note = "the model's config names no max_position_embeddings"
        return Limit("max_seq_len", MAX_SEQ_LEN_WITHOUT_MODEL, "default", note)
    scaling = config.get("rotary_scaling") or config.get("rope_scaling") or {}
    kind = scaling.get("rope_type") or scaling.get("type")
    factor = 1.0 if kind in UNSTRETCHED_ROPE else float(scaling.get("factor", 1.0))
    note = f"max_position_embeddings {positions}" + (f" x rotary factor {factor:g}" if factor != 1 else "")
    return Limit("max_seq_len", int(positions * factor), "model", note)


def _given(args: Mapping[str, Any], flag: Flag) -> int | None:
    for spelling in (flag.dest, *flag.spellings):
        if args.get(spelling) is not None:
            return int(args[spelling])
    return None


def effective_limits(config: Mapping[str, Any], build_args: Mapping[str, Any]) -> list[Limit]:
    """The limits that ``trtllm-build`` with `build_args` (only what the user gave) sets for this model.

    `config` is a checkpoint's or a Hugging Face config.json. The defaults are those of the recorded flags.
    """
    table = flags("trtllm-build")
    limits: dict[str, Limit] = {}
    for name in ("max_batch_size", "max_input_len", "max_seq_len", "max_num_tokens", "max_beam_width"):
        flag = table["--" + name]
        value = _given(build_args, flag)
        if value is not None:
            limits[name] = Limit(name, value, "user")
        elif flag.default is not None:
            limits[name] = Limit(name, int(flag.default), "default")
        else:
            limits[name] = _model_max_seq_len(config)
    packed = all(build_args.get(name, "enable") == "enable" for name in ("remove_input_padding", "context_fmha"))
    if packed:
        old = limits["max_input_len"]
        note = "TensorRT-LLM ignores it while remove_input_padding and context_fmha are on; max_seq_len counts"
        limits["max_input_len"] = Limit(old.name, old.value, old.origin, note)
    return list(limits.values())


def explain_limits(config: Mapping[str, Any], build_args: Mapping[str, Any]) -> str:
    """The limits as text, one line each: name, value, who decided it (default, model or user) and why."""
    lines = []
    for limit in effective_limits(config, build_args):
        lines.append(f"{limit.name:<15} {limit.value:>8}  {limit.origin:<8} {limit.note}".rstrip())
    return "\n".join(lines)
