"""Which toolchain is chosen and why, and what its children get."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from trtllm_workshop import toolchain as toolchains
from trtllm_workshop import toolchain_probe
from trtllm_workshop.command_line import CommandLineError, split_line
from trtllm_workshop.reference.version import VERSION
from trtllm_workshop.toolchain import REFERENCE, Toolchain, ToolchainNotFound
from trtllm_workshop.workspace import Workspace

GPU = SimpleNamespace(gpus=(SimpleNamespace(name="NVIDIA L4"),))
NO_GPU = SimpleNamespace(gpus=())


@pytest.fixture
def reference() -> Toolchain:
    return toolchains.choose("reference", quiet=True)


def install(folder: Path, version: str, body: str = "") -> Path:
    """An interpreter that finds a package tensorrt_llm of `version`; returns its path."""
    package = folder / "site" / "tensorrt_llm"
    package.mkdir(parents=True)
    (package / "version.py").write_text(f'__version__ = "{version}"\n')
    (package / "__init__.py").write_text(f'from .version import __version__\nprint("a banner")\n{body}\n')
    metadata = folder / "site" / f"tensorrt_llm-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: tensorrt_llm\nVersion: {version}\n")
    python = folder / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nexport PYTHONPATH="{folder}/site:$PYTHONPATH"\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return python


def checkout(folder: Path, version: str) -> Path:
    """A source checkout of TensorRT-LLM as far as the search looks at it; returns its examples folder."""
    root = folder / "TensorRT-LLM"
    (root / "tensorrt_llm").mkdir(parents=True)
    (root / "tensorrt_llm" / "version.py").write_text(f'__version__ = "{version}"\n')
    (root / "examples").mkdir()
    (root / "examples" / "run.py").write_text("print('run')\n")
    return root / "examples"


@pytest.fixture
def gpu_box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with TensorRT-LLM 1.2.1 installed beside an empty work folder, and nothing inherited."""
    monkeypatch.setenv("TRTLLM_PYTHON", str(install(tmp_path / "env", "1.2.1")))
    monkeypatch.delenv("TRTLLM_EXAMPLES", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(toolchain_probe, "CONTAINER_EXAMPLES", tmp_path / "no container")
    return tmp_path


# Choosing


def test_auto_without_a_gpu_says_which_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    chosen = toolchains.choose("auto", NO_GPU)
    printed = capsys.readouterr().out
    assert (chosen.name, chosen.version) == ("reference", VERSION)
    assert printed.count("\n") == 1 and VERSION in printed and "no usable NVIDIA GPU" in printed


def test_auto_takes_tensorrt_llm_when_everything_is_there(gpu_box: Path, capsys: pytest.CaptureFixture[str]) -> None:
    examples = checkout(gpu_box, "1.2.1")
    chosen = toolchains.choose("auto", GPU, work_dir=gpu_box / "work")
    assert (chosen.name, chosen.version, chosen.examples) == ("tensorrt_llm", "1.2.1", examples)
    assert chosen.pythonpath == () and chosen.python == gpu_box / "env" / "bin" / "python"
    assert "NVIDIA L4" in capsys.readouterr().out


def test_auto_falls_back_when_the_import_fails(tmp_path: Path, gpu_box: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = "raise ImportError('libcublasLt.so.13: cannot open shared object file')"
    monkeypatch.setenv("TRTLLM_PYTHON", str(install(tmp_path / "broken", "1.2.1", body)))
    checkout(gpu_box, "1.2.1")
    chosen = toolchains.choose("auto", GPU)
    assert chosen.name == "reference" and "libcublasLt.so.13" in chosen.reason


def test_missing_examples_name_the_command_that_gets_the_tag(gpu_box: Path) -> None:
    checkout(gpu_box, "1.0.0")
    with pytest.raises(ToolchainNotFound) as error:
        toolchains.choose("tensorrt_llm", GPU)
    assert "git clone --depth 1 --branch v1.2.1 https://github.com/NVIDIA/TensorRT-LLM.git" in str(error.value)
    assert "is of 1.0.0" in str(error.value)


def test_examples_named_by_the_environment_must_exist(gpu_box: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    examples = checkout(gpu_box, "9.9")
    monkeypatch.setenv("TRTLLM_EXAMPLES", str(examples))
    assert toolchains.choose("tensorrt_llm", GPU).examples == examples
    monkeypatch.setenv("TRTLLM_EXAMPLES", str(examples / "nowhere"))
    with pytest.raises(ToolchainNotFound, match="not a folder"):
        toolchains.choose("tensorrt_llm", GPU)


def test_another_release_is_used_with_a_warning(
    tmp_path: Path, gpu_box: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRTLLM_PYTHON", str(install(tmp_path / "newer", "1.3.0")))
    checkout(gpu_box, "1.3.0")
    assert toolchains.choose("tensorrt_llm", GPU).version == "1.3.0"
    assert re.search(r"warning: TensorRT-LLM 1\.3\.0 .* flags", capsys.readouterr().out)


def test_tensorrt_llm_by_name_lists_everything_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TRTLLM_PYTHON", raising=False)
    with pytest.raises(ToolchainNotFound) as error:
        toolchains.choose("tensorrt_llm", NO_GPU)
    text = str(error.value)
    assert sys.executable in text and "no usable NVIDIA GPU" in text and "reference" in text


def test_the_reference_never_passes_for_the_real_one(gpu_box: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTLLM_PYTHON", sys.executable)
    monkeypatch.setenv("PYTHONPATH", str(REFERENCE / "python"))
    monkeypatch.setenv("PATH", f"{REFERENCE / 'bin'}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(ToolchainNotFound, match="no Python with the package tensorrt_llm"):
        toolchains.choose("tensorrt_llm", GPU)


def test_the_environment_of_the_first_cell_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / ".venv-trtllm", "1.2.1")
    (tmp_path / "notebooks").mkdir()
    monkeypatch.chdir(tmp_path / "notebooks")
    monkeypatch.delenv("TRTLLM_PYTHON", raising=False)
    found = toolchain_probe.find(machine=GPU)
    assert found.python == tmp_path / ".venv-trtllm" / "bin" / "python"


def test_unknown_names_are_answered_with_the_choices() -> None:
    with pytest.raises(ValueError, match=r"'refrence'.*'auto', 'tensorrt_llm', 'reference'.*Did you mean 'reference'"):
        toolchains.choose("refrence")


# What children get


def test_environment_reaches_children_only(reference: Toolchain) -> None:
    before = dict(os.environ)
    child = reference.environment({"OMPI_MCA_btl_tcp_if_include": "lo"})
    assert dict(os.environ) == before
    assert child["OMPI_MCA_btl_tcp_if_include"] == "lo"
    assert child["TRTLLM_EXAMPLES"] == str(reference.examples)
    assert child["PYTHONPATH"].split(os.pathsep)[0] == str(REFERENCE / "python")


def test_kernel_only_variables_do_not_reach_children(reference: Toolchain, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    assert "MPLBACKEND" not in reference.environment()


def test_the_real_toolchain_never_sees_the_reference(
    reference: Toolchain, gpu_box: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout(gpu_box, "1.2.1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(REFERENCE / "python"), "/elsewhere"]))
    real = toolchains.choose("tensorrt_llm", GPU, quiet=True)
    assert real.environment()["PYTHONPATH"] == "/elsewhere"


@pytest.mark.parametrize(
    ("typed", "argv"),
    [
        ("python -m pip list", ["PYTHON", "-m", "pip", "list"]),
        ("trtllm-build --help", ["PYTHON", "BIN/trtllm-build", "--help"]),
        ("python examples/run.py --x 1", ["PYTHON", "EXAMPLES/run.py", "--x", "1"]),
        ("python -u TensorRT-LLM/examples/run.py", ["PYTHON", "-u", "EXAMPLES/run.py"]),
        ('python "$TRTLLM_EXAMPLES/run.py"', ["PYTHON", "EXAMPLES/run.py"]),
        ("examples/run.py", ["PYTHON", "EXAMPLES/run.py"]),
        ("python mine.py examples/run.py", ["PYTHON", "mine.py", "examples/run.py"]),
        ("env A=1 python examples/run.py", ["/usr/bin/env", "A=1", "PYTHON", "EXAMPLES/run.py"]),
    ],
)
def test_official_names_resolve_to_the_toolchain(reference: Toolchain, typed: str, argv: list[str]) -> None:
    places = {"PYTHON": reference.python, "BIN": reference.bin_dirs[0], "EXAMPLES": reference.examples}
    expected = [re.sub("PYTHON|BIN|EXAMPLES", lambda found: str(places[found.group()]), word) for word in argv]
    resolved = reference.resolve(typed)
    assert [os.path.realpath(resolved[0]), *resolved[1:]] == [os.path.realpath(expected[0]), *expected[1:]]


def test_missing_commands_and_examples_are_named(reference: Toolchain) -> None:
    with pytest.raises(ToolchainNotFound, match=r"no command 'trtllm-prune'; it has .*trtllm-build"):
        reference.resolve("trtllm-prune")
    with pytest.raises(ToolchainNotFound, match="'no-such-program'"):
        reference.resolve("no-such-program --x")
    with pytest.raises(CommandLineError, match=r"nearest is examples/models/core/llama/convert_checkpoint\.py"):
        reference.resolve("python examples/llama/convert_checkpoint.py")


def test_exec_becomes_the_command_and_keeps_its_exit_code(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys, tensorrt_llm\nprint('version', tensorrt_llm.__version__)\nsys.exit(7)\n")
    starter = "from trtllm_workshop.toolchain import choose; choose('reference').exec_command({!r})"
    run = subprocess.run(
        [sys.executable, "-c", starter.format(["python", str(script)])], capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 7 and f"version {VERSION}" in run.stdout
    refused = [sys.executable, "-c", starter.format(["trtllm-build", "--made-up"])]
    run = subprocess.run(refused, capture_output=True, text=True, timeout=120)
    assert run.returncode == 1 and "--made-up" in run.stderr


# Splitting a line


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("a 'b c' \"d e\" f\\ g ''", ["a", "b c", "d e", "f g", ""]),
        ("a \\\n  --x 1 \\\n  --y 2", ["a", "--x", "1", "--y", "2"]),
        ("a $X ${X} '$X' \"is $X\" \\$X", ["a", "1 2", "1 2", "$X", "is 1 2", "$X"]),
        ("a ~/m x~y  # note", ["a", os.path.expanduser("~/m"), "x~y"]),
        ("a b#c '|' \">\"", ["a", "b#c", "|", ">"]),
    ],
)
def test_lines_split_as_a_shell_would(line: str, words: list[str]) -> None:
    assert split_line(line, {"X": "1 2"}) == ({}, words)


def test_leading_assignments_are_for_this_command() -> None:
    assert split_line("A=1 B='x y' run C=3", {}) == ({"A": "1", "B": "x y"}, ["run", "C=3"])


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("a | b", "pipe"),
        ("a > f", "redirection"),
        ("a && b", "one sh"),
        ("a *.txt", "wildcard"),
        ("a $(b)", "plain forms"),
        ("a `b`", "substitution"),
        ("a\nb", "backslash"),
        ("a \\ \nb", "very last character"),
        ("a $NOPE", "{NOPE}"),
        ("a 'b", "never closed"),
        ("!a", "leave out the '!'"),
        ("  ", "no command"),
    ],
)
def test_what_needs_a_shell_is_refused_by_name(line: str, part: str) -> None:
    with pytest.raises(CommandLineError) as error:
        split_line(line, {})
    assert part in str(error.value)


# Folders


def test_workspace_follows_the_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    space = Workspace(Path("work"))
    monkeypatch.chdir("/")
    assert space.model_dir("org/name") == tmp_path / "work/models/org--name"
    assert space.checkpoint_dir("org/name", tp=2) == tmp_path / "work/checkpoints/name/float16-tp2"
    assert space.engine_dir("org/name", "bfloat16") == tmp_path / "work/engines/name/bfloat16-tp1"
    with pytest.raises(ValueError, match="names no model"):
        space.engine_dir("/")
