"""Loads for the engine and Hugging Face, and what one generation step takes, in milliseconds and bytes."""

from __future__ import annotations

import functools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from fp8_gpu import milliseconds
from random_checkpoint import checkpoint_config, write_checkpoint
from trtllm_workshop.reference.build import build_engine
from trtllm_workshop.reference.configs import BuildConfig, KvCacheConfig
from trtllm_workshop.reference.cuda_graphs import GenerationGraphs
from trtllm_workshop.reference.cuda_kernels import can_capture
from trtllm_workshop.reference.llm import LLM
from trtllm_workshop.reference.sampling_params import SamplingParams

ACTIVATIONS = 20.0  # the largest input of every linear layer, for FP8's scales: with random weights any will do
KINDS = {
    "attention": ("_generation", "_join", "_context", "flash", "fmha"),
    "matrix_products": ("gemm", "gemv", "nvjet", "cutlass", "xmma", "splitk", "_product"),
}


def random_llm(shape: str, layers: int | None, precision: str, limits: dict[str, int], root: Path, seed: int) -> LLM:
    """An engine with random weights, built and loaded; its folders are deleted again, for they are large."""
    import shutil

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    checkpoint, folder = root / "checkpoint", root / "engine"
    config = checkpoint_config(shape, layers, precision)
    write_checkpoint(checkpoint, config, seed, device, defaultdict(lambda: ACTIVATIONS))
    build_engine(checkpoint, BuildConfig(**limits), folder, log=lambda *_: None)
    shutil.rmtree(checkpoint)
    # No prompt repeats, so that nothing could be reused; looking for it would only blur what is measured.
    pool = KvCacheConfig(enable_block_reuse=False)
    llm = LLM(folder, made_up_tokenizer(config["vocab_size"]), kv_cache_config=pool, iter_stats_max_iterations=0)
    shutil.rmtree(folder)
    return llm


