"""The child interpreter as a process: what it may start, how it is interrupted, and that nothing is left running."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from children import failure, gone, wait_until
from trtllm_workshop.processes import group_alive
from trtllm_workshop.toolchain import REFERENCE, Toolchain, choose

Capsys = pytest.CaptureFixture[str]


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
    assert gone(grandchild)


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
