"""The scales of a quantized checkpoint, looked at one by one: were they measured, and can they be right?

A checkpoint with useless scales loads, builds and answers; only the answers are worse. So the values are checked: missing,
zero, negative, NaN, infinite, or exactly 1.0 everywhere.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trtllm_workshop.checkpoint import TensorInfo, config_section, read_config, read_tensor, require_kind, tensor_index
from trtllm_workshop.e4m3 import saturated_share

__all__ = ["ScaleAudit", "ScaleRow", "audit_scales", "saturated_share"]

KINDS = {
    "weights_scaling_factor": "weights",
    "activation_scaling_factor": "activations",
    "kv_cache_scaling_factor": "KV cache",
    "k_cache_scaling_factor": "K cache",
    "v_cache_scaling_factor": "V cache",
}


@dataclass(frozen=True)
class ScaleRow:
    """The scales of one tensor: its smallest and largest value (the same for one scale), and what is wrong with it."""

    name: str
    layer: int | None
    kind: str
    low: float
    high: float
    finding: str = ""


@dataclass(frozen=True)
class ScaleAudit:
    """All rows, and in `problems` what makes the checkpoint doubtful, in sentences."""

    rows: list[ScaleRow] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.problems

    def __str__(self) -> str:
        lines = [f"{'scales of':<14} {'tensors':>7} {'smallest':>10} {'largest':>10}  finding"]
        for kind in KINDS.values():
            rows = [row for row in self.rows if row.kind == kind]
            if rows:
                found = sorted({row.finding for row in rows} - {""})
                low, high = min(row.low for row in rows), max(row.high for row in rows)
                verdict = "; ".join(found) or ("all 1.0, see below" if (low, high) == (1.0, 1.0) else "plausible")
                lines.append(f"{kind:<14} {len(rows):>7} {low:>10.4g} {high:>10.4g}  {verdict}")
        return "\n".join([*lines, *self.problems])


def audit_scales(checkpoint_dir: str | Path) -> ScaleAudit:
    """Read every scale of a checkpoint, all ranks.

    Raises:
        WrongFolderKind, BrokenWeights: for a folder that is no checkpoint, or a damaged one.
    """
    folder = require_kind(checkpoint_dir, "checkpoint")
    config = read_config(folder)
    section = config_section(config, "quantization")
    rows: list[ScaleRow] = []
    missing: list[str] = []
    world = config_section(config, "mapping").get("world_size", 1)
    files = {f"rank{rank}.safetensors": folder / f"rank{rank}.safetensors" for rank in range(world)}
    for title, file in files.items():
        if not file.is_file():
            missing.append(f"{title} is missing: quantize the model again, or copy the whole folder")
            continue
        index = tensor_index(file)
        rows += [_row(file, name) for name in index if name.rpartition(".")[2] in KINDS]
        missing += _missing(index, section, f" of {title}" if world > 1 else "")
    problems = [*sorted({f"{row.name}: {row.finding}" for row in rows if row.finding}), *missing]
    problems += _all_one(rows, section.get("kv_cache_quant_algo"))
    return ScaleAudit(rows, problems)


def _row(file: Path, name: str) -> ScaleRow:
    values = [float(value) for value in read_tensor(file, name).float().flatten().tolist()]
    layer = re.search(r"(?<=\.layers\.)\d+", name)
    finding = ""
    if any(math.isnan(value) for value in values):
        finding = "NaN"
    elif any(math.isinf(value) for value in values):
        finding = "infinite"
    elif any(value == 0 for value in values):
        finding = "zero"
    elif any(value < 0 for value in values):
        finding = "negative"
    finite = [value for value in values if math.isfinite(value)] or [math.nan]
    kind = KINDS[name.rpartition(".")[2]]
    return ScaleRow(name, int(layer[0]) if layer else None, kind, min(finite), max(finite), finding)


def _missing(index: Mapping[str, TensorInfo], section: Mapping[str, Any], where: str) -> list[str]:
    """Scales that a file lacks, judged by its own weights: so it holds for every rank and pipeline stage."""
    algorithm, cache = section.get("quant_algo"), section.get("kv_cache_quant_algo")
    stored = {"FP8": "float8_e4m3fn", "W4A16_AWQ": "int8"}.get(str(algorithm))
    gone: dict[str, list[str]] = {}
    for name, info in index.items():
        module = name.removesuffix(".weight")
        if module == name:
            continue
        if info.dtype == stored:
            for suffix in ("weights_scaling_factor", "activation_scaling_factor")[: 2 if algorithm == "FP8" else 1]:
                if f"{module}.{suffix}" not in index:
                    gone.setdefault(f"scales of {KINDS[suffix]}", []).append(module)
        if cache and module.endswith(".attention.qkv"):
            attention = module.removesuffix(".qkv")
            joint, *separate = (f"{attention}.{part}_cache_scaling_factor" in index for part in ("kv", "k", "v"))
            if not joint and not all(separate):
                gone.setdefault("scales of the KV cache", []).append(attention)
    return [f"{what}{where} are missing for {', '.join(modules)}" for what, modules in gone.items()]


def _all_one(rows: list[ScaleRow], cache: object) -> list[str]:
    """A sentence for each kind whose scales are all exactly 1.0; keys, values and both together count as one kind."""
    groups: dict[str, list[ScaleRow]] = {}
    for row in rows:
        if not row.finding:
            groups.setdefault("the KV cache" if "cache" in row.kind else row.kind, []).append(row)
    problems = []
    for kind, found in groups.items():
        if any((row.low, row.high) != (1.0, 1.0) for row in found):
            continue
        text = f"all {len(found)} scales of {kind} are exactly 1.0: "
        if kind == "the KV cache" and cache == "FP8":
            text += (
                "this file cannot say why. Either the largest keys and values were measured and lie below 448 (ModelOpt then "
                "writes 1.0, its smallest FP8 scale), which is fine; or they were never measured. Look at keys and values, or at "
                "what calibration printed"
            )
        elif kind == "the KV cache":
            text += "not measured (an INT8 scale is amax / 127 and is not clamped); quantize the model again"
        else:
            text += "not calibrated; quantize the model again with quantize.py"
        problems.append(text)
    return problems
