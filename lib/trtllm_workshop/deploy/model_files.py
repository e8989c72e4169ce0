"""Model folders of a Triton repository: written beside their place and renamed, so that a server never sees half of one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from importlib import resources
from pathlib import Path


class RepositoryProblem(ValueError):
    """A model repository that cannot be written so; the message says what is wrong and what to do."""


def packaged_code(name: str) -> str:
    """The text of a model.py that comes with the course, by its file name in `data/triton`."""
    return (resources.files("trtllm_workshop") / "data" / "triton" / name).read_text(encoding="utf-8")


def write_folder(folder: Path, files: Mapping[str, str]) -> Path:
    """Write `files` (relative path -> text) as `folder`, which appears whole or not at all and replaces a former one.

    A path that ends in `/` makes an empty folder.

    Raises:
        RepositoryProblem: when `folder` exists and is not such a folder (it holds no config.pbtxt, nor do its subfolders).
    """
    folder = Path(folder)
    if folder.exists() and not _ours(folder):
        raise RepositoryProblem(f"{folder} holds something else than Triton models; name another folder, or remove it")
    folder.parent.mkdir(parents=True, exist_ok=True)
    new, old = (folder.with_name(f".{folder.name}.{word}-{os.getpid()}") for word in ("writing", "former"))
    for left in (new, old):
        shutil.rmtree(left, ignore_errors=True)
    try:
        for name, text in files.items():
            path = new / name
            if name.endswith("/"):
                path.mkdir(parents=True, exist_ok=True)
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        if folder.exists():
            os.replace(folder, old)
        os.replace(new, folder)
    finally:
        for left in (new, old):
            shutil.rmtree(left, ignore_errors=True)
    return folder


def _ours(folder: Path) -> bool:
    if not folder.is_dir():
        return False
    inside = [folder, *(entry for entry in folder.iterdir() if entry.is_dir())]
    return not any(folder.iterdir()) or any((entry / "config.pbtxt").is_file() for entry in inside)
