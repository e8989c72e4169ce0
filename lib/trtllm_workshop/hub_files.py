"""Which files of a repository are needed: config, tokenizer, and exactly one set of weights."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer*.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.*",
    "LICENSE*",
    "NOTICE*",
)


@dataclass(frozen=True)
class HubFile:
    """One file of a repository: its size in bytes, and the sha256 that the Hub keeps for large files."""

    name: str
    size: int
    sha256: str | None = None


@dataclass(frozen=True)
class Choice:
    """The files to download, the weights among them, and sentences about what was left out."""

    files: tuple[HubFile, ...]
    weights: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.files)


def weight_sets(names: Sequence[str]) -> dict[str, list[str]]:
    """{label: files} of the complete weight sets among top-level names, the one that transformers prefers first."""
    sets: dict[str, list[str]] = {}
    shards = [name for name in names if re.fullmatch(r"model-\d+-of-\d+\.safetensors", name)]
    others = [
        name
        for name in names
        if name.endswith(".safetensors")
        and name != "model.safetensors"
        and name not in shards
        and not name.startswith(("consolidated", "adapter"))
    ]
    pickles = [name for name in names if re.fullmatch(r"pytorch_model(-\d+-of-\d+)?\.bin", name)]
    if "model.safetensors" in names:
        sets["model.safetensors"] = ["model.safetensors"]
    if shards:
        sets["model-*.safetensors"] = [*shards, *(name for name in names if name == "model.safetensors.index.json")]
    if others and not sets:
        sets["*.safetensors"] = [*others, *(name for name in names if name.endswith(".safetensors.index.json"))]
    if pickles:
        index = [name for name in names if name == "pytorch_model.bin.index.json"]
        sets["pytorch_model*.bin"] = [*pickles, *index]
    return sets


def choose(files: Mapping[str, HubFile]) -> Choice | None:
    """Safetensors before pickles, the small files a model needs, only from the top folder. None: no weights there."""
    names = sorted(name for name in files if "/" not in name)
    sets = weight_sets(names)
    if not sets:
        return None
    (label, weights), *left_out = sets.items()
    notes = []
    if left_out:
        spared = sum(files[name].size for _, other in left_out for name in other)
        listed = ", ".join(other for other, _ in left_out)
        notes.append(f"two weight sets: {label} is taken, {listed} left out ({spared / 1e6:,.0f} MB spared)")
    if label.endswith(".bin"):
        notes.append("only pickle weights (.bin): converting them needs consent, because a pickle can run code")
    small = [name for name in names if any(fnmatch.fnmatch(name, pattern) for pattern in SMALL_FILES)]
    chosen = tuple(files[name] for name in [*small, *weights])
    return Choice(chosen, tuple(name for name in weights if not name.endswith(".json")), tuple(notes))
