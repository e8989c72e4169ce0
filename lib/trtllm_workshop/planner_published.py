"""The published throughput figures of TensorRT-LLM, as cases that the planner can predict."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trtllm_workshop.model_spec import ModelSpec
from trtllm_workshop.planner_gpus import Gpu, load_gpus
from trtllm_workshop.planner_memory import Split
from trtllm_workshop.planner_throughput import Load
from trtllm_workshop.planner_work import Engine

FILE = Path(__file__).parent / "data" / "perf_published.json"
GPUS = {
    "H200 141GB SXM": "H200",
    "H100 80GB SXM": "H100",
    "GH200 480GB": "GH200",
    "L40S": "L40S",
    "A100-SXM4-80GB": "A100 80GB",
    "B200 180GB": "B200",
    "GB200 192GB": "GB200",
}
# FP8 and FP4 checkpoints of these runs keep the KV cache in FP8, FP16 ones in FP16.
DTYPES = {"FP8": ("fp8", "fp8"), "FP4": ("nvfp4", "fp8"), "FP16": ("float16", "float16")}


def llama(size: str) -> ModelSpec:
    """Llama 3.1 or 3.3 of a size, "8B", "70B" or "405B", as its config.json says."""
    hidden, layers, heads, inner = {
        "8B": (4096, 32, 32, 14336),
        "70B": (8192, 80, 64, 28672),
        "405B": (16384, 126, 128, 53248),
    }[size]
    return ModelSpec(
        architecture="LlamaForCausalLM",
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_size=128,
        intermediate_size=inner,
        vocab_size=128256,
        max_position_embeddings=131072,
        rotary_base=500000.0,
    )


@dataclass(frozen=True)
class Case:
    """One published row: `tokens_per_second` of answers of the whole system, every request queued at once."""

    source: str
    model: str
    engine: Engine
    load: Load
    tokens_per_second: float


def cases(file: Path = FILE, gpus: Mapping[str, Gpu] | None = None) -> tuple[list[Case], list[str]]:
    """(cases, what was left out and why). The newest page's figures are per GPU and are multiplied by the ranks; v0.17 does
    not say how many requests it ran, so the number of v1.0 for the same lengths is taken."""
    table = gpus or load_gpus()
    document = json.loads(file.read_text(encoding="utf-8"))
    found, left_out = [], []
    for row in document["rows"]:
        label = f"{row['source']} {row['model']} on {row['gpu']}, {row['precision']}, {row['isl']}/{row['osl']}"
        size = next(
            (size for size in ("405B", "70B", "8B") if f"-{size}" in row["model"] and "Llama-3" in row["model"]), None
        )
        requests = _requests(document["requests_used"], row["source"], f"{row['isl']}/{row['osl']}")
        if size is None or row["gpu"] not in GPUS or row["precision"] not in DTYPES or requests is None:
            left_out.append(f"{label}: model, GPU, precision or number of requests not known exactly")
            continue
        split = Split(row["tp"], row["pp"])
        engine = Engine(llama(size), table[GPUS[row["gpu"]]], *DTYPES[row["precision"]], split)
        value = row["value"] * (split.ranks if "per GPU" in row["unit"] else 1)
        found.append(Case(row["source"], row["model"], engine, Load(row["isl"], row["osl"], requests), value))
    return found, left_out


def _requests(used: Mapping[str, Mapping[str, int]], source: str, lengths: str) -> int | None:
    own = used.get(source, {})
    return own.get(lengths) or next((page[lengths] for page in used.values() if lengths in page), None)
