"""Makes the course's environment: ``.venv`` with the locked packages and this checkout. Standard library only.

``python3 tools/setup_env.py`` may be run with any Python 3: it looks for a fitting one (3.10 to 3.12). The second run
finds its stamp and ends at once; an interrupted run is continued by the next one.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "requirements-cpu.lock"
PREFERRED = ("3.11", "3.12", "3.10")
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PROBE_SECONDS = 3
_FACTS = "import sys, ensurepip, venv; print('%d.%d' % sys.version_info[:2]); print(sys.base_prefix)"


def main() -> int:
    """Brings ``.venv`` up to date; returns the exit code of the step that failed, or 0."""
    venv = Path(os.environ.get("WORKSHOP_VENV") or ROOT / ".venv")
    stamp = venv / "workshop-stamp"
    wanted = fingerprint()
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted and (venv / "bin" / "python").exists():
        return 0
    started = time.monotonic()
    if not (venv / "bin" / "python").exists() or version_of(str(venv / "bin" / "python")) not in PREFERRED:
        python = find_python()
        if python is None:
            print(NO_PYTHON.format(there=there()), file=sys.stderr)
            return 1
        print(f"Making {venv} with {python} (Python {version_of(python)})", flush=True)
        made = subprocess.run([python, "-m", "venv", "--clear", str(venv)])
        if made.returncode:
            print(f"`{python} -m venv {venv}` failed; see above. On Debian: apt install python3-venv", file=sys.stderr)
            return made.returncode
    stamp.unlink(missing_ok=True)
    for step in steps(venv / "bin" / "python"):
        code = run_step(step, venv / "workshop-setup.log", started)
        if code:
            print(f"\nThis step failed (exit code {code}), its last words are above:", file=sys.stderr)
            print(f"  {' '.join(step)}\nMend the cause and run the same command again; it goes on.", file=sys.stderr)
            return code
    stamp.write_text(wanted, encoding="utf-8")
    print(f"{venv} is ready after {time.monotonic() - started:.0f} s.", flush=True)
    return 0


def fingerprint() -> str:
    """What the environment depends on: the lock, the project's metadata, where the checkout lies."""
    digest = hashlib.sha256(str(ROOT).encode())
    for path in (LOCK, ROOT / "pyproject.toml"):
        digest.update(path.read_bytes())
    return digest.hexdigest() + "\n"


def steps(python: Path) -> list[list[str]]:
    """The pip calls, in order."""
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    install = [*pip, "install", "--no-input", "--progress-bar", "off"]
    match = re.search(r"^torch==[\w.]+", LOCK.read_text(encoding="utf-8"), re.MULTILINE)
    if match is None:
        raise SystemExit(f"{LOCK} does not name torch; run `make lock`")
    extra = []
    if sys.platform == "linux" and platform.machine() == "x86_64":
        if reachable(TORCH_CPU_INDEX):
            extra = ["--extra-index-url", TORCH_CPU_INDEX]
        else:
            print(f"PyTorch's CPU index does not answer ({TORCH_CPU_INDEX}),")
            print(
                "so pip takes the torch it finds elsewhere; PyPI's own brings several gigabytes of CUDA libraries along."
            )
    print("Installing the locked packages (about 1.8 GB on disk with the CPU build of torch)", flush=True)
    # Two steps, so that only torch comes from the extra index; its dependencies are held by the lock as constraints.
    return [
        [*install, "--constraint", str(LOCK), *extra, match.group(0)],
        [*install, "--requirement", str(LOCK)],
        [*install, "--no-deps", "--no-build-isolation", "--editable", str(ROOT)],
        [*pip, "check"],
    ]


def run_step(step: list[str], log: Path, started: float) -> int:
    """Runs one pip call with its output in ``log``; says every 15 s where it is, and its last lines when it fails."""
    with log.open("w", encoding="utf-8") as stream:
        process = subprocess.Popen(step, cwd=ROOT, stdout=stream, stderr=subprocess.STDOUT)
        while True:
            try:
                code = process.wait(timeout=15)
                break
            except subprocess.TimeoutExpired:
                last = next(reversed(words(log)), "")
                print(f"  {time.monotonic() - started:4.0f} s  {last.strip()[:100]}", flush=True)
            except BaseException:
                process.kill()
                raise
    if code:
        print("\n".join(words(log)[-25:]), file=sys.stderr)
    return code


def words(log: Path) -> list[str]:
    """The lines that say something, cut to a readable length."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    dull = ("WARNING: Location", "Requirement already satisfied")  # one of each for every package
    return [line[:300] for line in lines if line.strip() and not line.startswith(dull)]


def reachable(url: str, seconds: float = PROBE_SECONDS) -> bool:
    """Whether the index answers within three seconds; pip itself would try for minutes."""
    answers: list[bool] = []

    def ask() -> None:
        try:
            with urllib.request.urlopen(f"{url}/torch/", timeout=seconds):
                answers.append(True)
        except (OSError, ValueError):
            answers.append(False)

    # In a thread, because looking up the name has no time limit of its own.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    return answers == [True]


def candidates() -> list[str]:
    """Interpreters to try: the one named by WORKSHOP_PYTHON only, else those on PATH, the running one, pyenv's."""
    if os.environ.get("WORKSHOP_PYTHON"):
        return [os.environ["WORKSHOP_PYTHON"]]
    found = []
    for version in PREFERRED:
        found += [path for folder in os.get_exec_path() if (path := shutil.which(f"python{version}", path=folder))]
        pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
        found += [str(path / "bin" / "python") for path in sorted(pyenv.glob(f"{version}.*"), reverse=True)]
    found += [sys.executable, *(path for name in ("python3", "python") if (path := shutil.which(name)))]
    return list(dict.fromkeys(found))


def version_of(python: str) -> str:
    """``3.11`` for a Python that starts and can make environments, else an empty text (pyenv's shims often cannot)."""
    try:
        result = subprocess.run([python, "-c", _FACTS], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout.split("\n")[0].strip() if result.returncode == 0 else ""


def find_python() -> str | None:
    """The most preferred Python that works; None when there is none from 3.10 to 3.12."""
    best: dict[str, str] = {}
    for python in candidates():
        best.setdefault(version_of(python), python)
        if PREFERRED[0] in best:
            break
    return next((best[version] for version in PREFERRED if version in best), None)


def there() -> str:
    """What was found instead, for the message."""
    return ", ".join(f"{python} ({version_of(python) or 'does not work'})" for python in candidates()) or "none"


NO_PYTHON = """\
The course needs Python 3.10, 3.11 or 3.12 with the venv module, and none was found.
Looked at: {there}
Install one (Debian or Ubuntu: apt install python3 python3-venv; macOS: brew install python@3.12; anywhere: conda or
pyenv), or name one: WORKSHOP_PYTHON=/path/to/python3.12 make course"""

if __name__ == "__main__":
    sys.exit(main())
