"""Is a Hugging Face folder complete? Checked from file sizes and headers, without loading a tensor."""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from trtllm_workshop.checkpoint import WrongFolderKind, read_config, require_kind
from trtllm_workshop.hub_files import HubFile, weight_sets
from trtllm_workshop.reference.convert_source import ConversionError, nothing_to_read, open_source
from trtllm_workshop.safetensors_file import BrokenWeights, lfs_pointer_size

TOKENIZERS = (("tokenizer.json",), ("tokenizer.model",), ("vocab.json", "merges.txt"))
_LARGEST_POINTER = 1024  # the format's own limit: https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md


@dataclass(frozen=True)
class FolderReport:
    """`problems` make the folder unusable, `notes` are good to know; `weights` are the files that will be read."""

    folder: Path
    problems: tuple[str, ...]
    notes: tuple[str, ...]
    weights: tuple[str, ...]
    bytes: int

    @property
    def ok(self) -> bool:
        return not self.problems


def verify_model_folder(path: str | Path) -> FolderReport:
    """Checks config.json, tokenizer and weights of a folder; problems are sentences with the file and the fix.

    Weights: no Git LFS pointers, every safetensors header fits its file's size, an index and its shards belong
    together, pickles are complete archives; of several sets the one that will be read is named.
    """
    folder = Path(path)
    try:
        read_config(require_kind(folder, "hf"))
    except (WrongFolderKind, BrokenWeights) as error:
        pointers = _pointers(folder) if folder.is_dir() else []
        return FolderReport(folder, tuple(pointers or [str(error)]), (), (), 0)
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_file())
    problems = _pointers(folder)
    notes: list[str] = []
    if not any(all(name in names for name in files) for files in TOKENIZERS):
        problems.append(
            f"{folder} has no tokenizer (tokenizer.json, tokenizer.model, or vocab.json with merges.txt): download "
            "these files of the same repository"
        )
    weights: tuple[str, ...] = ()
    if not problems:
        try:
            with open_source(folder, allow_pickle=False) as source:
                weights = tuple(sorted({info.file.name for info in source.index.values()}))
                notes += source.notes
        except BrokenWeights as error:
            problems += str(error).splitlines()
        except ConversionError:
            weights = tuple(n for n in weight_sets(names).get("pytorch_model*.bin", []) if n.endswith(".bin"))
            if weights:
                notes.append(f"only pickle weights ({', '.join(weights)}): converting them needs consent")
            problems += _check_pickles(folder, weights) if weights else [nothing_to_read(folder)]
    size = sum((folder / name).stat().st_size for name in names)
    return FolderReport(folder, tuple(problems), tuple(notes), () if problems else weights, size)


def _pointers(folder: Path) -> list[str]:
    """One sentence about all Git LFS pointers of a folder, with the bytes they stand for."""
    sizes = {}
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.stat().st_size <= _LARGEST_POINTER:
            with path.open("rb") as file:
                if (size := lfs_pointer_size(file.read(512))) is not None:
                    sizes[path.name] = size
    if not sizes:
        return []
    known = sum(int(size) for size in sizes.values() if size.isdecimal())
    return [
        f"{folder}: these are LFS pointers, {known:,} bytes expected: {', '.join(sizes)}. Run `git lfs pull` there, or "
        "download the model through the Hub's library"
    ]


def _check_pickles(folder: Path, weights: Iterable[str]) -> list[str]:
    """A .bin of torch 1.6 or later is a zip archive whose directory stands at the end: missing when truncated."""
    problems = []
    for name in weights:
        with (folder / name).open("rb") as file:
            head = file.read(4)
        if head == b"PK\x03\x04" and not zipfile.is_zipfile(folder / name):
            size = (folder / name).stat().st_size
            problems.append(f"{folder / name} is truncated ({size} bytes, no end of archive): download it again")
        elif head[:1] not in (b"P", b"\x80"):
            problems.append(f"{folder / name} is no PyTorch file: download it again")
    index = folder / "pytorch_model.bin.index.json"
    if "pytorch_model.bin" not in weights and index.is_file():
        try:
            listed = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return [*problems, f"{index} cannot be read ({error!r}): download it again"]
        if absent := sorted(listed - set(weights)):
            problems.append(f"{index.name} lists shards that are missing: {', '.join(absent)}; download them")
    return problems


def damaged_files(folder: Path, files: Iterable[HubFile]) -> dict[str, str]:
    """{name: what is wrong} of files that differ from the Hub's size or sha256."""
    wrong = {}
    for file in files:
        path = folder / file.name
        if not path.is_file():
            wrong[file.name] = "is missing"
        elif path.stat().st_size != file.size:
            wrong[file.name] = f"has {path.stat().st_size:,} bytes, the Hub's has {file.size:,}"
        elif file.sha256 and sha256(path) != file.sha256:
            wrong[file.name] = "has the right size but another sha256 than the Hub's"
    return wrong


def sha256(path: Path) -> str:
    """The file's SHA-256 as hexadecimal digits, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
