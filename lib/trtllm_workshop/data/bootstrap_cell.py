# Finds the course's files; on a rented GPU machine it also installs TensorRT-LLM. Safe to run again.
REPOSITORY = ""  # a Git address or a folder, for machines without the files (filled in by `workshop stamp --repo`)

import importlib.util
import os
import subprocess
import sys
from pathlib import Path


def find_course():
    """The folder of the course: this one or one above it, a copy fetched earlier, or a new copy of REPOSITORY."""
    here, source = Path.cwd(), os.environ.get("TRTLLM_WORKSHOP_REPO") or REPOSITORY
    base = next((path for path in (Path("/workspace"), Path("/content")) if path.is_dir()), Path.home())
    copy = base / "trtllm-workshop"
    for folder in [here, *here.parents, Path(source).expanduser() if source else here, copy]:
        if (folder / "lib" / "trtllm_workshop" / "__init__.py").is_file():
            return folder.resolve()
    if not source:
        raise RuntimeError(
            "The course's files are not on this machine. Set REPOSITORY in this cell (or the environment variable "
            f"TRTLLM_WORKSHOP_REPO) to the Git address or the folder of the course, or copy the files to {copy}."
        )
    print(f"Fetching {source} into {copy}")
    part = copy.with_suffix(".part")
    subprocess.run(["rm", "-rf", str(part)], check=True)
    command = ["git", "clone", "--depth", "1", source, str(part)]
    quiet = {**os.environ, "GIT_TERMINAL_PROMPT": "0"}
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=quiet)
    print(result.stdout)
    if result.returncode or not (part / "lib" / "trtllm_workshop" / "__init__.py").is_file():
        raise RuntimeError(f"{source} could not be fetched, or is not this course. Check REPOSITORY.\n{result.stdout}")
    part.rename(copy)
    return copy


def look():
    """Python, GPU, driver and compute capability in a line; nothing is installed before this is known."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,compute_cap", "--format=csv,noheader"]
    try:
        result = subprocess.run(query, capture_output=True, text=True, timeout=60)
        gpu = result.stdout.strip() if result.returncode == 0 else f"no usable GPU (exit code {result.returncode})"
    except (OSError, subprocess.TimeoutExpired):
        gpu = "no NVIDIA GPU"
    return f"Python {sys.version.split()[0]}, {gpu or 'no NVIDIA GPU'}"


print(look())
if importlib.util.find_spec("trtllm_workshop") is None:
    course_folder = find_course()
    sys.path.insert(0, str(course_folder / "lib"))
    if course_folder not in (Path.cwd(), *Path.cwd().parents):
        os.chdir(course_folder / "notebooks")  # so that "../work" lies in the course's folder

from trtllm_workshop import install_gpu

decision = install_gpu.prepare()
