"""Child processes in tests: waiting for them, and the words with which a toolchain cell fails."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from trtllm_workshop.session import ToolchainError
from trtllm_workshop.toolchain import Toolchain


def wait_until(condition: Callable[[], object], seconds: float = 60) -> None:
    """Polls `condition`; fails the test when it does not come true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def gone(pid: int) -> bool:
    """Whether the process has ended (it may still wait to be collected by its parent)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def failure(toolchain: Toolchain, code: str, **inputs: Any) -> str:
    """Runs a cell's code that must fail, and returns what the reader would see."""
    with pytest.raises(ToolchainError) as error:
        toolchain.run_python(code, inputs)
    return str(error.value)
