"""Prometheus metrics of the server, in a registry of its own. Names begin with `trtllm_`, times are in seconds."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_FAST = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 2.5, 5)
_SLOW = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160)


class ServeMetrics:
    """Counts and times what the server does."""

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        own = self.registry
        self._model = model
        labels = ["model_name"]
        self._requests = Counter(
            "trtllm_requests", "requests by route and HTTP status", ["route", "status"], registry=own
        )
        self._success = Counter(
            "trtllm_request_success", "answers by finish reason", [*labels, "finished_reason"], registry=own
        )
        self._cancelled = Counter(
            "trtllm_request_cancelled", "answers that nobody waited for any more", labels, registry=own
        )
        self._prompt = Counter("trtllm_prompt_tokens", "tokens read", labels, registry=own)
        self._generated = Counter("trtllm_generation_tokens", "tokens made", labels, registry=own)
        self._ttft = Histogram(
            "trtllm_time_to_first_token_seconds", "to the first token", labels, buckets=_SLOW, registry=own
        )
        self._tpot = Histogram(
            "trtllm_time_per_output_token_seconds", "after the first", labels, buckets=_FAST, registry=own
        )
        self._e2e = Histogram(
            "trtllm_e2e_request_latency_seconds", "to the last token", labels, buckets=_SLOW, registry=own
        )
        names = ("requests_running", "requests_waiting", "kv_blocks_used", "kv_blocks_free", "iterations")
        self._gauges = {
            name: Gauge(f"trtllm_{name}", name.replace("_", " ") + " now", labels, registry=own) for name in names
        }
        self._healthy = Gauge("trtllm_healthy", "1 while requests are taken", registry=own)

    def request(self, route: str, status: int) -> None:
        """One request was answered, or its stream began, with this status."""
        self._requests.labels(route, str(status)).inc()

    def answer(self, reason: str, prompt_tokens: int, tokens: int, ttft: float | None, e2e: float) -> None:
        """One choice has ended."""
        self._success.labels(self._model, reason).inc()
        self._prompt.labels(self._model).inc(prompt_tokens)
        self._generated.labels(self._model).inc(tokens)
        self._e2e.labels(self._model).observe(e2e)
        if ttft is not None:
            self._ttft.labels(self._model).observe(ttft)
            if tokens > 1:
                self._tpot.labels(self._model).observe((e2e - ttft) / (tokens - 1))

    def cancelled(self) -> None:
        self._cancelled.labels(self._model).inc()

    def text(self, gauges: Mapping[str, int] | None, healthy: bool) -> bytes:
        """The exposition format. Without `gauges` (the engine does not answer) the last ones are left out, not repeated."""
        self._healthy.set(int(healthy))
        for name, gauge in self._gauges.items():
            gauge.clear()
            if gauges is not None and name in gauges:
                gauge.labels(self._model).set(gauges[name])
        return generate_latest(self.registry)
