"""From work to time: a roofline with five constants, which say how much of the peak rates software reaches."""

from __future__ import annotations

from dataclasses import dataclass

from trtllm_workshop.planner_work import Work

# datasets/measurements/2026-12-03-h200-engine.json: a plain read of memory reaches 4.375 of the H200's 4.8 TB/s; no kernel
# is faster than that, so the fit may not pass it.
READ_CEILING = 0.911
# From the same file, Llama 3 8B in FP8, batch 1: (2.926 - 1.897) ms of a step are not explained by reading, in 32 layers.
# Measured, not fitted: published runs have large batches and cannot show it.
LAYER_SECONDS = 32e-6


@dataclass(frozen=True)
class Constants:
    """The constants of the model. Four are fitted over published runs (benchmarks/planner.py fits them again), one is measured.

    `compute`, `bandwidth`, `attention` and `link` are shares of the peak: of the tensor cores' dense rate, of the memory's
    bandwidth for weights and small kernels, of the same for the KV cache, and of the link. `layer_seconds` is what a layer
    of a step costs whatever it does (launches and gaps). `message_seconds` is what waiting for the other ranks costs each
    time: nothing can be said of it from published runs (NVLink takes some microseconds), so it counts only where it is
    measured.

    The form of the model (what is added, what is counted) was chosen with all published rows in sight; only the constants
    are judged on GPUs that the fit has not seen.
    """

    compute: float = 0.6789
    bandwidth: float = 0.911
    attention: float = 0.8364
    link: float = 0.5161
    layer_seconds: float = LAYER_SECONDS
    message_seconds: float = 0.0


IDEAL = Constants(1, 1, 1, 1, 0)  # the roofline itself
MEASURED_RATES = Constants(1, 1, 1, 1, LAYER_SECONDS)  # for rates that were measured: nothing is left to take off


@dataclass(frozen=True)
class Seconds:
    """Where time goes, in seconds, on one rank; the parts follow each other.

    Computing the matrix products and reading their weights are added, not hidden behind each other: over the published runs
    that fits better than the slower of the two, without a further constant.
    """

    products: float
    weights: float
    attention: float
    scores: float
    small_kernels: float
    link: float
    overhead: float

    @property
    def total(self) -> float:
        return self.compute + self.bandwidth + self.link + self.overhead

    @property
    def compute(self) -> float:
        return self.products + self.scores

    @property
    def bandwidth(self) -> float:
        return self.weights + self.attention + self.small_kernels

    @property
    def limit(self) -> str:
        """What takes most of the time: compute, bandwidth, link or overhead."""
        return max(("compute", "bandwidth", "link", "overhead"), key=lambda name: float(getattr(self, name)))


def seconds(work: Work, constants: Constants | None = None) -> Seconds:
    """Time of so much work on one rank."""
    by = constants or Constants()
    return Seconds(
        products=work.matrices / by.compute,
        weights=work.weights / by.bandwidth,
        attention=work.cache / by.attention,
        scores=work.scores / by.compute,
        small_kernels=work.streams / by.bandwidth,
        link=work.link / by.link + work.messages * by.message_seconds,
        overhead=work.layers * by.layer_seconds,
    )
