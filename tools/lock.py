"""Writes requirements-cpu.lock from pyproject.toml and requirements-cpu.in. Needs uv (``pip install uv``) and PyPI.

One file for Python 3.10 to 3.12: versions that differ carry environment markers. CUDA packages are left out, because
the CPU build of torch needs none of them; where pip takes torch's CUDA build instead, it resolves them itself.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "requirements-cpu.lock"
CUDA_ONLY = re.compile(
    r"nvidia-(cublas|cuda|cudnn|cufft|cufile|curand|cusolver|cusparse|nccl|nvjitlink|nvshmem|nvtx)|cuda-|triton=="
)
EVERYWHERE = "python_full_version < '3.13'"
HEADER = """\
# The exact versions of the CPU course, for Python 3.10 to 3.12. Made by `make lock`; do not edit.
# torch: on Linux the CPU build is meant. `make` asks PyTorch's CPU index for it first; PyPI's own build works too, but
# brings several gigabytes of CUDA libraries along.
"""


def short_marker(line: str) -> str:
    """A line without the limit that all of them share, the first Python that the course does not run on."""
    for spelled in (f" ; {EVERYWHERE}", f" and {EVERYWHERE}", f"{EVERYWHERE} and "):
        line = line.removesuffix(spelled) if spelled.startswith(" ;") else line.replace(spelled, "")
    return line


def main() -> int:
    """Compiles, filters and writes the lock; returns uv's exit code."""
    uv = shutil.which("uv")
    if uv is None:
        print("uv was not found on PATH. Install it with `pip install uv` and try again.", file=sys.stderr)
        return 1
    command = [uv, "pip", "compile", "pyproject.toml", "requirements-cpu.in", "--all-extras", "--universal"]
    command += ["--python-version", "3.10", "--no-header", "--no-annotate", "--quiet", *sys.argv[1:]]
    result = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if result.returncode:
        return result.returncode
    lines = [short_marker(line) for line in result.stdout.splitlines() if line and not CUDA_ONLY.match(line)]
    temporary = LOCK.with_suffix(".new")
    temporary.write_text(HEADER + "\n".join(lines) + "\n", encoding="utf-8")
    temporary.replace(LOCK)
    print(f"{LOCK.name}: {len(lines)} lines")
    return 0


if __name__ == "__main__":
    sys.exit(main())
