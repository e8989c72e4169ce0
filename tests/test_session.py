"""`%%toolchain`: one child per notebook, plain data across, a death that is explained, nothing left running."""

from __future__ import annotations

import asyncio
import gc
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nbformat
import numpy
import pytest
from trtllm_workshop.processes import group_alive
from trtllm_workshop.reference.version import VERSION
from trtllm_workshop.session import ToolchainError
from trtllm_workshop.toolchain import REFERENCE, Toolchain, choose, register_magics
from trtllm_workshop.toolchain_magic import parse_line

Capsys = pytest.CaptureFixture[str]


@pytest.fixture
def toolchain() -> Iterator[Toolchain]:
    chosen = choose("reference", quiet=True)
    yield chosen
    chosen.close()


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


def wait_until(condition: Callable[[], object], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def failure(toolchain: Toolchain, code: str, **inputs: Any) -> str:
    with pytest.raises(ToolchainError) as error:
        toolchain.run_python(code, inputs)
    return str(error.value)


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


# Processes


def test_P130_no_main_file_exists_that_a_worker_could_run_again(toolchain: Toolchain) -> None:
    code = (
        "import sys\nmain = sys.modules['__main__']\nr = [hasattr(main, '__file__'), main.__spec__ is None, __name__]"
    )
    assert toolchain.run_python(code, outputs=["r"]) == {"r": [False, True, "__main__"]}


def test_P130_spawned_workers_run_functions_of_files(toolchain: Toolchain, tmp_path: Path, capsys: Capsys) -> None:
    (tmp_path / "worker_of_a_file.py").write_text("def double(x):\n    return 2 * x\n")
    code = """
import multiprocessing, sys
sys.path.insert(0, folder)
import worker_of_a_file
print("once")
with multiprocessing.get_context("spawn").Pool(1) as pool:
    doubled = pool.map(worker_of_a_file.double, [1, 2])
"""
    assert toolchain.run_python(code, {"folder": tmp_path}, ["doubled"]) == {"doubled": [2, 4]}
    assert capsys.readouterr().out.count("once") == 1


@pytest.mark.parametrize(
    "use",
    [
        "with context.Pool(1) as pool: pool.map(f, [1])",
        "context.Process(target=f, args=(1,)).start()",
        "import concurrent.futures as c\nwith c.ProcessPoolExecutor(1, mp_context=context) as p: p.submit(f, 1).result()",
    ],
)
def test_P130_functions_of_a_cell_are_refused_instead_of_hanging(toolchain: Toolchain, use: str) -> None:
    code = f"import multiprocessing\ncontext = multiprocessing.get_context('spawn')\ndef f(x): return x\n{use}"
    assert "put them into a .py file" in failure(toolchain, code)


def test_string_annotations_of_a_cell_can_be_looked_up(toolchain: Toolchain) -> None:
    code = "import typing\nclass A: pass\nclass B:\n    a: 'A'\nok = typing.get_type_hints(B) == {'a': A}"
    assert toolchain.run_python(code, outputs=["ok"]) == {"ok": True}


def test_P129_heavy_packages_stay_out_of_this_process(toolchain: Toolchain) -> None:
    result = toolchain.run_python(
        "import os, sys, tensorrt_llm\nloaded = 'tensorrt_llm' in sys.modules\npid = os.getpid()",
        outputs=["loaded", "pid"],
    )
    assert result["loaded"] and result["pid"] != os.getpid()
    assert "tensorrt_llm" not in sys.modules and "mpi4py" not in sys.modules
    assert not any(str(REFERENCE / "python") in path for path in sys.path)


def test_P125_the_same_in_plain_python_and_inside_a_running_loop(toolchain: Toolchain) -> None:
    code = "import asyncio\nasync def f(): return n + 1\nx = asyncio.run(f())"  # the child itself has no running loop

    async def inside() -> list[dict[str, Any]]:
        return [toolchain.run_python(code, {"n": 1}, ["x"]) for _ in range(2)]

    outside = [toolchain.run_python(code, {"n": 1}, ["x"]) for _ in range(2)]
    assert outside == asyncio.run(inside()) == [{"x": 2}, {"x": 2}]


def test_closing_ends_grandchildren_too(toolchain: Toolchain) -> None:
    code = "import subprocess\npid = subprocess.Popen(['sleep', '600']).pid"
    grandchild = toolchain.run_python(code, outputs=["pid"])["pid"]
    child = toolchain.session.pid
    toolchain.close()
    assert child and not group_alive(child)
    assert not Path(f"/proc/{grandchild}/cmdline").exists() or not Path(f"/proc/{grandchild}/cmdline").read_bytes()


def test_exit_handlers_run_when_the_child_is_closed(toolchain: Toolchain, tmp_path: Path) -> None:
    note = tmp_path / "note"
    toolchain.run_python("import atexit, pathlib\natexit.register(lambda: pathlib.Path(note).touch())", {"note": note})
    toolchain.close()
    assert note.exists()


PARENT = """
import sys
from trtllm_workshop.toolchain import choose
t = choose("reference", quiet=True)
t.run_python("import subprocess; p = subprocess.Popen(['sleep', '600'])")
open(sys.argv[1], "w").write(str(t.session.pid))
t.run_python(sys.argv[2])
"""


@pytest.mark.parametrize(
    "busy",
    [
        "import time\nprint('busy')\ntime.sleep(600)",
        "import ctypes\nprint('busy')\nctypes.PyDLL(None).sleep(600)",  # native code that keeps the interpreter's lock
        "print('busy')\nwhile True: pass",
    ],
)
def test_the_child_ends_when_its_kernel_is_killed(tmp_path: Path, busy: str) -> None:
    note, screen = tmp_path / "pid", tmp_path / "screen"
    with screen.open("wb") as stream:
        parent = subprocess.Popen([sys.executable, "-c", PARENT, str(note), busy], stdout=stream)
    wait_until(lambda: b"busy" in screen.read_bytes())
    child = int(note.read_text())
    assert group_alive(child)
    parent.kill()
    parent.wait()
    wait_until(lambda: not group_alive(child))


@pytest.mark.parametrize("stubborn", [False, True])
def test_interrupt_reaches_the_child_and_keeps_it_alive(tmp_path: Path, stubborn: bool) -> None:
    """Ctrl-C once; a cell that swallows it is ended by a second one."""
    swallow = "while True:\n    try: time.sleep(600)\n    except KeyboardInterrupt: print('swallowed')"
    cell = "import time\nx = 1\nprint('busy')\n" + (swallow if stubborn else "time.sleep(600)")
    code = f"""
from trtllm_workshop.toolchain import choose
t = choose("reference", quiet=True)
try: t.run_python({cell!r})
except KeyboardInterrupt: print("interrupted here")
print("then", t.run_python("alive = 'x' in globals()", outputs=["alive"]))
"""
    screen = tmp_path / "screen"
    with screen.open("wb") as stream:
        parent = subprocess.Popen([sys.executable, "-c", code], stdout=stream)
    wait_until(lambda: b"busy" in screen.read_bytes())
    parent.send_signal(signal.SIGINT)
    if stubborn:
        wait_until(lambda: b"swallowed" in screen.read_bytes())
        parent.send_signal(signal.SIGINT)
    assert parent.wait(60) == 0
    text = screen.read_text()
    assert "interrupted here" in text and f"then {{'alive': {not stubborn}}}" in text


# In a notebook


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


def test_two_toolchains_have_two_children(toolchain: Toolchain) -> None:
    other = choose("reference", quiet=True)
    toolchain.run_python("x = 1")
    other.run_python("x = 2")
    assert toolchain.run_python("", outputs=["x"]) == {"x": 1}
    assert other.run_python("", outputs=["x"]) == {"x": 2}
    assert toolchain.session.pid != other.session.pid
    other.close()
    assert toolchain.run_python("", outputs=["x"]) == {"x": 1}


def test_a_forgotten_session_ends_its_child() -> None:
    forgotten = choose("reference", quiet=True)
    forgotten.run_python("x = 1")
    child = forgotten.session.pid
    del forgotten
    gc.collect()
    wait_until(lambda: child and not group_alive(child))


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
