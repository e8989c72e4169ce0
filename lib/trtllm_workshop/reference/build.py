"""trtllm-build: from a checkpoint folder to an engine folder, one engine file for every rank.

The decoder is captured with torch.export, once for each kind of pipeline stage (tensor-parallel ranks share a graph),
without any weights in memory, with dynamic dimensions bounded by the build's limits (TensorRT's optimization profile).
Then the weights are copied into the engine files tensor by tensor. Everything is written under a temporary name and
renamed when it is complete, so an interrupted build leaves no engine.
"""

from __future__ import annotations

import functools
import io
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.export import Dim

from trtllm_workshop.checkpoint import (
    RankMapping,
    classify,
    expected_layout,
    padded_vocabulary,
    read_config,
    require_kind,
    summarise_names,
    surplus_tensors,
    tensor_index,
)
from trtllm_workshop.model_spec import ModelSpec
from trtllm_workshop.quant_mode import QuantMode, UnsupportedQuantization
from trtllm_workshop.reference.build_output import BuildError, clear_leftovers, engine_files, engine_folder
from trtllm_workshop.reference.build_precision import check_precision, check_widths, cuda_capability
from trtllm_workshop.reference.collectives import HIDDEN_INPUT, rank_spec
from trtllm_workshop.reference.configs import BuildConfig
from trtllm_workshop.reference.convert_plan import Sharding, check_sharding
from trtllm_workshop.reference.convert_source import ConversionError
from trtllm_workshop.reference.engine import (
    GRAPH,
    config_sum,
    default_device,
    fingerprint,
    kv_cache_dtype,
    precision_of,
)
from trtllm_workshop.reference.engine_tensors import EngineTensor, embedding_dim, engine_tensors
from trtllm_workshop.reference.network import NetworkConfig, make_network
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
    """Capture one rank's decoder with dynamic dimensions bounded by the limits. No weight is allocated (the meta device)."""
    spec, most_blocks = network_config.local, -(-limits.max_seq_len // tokens_per_block)
    place = network_config.place
    with torch.device("meta"):
        network = make_network(network_config)

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
    first = empty(t) if place.is_first_stage else empty(t, spec.hidden_size, kind=network_config.dtype)
    given: dict[str, tuple[torch.Tensor, Any]] = {
        "input_ids" if place.is_first_stage else HIDDEN_INPUT: (first, {0: tokens}),
        "position_ids": (empty(t), {0: tokens}),
    }
    if place.is_last_stage:
        given["last_token_ids"] = (empty(r), {0: rows})
    of_cache = ({1: Dim("num_blocks", min=1)}, {0: tokens}, {0: requests, 1: blocks}, *[{0: requests}] * 4)
    shapes = {**{name: shape for name, (_, shape) in given.items()}, "cache": of_cache}
    inputs = (*(example for example, _ in given.values()), *cache)
    return torch.export.export(network, inputs, dynamic_shapes=shapes, strict=False)


def check_ranks(folder: Path) -> tuple[dict[str, Any], int]:
    """The checkpoint's configuration and how many ranks it has, after its files were compared with its mapping.

    Raises:
        WrongFolderKind: for a Hugging Face or engine folder.
        BuildError: when the model cannot be split like that, or the folder holds files of fewer or more ranks.
    """
    require_kind(folder, "checkpoint")
    config = read_config(folder)
    place = RankMapping.from_config(config)
    try:
        check_sharding(ModelSpec.from_checkpoint_config(config), Sharding(place.tp_size, place.pp_size))
    except ConversionError as error:
        raise BuildError(f"mapping in config.json of {folder}: {error}") from error
    world = place.tp_size * place.pp_size
    says = f"config.json says tp_size {place.tp_size} and pp_size {place.pp_size}, that is {world} rank file(s)"
    wanted = {f"rank{rank}.safetensors" for rank in range(world)}
    found = {file.name for file in folder.glob("rank*.safetensors")}
    if missing := wanted - found:
        first = min(missing, key=lambda name: (len(name), name))
        raise BuildError(f"{folder / first} does not exist: {says}, {len(missing)} missing. Convert the model again")
    if surplus := found - wanted:
        raise BuildError(
            f"{folder} mixes two conversions: {says}, and {', '.join(sorted(surplus))} are there too. Convert into a new folder"
        )
    return config, world


def check_checkpoint(folder: Path, config: dict[str, Any], rank: int) -> None:
    """Compare the tensors of one rank with what the configuration asks for.

    Raises:
        BrokenWeights: for a file that is missing or damaged.
        BuildError: for missing tensors or wrong shapes.
    """
    try:
        expected = expected_layout(config, rank)
    except UnsupportedQuantization as error:
        raise BuildError(f"{folder}: {error}") from error
    source = folder / f"rank{rank}.safetensors"
    found = tensor_index(source)
    missing = sorted(set(expected) - set(found))
    if missing:
        raise BuildError(
            f"Required but not provided tensors: {summarise_names(missing)} in {source}; convert the model again"
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


def build_engine(
    checkpoint_dir: str | Path, build: BuildConfig, output_dir: str | Path, log: Callable[[str], object] = print
) -> Path:
    """Build `output_dir` from `checkpoint_dir`.

    Raises:
        BuildError, WrongFolderKind: see `check_ranks`, `check_checkpoint` and `resolve_limits`.
    """
    checkpoint, output = Path(checkpoint_dir), Path(output_dir)
    config, world = check_ranks(checkpoint)
    for rank in range(world):
        check_checkpoint(checkpoint, config, rank)
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
    network = NetworkConfig(
        spec,
        getattr(torch, config["dtype"]),
        limits.max_seq_len,
        mode,
        build.plugin_config.use_paged_context_fmha,
        embedding_dim=embedding_dim(config),
    )
    ranks = [RankMapping.from_config(config, rank) for rank in range(world)]
    check_widths(_widths(spec, ranks[0]), mode, capability)
    graphs = _capture(network, ranks, limits, build.plugin_config.tokens_per_block, log)
    if build.visualize_network:
        from trtllm_workshop.reference.visualize import save_network

        for rank, program in enumerate(graphs):
            log(f"[TRT-LLM] [I] network written to {save_network(program, Path(build.visualize_network), rank)}")
    if build.dry_run:
        log("[TRT-LLM] [I] dry run: no engine is written")
        return output
    resolved = build.model_copy(update={"max_seq_len": limits.max_seq_len, "max_input_len": limits.max_input_len})
    contents = {"version": VERSION, "pretrained_config": config, "build_config": resolved.saved()}
    sources = [checkpoint / f"rank{rank}.safetensors" for rank in range(world)]
    tensors = [engine_tensors(config, rank, source, limits.max_seq_len) for rank, source in enumerate(sources)]
    _write(output, contents, graphs, tensors, precision_of(config))
    return output


def _widths(spec: ModelSpec, place: RankMapping) -> ModelSpec:
    """The sizes of one rank's matrices, its part of lm_head included."""
    rows = padded_vocabulary(spec.vocab_size, place.tp_size) // place.tp_size
    return replace(rank_spec(spec, place), vocab_size=rows)


def _capture(
    network: NetworkConfig,
    ranks: Sequence[RankMapping],
    limits: Limits,
    tokens_per_block: int,
    log: Callable[[str], object],
) -> list[torch.export.ExportedProgram]:
    """The graph of every rank; ranks whose stages have the same ends and as many layers share one."""
    made: dict[tuple[bool, bool, int], torch.export.ExportedProgram] = {}
    graphs = []
    for place in ranks:
        kind = (place.is_first_stage, place.is_last_stage, len(place.layers(network.spec.num_hidden_layers)))
        if kind not in made:
            made[kind] = export_network(replace(network, place=place), limits, tokens_per_block)
            stage = "" if place.pp_size == 1 else f" for pipeline stage {place.pp_rank} ({kind[2]} layers)"
            log(f"[TRT-LLM] [I] captured a graph of {len(made[kind].graph.nodes)} nodes{stage}")
        graphs.append(made[kind])
    return graphs


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
    graphs: Sequence[torch.export.ExportedProgram],
    tensors: Sequence[Callable[[], Iterator[EngineTensor]]],
    precision: str,
) -> None:
    """Write the files of the engine folder; each engine file carries the sum of the config.json that belongs to it.

    `graphs` and `tensors` are those of the ranks in order.
    """
    saved = {id(program): graph_tensor(program) for program in graphs}
    files = [saved[id(program)] for program in graphs]
    need = sum(tensor.nbytes for of_rank in tensors for tensor in of_rank()) + sum(graph.nbytes for graph in files)
    text = json.dumps(contents, indent=4) + "\n"

    def everything(rank: int) -> Iterator[EngineTensor]:
        yield from tensors[rank]()
        yield EngineTensor(GRAPH, "uint8", tuple(files[rank].shape), lambda: [files[rank]])

    with engine_folder(output, need, engine_files(len(files))) as work:
        for rank in range(len(files)):
            mark = json.dumps(fingerprint(default_device(), precision, len(files), rank))
            metadata = {"fingerprint": mark, "config_sha256": config_sum(text.encode()), "format": "pt"}
            write_engine_file(work / f"rank{rank}.engine", functools.partial(everything, rank), metadata)
        (work / "config.json").write_text(text)
