"""The weights of a Hugging Face folder as a stream: which files count, what they hold, and reading pieces of them.

Nothing here loads a model. Safetensors are read by position; pickled weights (.bin) only with consent, by torch's
restricted loader and mapped from disk.
"""

from __future__ import annotations

import json
import os
import pickle
import re
from pathlib import Path
from typing import Any

from trtllm_workshop.checkpoint import summarise_names
from trtllm_workshop.safetensors_file import BrokenWeights, TensorInfo, lfs_pointer_size, read_header

PICKLE_CONSENT = "TRTLLM_WORKSHOP_ALLOW_PICKLE"
FLOAT_TYPES = ("float64", "float32", "float16", "bfloat16")


class ConversionError(ValueError):
    """The conversion cannot be done as asked; the message names the thing, its value and the fix."""


class WeightSource:
    """Random access to the tensors of one weight set; a context manager that closes its files.

    `index` gives each tensor's TensorInfo, `notes` are sentences for the user about how the set was chosen.
    """

    def __init__(self, index: dict[str, TensorInfo], notes: list[str], arrays: dict[str, Any] | None = None) -> None:
        self.index, self.notes = index, notes
        self._arrays = arrays or {}
        self._files: dict[Path, int] = {}
        for file in sorted({info.file for name, info in index.items() if name not in self._arrays}):
            self._files[file] = os.open(file, os.O_RDONLY)

    def __enter__(self) -> WeightSource:
        return self

    def __exit__(self, *_: object) -> None:
        while self._files:
            os.close(self._files.popitem()[1])

    def location(self, name: str) -> tuple[int, int] | None:
        """(file descriptor, byte offset) of a tensor that lies in a plain file, else None."""
        info = self.index[name]
        return None if name in self._arrays else (self._files[info.file], info.offset)

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        """Fills the buffer with the tensor's bytes from `start` on. Raises BrokenWeights when the file ends early."""
        if name in self._arrays:
            buffer[:] = memoryview(self._arrays[name])[start : start + len(buffer)]
            return
        info, done = self.index[name], 0
        while done < len(buffer):
            count = os.preadv(self._files[info.file], [buffer[done:]], info.offset + start + done)
            if not count:
                raise BrokenWeights(f"{info.file} ended while {name} was read; download it again")
            done += count


def open_source(folder: str | Path, allow_pickle: bool | None = None) -> WeightSource:
    """Chooses the one weight set of a Hugging Face folder and opens it.

    `allow_pickle` None asks the environment variable TRTLLM_WORKSHOP_ALLOW_PICKLE. Raises BrokenWeights for missing
    or damaged files, ConversionError when there is nothing that can be read.
    """
    folder = Path(folder)
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_file())
    safe, notes = _safetensors_set(folder, names)
    pickles = [name for name in names if name.endswith(".bin") and _is_weights(name)]
    if safe:
        if pickles:
            notes.append(f"two weight sets: {safe[0]} is read, {', '.join(pickles)} are left alone")
        return WeightSource(_read_all(folder, safe), notes)
    if pickles:
        return _open_pickles(folder, pickles, allow_pickle)
    raise ConversionError(nothing_to_read(folder))


def _is_weights(name: str) -> bool:
    return name.startswith(("pytorch_model", "model"))


def _safetensors_set(folder: Path, names: list[str]) -> tuple[list[str], list[str]]:
    """The file names of the set and notes on the choice; what transformers would load comes first."""
    index = folder / "model.safetensors.index.json"
    others = [name for name in names if name.endswith(".safetensors") and name != "model.safetensors"]
    if "model.safetensors" in names:
        notes = [f"two weight sets: model.safetensors is read, {', '.join(others)} are left alone"] if others else []
        return ["model.safetensors"], notes
    if index.is_file():
        return _indexed_shards(folder, index), []
    chosen = [name for name in others if not name.startswith(("consolidated", "adapter"))]
    for name in chosen:
        if match := re.fullmatch(r"(.*)-(\d+)-of-(\d+)\.safetensors", name):
            stem, digits, total = match[1], len(match[2]), int(match[3])
            whole = [f"{stem}-{part:0{digits}}-of-{match[3]}.safetensors" for part in range(1, total + 1)]
            if absent := sorted(set(whole) - set(chosen)):
                raise BrokenWeights(f"{folder}: {', '.join(absent)} of {total} shards are missing; download them")
    return chosen, []


