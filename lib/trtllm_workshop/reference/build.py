"""trtllm-build: from a checkpoint folder to an engine folder.

The decoder is captured once with torch.export, without any weights in memory, with dynamic dimensions bounded by the
build's limits (TensorRT's optimization profile). Then the weights are copied into the engine file tensor by tensor.
Everything is written under a temporary name and renamed when it is complete, so an interrupted build leaves no engine.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.export import Dim

from trtllm_workshop.checkpoint import (
    classify,
    config_section,
    expected_layout,
    read_config,
    require_kind,
    summarise_names,
    surplus_tensors,
    tensor_index,
)
from trtllm_workshop.model_spec import ModelSpec
from trtllm_workshop.quant_mode import QuantMode, UnsupportedQuantization
from trtllm_workshop.reference.build_output import BuildError, clear_leftovers, engine_folder
from trtllm_workshop.reference.build_precision import check_precision, check_widths, cuda_capability
from trtllm_workshop.reference.configs import BuildConfig
from trtllm_workshop.reference.engine import (
    GRAPH,
    config_sum,
    default_device,
    fingerprint,
    kv_cache_dtype,
    precision_of,
)
from trtllm_workshop.reference.engine_tensors import EngineTensor, engine_tensors
from trtllm_workshop.reference.network import DecoderForCausalLM, NetworkConfig
from trtllm_workshop.reference.version import VERSION
from trtllm_workshop.safetensors_file import write_header


@dataclass(frozen=True)
class Limits:
    """The limits of an engine after all defaults are filled in, in requests and tokens."""

    max_batch_size: int
    max_input_len: int
    max_seq_len: int
    max_num_tokens: int


def resolve_limits(build: BuildConfig, pretrained: dict[str, Any]) -> tuple[Limits, list[str]]:
    """Fill in what the user left out, as trtllm-build does, and say where each number came from.

    `max_seq_len` defaults to max_position_embeddings times the factor of the rotary scaling (1 for llama3), or 2048 if
    the configuration has none. With remove_input_padding and context_fmha on, `max_input_len` is not used: a prompt may
    be as long as max_seq_len - 1 and max_num_tokens allow.

    Raises:
        BuildError: when the limits contradict each other or the model.
    """
    model_limit = pretrained.get("max_position_embeddings")
    scaling = pretrained.get("rotary_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type"))
    factor = 1 if kind in (None, "default", "llama3", "su", "longrope") else scaling.get("factor", 1)
    notes = []
    if build.max_seq_len is not None:
        max_seq_len, origin = build.max_seq_len, "given"
    elif model_limit:
        max_seq_len, origin = int(model_limit * factor), "max_position_embeddings of the model"
    else:
        max_seq_len, origin = 2048, "trtllm-build's default, since the model states none"
    notes.append(f"max_seq_len {max_seq_len} ({origin}): prompt and answer together")
    window = pretrained.get("sliding_window")
    if window and max_seq_len > window:
        raise BuildError(
            f"max_seq_len {max_seq_len} is longer than the model's sliding window ({window}), and the reference engine "
            f"attends to everything; build with --max_seq_len {window} or less"
        )
    plugin = build.plugin_config
    if plugin.remove_input_padding and plugin.context_fmha:
        max_input_len = max(1, min(max_seq_len - 1, build.max_num_tokens))
        notes.append(
            f"longest prompt {max_input_len} (max_seq_len - 1 and max_num_tokens decide; --max_input_len is not used)"
        )
    else:
        max_input_len = min(build.max_input_len, max_seq_len)
        notes.append(f"longest prompt {max_input_len} (--max_input_len)")
    if not plugin.remove_input_padding:
        raise BuildError("--remove_input_padding disable: the reference engine always packs tokens; leave it at enable")
    notes.append(f"max_num_tokens {build.max_num_tokens}: packed tokens in one step")
    notes.append(f"max_batch_size {build.max_batch_size}: requests in one step")
    return Limits(build.max_batch_size, max_input_len, max_seq_len, build.max_num_tokens), notes


def export_network(
    network_config: NetworkConfig, limits: Limits, tokens_per_block: int
) -> torch.export.ExportedProgram:
    """Capture the decoder with dynamic dimensions bounded by the limits. No weight is allocated (the meta device)."""
    spec, most_blocks = network_config.spec, -(-limits.max_seq_len // tokens_per_block)
    with torch.device("meta"):
        network = DecoderForCausalLM(network_config)

    def dim(name: str, most: int) -> Any:
        return Dim(name, min=1, max=most) if most > 1 else Dim.STATIC  # a dimension of exactly 1 is a static one

    tokens, rows = dim("num_tokens", limits.max_num_tokens), dim("num_logits", limits.max_num_tokens)
    requests, blocks = dim("num_requests", limits.max_batch_size), dim("blocks_per_request", most_blocks)

    def size(most: int, wanted: int) -> int:
        return max(
            1, min(most, wanted)
        )  # export treats sizes 0 and 1 as constants, so examples are larger if they can be

    t, r = size(limits.max_num_tokens, 7), size(limits.max_num_tokens, 5)
    b, m = size(limits.max_batch_size, 3), size(most_blocks, 4)

    def empty(*shape: int, kind: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.empty(*shape, dtype=kind, device="meta")

    pool_shape = (spec.num_hidden_layers, 6, tokens_per_block, 2, spec.num_key_value_heads, spec.head_size)
    pool = empty(*pool_shape, kind=kv_cache_dtype(network_config.mode, network_config.dtype))
    host = torch.int32
    cache = (pool, empty(t), empty(b, m), empty(b), *(empty(b, kind=host) for _ in range(3)))
    shapes = {
        "input_ids": {0: tokens},
        "position_ids": {0: tokens},
        "last_token_ids": {0: rows},
        "cache": ({1: Dim("num_blocks", min=1)}, {0: tokens}, {0: requests, 1: blocks}, *[{0: requests}] * 4),
    }
    inputs = (empty(t), empty(t), empty(r), *cache)
    return torch.export.export(network, inputs, dynamic_shapes=shapes, strict=False)


def check_checkpoint(folder: Path, rank: int) -> dict[str, Any]:
    """The checkpoint's configuration, after its tensors were compared with what the configuration asks for.

    Raises:
        WrongFolderKind: for a Hugging Face or engine folder.
        BuildError: for missing tensors, wrong shapes, or several ranks.
    """
    require_kind(folder, "checkpoint")
    config = read_config(folder)
    world = config_section(config, "mapping").get("world_size", 1)
    if world != 1:
        raise BuildError(
            f"{folder} is split over {world} ranks; the reference toolchain builds engines of one rank. Convert with "
            "--tp_size 1 --pp_size 1."
        )
    try:
        expected = expected_layout(config, rank)
    except UnsupportedQuantization as error:
        raise BuildError(f"{folder}: {error}") from error
    found = tensor_index(folder / f"rank{rank}.safetensors")
    missing = sorted(set(expected) - set(found))
    if missing:
        raise BuildError(
            f"Required but not provided tensors: {summarise_names(missing)} in {folder}; convert the model again"
        )
    for name, wanted in expected.items():
        if found[name].dtype != wanted.dtype:
            says = (
                "dtype"
                if wanted.dtype == str(config.get("dtype"))
                else f"{QuantMode.from_config(config).name}, that is"
            )
            raise BuildError(
                f"Parameter {name} is {found[name].dtype}, config.json of {folder} says {says} {wanted.dtype}: convert the "
                "model again"
            )
        if found[name].shape != wanted.shape:
            raise BuildError(
                f"Parameter {name} has invalid shape {found[name].shape} compared with expected shape {wanted.shape}; "
                "config.json and weights of the checkpoint disagree: convert the model again"
            )
    extra = sorted(surplus_tensors(found, expected))
    if extra:
        print(f"[TRT-LLM] [W] Provided but not required tensors: {summarise_names(extra)}")
    return config


def build_engine(
    checkpoint_dir: str | Path, build: BuildConfig, output_dir: str | Path, log: Callable[[str], object] = print
) -> Path:
    """Build `output_dir` from `checkpoint_dir`.

    Raises:
        BuildError, WrongFolderKind: see `check_checkpoint` and `resolve_limits`.
    """
    checkpoint, output = Path(checkpoint_dir), Path(output_dir)
    config = check_checkpoint(checkpoint, 0)
    if (kind := classify(output)) not in ("missing", "empty", "engine"):
        raise BuildError(f"--output_dir {output} already holds something else ({kind}); name a new or an engine folder")
    limits, notes = resolve_limits(build, config)
    for stale in clear_leftovers(output):
        log(f"[TRT-LLM] [I] removed {stale}, the rest of an interrupted build")
    for note in notes:
        log(f"[TRT-LLM] [I] {note}")
    mode = QuantMode.from_config(config)
    spec, capability = ModelSpec.from_checkpoint_config(config), cuda_capability()
    build = build.model_copy(update={"plugin_config": check_precision(mode, build.plugin_config, capability, log)})
    check_widths(spec, mode, capability)
    paged = build.plugin_config.use_paged_context_fmha
    network = NetworkConfig(spec, getattr(torch, config["dtype"]), limits.max_seq_len, mode, paged)
    program = export_network(network, limits, build.plugin_config.tokens_per_block)
    log(f"[TRT-LLM] [I] captured a graph of {len(program.graph.nodes)} nodes")
    if build.visualize_network:
        from trtllm_workshop.reference.visualize import save_network

        log(f"[TRT-LLM] [I] network written to {save_network(program, Path(build.visualize_network))}")
    if build.dry_run:
        log("[TRT-LLM] [I] dry run: no engine is written")
        return output
    resolved = build.model_copy(update={"max_seq_len": limits.max_seq_len, "max_input_len": limits.max_input_len})
    contents = {"version": VERSION, "pretrained_config": config, "build_config": resolved.saved()}
    tensors = engine_tensors(config, 0, checkpoint / "rank0.safetensors", limits.max_seq_len)
    _write(output, contents, program, tensors, precision_of(config))
    return output


def graph_tensor(program: torch.export.ExportedProgram) -> torch.Tensor:
    """The exported graph, saved without weights, as a tensor of bytes."""
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    return torch.frombuffer(bytearray(buffer.getbuffer()), dtype=torch.uint8)


def write_engine_file(path: Path, tensors: Callable[[], Iterator[EngineTensor]], metadata: dict[str, str]) -> None:
    """Write a safetensors container tensor by tensor, so that memory stays near the largest one.

    `tensors` is called twice: once for names and shapes, once for the bytes.
    """
    triples = [(tensor.name, tensor.dtype, tensor.shape) for tensor in tensors()]
    with path.open("wb") as file:
        offsets = write_header(file.fileno(), triples, metadata)
        for tensor in tensors():
            file.seek(offsets[tensor.name])
            for part in tensor.parts():
                file.write(part.contiguous().view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())


def _write(
    output: Path,
    contents: dict[str, Any],
    program: torch.export.ExportedProgram,
    tensors: Callable[[], Iterator[EngineTensor]],
    precision: str,
) -> None:
    """Write both files of the engine folder; the engine file carries the sum of the config.json that belongs to it."""
    graph = graph_tensor(program)
    need = sum(tensor.nbytes for tensor in tensors()) + graph.nbytes
    text = json.dumps(contents, indent=4) + "\n"
    mark = json.dumps(fingerprint(default_device(), precision, 1))
    metadata = {"fingerprint": mark, "config_sha256": config_sum(text.encode()), "format": "pt"}

    def everything() -> Iterator[EngineTensor]:
        yield from tensors()
        yield EngineTensor(GRAPH, "uint8", tuple(graph.shape), lambda: [graph])

    with engine_folder(output, need) as work:
        write_engine_file(work / "rank0.engine", everything, metadata)
        (work / "config.json").write_text(text)
