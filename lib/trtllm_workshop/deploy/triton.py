"""Model repositories for Triton Inference Server, with every value taken from the engine and explained in the file.

`write_python_model`: one model whose model.py uses TensorRT-LLM's Python; it serves with either toolchain. `write_repository`:
the five models of TensorRT-LLM's C++ backend, for NVIDIA's container.
"""

from __future__ import annotations

from pathlib import Path

from trtllm_workshop.deploy import pbtxt
from trtllm_workshop.deploy.engine_limits import WAITING_PER_SLOT, EngineLimits
from trtllm_workshop.deploy.model_files import RepositoryProblem, packaged_code, write_folder
from trtllm_workshop.deploy.triton_tensors import TEXT_INPUTS, TEXT_OUTPUTS

PYTHON_MODEL = "tensorrt_llm_python"


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


def tokenizer_folder(tokenizer: str | Path) -> Path:
    """The folder as an absolute path. Raises RepositoryProblem when it holds no tokenizer."""
    folder = Path(tokenizer)
    names = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
    if not any((folder / name).is_file() for name in names):
        raise RepositoryProblem(
            f"tokenizer {folder} has none of {', '.join(names)}; give the Hugging Face folder that the engine was made from"
        )
    return folder.resolve()


def check_values(fraction: float, tokens: int | None, waiting: int | None, limits: EngineLimits) -> None:
    """Raises RepositoryProblem for a value that Triton or the engine would refuse, or that cannot serve one request."""
    if not 0 < fraction <= 1:
        raise RepositoryProblem(
            f"kv_cache_free_gpu_mem_fraction is {fraction}: it is a share of the free memory, above 0 and at most 1"
        )
    if tokens is not None and tokens < limits.max_seq_len:
        raise RepositoryProblem(
            f"max_tokens_in_paged_kv_cache is {tokens}, less than one request of the engine's max_seq_len "
            f"({limits.max_seq_len}) needs; give at least that"
        )
    if waiting is not None and waiting < 0:
        raise RepositoryProblem(f"max_queue_size is {waiting}: give 0 for no limit, or a number of requests")


def cache_fraction(value: float) -> str:
    """The parameter for the KV cache's share of memory."""
    return pbtxt.parameter(
        "kv_cache_free_gpu_mem_fraction",
        value,
        "Share of the GPU memory that is still free once the engine is loaded; the KV cache takes it at the start. Lower it "
        "when something else uses the same GPU.",
    )


def cache_tokens(value: int, limits: EngineLimits) -> str:
    """The parameter for the KV cache's size in tokens."""
    return pbtxt.parameter(
        "max_tokens_in_paged_kv_cache",
        value,
        f"Upper bound of the KV cache in tokens; the smaller of this and the share above holds. The engine can use at most "
        f"{limits.most_cache_tokens}: {limits.max_batch_size} requests of {limits.max_seq_len} tokens in blocks of "
        f"{limits.tokens_per_block}.",
    )


def exclude_input(value: bool) -> str:
    """The parameter that keeps the prompt out of the answer."""
    return pbtxt.parameter(
        "exclude_input_in_output",
        value,
        "true: the answer only. TensorRT-LLM's own default is false, where an answer begins with the prompt and token "
        "counts include it.",
    )
