"""From logits to the next token, for one request at a time; greedy rows of a batch are taken together."""

from __future__ import annotations

import torch

from trtllm_workshop.reference.sampling_params import SamplingParams, StopRules

SMALLEST = 1e-6  # a smaller divisor makes float32 logits infinite


def apply_penalties(logits: torch.Tensor, params: SamplingParams, prompt: list[int], made: list[int]) -> torch.Tensor:
    """Lower the logits of tokens that were already used. logits: [vocabulary] float32; returns a new tensor.

    Repetition penalty as in CTRL (arXiv 1909.05858): positive logits are divided by it, negative ones multiplied, for
    tokens of the prompt and the answer. Presence and frequency penalties are subtracted once, or once per occurrence,
    for tokens of the answer.
    """
    repetition, presence, frequency = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
    if repetition not in (None, 1.0) and (prompt or made):
        used = torch.tensor(sorted({*prompt, *made}))
        values, repetition = logits[used], max(repetition or 1.0, SMALLEST)
        logits = logits.index_copy(0, used, torch.where(values > 0, values / repetition, values * repetition))
    if made and (presence or frequency):
        used, counts = torch.unique(torch.tensor(made), return_counts=True)
        logits = logits.index_add(0, used, -((presence or 0.0) + (frequency or 0.0) * counts.float()))
    return logits


def banned_tokens(rules: StopRules, made: list[int]) -> set[int]:
    """Token ids that may not come next: ends before `min_tokens`, and last tokens of started bad sequences."""
    banned = {s[-1] for s in rules.bad_sequences if len(s) == 1 or made[-(len(s) - 1) :] == s[:-1]}
    if len(made) < rules.min_tokens:
        banned |= rules.end_ids | rules.stop_ids
    return banned


def sampling_distribution(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Probabilities after temperature, top-k, then top-p. logits: [vocabulary] float32 -> [vocabulary]."""
    if params.temperature not in (None, 1.0):
        # The largest becomes 0 first: divided by a tiny temperature it stays 0, where it would become infinite.
        logits = (logits - logits.max()) / max(params.temperature or 1.0, SMALLEST)
    if params.top_k:
        kept = logits.topk(min(params.top_k, logits.numel()))
        logits = torch.full_like(logits, float("-inf")).index_copy(0, kept.indices, kept.values)
    probabilities = logits.softmax(-1)
    if params.top_p and params.top_p < 1:
        ordered, order = probabilities.sort(descending=True)
        # A token stays while the tokens before it have not reached top_p: the first one always stays.
        cut = ordered.cumsum(-1) - ordered >= params.top_p
        cut[0] = False  # a top_p below float32's smallest number compares as 0
        probabilities = probabilities.index_copy(0, order, ordered.masked_fill(cut, 0.0))
        probabilities = probabilities / probabilities.sum()
    return probabilities


def choose(
    logits: torch.Tensor,
    params: SamplingParams,
    rules: StopRules,
    prompt: list[int],
    made: list[int],
    generator: torch.Generator | None,
) -> int:
    """The next token of one request. logits: [vocabulary] float32 on the host."""
    logits = apply_penalties(logits, params, prompt, made)
    # An end token beyond the vocabulary (a tokenizer larger than the model) cannot come anyway.
    banned = {token for token in banned_tokens(rules, made) if token < logits.numel()}
    if banned:
        logits = logits.index_fill(0, torch.tensor(sorted(banned)), float("-inf"))
    if params.greedy:
        return int(logits.argmax())
    return int(torch.multinomial(sampling_distribution(logits, params), 1, generator=generator))


def is_plain_greedy(params: SamplingParams, rules: StopRules) -> bool:
    """Whether the next token is simply the largest logit, so that the whole batch needs one argmax."""
    penalties = (params.repetition_penalty or 1.0) != 1.0 or params.presence_penalty or params.frequency_penalty
    return params.greedy and not penalties and not rules.bad_sequences and not rules.min_tokens
