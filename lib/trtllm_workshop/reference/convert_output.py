"""A folder that appears whole or not at all.

Work happens in a hidden folder beside the target, which takes the target's name only after it was checked. Only
folders made here are ever removed; whatever else is found is left alone and named.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from trtllm_workshop.checkpoint import classify
from trtllm_workshop.reference.convert_source import ConversionError
from trtllm_workshop.reference.leftovers import alive

_OWN_FILES = re.compile(r"config\.json|rank\d+\.safetensors")


def check_target(target: Path) -> None:
    """Raises ConversionError unless the target is absent, empty, or a checkpoint with nothing else inside."""
    kind = classify(target)
    if kind in ("missing", "empty"):
        return
    if kind != "checkpoint":
        if target.is_file():
            raise ConversionError(f"--output_dir {target} is a file, which is not overwritten: choose a folder")
        what = {"hf": "a Hugging Face model, which is", "engine": "an engine, which is"}.get(kind, "files, which are")
        raise ConversionError(
            f"--output_dir {target} already holds {what} not overwritten: choose another folder, or empty this one"
        )
    strangers = sorted(entry.name for entry in target.iterdir() if not _OWN_FILES.fullmatch(entry.name))
    if strangers:
        raise ConversionError(
            f"--output_dir {target} is a checkpoint that also holds {', '.join(strangers)}, which the converter did "
            "not make: move them away or choose another folder"
        )


def check_space(target: Path, needed: int) -> None:
    """Raises ConversionError when the target's file system has less than `needed` bytes (and 1 % more) free."""
    place = target.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < needed * 1.01:
        raise ConversionError(
            f"not enough disk space for {target}: {needed / 1e9:.2f} GB are needed, {free / 1e9:.2f} GB are free on "
            f"{place}. Free some space or give --output_dir on another disk"
        )


def _work_name(target: Path, what: str) -> str:
    return f".{target.name}.{what}-{socket.gethostname()}-{os.getpid()}"


def clear_leftovers(target: Path) -> list[str]:
    """Removes what a killed conversion to the same target left behind on this host, and returns what was done.

    A checkpoint that was moved aside is put back when the target is missing.
    """
    done = []
    host = re.escape(socket.gethostname())
    pattern = re.compile(rf"\.{re.escape(target.name)}\.(converting|replaced)-{host}-(\d+)")
    for entry in sorted(target.parent.iterdir()) if target.parent.is_dir() else []:
        match = pattern.fullmatch(entry.name)
        if not match or not entry.is_dir() or alive(int(match[2])):
            continue
        if match[1] == "replaced" and not target.exists():
            entry.rename(target)
            done.append(f"put back {target}, which an interrupted conversion had moved aside")
        else:
            _remove_own(entry)
            done.append(f"removed {entry}, the rest of an interrupted conversion")
    return done


def _remove_own(folder: Path) -> None:
    for entry in list(folder.iterdir()):
        if _OWN_FILES.fullmatch(entry.name):
            entry.unlink()
    if not any(folder.iterdir()):
        folder.rmdir()


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def replacing(target: Path, verify: Callable[[Path], list[str]], needed: int = 0) -> Iterator[Path]:
    """Yields a fresh work folder; when the block ends well and `verify` finds no problem it becomes the target.

    An older checkpoint at the target is replaced only then. On any error the work folder is removed and the target is
    as before. Raises ConversionError with the problems that `verify` returns, and when the disk is full after all
    (`needed` bytes were planned).
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    work = target.with_name(_work_name(target, "converting"))
    work.mkdir()
    try:
        yield work
        if problems := verify(work):
            raise ConversionError("the written checkpoint is not right: " + "; ".join(problems))
        _sync_folder(work)
        check_target(target)  # again: a long conversion leaves time for somebody to put files there
        old = target.with_name(_work_name(target, "replaced"))
        if target.exists():
            target.rename(old)
        try:
            work.rename(target)
        except OSError:
            if old.exists():
                old.rename(target)
            raise
        _sync_folder(target.parent)
        if old.exists():
            _remove_own(old)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise ConversionError(
            f"the disk of {target.parent} is full ({error.strerror}): {target} needs {needed / 1e9:.3g} GB. Free some space "
            "or give --output_dir on another disk"
        ) from error
    finally:
        if work.exists():
            _remove_own(work)
