"""The configuration and output classes of the LLM API."""

from trtllm_workshop.reference.configs import (
    BuildConfig,
    CapacitySchedulerPolicy,
    ContextChunkingPolicy,
    KvCacheConfig,
    SchedulerConfig,
)
from trtllm_workshop.reference.outputs import CompletionOutput, RequestOutput
from trtllm_workshop.reference.sampling_params import SamplingParams

__all__ = [
    "BuildConfig",
    "CapacitySchedulerPolicy",
    "CompletionOutput",
    "ContextChunkingPolicy",
    "KvCacheConfig",
    "RequestOutput",
    "SamplingParams",
    "SchedulerConfig",
]
