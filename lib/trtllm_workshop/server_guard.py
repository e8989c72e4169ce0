"""Runs one command as a server's main process and makes sure that nothing of it outlives the program that asked for it.

Started as `python -I -S server_guard.py GRACE_S COMMAND…` in a process group of its own, with a pipe as standard input. The byte
`T` on that pipe asks the command to end (SIGTERM to its main process alone, as an init system does: what it started is its
own to end). The end of the pipe means that the asking program is gone: the command has GRACE_S seconds then, and the whole
group is killed afterwards. The exit status is the command's; 128 + N when signal N ended it.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time


def main() -> int:
    """Start the command, pass on what is asked, and return its exit status."""
    grace_s = float(sys.argv[1])
    # Handlers, not SIG_IGN: a child would inherit the latter and could not be ended by name.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    child = subprocess.Popen(sys.argv[2:], stdin=subprocess.DEVNULL)
    deadline = None
    while child.poll() is None:
        ready = [] if deadline else select.select([0], [], [], 0.1)[0]
        asked = os.read(0, 1) if ready else None
        if asked == b"T":
            child.terminate()
        elif asked == b"":
            child.terminate()
            deadline = time.monotonic() + grace_s
        if deadline and time.monotonic() > deadline:
            os.killpg(0, signal.SIGKILL)
        if deadline:
            time.sleep(0.05)
    if deadline:
        # Nobody is left who could end what the command left behind.
        os.killpg(0, signal.SIGKILL)
    with contextlib.suppress(OSError):
        os.killpg(0, signal.SIGTERM)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


if __name__ == "__main__":
    sys.exit(main())
