"""Parameters that several models share, each with its explanation, and the checks of their values."""

from __future__ import annotations

from trtllm_workshop.deploy import pbtxt
from trtllm_workshop.deploy.engine_limits import EngineLimits
from trtllm_workshop.deploy.model_files import RepositoryProblem


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
