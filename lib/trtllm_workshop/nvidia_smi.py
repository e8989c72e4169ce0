"""Ask ``nvidia-smi`` and read its three kinds of text: the CSV of ``--query-gpu``, the human header and ``topo -m``."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trtllm_workshop.gpu import Gpu, GpuReport, explain

FIELDS = ("index", "name", "memory.total", "memory.free", "compute_cap", "mig.mode.current", "driver_version")
WSL_PATH = "/usr/lib/wsl/lib/nvidia-smi"  # where Windows puts it; not on PATH in every shell
TIMEOUT_SECONDS = 20  # a broken driver can make nvidia-smi hang
INFOROM_CORRUPTED = 14  # a warning: the table printed beside it is complete

_NUMBER = re.compile(r"([0-9]{1,15})(?:\.[0-9]+)?(?:\s*[A-Za-z%]+)?")
_HEADER_CELL = re.compile(r"[a-z][a-z0-9_.]*(?: \[[^\]]*\])?")
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_DEVICE = re.compile(r"GPU[0-9]+")


@dataclass(frozen=True)
class CommandOutput:
    """How a command ended (127: not found, 124: no answer in time) and what it printed."""

    returncode: int
    text: str


Runner = Callable[[Sequence[str]], CommandOutput]


@dataclass(frozen=True)
class Links:
    """The GPU part of ``nvidia-smi topo -m``: ``matrix[i][j]`` is X, NV#, PIX, PXB, PHB, NODE or SYS."""

    gpus: tuple[str, ...]
    matrix: tuple[tuple[str, ...], ...]

    def between(self, first: int, second: int) -> str | None:
        """The connection between two GPUs by position, None when the table does not have it."""
        try:
            return self.matrix[first][second]
        except IndexError:
            return None


