"""What trtllm-bench notes down about each request, and what follows from it.

Names and definitions from TensorRT-LLM's `tensorrt_llm/bench/dataclasses/statistics.py`: TTFT is the time to the first
token, TPOT the time per output token after the first. All times are nanoseconds of one monotonic clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

PERCENTILES = {"p50": 0.50, "p90": 0.90, "p95": 0.95, "p99": 0.99}


@dataclass
class RequestRecord:
    """One request's tokens and times. `error_tokens` is always 0: a failed request ends the whole run."""

    id: int
    num_input_tokens: int
    start_timestamp: int
    tokens: list[int] = field(default_factory=list)
    first_token_timestamp: int = -1
    end_timestamp: int = -1
    error_tokens: int = 0

    @property
    def num_total_output_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_generated_tokens(self) -> int:
        """Tokens of the generation phase: all but the first, which the context phase makes."""
        return max(len(self.tokens) - 1, 0)

    @property
    def end_to_end_latency(self) -> int:
        return self.end_timestamp - self.start_timestamp

    @property
    def time_to_first_token(self) -> int:
        return self.first_token_timestamp - self.start_timestamp

    @property
    def generation_time(self) -> int:
        return self.end_timestamp - self.first_token_timestamp

    @property
    def intertoken_latency(self) -> float:
        """TPOT of this request; 0 when it has only one token."""
        return self.generation_time / self.num_generated_tokens if self.num_generated_tokens else 0.0

    @property
    def output_token_throughput(self) -> float:
        """All tokens over the whole latency, in tokens per nanosecond."""
        return len(self.tokens) / self.end_to_end_latency if self.end_to_end_latency > 0 else 0.0

    @property
    def generation_token_throughput(self) -> float:
        """Tokens of the generation phase over its time, in tokens per nanosecond; 0 when there is only one token."""
        return self.num_generated_tokens / self.generation_time if self.generation_time > 0 else 0.0

    def saved(self) -> dict[str, Any]:
        """The entry of `--request_json`, without the text."""
        entry = asdict(self)
        tokens = entry.pop("tokens")
        names = (
            "num_total_output_tokens",
            "num_generated_tokens",
            "generation_time",
            "time_to_first_token",
            "intertoken_latency",
            "end_to_end_latency",
            "output_token_throughput",
            "generation_token_throughput",
        )
        return {
            **entry,
            "decode_iteration": self.num_generated_tokens,
            **{name: getattr(self, name) for name in names},
            "output_tokens": len(tokens),
        }


def percentiles(values: Sequence[float], scale: float = 1.0) -> dict[str, float]:
    """p50, p90, p95, p99, minimum, maximum and average, each times `scale`.

    A percentile is a value that occurred: of n sorted values the one at position floor(n * share), counted from 0.

    Raises:
        ValueError: for no values.
    """
    if not values:
        raise ValueError("percentiles of nothing: at least one request must have ended")
    ordered = sorted(values)
    found = {name: ordered[int(len(ordered) * share)] for name, share in PERCENTILES.items()}
    found |= {"minimum": ordered[0], "maximum": ordered[-1], "average": sum(ordered) / len(ordered)}
    return {name: float(value) * scale for name, value in found.items()}
