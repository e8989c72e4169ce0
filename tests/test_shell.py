"""sh(): live output, errors that teach, nothing left running."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from children import gone, wait_until
from trtllm_workshop.live_output import Kept, LiveText
from trtllm_workshop.processes import group_alive
from trtllm_workshop.shell import CommandFailed, CommandRefused
from trtllm_workshop.toolchain import Toolchain, choose

Script = Callable[[str], str]
Capsys = pytest.CaptureFixture[str]


@pytest.fixture
def toolchain() -> Toolchain:
    return choose("reference", quiet=True)


@pytest.fixture
def script(tmp_path: Path) -> Script:
    """Writes a Python script and returns the command that runs it."""

    def write(text: str) -> str:
        path = tmp_path / "script.py"
        path.write_text(text)
        return f"python {path}"

    return write


def test_output_time_and_memory_are_given(toolchain: Toolchain, script: Script, capsys: Capsys) -> None:
    result = toolchain.sh(script("import sys\nprint('out')\nprint('err', file=sys.stderr)\nx = b'1' * 60_000_000"))
    assert (result.returncode, result.output) == (0, "out\nerr")
    printed = capsys.readouterr().out.splitlines()
    assert printed[:2] == ["out", "err"] and printed[2].startswith("done in ") and "peak" in printed[2]
    assert result.peak_memory_mb and result.peak_memory_mb < 10_000


def test_output_is_shown_while_the_command_runs(
    toolchain: Toolchain, script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command goes on only after its first line was seen."""
    seen = tmp_path / "seen"

    class Screen:
        def write(self, text: str) -> None:
            if "first" in text:
                seen.touch()

        def flush(self) -> None:
            pass

    monkeypatch.setattr(sys, "stdout", Screen())
    wait = (
        f"import os, time\nprint('first')\nwhile not os.path.exists({str(seen)!r}): time.sleep(0.01)\nprint('second')"
    )
    result = toolchain.sh(script(wait), timeout=60)
    assert result.output == "first\nsecond"


def test_quiet_and_unchecked_runs_say_nothing(toolchain: Toolchain, script: Script, capsys: Capsys) -> None:
    result = toolchain.sh(script("print(1); raise SystemExit(3)"), check=False, quiet=True)
    assert (result.returncode, result.output, capsys.readouterr().out) == (3, "1", "")


def test_failure_begins_with_the_first_error_line(toolchain: Toolchain, script: Script) -> None:
    with pytest.raises(CommandFailed) as error:
        toolchain.sh(script("print('fine')\nopen('/no/such/file')"))
    assert "FileNotFoundError" in str(error.value).splitlines()[0]
    assert "exit code 1" in str(error.value) and error.value.result.output.startswith("fine")


def test_P55_the_early_error_line_wins_over_the_late_type_error(toolchain: Toolchain, script: Script) -> None:
    early = "[04/09/2024-16:26:41] [TRT] [E] 9: [x.cpp::f::1] Error Code 9: Internal Error (FP8 needs compute capability 8.9)"
    noise = "for i in range(5000): print('[TRT] [I] step', i)"
    late = "raise TypeError(\"a bytes-like object is required, not 'NoneType'\")"
    with pytest.raises(CommandFailed) as error:
        toolchain.sh(script(f"print('start')\n{noise}\nprint({early!r})\n{noise}\n{late}"), quiet=True)
    assert "[TRT] [E] 9" in str(error.value).splitlines()[0]
    assert "TypeError" in str(error.value)


