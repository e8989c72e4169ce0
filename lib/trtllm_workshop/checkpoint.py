"""TensorRT-LLM checkpoint and engine folders: tell them apart, read them, and check that they are complete.

A checkpoint is config.json plus one rankN.safetensors for every rank; an engine is config.json plus one rankN.engine.
Names, shapes and split rules are those of TensorRT-LLM 1.2.1 (tensorrt_llm/models/modeling_utils.py,
tensorrt_llm/models/model_weights_loader.py, tensorrt_llm/mapping.py). Only headers are read, torch is not imported
until a tensor's values are asked for.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtllm_workshop.model_spec import ModelSpec, UnsupportedModel
from trtllm_workshop.quant_mode import QuantMode, TensorLayout, UnsupportedQuantization
from trtllm_workshop.safetensors_file import BrokenWeights, TensorInfo, read_header

__all__ = [
    "BrokenWeights",
    "RankMapping",
    "TensorInfo",
    "TensorLayout",
    "WrongFolderKind",
    "classify",
    "config_section",
    "expected_layout",
    "expected_tensors",
    "read_config",
    "read_tensor",
    "require_kind",
    "summarise_names",
    "tensor_index",
    "verify_checkpoint",
]

_KIND_NAMES = {
    "hf": "a Hugging Face model folder",
    "checkpoint": "a TensorRT-LLM checkpoint",
    "engine": "a TensorRT-LLM engine",
    "empty": "an empty folder",
    "missing": "not there",
    "unknown": "no folder that this course knows",
}
_NEXT_STEP = {
    (
        "missing",
        "hf",
    ): "check the path. A name on the Hugging Face Hub is not enough, as nothing is downloaded at this step: "
    "give the folder of the downloaded model (lesson 01 makes it)",
    ("hf", "checkpoint"): "run conversion first: convert_checkpoint.py --model_dir {path} --output_dir CHECKPOINT",
    ("hf", "engine"): "run conversion first (convert_checkpoint.py), then trtllm-build, and give the engine folder",
    ("checkpoint", "engine"): "build it first: trtllm-build --checkpoint_dir {path} --output_dir ENGINE",
    ("checkpoint", "hf"): "it is converted already: trtllm-build --checkpoint_dir {path} --output_dir ENGINE",
    ("engine", "checkpoint"): "it is built already: run it with examples/run.py --engine_dir {path}",
    ("engine", "hf"): "it is built already: run it with examples/run.py --engine_dir {path}",
}
_ORIGIN = {
    "hf": "download the model again (config.json and *.safetensors belong there)",
    "checkpoint": "make it with convert_checkpoint.py",
    "engine": "make it with trtllm-build",
}


class WrongFolderKind(ValueError):
    """A folder of another kind than the command needs; the message says which kind it is and what to run."""


def classify(path: str | Path) -> str:
    """One of "hf", "checkpoint", "engine", "empty", "missing", "unknown", judged by config.json and file names."""
    folder = Path(path)
    if not folder.exists():
        return "missing"
    if not folder.is_dir():
        return "unknown"
    names = [entry.name for entry in folder.iterdir()]
    if not names:
        return "empty"
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        config = {}
    if not isinstance(config, dict):
        return "unknown"
    if "pretrained_config" in config or any(re.fullmatch(r"rank\d+\.engine", name) for name in names):
        return "engine"
    if isinstance(config.get("architecture"), str) and "architectures" not in config:
        return "checkpoint"
    if "architectures" in config or "model_type" in config:
        return "hf"
    return "unknown"


def require_kind(path: str | Path, kind: str) -> Path:
    """Returns the path when it is of the kind; raises WrongFolderKind with the found kind and the next step."""
    found = classify(path)
    if found == kind:
        return Path(path)
    step = _NEXT_STEP.get((found, kind), _ORIGIN[kind]).format(path=path)
    raise WrongFolderKind(f"{path} is {_KIND_NAMES[found]}, but {_KIND_NAMES[kind]} is needed here: {step}")


def read_config(path: str | Path) -> dict[str, Any]:
    """The config.json of a folder (or of that file). Raises WrongFolderKind or BrokenWeights."""
    file = Path(path)
    if file.is_dir():
        file = file / "config.json"
    if not file.is_file():
        raise WrongFolderKind(f"{file} does not exist: {path} is {_KIND_NAMES[classify(path)]}")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise BrokenWeights(f"{file} is not readable JSON ({error}): make the folder again") from error
    if not isinstance(config, dict):
        raise BrokenWeights(f"{file} holds a {type(config).__name__}, expected an object: make the folder again")
    return config


def config_section(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The object `name` of a config.json, {} when it is null or not there. Raises BrokenWeights for anything else."""
    section = config.get(name)
    if section is None:
        return {}
    if not isinstance(section, dict):
        raise BrokenWeights(f"{name} of config.json is {section!r:.60}, expected an object: make the folder again")
    return section


def _ranks(mapping: Mapping[str, Any], key: str, default: int) -> int:
    value = mapping.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 1024:
        raise BrokenWeights(f"mapping of config.json: {key} is {value!r}, expected a whole number from 1 to 1024")
    return value


