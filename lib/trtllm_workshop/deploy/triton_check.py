"""Checks of a Triton model repository before a server is started: syntax, names, files, and what contradicts each other.

The syntax is read with Triton's own message type (tritonclient's `ModelConfig`), so that what passes here is what the server reads.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trtllm_workshop.checkpoint import BrokenWeights, WrongFolderKind
from trtllm_workshop.deploy.engine_limits import EngineLimits
from trtllm_workshop.deploy.model_files import RepositoryProblem
from trtllm_workshop.problem import Problem, error, warning

PLACEHOLDER = re.compile(r"\$\{(\w+)\}")
ENGINE_BACKENDS = ("tensorrtllm", "tensorrt_llm")
# Models that answer each request once, whatever is streamed.
ONE_ANSWER = ("preprocessing", "postprocessing")


def check_repository(repository: str | Path, *, streaming: bool = True) -> list[Problem]:
    """Everything that is wrong with the models in `repository`; empty when nothing is.

    Args:
        repository: folder with one folder a model.
        streaming: whether clients will ask for streams.

    Raises:
        ImportError: without tritonclient[grpc].
    """
    repository = Path(repository)
    if not repository.is_dir():
        return [error(f"{repository} is no folder", "write it with write_repository or write_python_model")]
    folders = sorted(path for path in repository.iterdir() if path.is_dir() and not path.name.startswith("."))
    if not folders:
        return [error(f"{repository} holds no model", "each model is a folder in it, with config.pbtxt and a folder 1")]
    problems: list[Problem] = []
    configs: dict[str, Any] = {}
    for folder in folders:
        config, found = read_config_pbtxt(folder / "config.pbtxt")
        problems += found
        if config is not None:
            configs[folder.name] = config
            problems += _of_model(folder, config)
    for name, config in configs.items():
        problems += _of_ensemble(repository / name, config, configs)
        problems += _of_bls(repository / name, config, configs)
    return problems + list(_of_decoupled(repository, configs, streaming))


def read_config_pbtxt(file: Path) -> tuple[Any, list[Problem]]:
    """The parsed `ModelConfig`, or None with the problem that keeps it from being read.

    A placeholder that nobody filled is an error where it is not a string; in a parameter it counts as unset.
    """
    from google.protobuf import text_format
    from tritonclient.grpc import model_config_pb2

    if not file.is_file():
        return None, [error(f"{file} is missing", "every model folder needs one; remove the folder if it is no model")]
    text = file.read_text(encoding="utf-8", errors="replace")
    try:
        return text_format.Parse(text, model_config_pb2.ModelConfig()), []
    except text_format.ParseError as problem:
        lines = text.splitlines()
        number = problem.GetLine() or 1
        line = lines[min(number, len(lines)) - 1].strip() if lines else ""
        open_place = PLACEHOLDER.search(line)
        if open_place:
            return None, [
                error(
                    f"{file}, line {number}: {open_place.group(0)} was never filled in ({line})",
                    f"tools/fill_template.py -i {file} {open_place.group(1)}:VALUE",
                )
            ]
        said = re.sub(r"^\d+:\d+ : ", "", str(problem))
        return None, [
            error(f"{file}, line {number}: {said} ({line})", "correct that line; true and false are written so")
        ]


def _of_model(folder: Path, config: Any) -> Iterator[Problem]:
    """Name, batch size, version folder and files of one model."""
    file, name = folder / "config.pbtxt", folder.name
    if config.name and config.name != name:
        yield error(
            f"{file}: name is {config.name!r}, the folder is {name!r}", f"write name: {name!r}, or rename the folder"
        )
    for key in sorted({"${" + found + "}" for found in PLACEHOLDER.findall(config.name + config.backend)}):
        yield error(f"{file}: {key} was never filled in", f"tools/fill_template.py -i {file} {key[2:-1]}:VALUE")
    versions = [path for path in folder.iterdir() if path.is_dir() and path.name.isdigit() and path.name != "0"]
    if not versions:
        yield error(f"{folder} has no version folder", f"mkdir {folder / '1'} (empty for an engine or an ensemble)")
    elif config.backend == "python":
        model = config.default_model_filename or "model.py"
        if not any((version / model).is_file() for version in versions):
            yield error(f"{versions[0] / model} is missing", "the python backend runs that file; write the model again")
    if config.max_batch_size < 0:
        yield error(f"{file}: max_batch_size is {config.max_batch_size}", "give 0 for none, or a number of requests")
    if not config.input or not config.output:
        part = "output" if config.input else "input"
        yield error(f"{file}: no {part} is declared", f"add the {part} list; without one no request can be made")
    for key in ("gpt_model_path", "tokenizer_dir"):
        value = _parameter(config, key)
        if value and not Path(value).is_dir():
            yield error(
                f"{file}: {key} is {value}, which is no folder here", "give the folder as the server will see it"
            )
        elif not value and key in config.parameters and (key != "tokenizer_dir" or config.backend == "python"):
            yield error(f"{file}: {key} is empty", "give the folder as the server will see it")
    yield from _of_numbers(file, config)
    yield from _of_engine(file, config)


def _of_numbers(file: Path, config: Any) -> Iterator[Problem]:
    fraction, tokens = (
        _parameter(config, key) for key in ("kv_cache_free_gpu_mem_fraction", "max_tokens_in_paged_kv_cache")
    )
    if fraction and not 0 < (_number(fraction) or 0) <= 1:
        yield error(
            f"{file}: kv_cache_free_gpu_mem_fraction is {fraction}",
            "give a share of the free memory above 0 and at most 1",
        )
    if tokens and (_number(tokens) or 0) < 1:
        yield error(
            f"{file}: max_tokens_in_paged_kv_cache is {tokens}", "give a whole number of tokens, or leave it out"
        )


def _of_engine(file: Path, config: Any) -> Iterator[Problem]:
    """What the engine's config.json contradicts."""
    path = _parameter(config, "gpt_model_path")
    if not path or not Path(path).is_dir():
        return
    try:
        limits = EngineLimits.of(path)
    except (WrongFolderKind, RepositoryProblem, BrokenWeights) as problem:
        yield error(f"{file}: gpt_model_path: {problem}", "give the folder that trtllm-build made")
        return
    if config.max_batch_size > limits.max_batch_size:
        yield error(
            f"{file}: max_batch_size is {config.max_batch_size}, the engine was built for {limits.max_batch_size}",
            f"write max_batch_size: {limits.max_batch_size}, or build with --max_batch_size {config.max_batch_size}",
        )
    tokens = _number(_parameter(config, "max_tokens_in_paged_kv_cache"))
    if tokens and tokens < limits.max_seq_len:
        yield error(
            f"{file}: max_tokens_in_paged_kv_cache is {tokens:.0f}, one request of the engine may need {limits.max_seq_len}",
            f"give at least {limits.max_seq_len} (max_seq_len of the engine)",
        )
    beams = _number(_parameter(config, "max_beam_width"))
    if beams and beams > limits.max_beam_width:
        yield error(
            f"{file}: max_beam_width is {beams:.0f}, the engine was built for {limits.max_beam_width}",
            f"write {limits.max_beam_width}, or build with --max_beam_width {beams:.0f}",
        )
    for key in ("enable_kv_cache_reuse", "enable_chunked_context"):
        if _parameter(config, key).lower() == "true" and not limits.paged_context:
            yield error(
                f"{file}: {key} is true, the engine was built without use_paged_context_fmha",
                "write false, or build with --use_paged_context_fmha enable",
            )
    if config.backend in ENGINE_BACKENDS and _parameter(config, "gpt_model_type") == "V1":
        yield warning(
            f"{file}: gpt_model_type is V1: a request waits until the whole batch before it has ended",
            "write inflight_fused_batching",
        )