@pytest.mark.parametrize("end", ["import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "raise SystemExit(137)"])
def test_P53_a_killed_command_points_to_host_memory(toolchain: Toolchain, script: Script, end: str) -> None:
    with pytest.raises(CommandFailed) as error:
        toolchain.sh(script(f"print('building')\n{end}"))
    text = str(error.value)
    assert "SIGKILL" in text and "host memory" in text and "last lines" in text
    assert "GPU memory" not in text.replace("not the GPU", "")


def build_stub(toolchain: Toolchain, tmp_path: Path, body: str) -> Toolchain:
    """A toolchain whose trtllm-build is `body`."""
    command = tmp_path / "bin" / "trtllm-build"
    command.parent.mkdir()
    command.write_text(f"#!{sys.executable}\nimport pathlib, json, sys\n{body}\nprint('Total time of building: 1 s')\n")
    command.chmod(0o755)
    toolchain.bin_dirs = (command.parent,)
    return toolchain


@pytest.mark.parametrize(
    ("written", "complaint"),
    [
        ({}, "rank0.engine is missing"),
        ({"config.json": "{}", "rank0.engine": ""}, "rank0.engine is empty"),
        ({"config.json": '{"pretrained_config": {"mapping": {"world_size": 2}}}', "rank0.engine": "x"}, "rank1.engine"),
    ],
)
def test_P54_success_without_engine_files_is_a_failure(
    toolchain: Toolchain, tmp_path: Path, written: dict[str, str], complaint: str
) -> None:
    body = f"e = pathlib.Path('e'); e.mkdir()\nfor n, t in {written!r}.items(): (e / n).write_text(t)"
    build_stub(toolchain, tmp_path, body)
    with pytest.raises(CommandFailed) as error:
        toolchain.sh("trtllm-build --checkpoint_dir c --output_dir e", cwd=tmp_path)
    assert complaint in str(error.value) and error.value.result.returncode == 0


def test_P54_engine_files_of_an_earlier_run_do_not_count(toolchain: Toolchain, tmp_path: Path) -> None:
    engine = tmp_path / "e"
    engine.mkdir()
    for name in ("config.json", "rank0.engine"):
        (engine / name).write_text("{}")
        os.utime(engine / name, (1e9, 1e9))
    build_stub(toolchain, tmp_path, "")
    with pytest.raises(CommandFailed, match="older than this run"):
        toolchain.sh(f"trtllm-build --checkpoint_dir c --output_dir={engine}")
    (engine / "config.json").write_text("{}")
    (engine / "rank0.engine").write_text("new")
    assert toolchain.sh(f"trtllm-build --checkpoint_dir c --output_dir={engine}").returncode == 0


def test_known_mistakes_are_refused_before_anything_runs(toolchain: Toolchain, tmp_path: Path) -> None:
    with pytest.raises(CommandRefused, match=r"--checkpoint_dri(?s:.*)--checkpoint_dir"):
        toolchain.sh("trtllm-build --checkpoint_dri c --output_dir e", cwd=tmp_path)
    with pytest.raises(CommandRefused, match="pipe"):
        toolchain.sh("touch made | cat", cwd=tmp_path)
    with pytest.raises(CommandRefused, match="not a folder"):
        toolchain.sh("touch made", cwd=tmp_path / "nowhere")
    assert list(tmp_path.iterdir()) == []


def test_facts_of_another_release_only_warn(toolchain: Toolchain, tmp_path: Path, capsys: Capsys) -> None:
    build_stub(
        toolchain,
        tmp_path,
        "e = pathlib.Path('e'); e.mkdir()\nfor n in ('config.json', 'rank0.engine'): (e / n).write_text('{}')",
    )
    toolchain.version = "1.3.0"
    toolchain.sh("trtllm-build --checkpoint_dir c --output_dir e --brand_new_flag", cwd=tmp_path)
    assert "warning: " in capsys.readouterr().err


def test_P99_extra_environment_reaches_the_child_only(toolchain: Toolchain, script: Script) -> None:
    command = script("import os\nprint(os.environ['OMPI_MCA_btl_tcp_if_include'], os.environ['A'])")
    result = toolchain.sh(f"A=1 {command}", env={"OMPI_MCA_btl_tcp_if_include": "lo"})
    assert result.output == "lo 1"
    assert "OMPI_MCA_btl_tcp_if_include" not in os.environ and "A" not in os.environ


@pytest.mark.skipif(
    not shutil.which("mpirun", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"),
    reason="no mpirun",
)
def test_P129_ranks_run_outside_this_process(toolchain: Toolchain, script: Script) -> None:
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    command = script(
        "import os, tensorrt_llm\nprint('rank', os.environ['OMPI_COMM_WORLD_RANK'], tensorrt_llm.__version__)"
    )
    result = toolchain.sh(f"mpirun --oversubscribe -n 2 {command}", env=root, timeout=120)
    assert "rank 0 1.2.1+reference" in result.output and "rank 1 1.2.1+reference" in result.output
    assert "mpi4py" not in sys.modules and "tensorrt_llm" not in sys.modules


def test_timeout_ends_the_whole_group(toolchain: Toolchain, script: Script, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    text = f"""
import pathlib, subprocess, time
worker = subprocess.Popen(["sleep", "600"])
pathlib.Path({str(note)!r}).write_text(str(worker.pid))
time.sleep(600)
"""
    with pytest.raises(CommandFailed, match="timed out after 3 s"):
        toolchain.sh(script(text), timeout=3)
    wait_until(lambda: gone(int(note.read_text())))


def test_a_process_left_behind_neither_blocks_nor_survives(toolchain: Toolchain, script: Script) -> None:
    result = toolchain.sh(script("import subprocess\nprint(subprocess.Popen(['sleep', '600']).pid)"), timeout=60)
    wait_until(lambda: gone(int(result.output)))


def test_interrupt_ends_the_group(tmp_path: Path) -> None:
    """Ctrl-C in the calling process, with a child that would rather go on."""
    note = tmp_path / "pid"
    stubborn = tmp_path / "stubborn.py"
    stubborn.write_text(
        "import os, pathlib, signal, time\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        f"pathlib.Path({str(note)!r}).write_text(str(os.getpid()))\n"
        "time.sleep(600)\n"
    )
    code = f"from trtllm_workshop.toolchain import choose; choose('reference').sh('python {stubborn}')"
    caller = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    wait_until(lambda: note.exists() and note.read_text())
    caller.send_signal(signal.SIGINT)
    _, problem = caller.communicate(timeout=60)
    assert b"KeyboardInterrupt" in problem
    assert not group_alive(int(note.read_text()))


def test_P125_the_same_in_plain_python_and_inside_a_running_loop(toolchain: Toolchain, script: Script) -> None:
    command = script("print('hello')")

    async def inside() -> list[str]:
        return [toolchain.sh(command).output, toolchain.sh(command).output]

    outside = [toolchain.sh(command).output for _ in range(2)]
    assert outside == asyncio.run(inside()) == ["hello", "hello"]


def test_the_log_holds_the_whole_output(toolchain: Toolchain, script: Script, tmp_path: Path) -> None:
    log = tmp_path / "logs" / "a.log"
    result = toolchain.sh(script("for i in range(9000): print('line', i)"), quiet=True, log=log)
    assert len(log.read_text().splitlines()) == 9000
    assert "lines left out" in result.output and len(result.output.splitlines()) < 3000


# The parts


def shown(*pieces: bytes) -> tuple[str, list[str]]:
    screen: list[str] = []
    kept: list[str] = []
    text = LiveText(screen.append, kept.append)
    for piece in pieces:
        text.feed(piece)
    text.finish()
    return "".join(screen), kept


def test_repainted_lines_are_thinned_out_and_kept_once() -> None:
    states = [f"\r{percent:3d}%".encode() for percent in range(101)]
    screen, kept = shown(*states, b"\ndone\n")
    assert kept == ["100%", "done"]
    assert screen.count("\r") < 20 and "100%\ndone\n" in screen


def test_split_characters_and_line_ends_arrive_whole() -> None:
    data = "naïve ✓\r\nnext".encode()
    screen, kept = shown(*(data[i : i + 1] for i in range(len(data))))
    assert kept == ["naïve ✓", "next"] and "\ufffd" not in screen


def test_kept_output_is_bounded_but_remembers_errors() -> None:
    kept = Kept(head_lines=2, tail_lines=2)
    for number in range(100):
        kept.add("[E] reason" if number == 50 else str(number))
    assert kept.text().splitlines() == ["0", "1", "[E] reason", "... (95 lines left out)", "98", "99"]
    kept.add("x" * 1_000_000)
    assert len(kept.text()) < 30_000
