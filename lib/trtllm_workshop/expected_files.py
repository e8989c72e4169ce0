"""The files that a command must leave: exit code 0 is not enough, since its writer may have been killed late."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

# Command or script -> (ending of its rank files, default of --output_dir, from the recorded command line facts).
_WRITERS = {
    "trtllm-build": (".engine", "engine_outputs"),
    "convert_checkpoint.py": (".safetensors", "tllm_checkpoint"),
    "quantize.py": (".safetensors", "exported_model"),
}


@dataclass(frozen=True)
class Snapshot:
    """State of the output folder before the command ran: name -> (modification time in ns, bytes, inode)."""

    folder: Path
    ending: str
    files: dict[str, tuple[int, int, int]]


def snapshot(words: list[str], cwd: Path) -> Snapshot | None:
    """What the command's output folder holds now; None for a command that writes no rank files or only shows help."""
    if {"-h", "--help", "--version"} & set(words):
        return None
    for word in words:
        if Path(word).name in _WRITERS:
            ending, default = _WRITERS[Path(word).name]
            if Path(word).name == "quantize.py" and _option(words, "--output_format", "") == "hf":
                return None
            folder = cwd / _option(words, "--output_dir", default)
            return Snapshot(folder, ending, _state(folder))
    return None


def missing(before: Snapshot | None) -> list[str]:
    """One sentence for each file that should be new and whole and is not."""
    if before is None:
        return []
    after = _state(before.folder)
    names = ["config.json", *(f"rank{rank}{before.ending}" for rank in range(_world_size(before.folder)))]
    problems = []
    for name in names:
        path = before.folder / name
        if name not in after:
            problems.append(f"it reported success, but {path} does not exist")
        elif after[name][1] == 0:
            problems.append(f"it reported success, but {path} is empty")
        elif before.files.get(name) == after[name]:
            problems.append(f"it reported success, but {path} is older than this run")
    return problems


def _state(folder: Path) -> dict[str, tuple[int, int, int]]:
    if not folder.is_dir():
        return {}
    stats = {path.name: path.stat() for path in folder.iterdir() if path.is_file()}
    return {name: (stat.st_mtime_ns, stat.st_size, stat.st_ino) for name, stat in stats.items()}


def _world_size(folder: Path) -> int:
    """The number of ranks that config.json promises, never fewer than one."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        mapping = config.get("pretrained_config", config)["mapping"]
        return max(1, int(mapping["world_size"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return 1


def _option(words: list[str], name: str, default: str) -> str:
    value = default
    for at, word in enumerate(words):
        if word == name and at + 1 < len(words):
            value = words[at + 1]
        elif word.startswith(name + "="):
            value = word.partition("=")[2]
    return value
