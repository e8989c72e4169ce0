"""Is there room for a download? Asked before it starts: the Hub's library only warns, and then fills the disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from trtllm_workshop.findings import check_space
from trtllm_workshop.host import Folder, Mount, measure_folder, mount_of, read_mounts, volumes
from trtllm_workshop.shell import ShownError


class NotEnoughSpace(ShownError):
    """A disk is too small; the text names the folder, the need, the free space and the fix."""


def require_space(places: Mapping[str, tuple[Path, int]], folders: Sequence[Folder] | None = None) -> None:
    """Raises NotEnoughSpace when the disk of a folder is too small.

    `places` maps a role ("work", "cache", "tmp") to (folder, bytes that will be written there). Folders need not exist:
    the nearest existing parent is measured. Needs on one disk are added up. `folders` replaces the measurement.
    """
    if folders is None:
        mounts = read_mounts()
        measured = (measure_folder(role, path, mounts) for role, (path, _) in places.items())
        folders = [folder for folder in measured if folder is not None]
    found = check_space(folders, {role: need for role, (_, need) in places.items()})
    if found:
        raise NotEnoughSpace("; ".join(f"{finding.message}: {finding.fix}" for finding in found))


def lasting_note(target: Path, mounts: Sequence[Mount] | None = None) -> str:
    """In a container with a volume: a sentence when `target` lies on the layer that is deleted with the container."""
    table = list(read_mounts() if mounts is None else mounts)
    kept, mount = volumes(table), mount_of(target, table)
    if not kept or mount is None or mount.filesystem != "overlay":
        return ""
    return f"{target} is deleted with this container; {kept[0]} outlives it: give a --work-dir there"
