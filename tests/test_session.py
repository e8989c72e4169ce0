"""The child interpreter: plain data across, output in order, errors and a death that are explained."""

from __future__ import annotations

import math
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
from children import failure, wait_until
from trtllm_workshop.processes import group_alive
from trtllm_workshop.reference.version import VERSION
from trtllm_workshop.session import ToolchainError
from trtllm_workshop.toolchain import REFERENCE, Toolchain

Capsys = pytest.CaptureFixture[str]


# Values


def test_plain_data_crosses_in_both_directions(toolchain: Toolchain) -> None:
    value = {
        "a": [1, 2.5, None, True],
        "b": (1, ("x", b"\x00\xff")),
        3: "drei ✓",
        "!tuple": 1,
        "big": 10**40,
        "inf": math.inf,
    }
    result = toolchain.run_python("back = value\nkind = type(value['b']).__name__", {"value": value}, ["back", "kind"])
    assert result == {"back": value, "kind": "tuple"}


def test_paths_and_numpy_scalars_arrive_as_plain_values(toolchain: Toolchain) -> None:
    inputs = {"p": Path("/a/b"), "n": numpy.float64(0.5), "i": numpy.int32(7), "s": numpy.str_("x")}
    code = "kinds = [type(v).__name__ for v in (p, n, i, s)]\nimport pathlib\nq = pathlib.Path(p) / 'c'"
    assert toolchain.run_python(code, inputs, ["kinds", "q"]) == {
        "kinds": ["str", "float", "int", "str"],
        "q": "/a/b/c",
    }


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ({"x": [0, {1, 2}]}, "value['x'][1] is of type builtins.set"),
        (numpy.zeros(3), "value is of type numpy.ndarray; .*tolist"),
        (len, "builtin_function_or_method"),
        (signal.SIGINT, "signal.Signals"),
    ],
)
def test_everything_else_is_refused_by_name_and_type(toolchain: Toolchain, value: Any, named: str) -> None:
    text = failure(toolchain, "pass", value=value)
    first, _, last = named.partition(".*")
    assert first in text and last in text and "only plain data" in text


def test_values_that_contain_themselves_are_refused(toolchain: Toolchain) -> None:
    loop: list[Any] = []
    loop.append(loop)
    assert "loop contains itself" in failure(toolchain, "pass", loop=loop)


def test_results_must_be_plain_and_exist(toolchain: Toolchain) -> None:
    with pytest.raises(ToolchainError, match=r"x\['a'\] is of type builtins\.object"):
        toolchain.run_python("x = {'a': object()}", outputs=["x"])
    with pytest.raises(ToolchainError, match="--out stats: no cell has set this name; did you mean 'stat'"):
        toolchain.run_python("stat = 1", outputs=["stats"])


def test_names_do_not_clash_silently(toolchain: Toolchain, capsys: Capsys) -> None:
    toolchain.run_python("y = n", {"n": 1})
    toolchain.run_python("n = [n]", {"n": 2})  # copied in again: no clash
    assert "note:" not in capsys.readouterr().out
    result = toolchain.run_python("z = n", {"n": 3}, ["z"])
    assert result == {"z": 3}
    assert "note: n was list here, set by an earlier %%toolchain cell" in capsys.readouterr().out


# Running cells


def test_variables_live_on_and_the_last_value_is_shown(toolchain: Toolchain, capsys: Capsys) -> None:
    toolchain.run_python("x = 20")
    toolchain.run_python("x += 1\nx * 2")
    toolchain.run_python("x;")
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.isdigit()] == ["42"]
    assert sum(line.startswith("done in ") for line in lines) == 3


def test_the_child_says_which_tensorrt_llm_it_has(toolchain: Toolchain, capsys: Capsys) -> None:
    toolchain.run_python("pass")
    assert f"tensorrt_llm {VERSION}" in capsys.readouterr().out
    assert toolchain.session.identity["version"] == VERSION
    assert Path(toolchain.session.identity["file"]).is_relative_to(REFERENCE / "python")


def test_a_foreign_tensorrt_llm_is_refused_at_start(tmp_path: Path, toolchain: Toolchain) -> None:
    (tmp_path / "tensorrt_llm").mkdir()
    (tmp_path / "tensorrt_llm" / "__init__.py").write_text("raise SystemExit('must not be imported')\n")
    (tmp_path / "tensorrt_llm" / "version.py").write_text("__version__ = '0.9'\n")
    toolchain.pythonpath = (tmp_path, *toolchain.pythonpath)
    text = failure(toolchain, "print('never')")
    assert "tensorrt_llm 0.9" in text and str(tmp_path) in text and toolchain.session.pid is None


