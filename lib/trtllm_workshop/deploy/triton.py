"""Model repositories for Triton Inference Server, with every value taken from the engine and explained in the file.

`write_python_model`: one model whose model.py uses TensorRT-LLM's Python; it serves with either toolchain. `write_repository`:
the five models of TensorRT-LLM's C++ backend, for NVIDIA's container.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trtllm_workshop.deploy import pbtxt
from trtllm_workshop.deploy.engine_limits import WAITING_PER_SLOT, EngineLimits, planned_cache_tokens
from trtllm_workshop.deploy.model_files import RepositoryProblem, packaged_code, write_folder
from trtllm_workshop.deploy.triton_chain import (
    BACKENDS,
    ENGINE_MODEL,
    ChainValues,
    bls,
    ensemble,
    postprocessing,
    preprocessing,
)
from trtllm_workshop.deploy.triton_chain import engine as engine_config
from trtllm_workshop.deploy.triton_parameters import cache_fraction, cache_tokens, check_values, exclude_input
from trtllm_workshop.deploy.triton_tensors import TEXT_INPUTS, TEXT_OUTPUTS

PYTHON_MODEL = "tensorrt_llm_python"
MOST_COPIES = 5  # of the Python models; a value that did well over many loads, as NVIDIA's docs/model_config.md reports


def write_python_model(
    repository: str | Path,
    engine: str | Path,
    tokenizer: str | Path,
    *,
    name: str = PYTHON_MODEL,
    kv_cache_free_gpu_mem_fraction: float = 0.9,
    max_tokens_in_paged_kv_cache: int | None = None,
    max_queue_size: int | None = None,
    exclude_input_in_output: bool = True,
) -> Path:
    """Write a model that takes text and answers with text, or a stream of pieces, into `repository`/`name`.

    Args:
        repository: folder that `start_tritonserver` gets; other models in it stay.
        engine: engine folder; its limits become the model's.
        tokenizer: Hugging Face folder of the model.
        kv_cache_free_gpu_mem_fraction: share of the free GPU memory for the KV cache, above 0 and at most 1.
        max_tokens_in_paged_kv_cache: its most tokens; by default what the engine can use at all.
        max_queue_size: requests in work, waiting ones included, before new ones are refused; 0 means no limit.
        exclude_input_in_output: whether answers leave the prompt out, unless a request says otherwise.

    Returns:
        The model's folder.

    Raises:
        RepositoryProblem, WrongFolderKind: for an engine, tokenizer or value that cannot work, saying what to do.
    """
    limits, folder = EngineLimits.of(engine), tokenizer_folder(tokenizer)
    check_values(kv_cache_free_gpu_mem_fraction, max_tokens_in_paged_kv_cache, max_queue_size, limits)
    tokens = limits.most_cache_tokens if max_tokens_in_paged_kv_cache is None else max_tokens_in_paged_kv_cache
    waiting = limits.max_batch_size * (1 + WAITING_PER_SLOT) if max_queue_size is None else max_queue_size
    config = pbtxt.document(
        pbtxt.comment("Text in, text out through TensorRT-LLM's Python API (LLM.generate_async in 1/model.py)."),
        f'name: {pbtxt.quoted(name)}\nbackend: "python"',
        pbtxt.comment(
            "0: Triton does not put requests together. The engine does, in flight, and a new request joins running ones; "
            f"it was built for {limits.max_batch_size} at once."
        )
        + "\nmax_batch_size: 0",
        pbtxt.decoupled(True, "true: a request may have many responses, which a stream needs. Must stay true."),
        pbtxt.tensors("input", TEXT_INPUTS),
        pbtxt.tensors("output", TEXT_OUTPUTS),
        pbtxt.instances(1, "One copy: each would load the whole engine and take a KV cache of its own."),
        pbtxt.parameter("gpt_model_path", limits.folder, "Folder of the engine."),
        pbtxt.parameter("tokenizer_dir", folder, "Hugging Face folder whose tokenizer belongs to the engine."),
        cache_fraction(kv_cache_free_gpu_mem_fraction),
        cache_tokens(tokens, limits),
        pbtxt.parameter(
            "max_queue_size",
            waiting,
            "Requests in work, waiting ones included; more are refused at once, with status UNAVAILABLE, instead of waiting "
            "for minutes. 0: no limit.",
        ),
        exclude_input(exclude_input_in_output),
    )
    return write_folder(Path(repository) / name, {"config.pbtxt": config, "1/model.py": packaged_code("llm_model.py")})


def write_repository(
    repository: str | Path,
    engine: str | Path,
    tokenizer: str | Path,
    *,
    backend: str = "tensorrtllm",
    streaming: bool = True,
    gpu: Any = None,
    max_batch_size: int | None = None,
    max_queue_delay_microseconds: int = 0,
    max_queue_size: int | None = None,
    kv_cache_free_gpu_mem_fraction: float = 0.9,
    max_tokens_in_paged_kv_cache: int | None = None,
    instances: int | None = None,
    exclude_input_in_output: bool = True,
    accumulate_tokens: bool = False,
) -> Path:
    """Write the models preprocessing, tensorrt_llm, postprocessing, ensemble and tensorrt_llm_bls; `repository` appears whole.

    Args:
        repository: folder for the five; replaced when it holds Triton models already.
        engine: engine folder, built with the TensorRT-LLM of the container that will serve it.
        tokenizer: Hugging Face folder of the model.
        backend: of tensorrt_llm: `tensorrtllm` (C++, in NVIDIA's container) or `python`, which runs on any toolchain.
        streaming: whether requests may stream; sets the decoupled mode of the whole chain.
        gpu: a GPU of the planner (`planner_gpus.find_gpu`): the KV cache is then what the planner finds room for there.
        max_batch_size: Triton's, by default the engine's and never above it.
        max_queue_delay_microseconds: time to wait for further requests; the engine batches by itself, so 0.
        max_queue_size: requests that may wait, 0 for no limit; by default 8 for each that can run.
        kv_cache_free_gpu_mem_fraction, max_tokens_in_paged_kv_cache: size of the KV cache; the smaller one holds.
        instances: copies of the Python models; by default as many as run at once, at most 5.
        exclude_input_in_output: whether answers leave the prompt out.
        accumulate_tokens: whether tensorrt_llm_bls streams all the text so far instead of what is new.

    Raises:
        RepositoryProblem, WrongFolderKind: for an engine, tokenizer or value that cannot work, saying what to do.

    Source: docs/model_config.md and docs/llama.md of tensorrtllm_backend r26.04. The C++ backend itself has not been run here.
    """
    limits, folder = EngineLimits.of(engine), tokenizer_folder(tokenizer)
    check_values(kv_cache_free_gpu_mem_fraction, max_tokens_in_paged_kv_cache, max_queue_size, limits)
    batch = limits.max_batch_size if max_batch_size is None else max_batch_size
    if backend not in BACKENDS:
        raise RepositoryProblem(f"backend is {backend!r}: choose one of {', '.join(BACKENDS)}")
    if not 1 <= batch <= limits.max_batch_size:
        raise RepositoryProblem(
            f"max_batch_size is {batch}: give 1 to {limits.max_batch_size}, which the engine was built for, or build it anew"
        )
    if max_queue_delay_microseconds < 0:
        raise RepositoryProblem(f"max_queue_delay_microseconds is {max_queue_delay_microseconds}: give 0 or more")
    tokens = limits.most_cache_tokens if max_tokens_in_paged_kv_cache is None else max_tokens_in_paged_kv_cache
    if gpu is not None:
        tokens = min(tokens, planned_cache_tokens(limits, gpu, kv_cache_free_gpu_mem_fraction))
    values = ChainValues(
        limits=limits,
        tokenizer=folder,
        backend=backend,
        cache_tokens=tokens,
        fraction=kv_cache_free_gpu_mem_fraction,
        batch=batch,
        delay_us=max_queue_delay_microseconds,
        waiting=batch * WAITING_PER_SLOT if max_queue_size is None else max_queue_size,
        copies=min(batch, MOST_COPIES) if instances is None else instances,
        streaming=streaming or backend == "python",
        exclude_input=exclude_input_in_output,
        accumulate_tokens=accumulate_tokens,
    )
    core = {f"{ENGINE_MODEL}/1/model.py": packaged_code("core_model.py")} if backend == "python" else {}
    return write_folder(
        Path(repository),
        {
            "preprocessing/config.pbtxt": preprocessing(values),
            "preprocessing/1/model.py": packaged_code("preprocessing_model.py"),
            f"{ENGINE_MODEL}/config.pbtxt": engine_config(values),
            f"{ENGINE_MODEL}/1/": "",
            **core,
            "postprocessing/config.pbtxt": postprocessing(values),
            "postprocessing/1/model.py": packaged_code("postprocessing_model.py"),
            "ensemble/config.pbtxt": ensemble(values),
            "ensemble/1/": "",
            "tensorrt_llm_bls/config.pbtxt": bls(values),
            "tensorrt_llm_bls/1/model.py": packaged_code("bls_model.py"),
        },
    )


def tokenizer_folder(tokenizer: str | Path) -> Path:
    """The folder as an absolute path. Raises RepositoryProblem when it holds no tokenizer."""
    folder = Path(tokenizer)
    names = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
    if not any((folder / name).is_file() for name in names):
        raise RepositoryProblem(
            f"tokenizer {folder} has none of {', '.join(names)}; give the Hugging Face folder that the engine was made from"
        )
    return folder.resolve()
