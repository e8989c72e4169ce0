"""The script that makes the environment: which Python it takes, what it says without one, and that it never hangs."""

from __future__ import annotations

import http.server
import importlib.util
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "tools" / "setup_env.py"
HERE = f"{sys.version_info.major}.{sys.version_info.minor}"


@pytest.fixture
def setup(tmp_path: Path) -> Any:
    """The script as a module of a small checkout of its own, so that nothing of the real one is touched."""
    (tmp_path / "tools").mkdir()
    shutil.copy(SCRIPT, tmp_path / "tools")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "requirements-cpu.lock").write_text("# lock\ntorch==2.13.0\n", encoding="utf-8")
    spec = importlib.util.spec_from_file_location("setup_env_copy", tmp_path / "tools" / "setup_env.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def fake(folder: Path, name: str, *lines: str) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text("\n".join(["#!/bin/sh", *lines]) + "\n", encoding="utf-8")
    path.chmod(0o755)
    return path


def test_a_shim_without_a_python_behind_it_is_passed_over(
    setup: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bin_folder = tmp_path / "bin"
    for version in setup.PREFERRED:
        fake(bin_folder, f"python{version}", "echo 'command not found' >&2", "exit 127")
    monkeypatch.setenv("PATH", str(bin_folder))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "none"))
    assert setup.version_of(str(bin_folder / "python3.11")) == ""
    assert setup.find_python() == sys.executable, "the running one is the only one left"


def test_the_preferred_version_wins_over_the_order_of_path(
    setup: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = fake(tmp_path / "a", "python3.10", "echo 3.10; echo /usr")
    second = fake(tmp_path / "b", "python3.11", "echo 3.11; echo /usr")
    monkeypatch.setenv("PATH", f"{first.parent}:{second.parent}")
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "none"))
    assert setup.find_python() == str(second)


def test_without_a_fitting_python_it_says_what_it_looked_at(
    setup: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old = fake(tmp_path / "bin", "python3", "echo 3.9; echo /usr")
    monkeypatch.setenv("WORKSHOP_PYTHON", str(old))
    assert setup.main() == 1
    said = capsys.readouterr().err
    assert f"{old} (3.9)" in said and "needs Python 3.10, 3.11 or 3.12" in said and "WORKSHOP_PYTHON=" in said
    assert not (tmp_path / ".venv").exists()


def test_a_finished_environment_is_left_alone_and_a_new_lock_is_noticed(setup: Any, tmp_path: Path) -> None:
    python = fake(tmp_path / ".venv", "x").parent / "bin" / "python"
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    stamp = tmp_path / ".venv" / "workshop-stamp"
    stamp.write_text(setup.fingerprint(), encoding="utf-8")
    assert setup.main() == 0
    before = setup.fingerprint()
    (tmp_path / "requirements-cpu.lock").write_text("torch==2.14.0\n", encoding="utf-8")
    assert setup.fingerprint() != before


def test_a_failing_step_shows_pips_words_leaves_no_stamp_and_can_be_repeated(
    setup: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("WORKSHOP_PYTHON", sys.executable)
    monkeypatch.delenv("WORKSHOP_VENV", raising=False)
    monkeypatch.setattr(setup, "reachable", lambda url: False)
    for _ in range(2):
        assert setup.main() == 1
        said = capsys.readouterr()
        assert "ERROR: " in said.err and "torch==2.13.0" in said.err
        assert "run the same command again" in said.err
    assert not (tmp_path / ".venv" / "workshop-stamp").exists()
    assert "Making" not in said.out, "the second run goes on with the environment that is there"


def test_only_torch_may_come_from_the_extra_index(setup: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "reachable", lambda url: True)
    monkeypatch.setattr(setup.sys, "platform", "linux")
    monkeypatch.setattr(setup.platform, "machine", lambda: "x86_64")
    torch, lock, package, check = setup.steps(Path("python"))
    assert torch[-3:] == ["--extra-index-url", setup.TORCH_CPU_INDEX, "torch==2.13.0"]
    assert "--extra-index-url" not in lock + package and "--no-deps" in package and check[-1] == "check"


def test_an_index_that_never_answers_does_not_hold_up(setup: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        started = time.monotonic()
        assert not setup.reachable(f"http://127.0.0.1:{silent.getsockname()[1]}", seconds=0.5)
        assert time.monotonic() - started < 30, "no hang; the limit itself is not measured here"
    assert not setup.reachable("http://127.0.0.1:9", seconds=5)


def test_an_index_that_answers_is_used(setup: Any, tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments: Any, **options: Any):
            super().__init__(*arguments, directory=str(tmp_path), **options)

        def log_message(self, *arguments: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert setup.reachable(f"http://127.0.0.1:{server.server_port}", seconds=20)
        assert not setup.reachable(f"http://127.0.0.1:{server.server_port}/none", seconds=20)
        server.shutdown()


def test_the_script_runs_with_an_old_python_too() -> None:
    """It must be able to say that Python is too old, so it may not need a new one: no match, no new library parts."""
    import ast

    tree = ast.parse(SCRIPT.read_text(encoding="utf-8"), feature_version=(3, 8))
    assert any(isinstance(n, ast.ImportFrom) and n.module == "__future__" for n in tree.body)
    assert subprocess.run(["make", "-n", "env"], cwd=ROOT, capture_output=True).returncode == 0
