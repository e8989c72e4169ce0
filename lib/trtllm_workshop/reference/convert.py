"""Hugging Face weights -> TensorRT-LLM checkpoint, streamed tensor by tensor.

The steps: describe the model, choose and check the weight set, plan every rank, check the disk, write into a hidden
folder, verify, rename. Peak memory is a few buffers; see convert_source, convert_plan, convert_write, convert_output.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trtllm_workshop.checkpoint import (
    BrokenWeights,
    classify,
    read_config,
    require_kind,
    summarise_names,
    verify_checkpoint,
)
from trtllm_workshop.model_spec import ModelSpec, UnsupportedModel
from trtllm_workshop.reference.convert_cast import FLOAT16_MAX
from trtllm_workshop.reference.convert_config import checkpoint_config
from trtllm_workshop.reference.convert_output import check_space, check_target, clear_leftovers, replacing
from trtllm_workshop.reference.convert_plan import (
    EMBEDDING,
    HEAD,
    OutputTensor,
    Sharding,
    check_sharding,
    plan_rank,
    source_tensors,
)
from trtllm_workshop.reference.convert_source import (
    FLOAT_TYPES,
    ConversionError,
    WeightSource,
    nothing_to_read,
    open_source,
)
from trtllm_workshop.reference.convert_write import RankWriter
from trtllm_workshop.safetensors_file import ITEM_SIZE, TensorInfo

DTYPES = ("auto", "float16", "bfloat16", "float32")
_HARMLESS = re.compile(r".*\.rotary_emb\.inv_freq")  # tables that old files carry; they follow from the config
_COMPARE_BYTES = 4 << 20


@dataclass(frozen=True)
class Conversion:
    """What was written: the folder, its config, the sizes in bytes of the rank files, warnings, and wall seconds."""

    folder: Path
    config: dict[str, Any]
    file_sizes: tuple[int, ...]
    warnings: tuple[str, ...]
    seconds: float


@dataclass
class _Report:
    say: Callable[[str], None]
    warnings: list[str] = field(default_factory=list)

    def warn(self, text: str) -> None:
        self.warnings.append(text)
        self.say(f"warning: {text}")


def choose_dtype(asked: str, source: str) -> str:
    """The stored type: `auto` follows the source, except that float32 becomes float16 (as infer_dtype does)."""
    if asked not in DTYPES:
        raise ConversionError(f"--dtype {asked} is not one of {', '.join(DTYPES)}")
    if asked != "auto":
        return asked
    if source not in FLOAT_TYPES:
        raise ConversionError(f"the source type {source!r} is not one to follow; give --dtype {', '.join(DTYPES[1:])}")
    return "float16" if source in ("float32", "float64") else source


def convert_checkpoint(
    model_dir: str | Path,
    output_dir: str | Path,
    *,
    dtype: str = "auto",
    sharding: Sharding | None = None,
    workers: int = 1,
    n_kv_head: int | None = None,
    save_config_only: bool = False,
    allow_pickle: bool | None = None,
    quant_algo: str | None = None,
    say: Callable[[str], None] = print,
) -> Conversion:
    """Converts a Hugging Face folder into a checkpoint folder with one rankN.safetensors for every rank.

    `workers` ranks are written at a time. `save_config_only` writes config.json alone. `n_kv_head` only has to agree
    with the weights. `quant_algo` W8A16 or W4A16 leaves the tensors as they are: trtllm-build quantizes them. Progress and
    warnings go to `say`.

    Raises WrongFolderKind, UnsupportedModel, BrokenWeights, ConversionError (all of them ValueError) or OSError, and
    leaves the output folder as it was then.
    """
    started = time.monotonic()
    sharding, target, report = sharding or Sharding(), Path(output_dir).resolve(), _Report(say)
    spec = hf_spec(model_dir)
    stored = choose_dtype(dtype, spec.dtype)
    check_sharding(spec, sharding)
    check_target(target)
    for line in clear_leftovers(target):
        say(line)
    if spec.sliding_window and spec.sliding_window < spec.max_position_embeddings:
        report.warn(
            f"sliding_window {spec.sliding_window} is not part of a checkpoint: give --max_attention_window_size "
            f"{spec.sliding_window} when you run the engine"
        )
    if save_config_only:
        config = checkpoint_config(spec, stored, sharding, quant_algo)
        with replacing(target, lambda _: []) as work:
            _write_config(work, config)
        return Conversion(target, config, (), tuple(report.warnings), time.monotonic() - started)
    with open_source(model_dir, allow_pickle) as source:
        for note in source.notes:
            say(note)
        head = _check_weights(spec, source, n_kv_head, report)
        _warn_about_range(source.index, spec, stored, dtype, report)
        config = checkpoint_config(spec, stored, sharding, quant_algo)
        ranks = sharding.tp_size * sharding.pp_size
        plans = [list(plan_rank(spec, sharding, rank, head)) for rank in range(ranks)]
        needed = sum(_plan_bytes(plan, stored) for plan in plans)
        check_space(target, needed)
        with replacing(target, verify_checkpoint, needed) as work:
            sizes = _write_ranks(work, plans, source, stored, workers, report)
            _write_config(work, config)
    return Conversion(target, config, sizes, tuple(report.warnings), time.monotonic() - started)


def hf_spec(folder: str | Path) -> ModelSpec:
    """The spec of a Hugging Face folder. Raises WrongFolderKind, UnsupportedModel or ConversionError."""
    folder = Path(folder)
    if classify(folder) == "unknown" and folder.is_dir():
        if any(folder.glob("*.gguf")):
            raise ConversionError(nothing_to_read(folder))
        if (folder / "config.json").exists():
            return ModelSpec.from_hf(folder)  # which says what is wrong with the file
    require_kind(folder, "hf")
    spec = ModelSpec.from_hf(folder)
    if quantized := read_config(folder).get("quantization_config"):
        method = quantized.get("quant_method") if isinstance(quantized, Mapping) else quantized
        raise UnsupportedModel(
            f"{folder}: the weights are quantized already (quant_method {method!r}), which the reference toolchain "
            "does not read: take the unquantized model"
        )
    return spec


def _plan_bytes(plan: list[OutputTensor], dtype: str) -> int:
    return sum(math.prod(tensor.shape) for tensor in plan) * ITEM_SIZE[dtype] + 200 * len(plan)


def _write_config(folder: Path, config: Mapping[str, Any]) -> None:
    with (folder / "config.json").open("w", encoding="utf-8") as file:
        json.dump(config, file, indent=4)
        file.flush()
        os.fsync(file.fileno())


def _write_ranks(
    work: Path, plans: list[list[OutputTensor]], source: WeightSource, dtype: str, workers: int, report: _Report
) -> tuple[int, ...]:
    overflows: dict[str, int] = {}

    def write(rank: int) -> int:
        writer = RankWriter(source, dtype, report.say)
        size = writer.write(work / f"rank{rank}.safetensors", plans[rank])
        report.say(f"rank{rank}.safetensors: {len(plans[rank])} tensors, {size / 1e6:.1f} MB")
        overflows.update(writer.overflows)
        return size

    with ThreadPoolExecutor(max(1, min(workers, len(plans)))) as pool:
        sizes = tuple(pool.map(write, range(len(plans))))
    if overflows:
        worst = ", ".join(f"{name}: {count}" for name, count in sorted(overflows.items(), key=lambda x: -x[1])[:8])
        raise ConversionError(
            f"{sum(overflows.values())} values in {len(overflows)} tensors lie beyond float16's range "
            f"(+-{FLOAT16_MAX:.0f}) and would become infinite ({worst}): use --dtype bfloat16"
        )
    return sizes


def _check_weights(spec: ModelSpec, source: WeightSource, n_kv_head: int | None, report: _Report) -> str:
    """Compares names, shapes and types with the spec; returns the source name of lm_head."""
    index = source.index
    tied = spec.tie_word_embeddings
    wanted = source_tensors(spec, with_head=not tied)
    missing = wanted.keys() - index.keys()
    if HEAD in missing:
        raise BrokenWeights(
            f"{HEAD} is missing and config.json says tie_word_embeddings false: the download is incomplete, or the key "
            "is wrong (true means that the embedding table is the head)"
        )
    if missing:
        raise BrokenWeights(f"required but not in the weights: {summarise_names(missing)}; download the model again")
    surplus = {name for name in index.keys() - wanted.keys() - {HEAD} if not _HARMLESS.fullmatch(name)}
    if surplus:
        raise UnsupportedModel(
            f"the weights hold tensors that a {spec.architecture} with this config.json does not have: "
            f"{summarise_names(surplus)}; leaving them out would change the model"
        )
    _check_kv_heads(spec, index, n_kv_head)
    for name, shape in wanted.items():
        if index[name].shape != shape:
            raise BrokenWeights(
                f"{name} has shape {index[name].shape}, config.json makes it {shape}: they do not agree"
            )
        if index[name].dtype not in FLOAT_TYPES:
            raise UnsupportedModel(f"{name} is stored as {index[name].dtype}; only {', '.join(FLOAT_TYPES)} are read")
    if not tied:
        return HEAD
    if HEAD in index and not _same_bytes(source, HEAD, EMBEDDING):
        report.warn(
            f"config.json says tie_word_embeddings true, but the weights hold another {HEAD}: it is left out and the "
            "embedding table is the head, as in transformers"
        )
    return EMBEDDING


def _check_kv_heads(spec: ModelSpec, index: Mapping[str, TensorInfo], n_kv_head: int | None) -> None:
    shape = index["model.layers.0.self_attn.k_proj.weight"].shape
    proven = shape[0] // spec.head_size
    for origin, claimed in (
        ("--n_kv_head", n_kv_head),
        ("num_key_value_heads in config.json", spec.num_key_value_heads),
    ):
        if claimed is not None and claimed * spec.head_size != shape[0]:
            raise ConversionError(
                f"{origin} is {claimed}, but the weights prove {proven} KV heads: k_proj has {shape[0]} rows and the "
                f"head size is {spec.head_size}. An engine with {claimed} would answer with nonsense"
            )


def _same_bytes(source: WeightSource, first: str, second: str) -> bool:
    a, b = source.index[first], source.index[second]
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    left, right = bytearray(_COMPARE_BYTES), bytearray(_COMPARE_BYTES)
    for start in range(0, a.nbytes, _COMPARE_BYTES):
        count = min(_COMPARE_BYTES, a.nbytes - start)
        views = memoryview(left)[:count], memoryview(right)[:count]
        for name, view in zip((first, second), views, strict=True):
            source.read_into(name, start, view)
        if views[0] != views[1]:
            return False
    return True


def _warn_about_range(
    index: Mapping[str, TensorInfo], spec: ModelSpec, stored: str, asked: str, report: _Report
) -> None:
    kinds = {info.dtype for info in index.values()}
    if stored == "float16" and "bfloat16" in kinds | {spec.dtype}:
        report.warn(
            "the source is bfloat16 and --dtype float16 was asked for: float16 ends at 65504, and activations of some "
            "models (Qwen2 is known for it) pass that; --dtype bfloat16 keeps the source's range"
            if asked != "auto"
            else "the weights are bfloat16, but config.json does not say so: float16 is used, give --dtype bfloat16"
        )
