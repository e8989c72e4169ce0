"""The engine LLM: `tensorrt_llm._tensorrt_engine.LLM` in the subset that the reference implements."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from trtllm_workshop.checkpoint import classify
from trtllm_workshop.reference.build import build_engine
from trtllm_workshop.reference.configs import (
    BuildConfig,
    KvCacheConfig,
    SchedulerConfig,
    official_fields,
    refuse_unknown,
)
from trtllm_workshop.reference.executor import Executor
from trtllm_workshop.reference.executor_loop import ExecutorLoop
from trtllm_workshop.reference.outputs import RequestOutput
from trtllm_workshop.reference.prompt_inputs import RequestMaker, prompt_text
from trtllm_workshop.reference.ranks import Ranks, asked_ranks, check_ranks, load_ranks
from trtllm_workshop.reference.request import Request
from trtllm_workshop.reference.sampling_params import SamplingParams
from trtllm_workshop.reference.tokenizer_source import load_tokenizer, read_generation_config

IMPLEMENTED = {
    "build_config",
    "kv_cache_config",
    "gather_generation_logits",
    "max_batch_size",
    "max_num_tokens",
    "max_seq_len",
    "max_input_len",
    "pipeline_parallel_size",
    "enable_tqdm",
    "scheduler_config",
    "enable_chunked_prefill",
    "iter_stats_max_iterations",
}
CONFIGS = {"build_config": BuildConfig, "kv_cache_config": KvCacheConfig, "scheduler_config": SchedulerConfig}
WHOLE_NUMBERS = ("max_batch_size", "max_num_tokens", "max_seq_len", "max_input_len", "iter_stats_max_iterations")


def close_all(loop: ExecutorLoop, executor: Executor) -> None:
    """End the thread, the requests and the other ranks of an engine."""
    loop.shutdown()
    executor.close()


class LLM:
    """Generates text with a TensorRT engine.

    Args:
        model: an engine folder, a TensorRT-LLM checkpoint folder, or a Hugging Face folder (the last two are converted and
            built inside `__init__`, in a temporary folder).
        tokenizer: Hugging Face folder or tokenizer object; by default the model folder, when it is a Hugging Face one.
        skip_tokenizer_init: no tokenizer; prompts must be token ids then.
        dtype: precision of the engine when one is built here; `auto` follows the model.
        tensor_parallel_size: ranks that share each layer, when an engine is built here; one process each.
        kwargs: `pipeline_parallel_size`, `build_config`, `kv_cache_config`, `scheduler_config`, `enable_chunked_prefill`,
            `iter_stats_max_iterations`, `gather_generation_logits`, `max_batch_size`, `max_num_tokens`, `max_seq_len`,
            `max_input_len`.

    Raises:
        ValueError: for an argument that is unknown or not implemented.
        EngineError, WrongFolderKind: for an engine that cannot be loaded here.
        RankError: when a rank of the engine does not come up; from `generate` too, when one ends.
    """

    def __init__(
        self,
        model: str | Path,
        tokenizer: Any = None,
        tokenizer_mode: str = "auto",
        skip_tokenizer_init: bool = False,
        trust_remote_code: bool = False,
        tensor_parallel_size: int = 1,
        dtype: str = "auto",
        revision: str | None = None,
        tokenizer_revision: str | None = None,
        **kwargs: Any,
    ) -> None:
        self.args = args = refuse_unknown(
            "LLM", kwargs, IMPLEMENTED, official_fields("tensorrt_llm._tensorrt_engine.LLM")
        )
        wanted_ranks = asked_ranks(tensor_parallel_size, args.get("pipeline_parallel_size", 1))
        self._workspace: tempfile.TemporaryDirectory | None = None
        self._loaded: Executor | None = None
        self._loop: ExecutorLoop | None = None
        self._ranks: Ranks | None = None
        folder = Path(model)
        kind = classify(folder)
        for name, kind_of in CONFIGS.items():
            if isinstance(args.get(name), dict):
                args[name] = kind_of(**args[name])
            elif not isinstance(args.get(name), kind_of | None):
                raise ValueError(f"{name} is {args[name]!r:.60}, expected {kind_of.__name__}(…)")
        for name in WHOLE_NUMBERS:
            value = args.get(name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
                raise ValueError(f"{name}={value!r} must be a whole number")
        build: BuildConfig | None = args.get("build_config")
        if kind == "engine" and build is not None:
            print("[TRT-LLM] [W] build_config is ignored: the model is an engine that was built already")
        if tokenizer is None and kind == "hf":
            tokenizer = folder
        self.tokenizer, tokenizer_folder = (None, None)
        if not skip_tokenizer_init:
            self.tokenizer, tokenizer_folder = load_tokenizer(
                tokenizer, trust_remote_code, tokenizer_mode, tokenizer_revision
            )
        generation_config = read_generation_config(tokenizer_folder)
        try:
            if kind in ("engine", "checkpoint"):
                check_ranks(folder, kind, wanted_ranks)
            engine_folder = folder if kind == "engine" else self._build(folder, kind, dtype, build, wanted_ranks)
            engine, self._ranks = load_ranks(engine_folder)
            self._loaded = Executor(
                engine,
                args.get("kv_cache_config"),
                args.get("max_batch_size"),
                max_num_tokens=args.get("max_num_tokens"),
                scheduler_config=args.get("scheduler_config"),
                enable_chunked_context=bool(args.get("enable_chunked_prefill")),
                most_stats=args.get("iter_stats_max_iterations"),
                ranks=self._ranks,
            )
        except BaseException:
            self.shutdown()
            raise
        self._engine_folder = engine_folder
        limits = self._executor.engine.build_config
        for name in ("max_seq_len", "max_input_len"):
            wanted = args.get(name)
            if wanted is not None and wanted != limits[name]:
                print(f"[TRT-LLM] [W] {name}={wanted} is replaced by the engine's own {limits[name]}")
        print(f"[TRT-LLM] [I] {self._executor.pool_description}")
        gathers = bool(args.get("gather_generation_logits") or limits["gather_generation_logits"])
        self._maker = RequestMaker(self._executor.engine, self.tokenizer, generation_config, gathers)
        self._loop = ExecutorLoop(self._executor)
        # An LLM that is forgotten, or left at the end of the program, must not leave its thread or its ranks behind.
        self._closing = weakref.finalize(self, close_all, self._loop, self._executor)

    def _build(self, folder: Path, kind: str, dtype: str, build: BuildConfig | None, ranks: tuple[int, int]) -> Path:
        """Convert if needed and build in a temporary workspace; returns the engine folder."""
        from trtllm_workshop.reference.convert import convert_checkpoint as convert
        from trtllm_workshop.reference.convert_plan import Sharding

        self._workspace = tempfile.TemporaryDirectory(prefix="tllm-workspace-")
        checkpoint = folder
        if kind != "checkpoint":
            checkpoint = Path(self._workspace.name) / "checkpoint"
            convert(folder, checkpoint, dtype=dtype, sharding=Sharding(tp_size=ranks[0], pp_size=ranks[1]))
        limits = {n: self.args[n] for n in ("max_batch_size", "max_seq_len", "max_num_tokens") if self.args.get(n)}
        config = build or BuildConfig(**limits)
        if self.args.get("gather_generation_logits"):
            config = config.model_copy(update={"gather_generation_logits": True})
        return build_engine(checkpoint, config, Path(self._workspace.name) / "engine")

    @property
    def _executor(self) -> Executor:
        if self._loaded is None:
            raise RuntimeError(
                "this LLM was shut down: its engine is no longer loaded. Make a new LLM to generate again"
            )
        return self._loaded

    @property
    def workspace(self) -> Path | None:
        """The temporary folder an engine was built in, or None."""
        return Path(self._workspace.name) if self._workspace else None

    def generate(
        self,
        inputs: str | Sequence[int] | dict | Sequence,
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        use_tqdm: bool = True,
        **kwargs: Any,
    ) -> RequestOutput | list[RequestOutput]:
        """Generate for one prompt or a list of prompts.

        Args:
            inputs: text, token ids, {"prompt": …} or {"prompt_token_ids": …}, or a list of these. A flat list of integers
                is one prompt.
            sampling_params: one for all, or one per prompt.
            use_tqdm: show progress; the reference prints none.

        Returns:
            A RequestOutput for one prompt, a list for a list.

        Raises:
            ValueError: for a prompt that is empty or too long, or parameters that need another build.
            RuntimeError: after shutdown.
        """
        refuse_unknown("LLM.generate", kwargs, set(), official_fields("LLM.generate"))
        if not isinstance(inputs, dict | Sequence):
            raise ValueError(
                f"inputs is a {type(inputs).__name__}, expected a text, a list of token ids, or a list of prompts (an "
                "array or tensor becomes a list with .tolist())"
            )
        if len(inputs) == 0 and not isinstance(inputs, str):
            raise ValueError("inputs is empty: give a text, a list of token ids, or a list of prompts")
        single = isinstance(inputs, str | dict) or (len(inputs) > 0 and isinstance(inputs[0], int))
        prompts = [inputs] if single else list(inputs)
        if isinstance(sampling_params, list | tuple):
            params = [one or SamplingParams() for one in sampling_params]
        else:
            params = [sampling_params or SamplingParams()] * len(prompts)
        for one in params:
            if not isinstance(one, SamplingParams):
                raise ValueError(f"sampling_params has {one!r:.60}, expected SamplingParams(…)")
        if len(params) != len(prompts):
            raise ValueError(f"{len(params)} sampling_params for {len(prompts)} prompts; give one, or one per prompt")
        executor = self._executor
        requests = [self._maker.make(p, s) for p, s in zip(prompts, params, strict=True)]
        try:
            for request in requests:
                executor.submit(request)
            running = requests
            while running := [r for r in running if not r.finished]:
                executor.step()
        except BaseException:
            executor.abort(requests)
            raise
        for request in requests:
            if request.error is not None:
                raise request.error
            if request.finish_reason == "cancelled":
                raise RuntimeError("this LLM was shut down while it generated: its answers are not complete")
        outputs = [RequestOutput.of(r, prompt_text(p)) for r, p in zip(requests, prompts, strict=True)]
        return outputs[0] if single else outputs

    def generate_async(
        self,
        inputs: str | Sequence[int] | dict,
        sampling_params: SamplingParams | None = None,
        streaming: bool = False,
        **kwargs: Any,
    ) -> RequestOutput:
        """Start one request and return at once.

        Args:
            inputs: one prompt: text, token ids, {"prompt": …} or {"prompt_token_ids": …}.
            sampling_params: how tokens are chosen.
            streaming: whether the result can be iterated over, token by token.

        Returns:
            A RequestOutput to `await`, to call `result()` on, or to iterate over with `for` or `async for`.

        Raises:
            ValueError: for a prompt that is empty or too long, a list of prompts, or parameters that need another build.
            RuntimeError: after shutdown.
        """
        refuse_unknown("LLM.generate_async", kwargs, set(), official_fields("LLM.generate_async"))
        executor = self._executor
        if isinstance(inputs, list | tuple) and inputs and not isinstance(inputs[0], int):
            raise ValueError(
                f"generate_async takes one prompt, not a list of {len(inputs)}: call it once for each, and wait for all "
                "(asyncio.gather), or use generate"
            )
        params = sampling_params or SamplingParams()
        if not isinstance(params, SamplingParams):
            raise ValueError(f"sampling_params is {sampling_params!r:.60}, expected SamplingParams(…)")
        request = self.make_request(inputs, params)
        output = RequestOutput.following(request, prompt_text(inputs), executor.abort, streaming)
        self.submit(request)
        return output

    # What a server needs: requests of its own, which it listens to without a RequestOutput. Not official.

    def make_request(self, inputs: str | Sequence[int] | dict, params: SamplingParams) -> Request:
        """Check one prompt and make it a request. Raises ValueError as `generate_async` does."""
        return self._maker.make(inputs, params)

    def submit(self, request: Request) -> None:
        """Queue a request; its listener hears of every token. Raises ValueError when it can never run."""
        assert self._loop is not None
        self._loop.submit(request)

    def abort(self, requests: Iterable[Request]) -> None:
        """Take requests out and free their blocks."""
        self._executor.abort(requests)

    @property
    def limits(self) -> dict[str, int]:
        """The engine's limits, as far as this LLM uses them."""
        executor = self._executor
        used = {"max_batch_size": executor.max_batch_size, "max_num_tokens": executor.max_num_tokens}
        return {**executor.engine.build_config, **used}

    def gauges(self) -> dict[str, int]:
        """Requests and KV-cache blocks at this moment."""
        return self._executor.gauges()

    def get_stats(self, timeout: float | None = 2) -> list[dict[str, Any]]:
        """Statistics of the iterations since the last call, oldest first; see `iteration_stats`.

        Args:
            timeout: seconds to wait for the first one while requests run; without requests nothing is waited for.
        """
        executor = self._executor
        end = time.monotonic() + (timeout or 0)
        while not (found := executor.stats.take()) and executor.busy and time.monotonic() < end:
            time.sleep(0.001)
        return found

    async def get_stats_async(self, timeout: float | None = 2) -> AsyncIterator[dict[str, Any]]:
        """The same, one by one as they come; ends when no iteration ended for `timeout` seconds."""
        last = time.monotonic()
        while time.monotonic() - last <= (timeout or 0):
            for entry in self._executor.stats.take():
                yield entry
                last = time.monotonic()
            await asyncio.sleep(0.002)

    def save(self, engine_dir: str) -> None:
        """Copy the engine to a folder, so that it need not be built again. The folder appears whole or not at all.

        Raises:
            FileExistsError: when the folder already holds something.
        """
        target = Path(engine_dir)
        if classify(target) not in ("missing", "empty"):
            raise FileExistsError(f"{engine_dir} is not empty; name a new folder")
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.saving-{os.getpid()}")
        try:
            shutil.copytree(self._engine_folder, temporary)
            os.replace(temporary, target)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def shutdown(self) -> None:
        """End what runs, free the engine, the KV cache and the temporary workspace. Safe to call twice."""
        if self._loop is not None:
            close_all(self._loop, self._executor)
            self._closing.detach()
        elif self._ranks is not None:
            self._ranks.close()
        self._loop = self._loaded = self._ranks = None
        if self._workspace is not None:
            self._workspace.cleanup()
            self._workspace = None
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()
