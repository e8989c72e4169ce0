"""What the library's planner predicts for the steps and loads that `tensor_parallel_gpu.py` measures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trtllm_workshop.model_spec import ModelSpec
from trtllm_workshop.planner_gpus import Gpu, PlanProblem, find_gpu, load_gpus
from trtllm_workshop.planner_memory import Split
from trtllm_workshop.planner_plan import next_token
from trtllm_workshop.planner_speed import seconds
from trtllm_workshop.planner_throughput import Load, schedule
from trtllm_workshop.planner_work import Engine

# precision of `random_checkpoint` -> the planner's types of weights and of the KV cache
TYPES = {"bf16": ("bfloat16", "bfloat16"), "fp8": ("fp8", "bfloat16"), "fp8-kv8": ("fp8", "fp8")}


def table_gpu(name: str) -> Gpu | None:
    """The GPU of the planner's table whose name the driver's begins with (`NVIDIA H100 80GB HBM3`); None for others."""
    words = name.split()
    for count in range(len(words), 0, -1):
        try:
            return find_gpu(" ".join(words[:count]), load_gpus())
        except PlanProblem:
            continue
    return None


@dataclass(frozen=True)
class Prediction:
    """Of one engine; keys as they stand in a row of the benchmark."""

    engine: Engine

    def step(self, batch: int, length: float) -> dict[str, Any]:
        """A generation step of `batch` requests that have `length` tokens each."""
        time = seconds(next_token(self.engine, batch, length))
        return {
            "predicted_milliseconds": round(time.total * 1e3, 4),
            "predicted_communication_share": round(time.link / time.total, 4),
        }

    def load(self, requests: int, prompt: int, new: int) -> dict[str, Any]:
        """`requests` of `prompt` and `new` tokens, queued at once."""
        time = seconds(schedule(self.engine, Load(prompt, new, requests)).work)
        return {
            "predicted_output_tokens_per_second": round(requests * new / time.total, 1),
            "predicted_communication_share": round(time.link / time.total, 4),
        }


def predicted(spec: ModelSpec, gpu: Gpu, precision: str, tp: int) -> Prediction:
    """The prediction for an engine of `tp` ranks, each on such a GPU."""
    dtype, kv_dtype = TYPES[precision]
    return Prediction(Engine(spec, gpu, dtype, kv_dtype, Split(tp)))
