"""Ports of this machine: a free one, and who holds one that is not."""

from __future__ import annotations

import contextlib
import errno
import os
import socket

LOOPBACK = "127.0.0.1"


def free_port(host: str = LOOPBACK) -> int:
    """A port that nobody listens on now. Another program may take it before you do: check that your server really came up."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def port_problem(port: int, host: str = LOOPBACK) -> str | None:
    """Why a server cannot listen on `port`, with the process that holds it where the machine tells; None when it can."""
    if not isinstance(port, int) or isinstance(port, bool) or not 1 <= port <= 65535:
        return f"port {port!r} is not a whole number from 1 to 65535"
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As servers do: a port whose last connections still time out is not in the way.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as problem:
            if problem.errno == errno.EACCES:
                return f"port {port} needs rights that this user does not have; choose one from 1024 on"
            if problem.errno != errno.EADDRINUSE:
                return f"port {port} on {host} cannot be used: {problem.strerror}"
            return f"port {port} on {host} is in use{_holder(port)}"
    return None


def _holder(port: int) -> str:
    """` by NAME (process N)`, or nothing when the machine does not tell."""
    with contextlib.suppress(Exception):  # psutil is missing, or other users' sockets are not shown
        import psutil

        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
                words = " ".join(psutil.Process(connection.pid).cmdline())
                mine = ", this very process" if connection.pid == os.getpid() else ""
                return f" by {words[:120]!r} (process {connection.pid}{mine})"
    return ""