def tensor_index(path: str | Path) -> dict[str, TensorInfo]:
    """{name: TensorInfo} of one safetensors file, or of all of them in a folder, from the headers only.

    Raises BrokenWeights for a damaged file, and when two files hold the same name (ranks of one checkpoint do: give
    one rankN.safetensors then).
    """
    path = Path(path)
    if not path.is_dir():
        return read_header(path)[0]
    index: dict[str, TensorInfo] = {}
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise BrokenWeights(f"{path} has no .safetensors file")
    for file in files:
        for name, info in read_header(file)[0].items():
            if name in index:
                raise BrokenWeights(
                    f"{name} is in {index[name].file.name} and in {file.name} of {path}: name the one file you mean"
                )
            index[name] = info
    return index


def read_tensor(path: str | Path, name: str) -> Any:
    """One tensor of a file or folder (as in tensor_index) as a torch tensor, mapped from disk: do not write to it."""
    import torch

    index = tensor_index(path)
    if name not in index:
        raise KeyError(f"{path} has no tensor {name!r}; it has {summarise_names(index)}")
    info = index[name]
    flat = torch.from_file(str(info.file), shared=False, size=info.file.stat().st_size, dtype=torch.uint8)
    part = flat[info.offset : info.offset + info.nbytes]
    dtype = getattr(torch, info.dtype)
    if info.offset % dtype.itemsize:
        part = part.clone()
    return part.view(dtype).view(info.shape)


@dataclass(frozen=True)
class RankMapping:
    """Place of one rank: rank = pp_rank * tp_size + tp_rank (context parallelism is not used here)."""

    tp_size: int = 1
    pp_size: int = 1
    rank: int = 0

    @classmethod
    def from_config(cls, config: Mapping[str, Any], rank: int = 0) -> RankMapping:
        """From a checkpoint config's `mapping`. Raises BrokenWeights when its numbers contradict each other."""
        entry = config_section(config, "mapping")
        tp, pp, cp = (_ranks(entry, key, 1) for key in ("tp_size", "pp_size", "cp_size"))
        world = _ranks(entry, "world_size", tp * pp * cp)
        if world != tp * pp * cp:
            raise BrokenWeights(f"mapping: world_size {world} is not tp_size {tp} * pp_size {pp} * cp_size {cp}")
        if not 0 <= rank < tp * pp:
            raise BrokenWeights(
                f"rank {rank} does not exist: tp_size {tp} * pp_size {pp} makes ranks 0 to {tp * pp - 1}"
            )
        return cls(tp, pp, rank)

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp_size

    @property
    def pp_rank(self) -> int:
        return self.rank // self.tp_size

    @property
    def is_first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp_size - 1

    def layers(self, count: int) -> range:
        """The stage's layers of `count`; the first count % pp_size stages get one more."""
        base, extra = divmod(count, self.pp_size)
        start = self.pp_rank * base + min(self.pp_rank, extra)
        return range(start, start + base + (self.pp_rank < extra))


