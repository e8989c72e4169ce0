"""The engine file: a safetensors container with the weights, the exported graph and a fingerprint.

`rankN.engine` holds the weights under their checkpoint names, the graph (`torch.export`, saved without weights) as a
tensor of bytes named `graph`, and in the header's metadata a fingerprint of what the engine was built by and for. A
graph and its kernels are only good for the toolchain, device and precision they were made for, so all of that is
compared before anything is loaded; a mismatch is refused in the words people meet with TensorRT engines.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import platform
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from trtllm_workshop.checkpoint import RankMapping, config_section, read_config, require_kind
from trtllm_workshop.quant_mode import QuantMode
from trtllm_workshop.reference.collectives import Communicator, connect, pin_stage_types
from trtllm_workshop.reference.cpu_kernels import prepare_for_processor
from trtllm_workshop.reference.cuda_kernels import optimize
from trtllm_workshop.reference.network import input_names
from trtllm_workshop.reference.version import VERSION

GRAPH = "graph"
FORMAT = 3  # changes with the graph's inputs or the layout of the KV-cache pool


class EngineError(RuntimeError):
    """An engine folder that cannot be loaded here; the text says why and what to do."""


def device_architecture(device: torch.device) -> str:
    """What an engine is built for: `9.0` for a CUDA device of that compute capability, `cpu-x86_64` for a processor."""
    if device.type == "cuda":
        return "{}.{}".format(*torch.cuda.get_device_capability(device))
    return f"cpu-{platform.machine()}"


def default_device() -> torch.device:
    """The first CUDA device if there is one, else the processor."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def fingerprint(device: torch.device, precision: str, world_size: int, rank: int = 0) -> dict[str, Any]:
    """What must be the same when an engine is built and when it is loaded."""
    return {
        "toolchain": VERSION,
        "torch": torch.__version__.split("+")[0],
        "format": FORMAT,
        "compute": device_architecture(device),
        "precision": precision,
        "world_size": world_size,
        "rank": rank,
    }


def precision_of(pretrained_config: dict[str, Any]) -> str:
    """The type and quantization of an engine in words, as its fingerprint keeps them: `bfloat16 FP8+FP8-KV`."""
    return f"{pretrained_config.get('dtype')} {QuantMode.from_config(pretrained_config).name}".strip()


def kv_cache_dtype(mode: QuantMode, dtype: torch.dtype) -> torch.dtype:
    """The type of the KV-cache pool's values; `dtype` is that of the unquantized tensors."""
    return {"FP8": torch.float8_e4m3fn, "INT8": torch.int8}.get(mode.kv_cache_quant_algo or "", dtype)


def config_sum(config: bytes) -> str:
    """What an engine file keeps of its config.json, to know it again."""
    return hashlib.sha256(config).hexdigest()


def check_fingerprint(built: dict[str, Any], here: dict[str, Any], path: Path) -> None:
    """Compare the fingerprint in an engine with that of this process.

    Raises:
        EngineError: naming the first difference, both values and the remedy.
    """
    tags = ("toolchain", "torch", "format")
    if any(built.get(tag) != here[tag] for tag in tags):
        sides = [f"{f['toolchain']} (torch {f['torch']}, engine format {f.get('format', 1)})" for f in (here, built)]
        raise EngineError(
            "Serialization assertion stdVersionRead == kSERIALIZATION_VERSION failed. Version tag does not match. "
            f"Note: Current Version: {sides[0]}, Serialized Engine Version: {sides[1]}. {path} was built by another "
            "version; run trtllm-build again with the version you load it with."
        )
    if built["compute"] != here["compute"]:
        raise EngineError(
            f"The engine plan file is generated on an incompatible device, expecting compute {here['compute']} got compute "
            f"{built['compute']}, please rebuild. ({path} was built for {built['compute']}; this machine is "
            f"{here['compute']}. Engines do not travel: run trtllm-build on the machine that will load it.)"
        )
    if built["precision"] != here["precision"]:
        raise EngineError(
            f"{path} was built for {built['precision']}, and config.json beside it says {here['precision']}: the two files do "
            "not belong together. Run trtllm-build again."
        )
    if built["world_size"] != here["world_size"]:
        raise EngineError(
            f"Engine world size ({built['world_size']}) != Runtime world size ({here['world_size']}). {path} is split over "
            f"{built['world_size']} ranks; start that many processes (mpirun -n {built['world_size']} …), or convert and "
            f"build again with --tp_size {here['world_size']}."
        )
    if built.get("rank", 0) != here.get("rank", 0):
        raise EngineError(
            f"{path} was built as rank {built.get('rank', 0)} and stands where rank {here.get('rank', 0)} belongs: files of "
            "the engine folder were renamed or mixed up. Run trtllm-build again."
        )


