"""What must hold for the repository as a whole: no private places, no leftovers, promises of the README that are kept."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
ME = Path(__file__).name
# Paths of one machine, addresses inside a network, and words that belong to a workplace and not to a course.
FORBIDDEN = {
    "a machine's own path": r"(?<![\w.$}{~-])/(?:work/(?:main|scratch|shared|\.library)|root/(?!\.cache/huggingface)"
    r"|opt/(?:pypi|wheels)|home/\w+/)",
    "a private address": r"(?://|@|\bhost\W{1,4})(?:10|192\.168|172\.(?:1[6-9]|2\d|3[01]))\.\d{1,3}\.\d{1,3}\.\d{1,3}\b(?!\.)",
    "a private host": r"https?://[\w.-]+\.(?:internal|local|lan|corp)\b",
    "a secret": r"\bhf_[A-Za-z0-9]{30,}|\bghp_[A-Za-z0-9]{30,}|-----BEGIN [A-Z ]*PRIVATE KEY-----",
    "an unfinished merge": r"^(?:<{7} |>{7} |={7}$)",
}
# Public package indexes beside PyPI, and the only files that may name them.
GPU_FILES = {"environment.yml", "lib/trtllm_workshop/install_gpu.py", "lib/trtllm_workshop/advice_install.py"}
INDEXES = {
    "download.pytorch.org/whl/cpu": {"tools/setup_env.py"},
    "download.pytorch.org/whl/cu130": GPU_FILES,
    "pypi.nvidia.com": GPU_FILES,
}


def tracked() -> list[str]:
    """The files in Git; in an unpacked archive without Git, everything that is not ignored by name."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode == 0 and listed.stdout:
        return [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]
    skip = (".venv", "work", ".git", "__pycache__", ".pytest_cache", ".ruff_cache", ".mypy_cache", ".hypothesis")
    files = [path.relative_to(ROOT) for path in ROOT.rglob("*") if path.is_file()]
    return [str(path) for path in files if not set(path.parts) & set(skip) and ".egg-info" not in str(path)]


def texts() -> dict[str, str]:
    found = {}
    for name in tracked():
        data = (ROOT / name).read_bytes()
        if b"\0" not in data[:4096]:
            found[name] = data.decode("utf-8")
    return found


@pytest.fixture(scope="module")
def contents() -> dict[str, str]:
    return texts()


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_file_contains(what: str, contents: dict[str, str]) -> None:
    pattern = re.compile(FORBIDDEN[what], re.MULTILINE)
    found = [
        f"{name}:{text.count(chr(10), 0, match.start()) + 1}: {match.group(0)!r}"
        for name, text in contents.items()
        if name != f"tests/{ME}"
        for match in pattern.finditer(text)
    ]
    assert not found


def test_package_indexes_are_named_only_where_they_are_used(contents: dict[str, str]) -> None:
    for index, allowed in INDEXES.items():
        named = {name for name, text in contents.items() if index in text} - {f"tests/{ME}"}
        assert named <= allowed, index


def test_large_and_generated_files_are_not_tracked() -> None:
    names = tracked()
    big = [name for name in names if (ROOT / name).stat().st_size > 2_000_000]
    assert not big
    made = [
        n
        for n in names
        if re.search(r"(^|/)(work|\.venv|__pycache__|\.ipynb_checkpoints)/|\.(pyc|safetensors|engine)$", n)
    ]
    assert not made


def test_files_end_with_a_line_end_and_have_unix_line_ends(contents: dict[str, str]) -> None:
    wrong = [name for name, text in contents.items() if text and (not text.endswith("\n") or "\r\n" in text)]
    assert not wrong


def test_python_files_stay_readable_in_length(contents: dict[str, str]) -> None:
    long = {
        n: lines
        for n, t in contents.items()
        if n.startswith("lib/") and n.endswith(".py") and (lines := t.count("\n")) > 400
    }
    assert not long


def test_the_licence_is_apache_2_and_pyproject_says_the_same(contents: dict[str, str]) -> None:
    assert contents["LICENSE"].split("\n")[:2] != [] and "Apache License" in contents["LICENSE"][:200]
    assert "END OF TERMS AND CONDITIONS" in contents["LICENSE"]
    assert 'license = "Apache-2.0"' in contents["pyproject.toml"]


def targets() -> dict[str, str]:
    """The Makefile's targets and their descriptions."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    return dict(re.findall(r"^([a-z-]+):[^#\n]*## (.*)$", text, re.MULTILINE))


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_every_command_on_the_page_exists(page: str, contents: dict[str, str]) -> None:
    text = contents[page]
    blocks = re.findall(r"```[a-z]*\n(.*?)```|`([^`\n]+)`", text, re.DOTALL)
    lines = [line for block in blocks for part in block for line in part.splitlines()]
    made = {
        word
        for line in lines
        if (match := re.match(r"(?:\w+=\S+ )*make ([a-z-]+)", line.strip()))
        for word in match.groups()
    }
    assert made and made <= set(targets()), made - set(targets())
    if page == "README.md":
        assert {"course", "test"} <= made
    used = {m.group(1) for line in lines if (m := re.search(r"\bworkshop ([a-z][a-z-]+)", line.strip()))}
    assert used <= workshop_commands(), used - workshop_commands()


def workshop_commands() -> set[str]:
    folder = ROOT / "lib/trtllm_workshop"
    sources = [path.read_text(encoding="utf-8") for path in (folder / "cli.py", *folder.glob("*_cli.py"))]
    return set(re.findall(r"add_parser\(\s*\"([a-z-]+)\"", "\n".join(sources)))


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "THIRD_PARTY.md"])
def test_links_between_files_resolve(page: str, contents: dict[str, str]) -> None:
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", contents[page])
    broken = [link for link in links if "://" not in link and not (ROOT / link).exists()]
    assert not broken


def test_continuous_integration_runs_the_same_script(contents: dict[str, str]) -> None:
    workflow: dict[str, Any] = yaml.safe_load(contents[".github/workflows/test.yml"])
    steps = [step.get("run", "") for job in workflow["jobs"].values() for step in job["steps"]]
    assert ".ci/run" in steps and "make course" in steps and "make lint" in steps
    assert re.search(r"^exec make test ", contents[".ci/run"], re.MULTILINE)
    assert (ROOT / ".ci/run").stat().st_mode & 0o111
