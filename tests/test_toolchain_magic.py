"""`%%toolchain` in a real IPython shell and in a real kernel."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from children import wait_until
from trtllm_workshop.processes import group_alive
from trtllm_workshop.reference.version import VERSION
from trtllm_workshop.toolchain import Toolchain, choose, register_magics
from trtllm_workshop.toolchain_magic import parse_line

Capsys = pytest.CaptureFixture[str]


@pytest.fixture
def notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, toolchain: Toolchain) -> Iterator[Any]:
    """A real IPython shell with the magic registered."""
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    from IPython.core.history import HistoryManager
    from IPython.core.interactiveshell import InteractiveShell

    monkeypatch.setattr(HistoryManager, "enabled", False)
    shell = InteractiveShell.instance()
    register_magics(toolchain)
    yield shell
    InteractiveShell.clear_instance()


def test_magic_copies_named_variables_in_and_results_out(notebook: Any, capsys: Capsys) -> None:
    notebook.user_ns.update(n=4, unnamed=5)
    cell = "%%toolchain n --out square, other\nsquare = n * n\nother = 'unnamed' in globals()\nsquare"
    assert notebook.run_cell(cell).success
    assert (notebook.user_ns["square"], notebook.user_ns["other"]) == (16, False)
    assert "16\n" in capsys.readouterr().out
    assert notebook.run_cell(cell).success  # again: nothing to complain about
    assert "note:" not in capsys.readouterr().out
    notebook.run_cell("square = 'mine'")
    notebook.run_cell(cell)
    assert "note: --out square replaces the notebook's own square (str)" in capsys.readouterr().out


def test_magic_errors_teach_and_show_no_library_frames(notebook: Any, capsys: Capsys) -> None:
    notebook.user_ns["engine"] = "x"
    result = notebook.run_cell("%%toolchain enigne\npass")
    assert "did you mean 'engine'" in str(result.error_in_exec)
    assert "Usage:" in str(notebook.run_cell("%%toolchain --output x\npass").error_in_exec)
    assert "at least one name" in str(notebook.run_cell("%%toolchain --out\npass").error_in_exec)
    capsys.readouterr()
    result = notebook.run_cell("%%toolchain\n1\n1 / 0")
    assert f"In [{notebook.execution_count}], line 3: 1 / 0" in str(result.error_in_exec)
    printed = capsys.readouterr().out
    assert "ToolchainError: ZeroDivisionError: division by zero" in printed and "session.py" not in printed


def test_fresh_starts_anew(notebook: Any, toolchain: Toolchain) -> None:
    notebook.run_cell("%%toolchain\nx = 1")
    first = toolchain.session.pid
    notebook.run_cell("%%toolchain --out x --fresh\nx = globals().get('x', 'nothing')")
    assert notebook.user_ns["x"] == "nothing"
    assert first and not group_alive(first)


def test_running_the_set_up_again_keeps_the_child(notebook: Any, toolchain: Toolchain) -> None:
    notebook.run_cell("%%toolchain\nx = 1")
    first = toolchain.session.pid
    again = choose("reference", quiet=True)
    register_magics(again)
    assert notebook.run_cell("%%toolchain --out y\ny = x").success and again.session.pid == first
    other = choose("reference", quiet=True)
    other.extra_environment["A"] = "1"
    register_magics(other)
    assert first and not group_alive(first)
    assert notebook.run_cell("%%toolchain --out a\nimport os\na = os.environ['A']").success
    other.close()


def test_a_command_shows_its_output_once(notebook: Any, toolchain: Toolchain, capsys: Capsys) -> None:
    notebook.user_ns["sh"] = toolchain.sh
    notebook.run_cell("sh('python -c \"print(6 * 7)\"')")
    printed = capsys.readouterr().out
    assert printed.startswith("42\ndone in") and printed.count("42") == 1


def test_magic_line() -> None:
    assert parse_line("a b, c --fresh --out d e  # note") == (["a", "b", "c"], ["d", "e"], True)
    assert parse_line("") == ([], [], False)


def test_in_a_real_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jupyter's own loop runs there; the child dies and the kernel lives; nothing is left when the kernel is gone."""
    from nbclient import NotebookClient

    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    cells = [
        "from trtllm_workshop.toolchain import choose, register_magics\n"
        "t = choose('reference')\nregister_magics(t)\nn = 3",
        "%%toolchain n --out m pid\nimport os, tensorrt_llm\nm, pid = n + 1, os.getpid()\nprint('in the child')\nm",
        "result = t.sh('python -c \"print(6 * 7)\"')",
        "%%toolchain\nimport os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
        "%%toolchain --out pid2\npid2 = os.getpid() if 'os' in globals() else __import__('os').getpid()",
        "print(m, pid != pid2, t.session.pid == pid2)\nprint('pid', pid2)",
    ]
    document = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells])
    document.cells[3].metadata["tags"] = ["raises-exception"]
    NotebookClient(
        document, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()

    def text(index: int) -> str:
        return "".join(output.get("text", "") for output in document.cells[index].outputs)

    assert "in the child\n4\n" in text(1) and VERSION in text(1)
    assert "42\n" in text(2) and "done in" in text(2)
    (error,) = [output for output in document.cells[3].outputs if output.output_type == "error"]
    assert error.ename == "ToolchainError" and "host memory" in error.evalue and len(error.traceback) == 1
    assert text(5).startswith("4 True True\n")
    child = int(text(5).split()[-1])
    wait_until(lambda: not group_alive(child))