@dataclass
class Engine:
    """A loaded engine, or one rank of it: call `run` with the packed inputs of one step (see `input_names`).

    Attributes:
        mapping: which rank of how many this is.
        communicator: connects the ranks; None for an engine of one rank.
    """

    config: dict[str, Any]
    folder: Path
    device: torch.device
    dtype: torch.dtype
    run: Callable[..., torch.Tensor]
    kv_cache_dtype: torch.dtype
    mapping: RankMapping = field(default_factory=RankMapping)
    communicator: Communicator | None = None

    @property
    def input_names(self) -> tuple[str, ...]:
        """The inputs of `run` in order, see `network.input_names`."""
        return input_names(self.mapping)

    @property
    def layers(self) -> int:
        """Layers of this rank's pipeline stage."""
        return len(self.mapping.layers(self.pretrained_config["num_hidden_layers"]))

    @property
    def heads(self) -> int:
        """Query heads of this rank."""
        return self.pretrained_config["num_attention_heads"] // self.mapping.tp_size

    @property
    def kv_heads(self) -> int:
        """KV heads of this rank: with fewer heads than ranks, a copy of one."""
        return max(1, self.pretrained_config["num_key_value_heads"] // self.mapping.tp_size)

    @property
    def hidden_states_dtype(self) -> torch.dtype:
        """The type of hidden states between pipeline stages, [tokens, hidden_size]."""
        return stage_dtype(self.device, self.dtype)

    @property
    def build_config(self) -> dict[str, Any]:
        return self.config["build_config"]

    @property
    def pretrained_config(self) -> dict[str, Any]:
        return self.config["pretrained_config"]


def read_fingerprint(path: Path) -> dict[str, Any]:
    """The fingerprint in an engine file.

    Raises:
        EngineError: when the file is not an engine of this toolchain, or is cut off.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            mark = json.loads((file.metadata() or {})["fingerprint"])
        return mark | {name: mark[name] for name in ("toolchain", "torch", "compute", "precision", "world_size")}
    except (SafetensorError, KeyError, TypeError, ValueError, OSError) as error:
        raise EngineError(
            f"{path} is not a complete engine of the reference toolchain ({type(error).__name__}: {error}). If TensorRT-LLM "
            "built it, load it with TensorRT-LLM; otherwise run trtllm-build again."
        ) from error


def stage_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """The type of hidden states between stages: processors compute wider than the engine's `dtype`, devices do not."""
    return torch.float32 if device.type == "cpu" else dtype


def load_engine(
    folder: str | Path,
    device: torch.device | None = None,
    rank: int = 0,
    communicator: Communicator | None = None,
) -> Engine:
    """Check and load `rank{rank}.engine` of an engine folder.

    Args:
        folder: with config.json and one rankN.engine for every rank.
        device: by default the first CUDA device, else the processor.
        rank: which of them.
        communicator: connects the ranks of an engine that has several; such an engine is refused without it.

    Raises:
        WrongFolderKind: for a checkpoint or Hugging Face folder.
        BrokenWeights: for a config.json that cannot be read, or a rank that it does not have.
        EngineError: for another version, device, world size, or a damaged file.
    """
    from safetensors import safe_open

    folder = Path(folder)
    require_kind(folder, "engine")
    config = read_config(folder)
    path = folder / f"rank{rank}.engine"
    device = device or default_device()
    if missing := {"pretrained_config", "build_config"} - set(config):
        raise EngineError(
            f"{folder / 'config.json'} is not an engine's: {' and '.join(sorted(missing))} missing. Run trtllm-build again."
        )
    sections = [config_section(config, name) for name in ("pretrained_config", "build_config")]
    mapping = RankMapping.from_config(sections[0], rank)
    if not path.is_file():
        raise EngineError(f"{path} is missing: the engine folder is incomplete. Run trtllm-build again.")
    version = config.get("version")
    if version != VERSION:
        raise EngineError(
            f"Version tag does not match. Note: Current Version: {VERSION}, Serialized Engine Version: {version} (from "
            f"{folder / 'config.json'}). Load this engine with TensorRT-LLM {version}, or run trtllm-build again here."
        )
    ranks = 1 if communicator is None else mapping.tp_size * mapping.pp_size
    check_fingerprint(read_fingerprint(path), fingerprint(device, precision_of(sections[0]), ranks, rank), path)
    try:
        with safe_open(path, framework="pt") as file:
            kept = (file.metadata() or {}).get("config_sha256")
            graph = file.get_tensor(GRAPH)
            # Copied out of the mapped file: aligned memory, and the file may be replaced while the engine is in use.
            weights = {name: file.get_tensor(name).to(device, copy=True) for name in file.keys() if name != GRAPH}  # noqa: SIM118
        program = torch.export.load(io.BytesIO(graph.numpy().tobytes()))
        stage = None if mapping.pp_size == 1 else stage_dtype(device, getattr(torch, str(sections[0]["dtype"])))
        bind_other = functools.partial(bind, program, communicator=communicator, stage=stage)
        plain = bind_other(weights)
    except Exception as error:  # a damaged graph fails in many ways, none of which says which file it was
        reason = (str(error).splitlines() or [""])[0]
        raise EngineError(f"{path} is damaged ({type(error).__name__}: {reason}). Run trtllm-build again.") from error
    if kept is not None and kept != config_sum((folder / "config.json").read_bytes()):
        raise EngineError(
            f"{path} and config.json beside it do not belong together: a build was interrupted, or config.json was edited "
            "(an engine's limits cannot be changed after the build). Run trtllm-build again."
        )
    dtype, mode = getattr(torch, str(sections[0]["dtype"])), QuantMode.from_config(sections[0])
    on_processor = device.type == "cpu"
    run = prepare_for_processor(plain, bind_other, weights, dtype, mode) if on_processor else optimize(plain)
    return Engine(config, folder, device, dtype, run, kv_cache_dtype(mode, dtype), mapping, communicator)


def bind(
    program: torch.export.ExportedProgram,
    weights: dict[str, torch.Tensor],
    communicator: Communicator | None = None,
    stage: torch.dtype | None = None,
) -> GraphModule:
    """The graph as a callable with these weights; the graph names no type, so they decide what it computes in.

    `communicator` connects it with the other ranks; `stage` is the type of hidden states between pipeline stages.
    """
    module = program.module()
    module.load_state_dict(weights, assign=True)
    if stage is not None:
        pin_stage_types(module, weights["transformer.layers.0.input_layernorm.weight"].dtype, stage)
    return module if communicator is None else connect(module, communicator)