def test_files_of_the_current_folder_do_not_hide_packages(
    tmp_path: Path, toolchain: Toolchain, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("raise RuntimeError\n")
    (tmp_path / "tensorrt_llm.py").write_text("raise RuntimeError\n")
    (tmp_path / "mine.py").write_text("value = 5\n")
    monkeypatch.chdir(tmp_path)
    assert toolchain.run_python("import tensorrt_llm, json, mine\nx = mine.value", outputs=["x"]) == {"x": 5}


def test_the_child_follows_the_notebook_to_another_folder(
    tmp_path: Path, toolchain: Toolchain, monkeypatch: pytest.MonkeyPatch
) -> None:
    toolchain.run_python("import os")
    monkeypatch.chdir(tmp_path)
    assert toolchain.run_python("here = os.getcwd()", outputs=["here"]) == {"here": str(tmp_path.resolve())}


def test_output_comes_live_and_in_order(tmp_path: Path, toolchain: Toolchain, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cell goes on only after its first line was seen."""
    seen, screen = tmp_path / "seen", []

    class Screen:
        def write(self, text: str) -> None:
            screen.append(text)
            if "first" in text:
                seen.touch()

        def flush(self) -> None:
            pass

    monkeypatch.setattr(sys, "stdout", Screen())
    code = """
import os, subprocess, sys, time
print("first")
while not os.path.exists(seen): time.sleep(0.01)
print("second", file=sys.stderr)
subprocess.run(["echo", "third"])
os.write(1, b"fourth\\n")
print("fifth", end="")
"""
    toolchain.run_python(code, {"seen": seen})
    lines = "".join(screen).splitlines()
    assert lines[1:6] == ["first", "second", "third", "fourth", "fifth"]


def test_much_output_between_and_in_cells_blocks_nothing(toolchain: Toolchain, capsys: Capsys) -> None:
    code = """
import threading
def chatter():
    for i in range(3000): print("x" * 100, i)
thread = threading.Thread(target=chatter)
thread.start()
"""
    toolchain.run_python(code)
    toolchain.run_python("thread.join()\nfor i in range(3000): print('y' * 100, i)")
    text = capsys.readouterr().out
    assert text.count("x" * 100) == text.count("y" * 100) == 3000


# Failures


def test_errors_show_the_users_frames_only(toolchain: Toolchain) -> None:
    toolchain.run_python("def parse(text):\n    import json\n    return json.loads(text)")
    with pytest.raises(ToolchainError) as error:
        toolchain.run_python("a = 1\nparse('{')")
    lines = str(error.value).splitlines()
    assert lines[0].startswith("json.decoder.JSONDecodeError")
    assert lines[1].strip() == "code 2, line 2: parse('{')"
    assert lines[2].strip() == "code 1, line 3 in parse: return json.loads(text)"
    assert "raised in" in lines[3] and "json/decoder.py" in lines[3]
    assert "toolchain_child" not in str(error.value) and error.value.__cause__ is None
    assert "Traceback" in error.value.traceback_text


def test_the_reason_logged_before_an_exception_is_shown(toolchain: Toolchain) -> None:
    code = "print('[TRT] [E] 9: FP8 is not supported here')\nprint('more')\nraise TypeError('NoneType')"
    assert "first error in the output: [TRT] [E] 9: FP8 is not supported here" in failure(toolchain, code)


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        ("await x", "asyncio.run"),
        ("!ls", "plain Python"),
        ("import sys; sys.exit(0)", "reaching its last line"),
    ],
)
def test_habits_of_notebooks_get_advice(toolchain: Toolchain, code: str, advice: str) -> None:
    assert advice in failure(toolchain, code)
    assert toolchain.session.pid is not None


def test_P53_a_killed_child_says_why_and_the_next_cell_works(toolchain: Toolchain, capsys: Capsys) -> None:
    toolchain.run_python("x = 1")
    before = toolchain.session.pid
    text = failure(toolchain, "print('loading weights')\nimport os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    assert "SIGKILL" in text and "host memory" in text and "loading weights" in text
    assert before and not group_alive(before)
    assert toolchain.run_python("y = 'x' in globals()", outputs=["y"]) == {"y": False}
    assert "variables of earlier %%toolchain cells are gone" in capsys.readouterr().out


def test_a_crash_in_native_code_is_named(toolchain: Toolchain) -> None:
    assert "SIGSEGV" in failure(toolchain, "import ctypes; ctypes.string_at(0)")
    assert "exit code 3" in failure(toolchain, "import os; os._exit(3)")


def test_a_death_between_cells_is_noticed(toolchain: Toolchain, capsys: Capsys) -> None:
    toolchain.run_python("x = 1")
    assert toolchain.session.pid
    os.kill(toolchain.session.pid, signal.SIGKILL)
    wait_until(lambda: toolchain.session.pid is None)
    toolchain.run_python("x = 2")
    printed = capsys.readouterr().out
    assert "ended between two cells: signal SIGKILL" in printed and "are gone" in printed
