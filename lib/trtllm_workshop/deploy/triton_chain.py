"""The config.pbtxt of the five models around TensorRT-LLM's C++ backend: tokenize, engine, detokenize, and two ways to join them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trtllm_workshop.deploy import pbtxt
from trtllm_workshop.deploy.engine_limits import EngineLimits
from trtllm_workshop.deploy.pbtxt import Tensor
from trtllm_workshop.deploy.triton_parameters import cache_fraction, cache_tokens, exclude_input
from trtllm_workshop.deploy.triton_tensors import CHAIN_INPUTS, TEXT_INPUTS

ENGINE_MODEL = "tensorrt_llm"
WORKER = "/opt/tritonserver/backends/tensorrtllm/trtllmExecutorWorker"  # in NVIDIA's container
BACKENDS = ("tensorrtllm", "python")
# Names of the chain's tensors: the ensemble's own, preprocessing's and the engine's.
WORDS = {"stop_words": ("STOP_WORDS_DICT", "STOP_WORDS_IDS", "stop_words_list"),
         "bad_words": ("BAD_WORDS_DICT", "BAD_WORDS_IDS", "bad_words_list")}  # fmt: skip
SAMPLING = {"temperature": "temperature", "runtime_top_k": "top_k", "runtime_top_p": "top_p", "seed": "seed",
            "min_tokens": "min_tokens", "repetition_penalty": "repetition_penalty",
            "presence_penalty": "presence_penalty", "frequency_penalty": "frequency_penalty",
            "exclude_input_in_output": "exclude_input_in_output", "streaming": "stream", "stop": "stop"}  # fmt: skip


@dataclass(frozen=True)
class ChainValues:
    """What the five files need; see `triton.write_repository`."""

    limits: EngineLimits
    tokenizer: Path
    backend: str
    cache_tokens: int
    fraction: float
    batch: int
    delay_us: int
    waiting: int
    copies: int
    streaming: bool
    exclude_input: bool
    accumulate_tokens: bool

    def head(self, name: str, backend: str, about: str) -> str:
        """The first lines of a file."""
        return "\n".join(
            [
                pbtxt.comment(about),
                f"name: {pbtxt.quoted(name)}",
                f"backend: {pbtxt.quoted(backend)}" if backend else 'platform: "ensemble"',
                pbtxt.comment(
                    f"Requests that Triton hands over together; the same in every model of the chain. The engine was built "
                    f"for {self.limits.max_batch_size} at once (max_batch_size of its config.json)."
                ),
                f"max_batch_size: {self.batch}",
            ]
        )


def preprocessing(values: ChainValues) -> str:
    """Text to tokens."""
    return pbtxt.document(
        values.head("preprocessing", "python", "Text to token ids; the tokenizer runs in 1/model.py."),
        pbtxt.batching(values.batch, values.delay_us, values.waiting),
        pbtxt.tensors(
            "input",
            [
                Tensor("QUERY", "STRING", note="the prompt"),
                Tensor("REQUEST_OUTPUT_LEN", "INT32", note="longest answer in tokens"),
                Tensor("STOP_WORDS_DICT", "STRING", (-1,), True),
                Tensor("BAD_WORDS_DICT", "STRING", (-1,), True),
                Tensor("END_ID", "INT32", optional=True),
                Tensor("PAD_ID", "INT32", optional=True),
            ],
        ),
        pbtxt.tensors(
            "output",
            [
                Tensor("INPUT_ID", "INT32", (-1,)),
                Tensor("REQUEST_INPUT_LEN", "INT32"),
                Tensor("REQUEST_OUTPUT_LEN", "INT32"),
                Tensor("STOP_WORDS_IDS", "INT32", (2, -1), note="tokens, and where each word ends"),
                Tensor("BAD_WORDS_IDS", "INT32", (2, -1)),
                Tensor("OUT_END_ID", "INT32"),
                Tensor("OUT_PAD_ID", "INT32"),
            ],
        ),
        pbtxt.instances(values.copies, "Copies that tokenize at the same time."),
        pbtxt.parameter(
            "tokenizer_dir", values.tokenizer, "Hugging Face folder whose tokenizer belongs to the engine."
        ),
        pbtxt.parameter(
            "add_special_tokens",
            True,
            "true: the token that begins a text is put before the prompt where the model has one.",
        ),
    )


def postprocessing(values: ChainValues) -> str:
    """Tokens to text."""
    return pbtxt.document(
        values.head("postprocessing", "python", "Token ids to text. Each response is decoded by itself."),
        pbtxt.tensors(
            "input",
            [
                Tensor("TOKENS_BATCH", "INT32", (-1, -1), note="[beams, tokens]"),
                Tensor("SEQUENCE_LENGTH", "INT32", (-1,)),
            ],
        ),
        pbtxt.tensors("output", [Tensor("OUTPUT", "STRING", (-1,), note="one text a beam")]),
        pbtxt.instances(values.copies, "Copies that detokenize at the same time."),
        pbtxt.parameter(
            "tokenizer_dir", values.tokenizer, "Hugging Face folder whose tokenizer belongs to the engine."
        ),
        pbtxt.parameter("skip_special_tokens", True, "true: end and padding tokens do not show in the text."),
    )


def engine(values: ChainValues) -> str:
    """The engine itself: tokens to tokens."""
    limits, one = values.limits, dict(optional=True, flat=True)
    cpp = values.backend == "tensorrtllm"
    inputs = [
        Tensor("input_ids", "INT32", (-1,), True, "the prompt", ragged=True),
        Tensor("input_lengths", "INT32", flat=True),
        Tensor("request_output_len", "INT32", flat=True, note="longest answer in tokens"),
        Tensor("end_id", "INT32", **one),  # type: ignore[arg-type]
        Tensor("pad_id", "INT32", **one),  # type: ignore[arg-type]
        Tensor("stop_words_list", "INT32", (2, -1), True, ragged=True),
        Tensor("bad_words_list", "INT32", (2, -1), True, ragged=True),
        *(Tensor(name, _kind(theirs), **one) for name, theirs in SAMPLING.items()),  # type: ignore[arg-type]
        Tensor("beam_width", "INT32", **one),  # type: ignore[arg-type]
        Tensor("len_penalty", "FP32", **one),  # type: ignore[arg-type]
    ]
    outputs = [
        Tensor("output_ids", "INT32", (-1, -1), note="[beams, tokens]"),
        Tensor("sequence_length", "INT32", (-1,)),
    ]
    return pbtxt.document(
        values.head(ENGINE_MODEL, values.backend, "The engine: token ids in, token ids out."),
        pbtxt.decoupled(
            values.streaming,
            "true: a request may have many responses, which a stream needs. tensorrt_llm_bls must say the same.",
        ),
        pbtxt.batching(values.batch, values.delay_us, values.waiting),
        pbtxt.tensors("input", inputs),
        pbtxt.tensors("output", outputs),
        pbtxt.instances(1, "One: the engine runs its requests together, and a copy would load its weights again."),
        pbtxt.parameter("gpt_model_path", limits.folder, "Folder of the engine, as the server sees it."),
        pbtxt.parameter(
            "gpt_model_type",
            "inflight_fused_batching",
            "A new request joins the running batch at the next step. V1 would make it wait until the whole batch has ended.",
        ),
        pbtxt.parameter(
            "batch_scheduler_policy",
            "guaranteed_no_evict",
            "A request begins only when its longest answer fits into the KV cache. max_utilization begins more and may have "
            "to pause some.",
        ),
        cache_fraction(values.fraction),
        cache_tokens(values.cache_tokens, limits),
        pbtxt.parameter(
            "enable_kv_cache_reuse",
            limits.paged_context,
            "Prompts with the same beginning share its KV cache. Needs an engine built with use_paged_context_fmha, which "
            f"this one {'has' if limits.paged_context else 'does not have'}.",
        ),
        pbtxt.parameter(
            "enable_chunked_context",
            limits.paged_context,
            f"Prompts that do not fit into a step (max_num_tokens {limits.max_num_tokens}) are read in parts, and others go on "
            "meanwhile. Needs use_paged_context_fmha too.",
        ),
        pbtxt.parameter("max_beam_width", limits.max_beam_width, "Most beams; not more than the engine was built for."),
        exclude_input(values.exclude_input),
        pbtxt.parameter("cancellation_check_period_ms", 100, "How often clients that went away are looked for."),
        pbtxt.parameter("stats_check_period_ms", 100, "How often the nv_trt_llm_… figures of /metrics are brought up to date."),
        pbtxt.parameter("executor_worker_path", WORKER, "Program for further ranks; its place in NVIDIA's container.") if cpp else "",
        pbtxt.parameter("FORCE_CPU_ONLY_INPUT_TENSORS", "no", "Inputs may stay in GPU memory.") if cpp else "",
        "" if cpp else pbtxt.parameter("tokenizer_dir", values.tokenizer, "For stop words, which this backend takes as text."),
    )  # fmt: skip


def ensemble(values: ChainValues) -> str:
    """The three models in a row, joined by the server itself."""
    first = {"QUERY": "text_input", "REQUEST_OUTPUT_LEN": "max_tokens", "END_ID": "end_id", "PAD_ID": "pad_id"}
    first |= {theirs: ours for ours, (theirs, _, _) in WORDS.items()}
    between = {
        "INPUT_ID": "input_ids",
        "REQUEST_INPUT_LEN": "input_lengths",
        "REQUEST_OUTPUT_LEN": "request_output_len",
    }
    between |= {ids: listed for _, ids, listed in WORDS.values()} | {"OUT_END_ID": "end_id", "OUT_PAD_ID": "pad_id"}
    inner = {name: f"_{name}" for name in between}
    return pbtxt.document(
        values.head(
            "ensemble",
            "",
            "preprocessing, tensorrt_llm and postprocessing in a row. A stream decodes each response by itself, so a character "
            "of several tokens comes out broken: use tensorrt_llm_bls for streams.",
        ),
        pbtxt.decoupled(values.streaming, "Follows tensorrt_llm, the one model in it that may answer more than once."),
        pbtxt.tensors("input", CHAIN_INPUTS),
        pbtxt.tensors("output", [Tensor("text_output", "STRING", (-1,), note="one text a beam")]),
        pbtxt.ensemble(
            [
                ("preprocessing", first, inner),
                (
                    ENGINE_MODEL,
                    {engines: inner[name] for name, engines in between.items()} | SAMPLING,
                    {"output_ids": "_output_ids", "sequence_length": "_sequence_length"},
                ),
                (
                    "postprocessing",
                    {"TOKENS_BATCH": "_output_ids", "SEQUENCE_LENGTH": "_sequence_length"},
                    {"OUTPUT": "text_output"},
                ),
            ]
        ),
    )


def bls(values: ChainValues) -> str:
    """The three models in a loop of Python."""
    return pbtxt.document(
        values.head("tensorrt_llm_bls", "python", "The chain as a loop in 1/model.py; whole characters in streams."),
        pbtxt.decoupled(values.streaming, "Must say the same as tensorrt_llm: true for streams."),
        pbtxt.tensors("input", CHAIN_INPUTS),
        pbtxt.tensors("output", [Tensor("text_output", "STRING", (-1,))]),
        pbtxt.instances(
            values.copies, "Each copy drives one request, so this is the most that run at once through this model."
        ),
        pbtxt.parameter("tensorrt_llm_model_name", ENGINE_MODEL, "The model that runs the engine."),
        pbtxt.parameter(
            "accumulate_tokens",
            values.accumulate_tokens,
            "false: a streamed response holds the text since the one before. true: all the text so far.",
        ),
    )


def _kind(name: str) -> str:
    return next(tensor.kind for tensor in TEXT_INPUTS if tensor.name == name)