def run_command(argv: Sequence[str]) -> CommandOutput:
    """Runs a short query and returns its status and standard output; never raises for a missing or hanging program."""
    program = shutil.which(argv[0])
    if program is None and argv[0] == "nvidia-smi" and os.access(WSL_PATH, os.X_OK):
        program = WSL_PATH
    if program is None:
        return CommandOutput(127, "")
    try:
        done = subprocess.run(
            [program, *argv[1:]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return CommandOutput(124, f"{argv[0]} gave no answer within {TIMEOUT_SECONDS} s")
    except OSError as error:
        return CommandOutput(126, f"{argv[0]} cannot be started: {error}")
    return CommandOutput(done.returncode, done.stdout)


def query(runner: Runner = run_command) -> GpuReport:
    """Every GPU that nvidia-smi lists. The exit status counts before the text: failures are printed to stdout too."""
    fields: tuple[str, ...] = FIELDS
    for _ in FIELDS:
        output = runner(["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv"])
        unknown = set(re.findall(r'"?([a-z_.]+)"? is not a valid field', output.text)) & set(fields)
        if output.returncode == 0 or not unknown:
            break
        fields = tuple(field for field in fields if field not in unknown)  # older drivers have no compute_cap
    if output.returncode == 127:
        return GpuReport()
    if output.returncode not in (0, INFOROM_CORRUPTED):
        return GpuReport(problem=explain(output.text, output.returncode), source="nvidia-smi")
    gpus = tuple(parse_query(output.text, fields))
    if not gpus:
        return GpuReport(problem=explain(output.text), source="nvidia-smi")
    header = runner(["nvidia-smi"])
    driver, cuda = parse_header(header.text) if header.returncode in (0, INFOROM_CORRUPTED) else (None, None)
    return GpuReport(gpus, driver or gpus[0].driver_version, cuda, None, "nvidia-smi")


def parse_query(text: str, fields: Sequence[str] = FIELDS) -> list[Gpu]:
    """GPUs from CSV text, one a line; never raises. A value in brackets (or N/A, ERR!) is None and costs nothing else.

    `fields` names the columns of text without a header line; a header line, as ``--format=csv`` prints it, wins.
    """
    columns = list(fields)
    gpus: list[Gpu] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) < min(2, len(columns)) or not any(cells):
            continue  # a warning or an empty line, not a row
        header = _header(cells)
        if header:
            columns = header
            continue
        row = dict(zip(columns, cells, strict=False))
        index, mig = number(row.get("index")), value(row.get("mig.mode.current"))
        gpus.append(
            Gpu(
                index=len(gpus) if index is None else index,
                name=value(row.get("name")) or "unnamed GPU",
                memory_total_mib=number(row.get("memory.total")) or None,
                memory_free_mib=number(row.get("memory.free")),
                compute_capability=_capability(row.get("compute_cap")),
                mig=None if mig is None else mig.lower() == "enabled",
                driver_version=value(row.get("driver_version")),
            )
        )
    return gpus


def value(cell: str | None) -> str | None:
    """The text of a CSV cell, or None for every spelling of a missing value."""
    text = (cell or "").strip()
    if not text or text.startswith("[") or text.upper() in ("N/A", "ERR!", "NOT SUPPORTED", "UNKNOWN ERROR"):
        return None
    return text


def number(cell: str | None) -> int | None:
    """The whole number that a cell starts with (``24576``, ``24576 MiB``), or None for anything else."""
    found = _NUMBER.fullmatch(value(cell) or "")
    return int(found.group(1)) if found else None


def parse_header(text: str) -> tuple[str | None, str | None]:
    """(driver version, CUDA version) of the human table. Old branches print no CUDA field, new ones say KMD and UMD."""
    driver = re.search(r"(?:Driver|KMD) Version:\s*([0-9][0-9.]*)", text)
    cuda = re.search(r"CUDA(?: UMD)? Version:\s*([0-9][0-9.]*)", text)
    return (driver.group(1) if driver else None), (cuda.group(1) if cuda else None)


def parse_topology(text: str) -> Links | None:
    """The GPU columns of ``nvidia-smi topo -m``, None when there is no such table.

    Cells are tab separated and padded. Empty cells are dropped, since some releases print extra tabs; GPU columns come
    first and are never empty, so affinity columns (which can be) cannot shift them. Network cards and the legend are
    left out.
    """
    columns: list[str] = []
    rows: dict[str, list[str]] = {}
    for line in _ANSI.sub("", text).splitlines():
        cells = [cell.strip() for cell in line.split("\t") if cell.strip()]
        if not cells or not _DEVICE.fullmatch(cells[0]):
            continue
        if not columns:
            columns = cells
        else:
            rows[cells[0]] = cells[1:]
    wanted = [position for position, name in enumerate(columns) if _DEVICE.fullmatch(name)]
    names = tuple(columns[position] for position in wanted)
    matrix = []
    for name in names:
        row = rows.get(name, [])
        if not wanted or len(row) <= wanted[-1]:
            return None  # the table was cut off
        matrix.append(tuple(row[position] for position in wanted))
    return Links(names, tuple(matrix)) if names else None


def peer_access(connection: str | None, name: str) -> bool | None:
    """Whether two GPUs called `name` likely reach each other's memory directly (P2P); None when nothing is known.

    A guess from the table: NVLink yes; one or more PCIe switches yes, except on GeForce cards; through the CPU's host
    bridge or further (PHB, NODE, SYS) reported failing, on A10 and RTX 4090 among others.
    """
    if connection is None or value(connection) is None or connection == "X":
        return None
    if connection.startswith("NV"):
        return True
    if connection in ("PIX", "PXB"):
        return "geforce" not in name.lower()
    return False if connection in ("PHB", "NODE", "SYS") else None


def _header(cells: Sequence[str]) -> list[str] | None:
    names = [cell.split(" [")[0] for cell in cells]
    known = any(name in FIELDS for name in names)
    return names if known and all(_HEADER_CELL.fullmatch(cell) for cell in cells) else None


def _capability(cell: str | None) -> str | None:
    return cell.strip() if cell and re.fullmatch(r"\s*[0-9]{1,2}\.[0-9]{1,2}\s*", cell) else None
