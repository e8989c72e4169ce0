"""What one lesson leaves behind: ``work/results/NN.json`` with its numbers, checks, exercises, figures and machine."""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

KEY_PACKAGES = (
    "tensorrt_llm",
    "torch",
    "transformers",
    "huggingface_hub",
    "safetensors",
    "tokenizers",
    "nvidia-modelopt",
    "numpy",
)


def now() -> str:
    """The present moment in UTC, ISO 8601 with microseconds, so that the order of two records can be told."""
    return datetime.now(timezone.utc).isoformat(timespec="microseconds")


def write_text(path: Path, text: str) -> None:
    """Writes a whole file or nothing: first under a temporary name in the same folder, then renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_json(path: Path, data: Any) -> None:
    """:func:`write_text` of ``data`` as readable JSON."""
    write_text(path, json.dumps(data, indent=2, ensure_ascii=False, default=str) + "\n")


def package_versions() -> dict[str, str]:
    """Versions of the packages that decide a result, as installed beside the notebook kernel; nothing is imported."""
    found = {}
    for name in KEY_PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def finite(name: str, value: Any) -> float | int:
    """``value`` (also a numpy or torch scalar) as a plain finite number. Raises ValueError or TypeError otherwise."""
    plain = value.item() if hasattr(value, "item") else value
    if isinstance(plain, bool) or not isinstance(plain, int | float):
        raise TypeError(f"the value of {name!r} must be a number, not {type(value).__name__}: {value!r}")
    if not math.isfinite(plain):
        raise ValueError(f"the value of {name!r} is {plain}; only a finite number can be recorded")
    return plain


@dataclass
class Quantity:
    """One number with a unit: predicted, measured or both. ``quiet`` ones are shown in another place than the rest."""

    name: str
    unit: str
    predicted: float | None = None
    measured: float | None = None
    samples: dict[str, float] = field(default_factory=dict)
    quiet: bool = False

    @property
    def ratio(self) -> float | None:
        """Measured divided by predicted; None while one is missing or the prediction is zero."""
        if self.predicted is None or self.measured is None or self.predicted == 0:
            return None
        return self.measured / self.predicted

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "unit": self.unit,
            "predicted": self.predicted,
            "measured": self.measured,
            "ratio": self.ratio,
            "samples": self.samples,
        }


def summarise(name: str, samples: Sequence[Any]) -> dict[str, float]:
    """Count, smallest, median, largest and sample deviation of repeated measurements."""
    values = [finite(name, sample) for sample in samples]
    if not values:
        raise ValueError(f"measurement {name!r} has an empty list of samples")
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    middle = statistics.median(values)
    return {"count": len(values), "min": min(values), "median": middle, "max": max(values), "stdev": spread}


@dataclass
class Record:
    """Everything of one lesson's run; :meth:`write` puts it on disk in one step."""

    lesson: str
    context: dict[str, Any]
    started: str = field(default_factory=now)
    quantities: dict[str, Quantity] = field(default_factory=dict)
    checks: dict[str, dict[str, Any]] = field(default_factory=dict)
    exercises: dict[str, dict[str, Any]] = field(default_factory=dict)
    figures: dict[str, dict[str, str]] = field(default_factory=dict)
    artifacts: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def quantity(self, name: str, unit: str) -> Quantity:
        """The quantity of that name, made when new. Raises ValueError when the unit differs from the earlier one."""
        known = self.quantities.setdefault(name, Quantity(name, unit))
        if known.unit != unit:
            raise ValueError(f"{name!r} was given in {known.unit!r} before and now in {unit!r}; use one unit for both")
        return known

    def as_dict(self, status: str) -> dict[str, Any]:
        finished = now()
        seconds = (datetime.fromisoformat(finished) - datetime.fromisoformat(self.started)).total_seconds()
        return {
            "schema": 1,
            "lesson": self.lesson,
            "status": status,
            "started": self.started,
            "finished": finished,
            "seconds": round(seconds, 3),
            **self.context,
            "python": platform.python_version(),
            "packages": package_versions(),
            "quantities": [quantity.as_dict() for quantity in self.quantities.values()],
            "checks": list(self.checks.values()),
            "exercises": list(self.exercises.values()),
            "figures": list(self.figures.values()),
            "artifacts": list(self.artifacts.values()),
            "notes": self.notes,
        }

    def write(self, path: Path, status: str) -> None:
        """Writes the record as JSON; ``status`` is ``ok`` or ``failed``."""
        write_json(path, self.as_dict(status))
