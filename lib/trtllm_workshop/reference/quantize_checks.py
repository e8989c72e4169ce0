"""What is checked before the first calibration batch: a mistake must not cost the minutes that calibration takes."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable
from pathlib import Path

from trtllm_workshop.model_spec import ModelSpec
from trtllm_workshop.reference.convert_plan import source_tensors
from trtllm_workshop.reference.convert_source import open_source
from trtllm_workshop.reference.quantize_formats import QuantizeError

MODELOPT = "0.37"
_MEMINFO, _CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def check_modelopt(say: Callable[[str], None]) -> str:
    """The version of the installed ModelOpt; a release other than TensorRT-LLM 1.2.1's pin is said.

    Raises QuantizeError when it is missing.
    """
    try:
        version = importlib.metadata.version("nvidia-modelopt")
    except importlib.metadata.PackageNotFoundError as error:
        raise QuantizeError(
            f"NVIDIA ModelOpt is not installed here, and it does the quantization: pip install 'nvidia-modelopt=={MODELOPT}.*'"
        ) from error
    if not version.startswith(MODELOPT + "."):
        say(
            f"warning: ModelOpt {version} is installed; the course was tried with {MODELOPT}, which TensorRT-LLM 1.2.1 pins"
        )
    return version


def check_device(device: str) -> None:
    """Raises QuantizeError when `cuda` is asked for and there is none, saying what to do."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise QuantizeError("--device cuda (the default) needs a CUDA GPU, and torch finds none here: add --device cpu")


def check_tokenizer(folder: Path) -> None:
    """Raises QuantizeError for a model folder without a tokenizer, whose absence transformers reports as a riddle."""
    names = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
    if not any((folder / name).is_file() for name in names) and not any(folder.glob("*.tiktoken")):
        raise QuantizeError(
            f"{folder} has no tokenizer ({names[0]} or {names[1]}), and calibration needs one: copy it from the model's "
            "page, or download the model again"
        )


def check_writable(target: Path) -> None:
    """Raises OSError, naming the target, when no folder can be made where it is to be; nothing is left behind."""
    place = target.parent
    while not place.exists():
        place = place.parent
    probe = place / f".{target.name}.probe-{os.getpid()}"
    try:
        probe.mkdir()
        probe.rmdir()
    except OSError as error:  # the probe's own name would tell the reader nothing
        raise OSError(error.errno, error.strerror, str(target)) from error


def memory_needed(spec: ModelSpec, device: str, tokens_per_batch: int) -> int:
    """Bytes that quantizing takes at its peak, roughly: the model, the copy that is exported, and one batch's logits."""
    head = spec.vocab_size * spec.hidden_size if spec.tie_word_embeddings else 0
    width = 4 if device == "cpu" else 2  # float32 on a processor, the stored type on a GPU
    return int(spec.parameter_count() * 2 * width + head * width + tokens_per_batch * spec.vocab_size * 2 * width)


def free_memory(device: str) -> int | None:
    """Bytes of memory that are free for this process on the device; None when the system does not say."""
    if device == "cuda":
        import torch

        return int(torch.cuda.mem_get_info()[0])
    try:
        lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines() if ":" in line)
        free = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError, IndexError):
        return None
    try:  # a container's own limit is not in meminfo
        limit = int((_CGROUP / "memory.max").read_text())
        free = min(free, limit - int((_CGROUP / "memory.current").read_text()))
    except (OSError, ValueError):
        pass
    return free


def check_memory(spec: ModelSpec, device: str, tokens_per_batch: int) -> None:
    """Raises QuantizeError when the model does not fit: off-loaded weights fail only after all batches."""
    needed, free = memory_needed(spec, device, tokens_per_batch), free_memory(device)
    if free is not None and needed > free:
        raise QuantizeError(
            f"the model does not fit: quantizing it takes about {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free on "
            f"{device}. Free memory, lower --batch_size or --calib_max_seq_length, or take a larger machine"
        )


def check_weights(spec: ModelSpec, model_dir: Path) -> None:
    """Raises BrokenWeights or QuantizeError unless every tensor that the config promises is in the folder."""
    with open_source(model_dir) as source:
        index = source.index
        for name, shape in source_tensors(spec, with_head=not spec.tie_word_embeddings).items():
            if name not in index:
                raise QuantizeError(
                    f"{model_dir} lacks {name}, which its config.json promises: download the model again"
                )
            if index[name].shape != shape:
                raise QuantizeError(
                    f"{name} has shape {index[name].shape}, config.json makes it {shape}: they do not agree"
                )
