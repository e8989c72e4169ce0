"""A/B of two engines over the same prompts, without a person or a model that judges: which answers are worse, and how sure.

Both engines answer every prompt greedily. What can be measured without a judge:

* the **gate**: is the answer text at all, or empty, a loop, undecodable (`degenerate.degenerate_reason`);
* the **score**: how probable the answer is to one engine, the scorer (usually the 16-bit one): the mean log probability per
  token when it reads prompt and answer teacher-forced. The two answers are compared by this number;
* the **agreement**: how many tokens are the same, and where the first one differs.

What the verdict can claim: that the scorer finds one engine's answers less probable, by more than a stated tolerance, on
prompts like these. What it cannot claim: that an answer is true, useful or well written. A dull answer is probable, and a
loop is *very* probable, so the gate comes before the score. And the scorer favours itself: greedy answers are made of its
own best tokens. When the scorer is one of the two, a small loss of the other is expected, and the tolerance must be wider
than the loss that a harmless change makes (a second 16-bit or a 32-bit engine on the same prompts shows how much that is).

Intervals come from the bootstrap over prompts, with both answers of a prompt drawn together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trtllm_workshop.degenerate import degenerate_reason
from trtllm_workshop.quality import Interval, bootstrap_interval, score_tokens

TOLERANCE = 0.1  # nats per token: each token of the answer 10 % less probable
MIN_PROMPTS = 10  # fewer say nothing, however clear they look: the bootstrap is too sure of itself on a few values

NO_DIFFERENCE = "no difference seen"
TOO_FEW = "too few prompts to tell"


@dataclass(frozen=True)
class Answer:
    """What an engine answered to one prompt.

    Attributes:
        text: the answer without the prompt.
        token_ids: its tokens.
        score: mean log probability per token under the scorer, in nats (see `answer_score`); None only for an answer
            without tokens.
    """

    text: str
    token_ids: Sequence[int]
    score: float | None = None


@dataclass(frozen=True)
class Outcome:
    """One prompt: what came out, and why.

    Attributes:
        winner: "A", "B" or "tie".
        difference: score of B minus score of A, nats per token; None when an answer is degenerate.
        degenerate_a, degenerate_b: the gate's reason, None for an answer that passes.
        agreement: share of the longer answer's places that hold the same token in both.
        first_difference: place of the first token that differs, from 0; None for equal answers.
    """

    winner: str
    difference: float | None
    degenerate_a: str | None
    degenerate_b: str | None
    agreement: float
    first_difference: int | None


@dataclass(frozen=True)
class ABReport:
    """Two engines on the same prompts.

    Attributes:
        a, b, scorer: names; `scorer` may be one of the two.
        outcomes: one for each prompt.
        difference: mean score of B minus that of A over the prompts whose two answers pass the gate, nats per token;
            None with fewer than two such prompts.
        win_share: share of all prompts that B wins, a tie counting half: 0.5 is even.
        more_degenerate: share of B's answers that the gate stops, less that of A's.
    """

    a: str
    b: str
    scorer: str
    outcomes: list[Outcome]
    difference: Interval | None
    win_share: Interval
    more_degenerate: Interval
    tolerance: float
    min_prompts: int

    @property
    def scored(self) -> int:
        """Prompts whose two answers pass the gate."""
        return sum(outcome.difference is not None for outcome in self.outcomes)

    @property
    def wins(self) -> dict[str, int]:
        """How many prompts A wins, B wins, and neither does."""
        return {name: sum(o.winner == name for o in self.outcomes) for name in ("A", "B", "tie")}

    @property
    def rule(self) -> str:
        """How the verdict is reached, in sentences, in the order in which the conditions are tried."""
        return (
            "An engine fails the gate when the interval of its surplus of degenerate answers lies above 0. "
            f"With fewer than {self.min_prompts} prompts whose answers both pass, it is too few to tell. An engine is worse "
            f"when the interval of the mean difference lies beyond the tolerance of {self.tolerance:g} nats per token and "
            "the interval of the win share beyond one half. When the interval of the mean difference lies within the "
            "tolerance, no difference is seen if it holds 0, and otherwise one engine is worse within the tolerance. "
            "Everything else is too few prompts to tell."
        )

    @property
    def verdict(self) -> str:
        """In words, by `rule`: somebody fails the gate or is worse (perhaps within the tolerance), no difference, too few."""
        if self.more_degenerate.low > 0:
            return f"{self.b} fails the degenerate gate"
        if self.more_degenerate.high < 0:
            return f"{self.a} fails the degenerate gate"
        if self.difference is None or self.scored < self.min_prompts:
            return TOO_FEW
        if self.difference.high < -self.tolerance and self.win_share.high < 0.5:
            return f"{self.b} is worse"
        if self.difference.low > self.tolerance and self.win_share.low > 0.5:
            return f"{self.a} is worse"
        if -self.tolerance <= self.difference.low and self.difference.high <= self.tolerance:
            loser = self.b if self.difference.high < 0 else self.a if self.difference.low > 0 else None
            return f"{loser} is worse, but within the tolerance" if loser else NO_DIFFERENCE
        return TOO_FEW

    def __str__(self) -> str:
        wins, places = self.wins, [o.first_difference for o in self.outcomes if o.first_difference is not None]
        first = f", the others part at token {np.median(places):g} (median, from 0)" if places else ""
        stopped = [sum(getattr(o, f"degenerate_{side}") is not None for o in self.outcomes) for side in "ab"]
        rows = [
            ("A, B", f"{self.a}, {self.b}; {len(self.outcomes)} prompts"),
            ("degenerate", f"A {stopped[0]}, B {stopped[1]}"),
            (
                "better",
                f"A {wins['A']}, B {wins['B']}, tie {wins['tie']} (tolerance {self.tolerance:g} nats per token)",
            ),
            ("win share of B", str(self.win_share)),
            ("score, B - A", "-" if self.difference is None else f"{self.difference} nats per token, by {self.scorer}"),
            ("equal tokens", f"{self.agreement:.0%}; {len(self.outcomes) - len(places)} answers equal{first}"),
            ("verdict", self.verdict),
        ]
        if self.scorer in (self.a, self.b):
            rows.append(("mind", f"{self.scorer} scores its own answers, too, which favours them"))
        return "\n".join(f"{name:<16} {value}" for name, value in rows)

    @property
    def agreement(self) -> float:
        """Mean over the prompts of the share of equal tokens."""
        return float(np.mean([outcome.agreement for outcome in self.outcomes]))


def answer_score(logits: Any, prompt_tokens: int, token_ids: Sequence[int]) -> float:
    """Mean log probability per token of an answer, in nats, from the scorer's reading of prompt and answer.

    Args:
        logits: [T, vocabulary], the scorer's logits after each token of prompt and answer; NumPy or torch.
        prompt_tokens: how many of the T tokens are the prompt's, at least 1.
        token_ids: the T tokens of prompt and answer.

    Raises:
        ValueError: when no token is left for the answer, and as `quality.score_tokens` does.
    """
    if not 1 <= prompt_tokens < len(token_ids):
        raise ValueError(
            f"{prompt_tokens} prompt tokens of {len(token_ids)} tokens: the prompt needs at least one, and the answer, too; "
            "an answer without tokens has the score None"
        )
    return -float(score_tokens(logits, token_ids)[prompt_tokens - 1 :].mean())


def compare_answers(
    answers_a: Sequence[Answer],
    answers_b: Sequence[Answer],
    a: str = "A",
    b: str = "B",
    *,
    scorer: str = "the scorer",
    tolerance: float = TOLERANCE,
    min_prompts: int = MIN_PROMPTS,
    level: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> ABReport:
    """Judge two engines by their answers to the same prompts, in the same order.

    Args:
        answers_a, answers_b: one answer for each prompt, at least two.
        a, b, scorer: the engines' names in the report.
        tolerance: difference of two scores that still is a tie, nats per token, at least 0.
        min_prompts: with fewer prompts whose answers both pass the gate there is no verdict by score.
        level, resamples, seed: see `quality.bootstrap_interval`.

    Raises:
        ValueError: for lists that are empty or differ in length, one single prompt, a score that is missing, NaN or
            infinite (naming engine and prompt), a tolerance below 0.
    """
    if len(answers_a) != len(answers_b):
        raise ValueError(
            f"{len(answers_a)} answers of {a} and {len(answers_b)} of {b}: both must answer every prompt, in one order"
        )
    if len(answers_a) < 2:
        raise ValueError(f"{len(answers_a)} prompt(s): an interval needs at least two, a verdict {min_prompts} or more")
    if not 0 <= tolerance < math.inf:
        raise ValueError(f"tolerance is {tolerance}, expected nats per token from 0, such as {TOLERANCE}")
    outcomes = [
        _outcome(_checked(left, a, prompt), _checked(right, b, prompt), tolerance)
        for prompt, (left, right) in enumerate(zip(answers_a, answers_b, strict=True))
    ]

    def interval(values: Sequence[float]) -> Interval:
        return bootstrap_interval([[value] for value in values], np.mean, level, resamples, seed)

    differences = [outcome.difference for outcome in outcomes if outcome.difference is not None]
    return ABReport(
        a,
        b,
        scorer,
        outcomes,
        interval(differences) if len(differences) > 1 else None,
        interval([{"A": 0.0, "tie": 0.5, "B": 1.0}[outcome.winner] for outcome in outcomes]),
        interval([float(o.degenerate_b is not None) - float(o.degenerate_a is not None) for o in outcomes]),
        tolerance,
        min_prompts,
    )


def _checked(answer: Answer, engine: str, prompt: int) -> Answer:
    if answer.score is None and len(answer.token_ids):
        raise ValueError(f"the answer of {engine} to prompt {prompt} has no score: see answer_score")
    if answer.score is not None and not math.isfinite(answer.score):
        raise ValueError(
            f"the answer of {engine} to prompt {prompt} has the score {answer.score}: look at the scorer's logits, and at "
            "its scales (scale_audit)"
        )
    return answer


def _outcome(left: Answer, right: Answer, tolerance: float) -> Outcome:
    reasons = degenerate_reason(left.text), degenerate_reason(right.text)
    difference, winner = None, "tie"
    if reasons[0] is None and reasons[1] is None:
        if left.score is None or right.score is None:
            raise ValueError(
                f"an answer without tokens has the text {(left.text if left.score is None else right.text)!r}"
            )
        difference = right.score - left.score
        winner = "tie" if abs(difference) <= tolerance else "B" if difference > 0 else "A"
    elif (reasons[0] is None) != (reasons[1] is None):
        winner = "A" if reasons[0] is None else "B"
    return Outcome(winner, difference, *reasons, *_agreement(left.token_ids, right.token_ids))


def _agreement(left: Sequence[int], right: Sequence[int]) -> tuple[float, int | None]:
    """Share of the longer answer's places with the same token, and the first place that differs (None: nowhere)."""
    same = [x == y for x, y in zip(left, right, strict=False)]
    longest = max(len(left), len(right))
    first = next((place for place, equal in enumerate(same) if not equal), len(same) if len(same) < longest else None)
    return (sum(same) / longest if longest else 1.0), first
