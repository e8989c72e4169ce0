"""An engine folder that is complete or not there, and what a killed build left behind.

The files are written into a hidden folder beside the target and renamed into place when they are complete. Files of
other kinds in an engine folder (a network picture, notes) stay where they are.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from trtllm_workshop.reference.leftovers import alive

OUT_OF_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
FILES = ("rank0.engine", "config.json")
_OWN_FILE = re.compile(r"rank\d+\.engine|config\.json")


def engine_files(world_size: int) -> tuple[str, ...]:
    """The files of an engine of so many ranks, in the order in which they are put in place.

    The engines first: with the old config.json beside them, they are refused when they are loaded (engine.load_engine).
    """
    return (*(f"rank{rank}.engine" for rank in range(world_size)), "config.json")


class BuildError(RuntimeError):
    """A build that cannot be done; the text says why and what to change."""


def check_space(output: Path, need: int) -> None:
    """Raises BuildError when the file system of the output has less than `need` bytes free."""
    place = output.absolute()
    while not place.exists():
        place = place.parent
    if (free := shutil.disk_usage(place).free) < need:
        raise BuildError(
            f"the engine needs {need / 1e6:.1f} MB, {place} has {free / 1e6:.1f} MB free; free space there or choose "
            f"another --output_dir than {output}"
        )


def clear_leftovers(output: Path) -> list[Path]:
    """Remove what killed builds of the same output left behind on this host; returns the removed folders.

    Only folders with the name a build gives, of a process that is gone, with nothing but a build's files are removed.
    """
    pattern = re.compile(rf"\.{re.escape(output.name)}\.building-{re.escape(socket.gethostname())}-(\d+)")
    removed = []
    for entry in sorted(output.parent.iterdir()) if output.parent.is_dir() else []:
        match = pattern.fullmatch(entry.name)
        if not match or not entry.is_dir() or entry.is_symlink() or alive(int(match[1])):
            continue
        if all(_OWN_FILE.fullmatch(file.name) for file in entry.iterdir()):
            shutil.rmtree(entry)
            removed.append(entry)
    return removed


@contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Holds back other processes that enter the same folder: two builds would mix the files of their engines."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems have no locks
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


@contextmanager
def engine_folder(output: Path, need: int, files: tuple[str, ...] = FILES) -> Iterator[Path]:
    """Yields a fresh folder for `files`; when the block ends well they are put in place, otherwise they are removed.

    Rank files of an earlier build with more ranks are removed then: they belong to nothing any more.

    Raises:
        BuildError: when the disk is full, before or while writing `need` bytes.
    """
    check_space(output, need)
    output.parent.mkdir(parents=True, exist_ok=True)
    work = output.with_name(f".{output.name}.building-{socket.gethostname()}-{os.getpid()}")
    work.mkdir()
    try:
        yield work
        with one_at_a_time(output.parent):
            if output.is_dir():
                for name in files:
                    os.replace(work / name, output / name)
                for old in output.iterdir():
                    if _OWN_FILE.fullmatch(old.name) and old.name not in files:
                        old.unlink()
            else:
                os.rename(work, output)
    except OSError as error:
        if error.errno not in OUT_OF_SPACE:
            raise
        raise BuildError(
            f"the disk of {output.parent.absolute()} is full ({error.strerror}): the engine needs {need / 1e6:.1f} MB; free "
            f"space there or choose another --output_dir than {output}"
        ) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
