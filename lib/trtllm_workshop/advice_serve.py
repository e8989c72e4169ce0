"""Failures of servers at their start: ports, the backend, the tokenizer, memory.

The texts are those of trtllm-serve (uvicorn's among them), of tritonserver and of transformers.
"""

from __future__ import annotations

import re
from pathlib import Path

from trtllm_workshop.advice_model import Advice, Context, Rule
from trtllm_workshop.advice_rules import gpu_memory_error
from trtllm_workshop.command_rules import looks_like_engine

_UNRECOGNIZED = r"Unrecognized model in ([^\n]+?)\. Should have"
_IN_USE = (
    r"bind socket to [^\n]*?:(\d+): [^\n]*in use",  # trtllm-serve, which binds before it loads anything
    r"bind on address \([^\n]*?, (\d+)[^\n]*?\): [^\n]*in use",  # uvicorn
    r"Socket '[^'\n]*:(\d+)' already in use",  # tritonserver
)


def _on_tensorrt(context: Context) -> bool:
    return re.search(r"--backend[= ]['\"]?(?:tensorrt|trt)\b", context.server) is not None


def port_in_use(context: Context) -> Advice | None:
    """Another process listens on the port: often an earlier server that was not ended."""
    match = next((found for pattern in _IN_USE if (found := context.search(pattern))), None)
    if match is None:
        return None
    port = match.group(1)
    cause = f"port {port} is in use, perhaps by an earlier server that still runs"
    flag = "--http-port, --grpc-port or --metrics-port" if match.re.pattern == _IN_USE[2] else "--port"
    fix = f"end that process (ss -ltnp 'sport = :{port}' names it), or choose another number with {flag}"
    return Advice(cause, fix)


def engine_without_backend(context: Context) -> Advice | None:
    """P58: an engine folder given to the PyTorch backend, which finds no model type in its config.json."""
    match = context.search(_UNRECOGNIZED)
    if match is None or _on_tensorrt(context):
        return None
    folder = match.group(1)
    if not looks_like_engine(folder) and (Path(folder).is_dir() or "engine" not in folder.lower()):
        return None
    cause = "an engine folder was given to the PyTorch backend, the default since 1.0, which reads Hugging Face folders"
    fix = "serve engines with --backend tensorrt; in Python take LLM from tensorrt_llm._tensorrt_engine"
    return Advice(cause, fix, "P58")


def no_tokenizer(context: Context) -> Advice | None:
    """The folder that the tokenizer is read from holds none; without --tokenizer that is the engine's own."""
    if not context.server:
        return None
    missing = r"Can't load tokenizer for '([^'\n]+)'|Repo id must be in the form [^\n]*: '([^'\n]+)'"
    match = context.search(f"{_UNRECOGNIZED}|{missing}" if _on_tensorrt(context) else missing)
    if match is None:
        return None
    folder = next(group for group in match.groups() if group)
    if "--tokenizer" in context.server:
        fix = "give --tokenizer the Hugging Face folder of the model, in which tokenizer.json or tokenizer.model lies"
    else:
        fix = "add --tokenizer FOLDER with the Hugging Face folder of the model: an engine folder has no tokenizer"
    return Advice(f"there is no tokenizer in {folder}", fix)


def memory_at_start(context: Context) -> Advice | None:
    """P53: the GPU is full before the first request: weights, buffers for the largest batch and the KV cache."""
    if not context.server or gpu_memory_error(context) is None:
        return None
    cause = "the GPU memory is full: weights, buffers of the largest batch and the KV cache do not fit together"
    if context.server.startswith("tritonserver"):
        smaller = "kv_cache_free_gpu_mem_fraction in the model's config.pbtxt"
    else:
        smaller = "--free_gpu_memory_fraction, --max_batch_size and --max_num_tokens"
    fix = f"end what else uses the GPU (nvidia-smi lists it), then lower {smaller}; after that, a smaller precision"
    return Advice(cause, fix, "P53")


SERVE_RULES: tuple[Rule, ...] = (port_in_use, engine_without_backend, no_tokenizer, memory_at_start)