def padded_vocabulary(vocab_size: int, tp_size: int) -> int:
    """Rows of lm_head over all ranks: the vocabulary rounded up to a multiple of tp_size."""
    return -(-vocab_size // tp_size) * tp_size


def expected_layout(pretrained_config: Mapping[str, Any], rank: int = 0) -> dict[str, TensorLayout]:
    """{TensorRT-LLM name: shape on this rank and type} of a checkpoint with this config, quantized or not.

    Layer numbers are local to the pipeline stage. Raises UnsupportedModel, UnsupportedQuantization or BrokenWeights for
    a config that contradicts itself.
    """
    spec = ModelSpec.from_checkpoint_config(pretrained_config)
    mode, dtype = QuantMode.from_config(pretrained_config), str(pretrained_config.get("dtype"))
    place = RankMapping.from_config(pretrained_config, rank)
    tp, hidden = place.tp_size, spec.hidden_size
    heads = spec.num_attention_heads // tp
    kv_heads = max(1, spec.num_key_value_heads // tp)  # fewer KV heads than ranks: each rank holds a copy of one
    qkv, inner = (heads + 2 * kv_heads) * spec.head_size, spec.intermediate_size // tp
    rows = padded_vocabulary(spec.vocab_size, tp)
    layout: dict[str, TensorLayout] = {}

    def plain(name: str, *shape: int) -> None:
        layout[name] = TensorLayout(shape, dtype)

    def linear(module: str, outputs: int, inputs: int) -> None:
        layout.update(mode.linear_tensors(module, outputs, inputs, dtype))

    if place.is_first_stage:
        table = (spec.vocab_size, hidden)
        if pretrained_config.get("use_parallel_embedding") and tp > 1:
            by_hidden = pretrained_config.get("embedding_sharding_dim", 0) == 1
            table = (spec.vocab_size, hidden // tp) if by_hidden else (rows // tp, hidden)
        plain("transformer.vocab_embedding.weight", *table)
    for local in range(len(place.layers(spec.num_hidden_layers))):
        layer = f"transformer.layers.{local}."
        plain(layer + "input_layernorm.weight", hidden)
        linear(layer + "attention.qkv", qkv, hidden)
        if spec.attn_bias:
            plain(layer + "attention.qkv.bias", qkv)
        linear(layer + "attention.dense", hidden, heads * spec.head_size)
        if mode.kv_cache_quant_algo:
            layout[layer + "attention.kv_cache_scaling_factor"] = TensorLayout((1,), "float32")
        plain(layer + "post_layernorm.weight", hidden)
        linear(layer + "mlp.fc", inner, hidden)
        linear(layer + "mlp.gate", inner, hidden)
        linear(layer + "mlp.proj", hidden, inner)
    if place.is_last_stage:
        plain("transformer.ln_f.weight", hidden)
        # With share_embedding_table, as ModelOpt writes it, the head is the embedding and has no tensor of its own.
        if not (pretrained_config.get("share_embedding_table") and place.is_first_stage):
            linear("lm_head", rows // tp, hidden)
    return layout


def surplus_tensors(found: Iterable[str], layout: Mapping[str, TensorLayout]) -> set[str]:
    """Names that the config does not ask for and that no TensorRT-LLM tool writes beside those it does.

    ModelOpt writes k_cache_scaling_factor and v_cache_scaling_factor beside the joint one, which is their maximum.
    """
    joint = ".kv_cache_scaling_factor"
    known = {name.replace(joint, f".{part}_cache_scaling_factor") for name in layout if joint in name for part in "kv"}
    if "transformer.ln_f.weight" in layout:
        known.add("lm_head.weight")  # may be there beside a shared embedding table
    return set(found) - layout.keys() - known


def expected_tensors(pretrained_config: Mapping[str, Any], rank: int = 0) -> dict[str, tuple[int, ...]]:
    """{TensorRT-LLM name: shape on this rank}; see `expected_layout`, which also gives the types."""
    return {name: layout.shape for name, layout in expected_layout(pretrained_config, rank).items()}


def summarise_names(names: Iterable[str], most: int = 6) -> str:
    """Says many tensor names in one line: "3 patterns x 80 layers: model.layers.*.mlp.up_proj.weight, ..."."""
    layers: dict[str, set[str]] = defaultdict(set)
    for name in names:
        number = re.search(r"(?<=\.)\d+(?=\.)", name)
        layers[re.sub(r"(?<=\.)\d+(?=\.)", "*", name, count=1)].add(number.group() if number else "")
    groups: dict[int, list[str]] = defaultdict(list)
    for pattern, numbers in layers.items():
        groups[0 if numbers == {""} else len(numbers)].append(pattern)
    parts = []
    for count, patterns in sorted(groups.items(), reverse=True):
        shown = ", ".join(sorted(patterns)[:most]) + (", ..." if len(patterns) > most else "")
        plural = f"{len(patterns)} pattern{'s' * (len(patterns) > 1)}"
        parts.append(f"{plural} x {count} layer{'s' * (count > 1)}: {shown}" if count else shown)
    return "; ".join(parts) or "no names"


def verify_checkpoint(path: str | Path) -> list[str]:
    """Everything that is wrong with a checkpoint folder, as sentences; an empty list means it is complete.

    Checks config.json, one file per rank, every header, the set of names, and each tensor's shape and type, quantized or
    not. The values of scales are `scale_audit`'s business.
    """
    folder = Path(path)
    try:
        config = read_config(require_kind(folder, "checkpoint"))
        place = RankMapping.from_config(config)
        wanted = {rank: expected_layout(config, rank) for rank in range(place.tp_size * place.pp_size)}
    except (WrongFolderKind, BrokenWeights, UnsupportedModel, UnsupportedQuantization) as error:
        return [str(error)]
    problems = []
    surplus = {file.name for file in folder.glob("rank*.safetensors")} - {f"rank{r}.safetensors" for r in wanted}
    if surplus:
        problems.append(
            f"{folder}: {', '.join(sorted(surplus))} belong to no rank of mapping (world size {len(wanted)})"
        )
    for rank, layout in wanted.items():
        try:
            index, _ = read_header(folder / f"rank{rank}.safetensors")
        except BrokenWeights as error:
            problems.append(str(error))
            continue
        problems += _compare(f"rank{rank}", index, layout, config)
    return problems


def _compare(
    rank: str, index: Mapping[str, TensorInfo], layout: Mapping[str, TensorLayout], config: Mapping[str, Any]
) -> list[str]:
    problems = []
    missing, extra = layout.keys() - index.keys(), surplus_tensors(index, layout)
    if missing:
        problems.append(f"{rank}: required but not provided: {summarise_names(missing)}")
    if extra:
        problems.append(f"{rank}: provided but not required: {summarise_names(extra)}")
    for name in sorted(layout.keys() & index.keys()):
        info, wanted = index[name], layout[name]
        if info.shape != wanted.shape:
            problems.append(f"{rank}: {name} has shape {info.shape}, the config makes it {wanted.shape}")
        if info.dtype != wanted.dtype:
            says = f"dtype {wanted.dtype}" if wanted.dtype == config.get("dtype") else f"{wanted.dtype} (quantization)"
            problems.append(f"{rank}: {name} is {info.dtype}, config.json says {says}")
    return problems
