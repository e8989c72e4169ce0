"""Every picture that the course draws: functions that take plain numbers and return a matplotlib figure."""

from __future__ import annotations

from trtllm_workshop.figures import (
    checkpoint,
    download,
    engine,
    hardware,
    inference,
    kv_pool,
    parallel,
    quantize,
    serving,
    streaming,
    style,
)

__all__ = [
    "checkpoint",
    "download",
    "engine",
    "hardware",
    "inference",
    "kv_pool",
    "parallel",
    "quantize",
    "serving",
    "streaming",
    "style",
]
