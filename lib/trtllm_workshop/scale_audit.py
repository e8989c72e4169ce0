"""The scales of a quantized checkpoint, looked at one by one: were they measured, and can they be right?

A checkpoint with useless scales loads, builds and answers; only the answers are worse. So the values are checked: missing,
zero, negative, NaN, infinite, or exactly 1.0 everywhere.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path

from trtllm_workshop.checkpoint import config_section, read_config, read_tensor, require_kind, tensor_index
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
                lines.append(f"{kind:<14} {len(rows):>7} {low:>10.4g} {high:>10.4g}  {'; '.join(found) or 'plausible'}")
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
    problems: list[str] = []
    for file in sorted(folder.glob("rank*.safetensors")):
        names = [name for name in tensor_index(file) if name.rpartition(".")[2] in KINDS]
        rows += [_row(file, name) for name in names]
    problems += sorted({f"{row.name}: {row.finding}" for row in rows if row.finding})
    wanted = (
        set(range(config.get("num_hidden_layers") or 0))
        if config_section(config, "mapping").get("pp_size", 1) == 1
        else set()
    )
    for kind in ("weights", "activations"):
        if section.get("quant_algo") == "FP8":
            problems += _missing(rows, (kind,), wanted, f"scales of {kind}")
    if section.get("kv_cache_quant_algo"):
        problems += _missing(rows, ("KV cache", "K cache", "V cache"), wanted, "scales of the KV cache")
    for kind in KINDS.values():
        values = [row for row in rows if row.kind == kind and not row.finding]
        if values and all(row.low == row.high == 1.0 for row in values):
            problems.append(_all_one(kind, len(values)))
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


def _missing(rows: list[ScaleRow], kinds: tuple[str, ...], wanted: set[int], what: str) -> list[str]:
    gone = sorted(wanted - {row.layer for row in rows if row.kind in kinds and row.layer is not None})
    return [f"{what} are missing in layers {', '.join(map(str, gone))}"] if gone else []


def _all_one(kind: str, count: int) -> str:
    text = f"all {count} scales of {kind.replace('weights', 'the weights').replace('KV', 'the KV')} are exactly 1.0: "
    if "cache" in kind:
        return (
            text
            + "not calibrated, or measured below 1.0 and clamped (ModelOpt writes no smaller FP8 scale). Harmless while "
            "keys and values stay within ±448; look at what calibration printed"
        )
    return text + "not calibrated; quantize the model again with quantize.py"
