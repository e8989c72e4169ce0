"""The table of GPUs that plans are made for: an editable file, read and checked."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TABLE = Path(__file__).parent / "data" / "gpus.yml"
PRECISIONS = ("fp32", "fp16", "fp8", "fp4")


class PlanProblem(ValueError):
    """A plan that cannot be made, with what was wrong and what to do next."""


@dataclass(frozen=True)
class Gpu:
    """One GPU: `memory` bytes, `bandwidth` bytes/s of its memory, `flops` dense operations/s by precision, `link` bytes/s
    to another GPU in one direction, `price` US dollars an hour (None: unknown)."""

    name: str
    memory: float
    bandwidth: float
    flops: Mapping[str, float]
    link: float
    kind: str
    price: float | None = None
    source: str = ""

    def rate(self, precision: str) -> float:
        """Dense operations per second. Raises PlanProblem for a precision that the GPU has no unit for."""
        if precision not in self.flops:
            raise PlanProblem(
                f"{self.name} has no {precision} rate in the table (it has {', '.join(self.flops)}): choose another "
                "--dtype, or add the rate to a copy of the table and pass it with --gpus"
            )
        return self.flops[precision]


def load_gpus(path: Path | None = None) -> dict[str, Gpu]:
    """All GPUs of a table file, by name. Raises PlanProblem naming the file, the GPU and the field that is wrong."""
    import yaml

    file = path or TABLE
    try:
        table = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanProblem(
            f"the GPU table {file} cannot be read ({error.strerror}): pass another with --gpus"
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:  # the last: brackets without end
        raise PlanProblem(
            f"the GPU table {file} is not YAML ({str(error).splitlines()[0]}): start from {TABLE}"
        ) from error
    entries = table.get("gpus") if isinstance(table, Mapping) else None
    if not isinstance(entries, Mapping) or not entries:
        raise PlanProblem(f"the GPU table {file} has no 'gpus': start from a copy of {TABLE}")
    return {str(name): _gpu(str(name), entry, file) for name, entry in entries.items()}


def _gpu(name: str, entry: Any, file: Path) -> Gpu:
    where = f"the GPU table {file}, {name}"
    if not isinstance(entry, Mapping):
        raise PlanProblem(f"{where}: expected fields such as memory_gib, found {entry!r}")
    rates = entry.get("flops")
    if not isinstance(rates, Mapping) or not rates or set(rates) - set(PRECISIONS):
        raise PlanProblem(f"{where}: flops is {rates!r}, expected rates for some of {', '.join(PRECISIONS)}")
    if entry.get("kind") not in ("nvlink", "pcie"):
        raise PlanProblem(f"{where}: kind is {entry.get('kind')!r}, expected nvlink or pcie")
    return Gpu(
        name,
        memory=_number(entry.get("memory_gib"), "memory_gib", where) * 2**30,
        bandwidth=_number(entry.get("bandwidth"), "bandwidth", where),
        flops={str(key): _number(value, f"flops {key}", where) for key, value in rates.items()},
        link=_number(entry.get("link"), "link", where),
        kind=str(entry["kind"]),
        price=None if entry.get("price") is None else _number(entry["price"], "price", where),
        source=str(entry.get("source", "")),
    )


def _number(value: Any, field: str, where: str) -> float:
    """YAML reads 1e9 without a sign as text, so text that is a number counts as one."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(value, bool) or not 0 < number < math.inf:
        raise PlanProblem(f"{where}: {field} is {value!r}, expected a number above 0")
    return number


def find_gpu(name: str, gpus: Mapping[str, Gpu]) -> Gpu:
    """The GPU of this name: case, spaces and hyphens do not count. Raises PlanProblem listing all and the nearest."""
    plain = {_plain(known): gpu for known, gpu in gpus.items()}
    if _plain(name) in plain:
        return plain[_plain(name)]
    starts = [gpu.name for key, gpu in plain.items() if _plain(name) and key.startswith(_plain(name))]
    near = starts or [plain[key].name for key in difflib.get_close_matches(_plain(name), plain, n=2, cutoff=0.5)]
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    raise PlanProblem(
        f"the GPU {name!r} is not in the table.{hint} Known are {', '.join(gpus)}. Another one: add it to a copy of {TABLE} "
        "and pass that with --gpus"
    )


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]|nvidia|geforce|tesla", "", name.lower())