def _of_ensemble(folder: Path, config: Any, configs: Mapping[str, Any]) -> Iterator[Problem]:
    """Names of models and tensors in the steps of an ensemble, and its batch size."""
    file, known = folder / "config.pbtxt", {tensor.name for tensor in config.input}
    steps = list(config.ensemble_scheduling.step)
    for step in steps:
        known |= set(step.output_map.values())
    for step in steps:
        member = configs.get(step.model_name)
        if member is None:
            yield error(
                f"{file}: step {step.model_name!r} is no model of this repository", _nearest(step.model_name, configs)
            )
            continue
        if member.max_batch_size < config.max_batch_size:
            yield error(
                f"{file}: max_batch_size is {config.max_batch_size}, that of {step.model_name} is {member.max_batch_size}",
                "give every model of the chain the same",
            )
        for kind, names, tensors in (
            ("input", step.input_map, member.input),
            ("output", step.output_map, member.output),
        ):
            there = [tensor.name for tensor in tensors]
            for name in names:
                if name not in there:
                    yield error(f"{file}: step {step.model_name!r} has no {kind} {name!r}", _nearest(name, there))
        for name, source in step.input_map.items():
            if source not in known:
                yield error(
                    f"{file}: {name!r} of step {step.model_name!r} comes from {source!r}, which nothing in the ensemble makes",
                    _nearest(source, known),
                )
        for tensor in member.input:
            if not tensor.optional and tensor.name not in step.input_map:
                yield error(
                    f"{file}: step {step.model_name!r} does not get its input {tensor.name!r}",
                    f'add input_map {{ key: "{tensor.name}" value: … }}',
                )
    for tensor in config.output:
        if steps and not any(tensor.name in step.output_map.values() for step in steps):
            yield error(f"{file}: no step makes the output {tensor.name!r}", "map an output of the last step to it")


