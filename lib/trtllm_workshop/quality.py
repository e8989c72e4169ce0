"""What quantization cost: perplexity, KL divergence and agreement of two engines on the same texts, with uncertainty.

Everything is worked out from logits, in float64 and a few tokens at a time. Intervals come from the bootstrap (Efron 1979)
over whole texts: the tokens of a text resemble each other, so drawing single tokens would claim too much certainty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from trtllm_workshop.e4m3 import as_array

_ROWS = 64  # rows of logits widened to float64 at a time: 64 x 150,000 x 8 bytes = 77 MB


@dataclass(frozen=True)
class Interval:
    """An estimate and the bounds between which the given share of resampled results lies."""

    low: float
    estimate: float
    high: float

    def __str__(self) -> str:
        return f"{self.estimate:.4g} ({self.low:.4g} to {self.high:.4g})"


@dataclass(frozen=True)
class TokenComparison:
    """Two engines at every predicted token of one text (or of several, see `concatenate`); arrays of equal length.

    Attributes:
        nll_reference, nll_candidate: negative log probability of the text's next token, in nats.
        kl: KL(reference || candidate), in nats.
        agree: whether both have the same most probable token.
        margin: by how much the reference's best logit leads its second.
        noise: largest difference of the two rows of logits, their mean difference taken out.
    """

    nll_reference: np.ndarray
    nll_candidate: np.ndarray
    kl: np.ndarray
    agree: np.ndarray
    margin: np.ndarray
    noise: np.ndarray

    @classmethod
    def concatenate(cls, parts: Sequence[TokenComparison]) -> TokenComparison:
        """The comparisons of several texts behind each other. Raises ValueError when there are none."""
        if not parts:
            raise ValueError("no comparisons to join: compare at least one text")
        return cls(*(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(cls)))

    def __len__(self) -> int:
        return len(self.kl)


def _checked(name: str, logits: Any, token_ids: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    values, ids = as_array(logits), as_array(token_ids)
    if values.ndim != 2 or len(values) != len(ids):
        raise ValueError(
            f"{name} logits have the shape {values.shape} for {len(ids)} tokens, expected [{len(ids)}, vocabulary]: ask for "
            "return_context_logits, and give the ids that the engine was given"
        )
    if len(ids) < 2:
        raise ValueError(f"{len(ids)} token: a text needs at least two, the first predicts the second")
    if ids.min() < 0 or ids.max() >= values.shape[1]:
        wrong = int(ids.min() if ids.min() < 0 else ids.max())
        raise ValueError(f"token {wrong} is outside the vocabulary of {values.shape[1]} of {name} logits")
    return values, ids


def _log_softmax(rows: np.ndarray, name: str) -> np.ndarray:
    wide = rows.astype(np.float64)
    if not np.isfinite(wide).all():
        raise ValueError(f"{name} logits hold NaN or infinity: look at the scales of the checkpoint (scale_audit)")
    wide -= wide.max(-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(-1, keepdims=True))


def score_tokens(logits: Any, token_ids: Sequence[int]) -> np.ndarray:
    """Negative log probability, in nats, of each token but the first: [T - 1] from logits [T, vocabulary]."""
    values, ids = _checked("the", logits, token_ids)
    parts = []
    for start in range(0, len(ids) - 1, _ROWS):
        rows = _log_softmax(values[start : min(start + _ROWS, len(ids) - 1)], "the")
        parts.append(-rows[np.arange(len(rows)), ids[start + 1 : start + 1 + len(rows)]])
    return np.concatenate(parts)


def compare_logits(reference: Any, candidate: Any, token_ids: Sequence[int]) -> TokenComparison:
    """Two engines on one text; the last row of logits is left out, since no token follows it.

    Args:
        reference, candidate: [T, vocabulary] logits after each token; NumPy or torch.
        token_ids: the T tokens that both engines were given.

    Raises:
        ValueError: for shapes that do not fit, ids outside the vocabulary, NaN or infinity.
    """
    left, ids = _checked("the reference", reference, token_ids)
    right = as_array(candidate)
    if left.shape != right.shape:
        raise ValueError(f"reference logits are {left.shape}, candidate logits {right.shape}: not the same model")
    parts = []
    for start in range(0, len(ids) - 1, _ROWS):
        stop = min(start + _ROWS, len(ids) - 1)
        a, b = left[start:stop].astype(np.float64), right[start:stop].astype(np.float64)
        p, q = _log_softmax(a, "reference"), _log_softmax(b, "candidate")
        index, following = np.arange(stop - start), ids[start + 1 : stop + 1]
        difference = b - a
        difference -= difference.mean(-1, keepdims=True)
        best = np.partition(a, -2, axis=-1)[:, -2:]
        parts.append(
            TokenComparison(
                -p[index, following],
                -q[index, following],
                np.maximum((np.exp(p) * (p - q)).sum(-1), 0.0),
                a.argmax(-1) == b.argmax(-1),
                best[:, 1] - best[:, 0],
                np.abs(difference).max(-1),
            )
        )
    return TokenComparison.concatenate(parts)


def perplexity(nll: Any) -> float:
    """exp of the mean negative log probability per token."""
    return float(np.exp(np.mean(np.asarray(nll, dtype=np.float64))))


def bootstrap_interval(
    per_text: Sequence[Any],
    statistic: Callable[[np.ndarray], float],
    level: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> Interval:
    """An interval for a statistic of all tokens, resampling whole texts.

    Args:
        per_text: one array per text; tokens on the first dimension. What belongs together (two engines' values for the
            same token) lies on the second, so that both are drawn together.
        statistic: from the joined array of the drawn texts to a number.
        level: share of the results between the bounds.
        resamples, seed: how many draws, and their start.

    Raises:
        ValueError: for fewer than two texts, or a level that is no share.
    """
    if len(per_text) < 2:
        raise ValueError(
            f"{len(per_text)} text(s): an interval needs at least two, and says little with fewer than ten"
        )
    if not 0 < level < 1:
        raise ValueError(f"level is {level}, expected a share such as 0.95")
    if resamples < 1:
        raise ValueError(f"resamples is {resamples}, expected 1 or more; 1000 give steady bounds")
    arrays = [np.asarray(values, dtype=np.float64) for values in per_text]
    generator = np.random.default_rng(seed)
    found = []
    for _ in range(resamples):
        drawn = generator.integers(0, len(arrays), len(arrays))
        found.append(float(statistic(np.concatenate([arrays[i] for i in drawn]))))
    low, high = np.quantile(found, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(low), float(statistic(np.concatenate(arrays))), float(high))


def perplexity_ratio(pairs: np.ndarray) -> float:
    """Candidate's perplexity over the reference's; pairs: [tokens, 2] of (nll_reference, nll_candidate)."""
    return float(np.exp((pairs[:, 1] - pairs[:, 0]).mean()))


@dataclass(frozen=True)
class QualityReport:
    """A candidate against a reference on the same texts."""

    reference: str
    candidate: str
    tokens: int
    perplexity_reference: float
    perplexity_candidate: float
    ratio: Interval
    kl: Interval
    agreement: Interval

    @property
    def verdict(self) -> str:
        """`worse` or `better` when the interval of the perplexity ratio lies on one side of 1, else no difference found."""
        if self.ratio.low > 1:
            return f"{self.candidate} is worse than {self.reference}"
        if self.ratio.high < 1:
            return f"{self.candidate} is better than {self.reference}"
        return f"no difference found between {self.candidate} and {self.reference} on {self.tokens} tokens"

    def __str__(self) -> str:
        rows = [
            ("perplexity", f"{self.perplexity_reference:.4g} -> {self.perplexity_candidate:.4g}"),
            ("ratio", str(self.ratio)),
            ("KL divergence, nats", str(self.kl)),
            ("same best token", str(self.agreement)),
            ("verdict", self.verdict),
        ]
        return "\n".join(f"{name:<20} {value}" for name, value in rows)


def quality_report(texts: Sequence[TokenComparison], reference: str, candidate: str, seed: int = 0) -> QualityReport:
    """Judge an engine from the comparisons of single texts. Raises ValueError for fewer than two texts."""
    pairs = [np.stack((text.nll_reference, text.nll_candidate), axis=1) for text in texts]
    ratio = bootstrap_interval(pairs, perplexity_ratio, seed=seed)
    joined = TokenComparison.concatenate(texts)
    return QualityReport(
        reference,
        candidate,
        len(joined),
        perplexity(joined.nll_reference),
        perplexity(joined.nll_candidate),
        ratio,
        bootstrap_interval([text.kl for text in texts], np.mean, seed=seed),
        bootstrap_interval([text.agree for text in texts], np.mean, seed=seed),
    )