def made_up_tokenizer(vocabulary: int) -> Any:
    """A byte-level tokenizer of so many tokens, each a byte or a short word: its decoder does all the work of a real one."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = "etaoinshrdlucmfwypvbgkqjxz"
    for number in range(vocabulary):
        word = ""
        while number or not word:
            number, letter = divmod(number, len(letters))
            word += letters[letter]
        words.append("Ġ" + word + "s")
    backend = Tokenizer(models.BPE({word: at for at, word in enumerate(words[:vocabulary])}, []))
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def random_prompts(llm: LLM, requests: int, length: int, seed: int) -> list[list[int]]:
    vocabulary = llm._executor.engine.pretrained_config["vocab_size"]
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocabulary, (requests, length), generator=generator).tolist()


def fixed_length(tokens: int) -> SamplingParams:
    """Greedy, exactly so many tokens, detokenized."""
    return SamplingParams(max_tokens=tokens, end_id=-1, ignore_eos=True)


@contextmanager
def step_clock(llm: LLM) -> Iterator[list[tuple[bool, Callable[[], float]]]]:
    """Notes each step of the executor: whether it had prompts in it, and a function that gives its milliseconds on the device.

    The function is called after the run, when nothing has to be waited for.
    """
    runner, steps = llm._executor._runner, []
    launch = runner.launch

    def timed(batch: Any, before: Any) -> Any:
        if not torch.cuda.is_available():
            started = time.perf_counter()
            launched = launch(batch, before)
            spent = (time.perf_counter() - started) * 1e3
            steps.append((bool(batch.context), lambda: spent))
            return launched
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        launched = launch(batch, before)
        end.record()
        steps.append((bool(batch.context), lambda: begin.elapsed_time(end)))
        return launched

    runner.launch = timed  # type: ignore[method-assign]
    try:
        yield steps
    finally:
        del runner.launch  # type: ignore[attr-defined]


def whole_engine(llm: LLM, requests: int, prompt: int, new: int, seed: int) -> dict[str, Any]:
    """All requests queued at once, through scheduler, model, sampling and detokenizer; what it took and where the time went."""
    warm_up(llm, requests, prompt, seed)
    prompts = random_prompts(llm, requests, prompt, seed + 1)
    with step_clock(llm) as steps:
        started = time.perf_counter()
        outputs = llm.generate(prompts, fixed_length(new))
        seconds = time.perf_counter() - started
    for output in outputs if isinstance(outputs, list) else [outputs]:
        answer = output.outputs[0]
        if len(answer.token_ids) != new or not answer.text:
            raise SystemExit(f"a request gave {len(answer.token_ids)} tokens instead of {new}; nothing is measured")
    spent = {kind: sum(ms() for had, ms in steps if had is kind) / 1e3 for kind in (True, False)}
    return {
        "requests": requests,
        "prompt_tokens": prompt,
        "new_tokens": new,
        "seconds": round(seconds, 3),
        "output_tokens_per_second": round(requests * new / seconds, 1),
        "total_tokens_per_second": round(requests * (prompt + new) / seconds, 1),
        "steps_with_prompts": sum(had for had, _ in steps),
        "steps_of_generation_only": sum(not had for had, _ in steps),
        "seconds_of_steps_with_prompts": round(spent[True], 3),
        "seconds_of_steps_of_generation_only": round(spent[False], 3),
        "share_outside_the_model": round(1 - sum(spent.values()) / seconds, 4),
        "pool": llm._executor.pool_description,
    }


def warm_up(llm: LLM, requests: int, prompt: int, seed: int) -> None:
    """Run what the engine's own warm-up leaves out: steps full of prompts of these lengths, with few and many others in them."""
    tokens = llm._executor.max_num_tokens
    for length in {prompt, min(prompt, 80)}:
        llm.generate(random_prompts(llm, min(requests, tokens // length + 8), length, seed), fixed_length(3))


def generation_steps(
    llm: LLM, batch: int, context: int, steps: int = 20, rounds: int = 7
) -> tuple[dict[str, Any], Callable[[], object]]:
    """Steps in which `batch` requests with `context` tokens in the cache generate, one behind the other without a pause.

    Returns:
        What was measured, and a function that runs one more such step.
    """
    executor = llm._executor
    engine, per_block = executor.engine, executor.kv_cache.tokens_per_block
    each, spare = -(-context // per_block), executor.kv_cache.num_blocks
    most = -(-engine.build_config["max_seq_len"] // per_block)
    on_device = can_capture(engine)
    graphs = GenerationGraphs(engine.run, executor.pool, batch, most, spare if on_device else 0, per_block, on_device)
    inputs = ([1] * batch, [context] * batch, [list(range(row * each, (row + 1) * each)) for row in range(batch)])

    def some() -> None:
        for _ in range(steps):
            graphs.step(*inputs)

    some()
    times = [milliseconds(some, engine.device) / steps for _ in range(rounds)]
    needed = step_bytes(llm, batch, context)
    row = {
        "batch": batch,
        "context": context,
        "milliseconds": round(statistics.median(times), 4),
        "milliseconds_all": [round(t, 4) for t in times],
        "tokens_per_second": round(batch / statistics.median(times) * 1e3, 1),
        "bytes": needed,
    }
    return row, lambda: graphs.step(*inputs)


def step_bytes(llm: LLM, batch: int, context: int) -> int:
    """What a generation step must read at least: every weight that multiplies once, and every cached key and value."""
    engine = llm._executor.engine
    model, weights = engine.pretrained_config, dict(engine.run.state_dict())  # type: ignore[attr-defined]
    looked_up = ("vocab_embedding", "rotary_table")
    matrices = sum(w.nbytes for name, w in weights.items() if not any(part in name for part in looked_up))
    values = 2 * model["num_hidden_layers"] * model["num_key_value_heads"] * model["head_size"]
    return matrices + batch * context * values * engine.kv_cache_dtype.itemsize


def kernel_shares(run: Callable[[], object]) -> dict[str, float]:
    """Milliseconds on the device by kind of kernel, from one profiled step; empty where it cannot be profiled.

    A process that was profiled once stays slower: time nothing in it afterwards.
    """
    if not torch.cuda.is_available():
        return {}
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    found = {**dict.fromkeys(KINDS, 0.0), "other": 0.0}
    for event in profiler.key_averages():
        name, spent = event.key.lower(), event.self_device_time_total / 1e3
        kind = next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), "other")
        found[kind] += spent
    return {kind: round(spent, 4) for kind, spent in found.items()}


def bandwidth() -> dict[str, float]:
    """Bytes per second of a large copy (read and written bytes together) and of a large sum, the best of several."""
    on_gpu = torch.cuda.is_available()
    size = (4 << 30) if on_gpu else (64 << 20)
    source = torch.ones(size // 4, dtype=torch.float32, device="cuda" if on_gpu else "cpu")
    target = torch.empty_like(source)
    copied = min(milliseconds(lambda: target.copy_(source), source.device) for _ in range(8))
    read = min(milliseconds(lambda: torch.amax(source), source.device) for _ in range(8))
    return {"copy": 2 * size / copied * 1e3, "read": size / read * 1e3}


def hugging_face(shape: str, layers: int | None, loads: list[tuple[int, int, int]], seed: int) -> list[dict[str, Any]]:
    """Hugging Face `generate` with random weights of the shape in bfloat16; loads: (batch, prompt tokens, new tokens)."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config, device = checkpoint_config(shape, layers, "bf16"), "cuda" if torch.cuda.is_available() else "cpu"
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    more = {"num_key_value_heads": config["num_key_value_heads"], "max_position_embeddings": 2048}
    kept = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = LlamaForCausalLM(LlamaConfig(**{name: config[name] for name in names}, **more)).eval()
    finally:
        torch.set_default_dtype(kept)
    model.generation_config.eos_token_id = None
    results = []
    for batch, prompt, new in loads:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, config["vocab_size"], (batch, prompt), generator=generator).to(device)
        options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0}
        with torch.inference_mode():
            model.generate(ids, max_new_tokens=3, min_new_tokens=3, **options)
            run = functools.partial(model.generate, ids, max_new_tokens=new, min_new_tokens=new, **options)
            spent = milliseconds(run, ids.device) / 1e3
        results.append(
            {
                "batch": batch,
                "prompt_tokens": prompt,
                "new_tokens": new,
                "seconds": round(spent, 3),
                "output_tokens_per_second": round(batch * new / spent, 1),
            }
        )
    return results
