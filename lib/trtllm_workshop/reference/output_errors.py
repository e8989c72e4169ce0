"""What the system says when an output cannot be written, as a sentence with the flag to change."""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable
from pathlib import Path

_REASONS = {
    errno.EEXIST: "a file is in the place of a folder",
    errno.ENOTDIR: "a file is in the place of a folder",
    errno.ENOTEMPTY: "another process has just written there",
    errno.ENAMETOOLONG: "the name is too long",
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "your share of the disk is full",
    errno.EACCES: "you have no permission to write there",
    errno.EPERM: "you have no permission to write there",
    errno.EROFS: "that file system can only be read",
    errno.ELOOP: "its symbolic links lead in a circle",
}


def output_error(error: OSError, flag: str, output: str | Path) -> str:
    """One sentence: the flag, its value, why it cannot be written, and the remedy.

    Errors of another kind stay as they are, unless they are about the output's own path.
    """
    reason = _REASONS.get(error.errno or 0)
    elsewhere = not error.filename or Path(error.filename).resolve() != Path(output).resolve()
    if reason is None:
        if elsewhere:
            return str(error)
        reason = (error.strerror or type(error).__name__).lower()
    place = f" ({error.filename})" if error.filename and elsewhere else ""
    return f"{flag} {output} cannot be written: {reason}{place}; choose another {flag}"


def exit_code(work: Callable[[], object], output_dir: str | Path) -> int:
    """Does the work of a command; 0, or 1 after an error of its input or output was said on standard error."""
    try:
        work()
    except OSError as error:
        print(f"error: {output_error(error, '--output_dir', output_dir)}", file=sys.stderr, flush=True)
        return 1
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
    return 0