def _of_bls(folder: Path, config: Any, configs: Mapping[str, Any]) -> Iterator[Problem]:
    name = _parameter(config, "tensorrt_llm_model_name")
    if name and name not in configs:
        yield error(
            f"{folder / 'config.pbtxt'}: tensorrt_llm_model_name is {name!r}, no model of this repository",
            _nearest(name, configs),
        )


def _of_decoupled(repository: Path, configs: Mapping[str, Any], streaming: bool) -> Iterator[Problem]:
    """Decoupled mode along each chain: with streams true in every model that answers more than once."""
    chain = {name: config for name, config in configs.items() if name not in ONE_ANSWER}
    engines = [name for name, config in chain.items() if "gpt_model_path" in config.parameters]
    for name, config in chain.items():
        file, value = repository / name / "config.pbtxt", config.model_transaction_policy.decoupled
        said = "false" if config.HasField("model_transaction_policy") else "absent"
        members = [step.model_name for step in config.ensemble_scheduling.step]
        inner = [_parameter(config, "tensorrt_llm_model_name"), *members]
        part = name in engines or any(member in engines for member in inner)
        if streaming and members and not value and any(member in engines for member in members):
            yield warning(
                f"{file}: streams are wanted and decoupled is {said} in the ensemble; the server takes it from the ensemble's "
                "models, and a reader cannot see it",
                "write model_transaction_policy { decoupled: true } there too",
            )
        elif streaming and part and not value:
            yield error(
                f"{file}: streams are wanted and decoupled is {said}; a stream would be refused or give its last piece only",
                "write model_transaction_policy { decoupled: true } into every model of the chain",
            )
        for member in inner:
            if (
                not streaming
                and not members
                and member in engines
                and configs[member].model_transaction_policy.decoupled != value
            ):
                yield error(
                    f"{file}: decoupled is {str(value).lower() if value else said}, that of {member} is {str(not value).lower()}",
                    "give both the same value",
                )
    for name in ONE_ANSWER:
        if name in configs and configs[name].model_transaction_policy.decoupled:
            yield error(
                f"{repository / name / 'config.pbtxt'}: decoupled is true, but its model.py returns one answer for each request",
                "leave model_transaction_policy out there",
            )


def _parameter(config: Any, key: str) -> str:
    """A parameter's text; empty when it is not there or its placeholder was never filled in."""
    value = config.parameters[key].string_value if key in config.parameters else ""
    return "" if PLACEHOLDER.fullmatch(value) else str(value)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _nearest(name: str, there: Any) -> str:
    near = [one for one in there if one.endswith(f"_{name}")] or difflib.get_close_matches(name, list(there), n=1)
    return f"did you mean {near[0]!r}?" if near else f"there is {', '.join(sorted(there))}"
