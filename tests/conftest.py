"""Fixtures that several test files share."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Tiny engines, each built once (see engines.py)."""
    pytest.importorskip("torch")
    from engines import Engines

    return Engines(tmp_path_factory.mktemp("engines"))
