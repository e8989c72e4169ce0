"""The command that starts the C++ backend in NVIDIA's container: one process a rank, and the number comes from the engine."""

from __future__ import annotations

import shlex
from pathlib import Path

from trtllm_workshop.deploy.engine_limits import EngineLimits
from trtllm_workshop.deploy.model_files import RepositoryProblem
from trtllm_workshop.deploy.triton_check import read_config_pbtxt

SCRIPT = "/app/scripts/launch_triton_server.py"  # its place in the tritonserver …-trtllm-python-py3 container


def engine_of(repository: str | Path, model: str = "tensorrt_llm") -> EngineLimits:
    """The engine that a model of a repository serves. Raises RepositoryProblem when its config.pbtxt names none."""
    file = Path(repository) / model / "config.pbtxt"
    config, problems = read_config_pbtxt(file)
    if config is None:
        raise RepositoryProblem(str(problems[0]))
    if "gpt_model_path" not in config.parameters:
        raise RepositoryProblem(
            f"{file} has no parameter gpt_model_path, which names the engine; write the model again"
        )
    return EngineLimits.of(config.parameters["gpt_model_path"].string_value)


def launch_command(repository: str | Path, *, world_size: int | None = None, script: str = SCRIPT) -> str:
    """The line to type in the container: `launch_triton_server.py` with the world size that the engine was built for.

    Args:
        repository: written by `write_repository`.
        world_size: processes; by default tp_size * pp_size of the engine, and nothing else is accepted.
        script: where the launch script lies.

    Raises:
        RepositoryProblem: for another world size: the server would only say so after loading ("MPI worldSize is expected to be
            equal to tp*pp").
    """
    ranks = engine_of(repository).world_size
    if world_size is not None and world_size != ranks:
        raise RepositoryProblem(
            f"world_size is {world_size}, the engine was built for {ranks} (tp_size * pp_size of its config.json); "
            f"use {ranks}, or convert and build the engine for {world_size}"
        )
    words = ["python3", script, f"--world_size={ranks}", f"--model_repo={Path(repository).resolve()}"]
    return shlex.join(words)
