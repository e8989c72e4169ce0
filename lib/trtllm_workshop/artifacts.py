"""Files and folders that a lesson made: what they are, and whether they are still there."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def describe(path: Path, root: Path, kind: str = "") -> dict[str, Any]:
    """``path`` (relative to ``root`` when inside it), ``kind``, ``bytes`` and ``problem`` ('' when all is well)."""
    place = path if path.is_absolute() else root / path
    name = str(place.relative_to(root)) if place.is_relative_to(root) else str(place)
    entry = {"path": name, "kind": kind, "bytes": 0, "problem": ""}
    if not place.exists():
        return {**entry, "problem": "is not there"}
    files = [item for item in place.rglob("*") if item.is_file()] if place.is_dir() else [place]
    entry["bytes"] = sum(item.stat().st_size for item in files)
    if not entry["bytes"]:
        return {**entry, "problem": "is empty"}
    if kind:
        from trtllm_workshop.checkpoint import classify

        found = classify(place)
        if found != kind:
            return {**entry, "problem": f"is of kind {found!r}, not {kind!r}"}
    return entry


def recheck(recorded: dict[str, Any], root: Path) -> str:
    """What changed since ``recorded`` was written: '' or a sentence that names the file."""
    found = describe(root / recorded["path"], root, recorded.get("kind", ""))
    if found["problem"]:
        return f"{recorded['path']} {found['problem']}"
    if found["bytes"] != recorded["bytes"]:
        return f"{recorded['path']} has {found['bytes']:,} bytes; it had {recorded['bytes']:,} when the lesson ended"
    return ""