def _indexed_shards(folder: Path, index: Path) -> list[str]:
    try:
        weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        shards = sorted(set(weight_map.values()))
        strange = [shard for shard in shards if not shard or Path(shard).name != shard or "\0" in shard]
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise BrokenWeights(f"{index} cannot be read ({error!r}); download it again") from error
    if strange or not shards:
        raise BrokenWeights(
            f"{index} names {', '.join(map(repr, strange)) or 'no files'}, expected file names of its own folder: "
            "download it again"
        )
    if absent := [shard for shard in shards if not (folder / shard).is_file()]:
        raise BrokenWeights(
            f"{index.name} lists {len(shards)} shards, missing are {', '.join(absent)}: download them to {folder} "
            "(a repeated download fetches only what is missing)"
        )
    found = _read_all(folder, shards)
    misplaced = [name for name, shard in weight_map.items() if name not in found or found[name].file.name != shard]
    if misplaced:
        raise BrokenWeights(
            f"{index.name} and the shards do not belong together: {len(misplaced)} tensors are not where it says "
            f"({summarise_names(misplaced)}); download index and shards of one revision again"
        )
    return shards


def _read_all(folder: Path, files: list[str]) -> dict[str, TensorInfo]:
    index: dict[str, TensorInfo] = {}
    problems = []
    for file in files:
        try:
            header, _ = read_header(folder / file)
        except BrokenWeights as error:
            problems.append(str(error))
            continue
        if twice := header.keys() & index.keys():
            problems.append(f"{folder / file} repeats tensors of another file: {summarise_names(twice)}; keep one set")
        index.update(header)
    if problems:
        raise BrokenWeights("\n".join(problems))
    return index


def nothing_to_read(folder: Path) -> str:
    """Says what a folder without usable weights holds instead, and what to download."""
    names = sorted(entry.name for entry in folder.iterdir())
    gguf = [name for name in names if name.endswith(".gguf")]
    if gguf:
        return (
            f"{folder} has only GGUF weights ({', '.join(gguf)}), which llama.cpp uses and TensorRT-LLM cannot read: "
            "download the original repository of the model with its .safetensors files"
        )
    if consolidated := [name for name in names if name.startswith("consolidated")]:
        return (
            f"{folder} has only {', '.join(consolidated)}, the publisher's own layout with other tensor names: "
            "download model*.safetensors and config.json of the same repository"
        )
    if adapter := [name for name in names if name.startswith("adapter")]:
        return f"{folder} has only an adapter ({', '.join(adapter)}): merge it into its base model first"
    return f"{folder} has no weights (*.safetensors): download the model again"


def _open_pickles(folder: Path, files: list[str], allow_pickle: bool | None) -> WeightSource:
    if allow_pickle is None:
        allow_pickle = os.environ.get(PICKLE_CONSENT, "") not in ("", "0")
    if not allow_pickle:
        raise ConversionError(
            f"{folder} has only pickle weights ({', '.join(files)}): loading needs consent, because a pickle can run "
            f"code. Better download the .safetensors files; if you trust the source, set {PICKLE_CONSENT}=1 (they are "
            "then read with torch's weights-only loader, which refuses code)"
        )
    index: dict[str, TensorInfo] = {}
    arrays: dict[str, Any] = {}
    for file in files:
        for name, tensor in _load_pickle(folder / file).items():
            tensor = tensor.detach().contiguous()
            dtype = str(tensor.dtype).removeprefix("torch.")
            index[name] = TensorInfo(dtype, tuple(tensor.shape), tensor.nbytes, folder / file)
            arrays[name] = _as_bytes(tensor)
    return WeightSource(index, [f"pickle weights read with the weights-only loader: {', '.join(files)}"], arrays)


def _as_bytes(tensor: Any) -> Any:
    import torch

    return tensor.reshape(-1).view(torch.uint8).numpy()


def _load_pickle(path: Path) -> dict[str, Any]:
    import torch

    with path.open("rb") as file:
        if (size := lfs_pointer_size(file.read(512))) is not None:
            raise BrokenWeights(f"{path} is a Git LFS pointer, the weights have {size} bytes: run `git lfs pull`")
    try:
        try:
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
            if "mmap" not in str(error):
                raise
            state = torch.load(path, map_location="cpu", weights_only=True)  # the old format cannot be mapped
    except pickle.UnpicklingError as error:
        reason = next((line for line in str(error).splitlines() if "GLOBAL" in line or "Unsupported" in line), "")
        raise ConversionError(
            f"{path} is refused: it holds more than tensors, so loading it would run code from the file"
            f"{f' ({reason.strip()})' if reason else ''}. Use the .safetensors files of the model"
        ) from error
    except (RuntimeError, EOFError, OSError) as error:
        raise BrokenWeights(
            f"{path} ({path.stat().st_size} bytes) is no complete PyTorch file ({str(error).splitlines()[0]}); "
            "download it again"
        ) from error
    if not isinstance(state, dict) or not all(
        isinstance(name, str) and isinstance(value, torch.Tensor) and value.layout == torch.strided
        for name, value in state.items()
    ):
        raise ConversionError(
            f"{path} is no state dictionary of dense tensors; use the .safetensors files of the model"
        )
    return state
