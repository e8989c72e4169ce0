"""The engine LLM: `tensorrt_llm._tensorrt_engine.LLM` in the subset that the reference implements."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from trtllm_workshop.checkpoint import classify
from trtllm_workshop.reference.build import build_engine
from trtllm_workshop.reference.configs import BuildConfig, KvCacheConfig, official_fields, refuse_unknown
from trtllm_workshop.reference.engine import load_engine
from trtllm_workshop.reference.executor import Executor
from trtllm_workshop.reference.outputs import RequestOutput
from trtllm_workshop.reference.request import Request
from trtllm_workshop.reference.sampling_params import SamplingParams, check_bad_words, stop_rules

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
}


def read_generation_config(folder: Path | None) -> dict[str, Any] | None:
    """generation_config.json of a model folder, or None: many models have none, and that is no error.

    Raises ValueError for a file that cannot be read.
    """
    path = folder / "generation_config.json" if folder else None
    if path is None or not path.is_file():
        return None
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not readable JSON ({error}): download the model again") from error
    ends = config.get("eos_token_id") if isinstance(config, dict) else config
    whole = [isinstance(end, int) and not isinstance(end, bool) for end in (ends if isinstance(ends, list) else [ends])]
    if not isinstance(config, dict) or not (ends is None or all(whole)):
        raise ValueError(f"{path}: eos_token_id is {ends!r:.60}, expected a token id or a list of them")
    return config


def load_tokenizer(
    source: Any, trust_remote_code: bool = False, mode: str = "auto", revision: str | None = None
) -> tuple[Any, Path | None]:
    """A tokenizer from a folder, a name or an object, and the folder it lies in.

    Raises:
        FileNotFoundError: when a folder has no tokenizer files, or a name is neither a folder nor on the hub.
        ValueError: for damaged files, and for a tokenizer that needs code from its folder.
    """
    if source is None or not isinstance(source, str | Path):
        return source, None
    from transformers import AutoTokenizer

    folder = Path(source)
    if folder.is_dir() and not any(
        (folder / f).is_file() for f in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
    ):
        raise FileNotFoundError(
            f"{folder} has no tokenizer files; pass the Hugging Face model folder as tokenizer (engine and checkpoint folders "
            "do not carry a tokenizer)"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(source), trust_remote_code=trust_remote_code, use_fast=mode != "slow", revision=revision or "main"
        )
    except Exception as error:  # damaged files fail in many ways, none of which names the file
        reason = (str(error).splitlines() or [""])[0]
        if folder.is_dir():
            if "trust_remote_code" in str(error):
                raise
            raise ValueError(
                f"the tokenizer in {folder} cannot be read ({type(error).__name__}: {reason}); download the model again"
            ) from error
        raise FileNotFoundError(
            f"tokenizer {str(source)!r} is no folder here and could not be had from the hub either "
            f"({reason}); pass the Hugging Face model folder as tokenizer"
        ) from error
    return tokenizer, folder if folder.is_dir() else None


class LLM:
    """Generates text with a TensorRT engine.

    Args:
        model: an engine folder, a TensorRT-LLM checkpoint folder, or a Hugging Face folder (the last two are converted and
            built inside `__init__`, in a temporary folder).
        tokenizer: Hugging Face folder or tokenizer object; by default the model folder, when it is a Hugging Face one.
        skip_tokenizer_init: no tokenizer; prompts must be token ids then.
        dtype: precision of the engine when one is built here; `auto` follows the model.
        kwargs: `build_config`, `kv_cache_config`, `gather_generation_logits`, `max_batch_size`, `max_num_tokens`,
            `max_seq_len`, `max_input_len`.

    Raises:
        ValueError: for an argument that is unknown or not implemented.
        EngineError, WrongFolderKind: for an engine that cannot be loaded here.
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
        if tensor_parallel_size != 1 or args.get("pipeline_parallel_size", 1) != 1:
            raise ValueError(
                f"tensor_parallel_size={tensor_parallel_size}, pipeline_parallel_size={args.get('pipeline_parallel_size', 1)}: "
                "the reference toolchain runs engines of one rank; leave both at 1"
            )
        self._workspace: tempfile.TemporaryDirectory | None = None
        self._loaded: Executor | None = None
        folder = Path(model)
        kind = classify(folder)
        for name, kind_of in (("build_config", BuildConfig), ("kv_cache_config", KvCacheConfig)):
            if isinstance(args.get(name), dict):
                args[name] = kind_of(**args[name])
            elif not isinstance(args.get(name), kind_of | None):
                raise ValueError(f"{name} is {args[name]!r:.60}, expected {kind_of.__name__}(…)")
        for name in ("max_batch_size", "max_num_tokens", "max_seq_len", "max_input_len"):
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
        self._generation_config = read_generation_config(tokenizer_folder)
        try:
            engine_folder = folder if kind == "engine" else self._build(folder, kind, dtype, build)
            self._loaded = Executor(load_engine(engine_folder), args.get("kv_cache_config"), args.get("max_batch_size"))
        except BaseException:
            self.shutdown()
            raise
        self._engine_folder = engine_folder
        limits = self._executor.engine.build_config
        for name in ("max_seq_len", "max_input_len", "max_num_tokens"):
            wanted = args.get(name)
            if wanted is not None and wanted != limits[name]:
                print(f"[TRT-LLM] [W] {name}={wanted} is replaced by the engine's own {limits[name]}")
        print(f"[TRT-LLM] [I] {self._executor.pool_description}")
        self._ids = itertools.count(1)  # threads may ask at the same time

    def _build(self, folder: Path, kind: str, dtype: str, build: BuildConfig | None) -> Path:
        """Convert if needed and build in a temporary workspace; returns the engine folder."""
        from trtllm_workshop.reference.convert import convert_checkpoint as convert

        self._workspace = tempfile.TemporaryDirectory(prefix="tllm-workspace-")
        checkpoint = folder
        if kind != "checkpoint":
            checkpoint = Path(self._workspace.name) / "checkpoint"
            convert(folder, checkpoint, dtype=dtype)
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
        requests = [self._request(p, s) for p, s in zip(prompts, params, strict=True)]
        try:
            for request in requests:
                self._executor.submit(request)
            while self._executor.busy:
                self._executor.step()
        except BaseException:
            self._executor.abort(requests)
            raise
        outputs = [
            RequestOutput.of(r, p.get("prompt") if isinstance(p, dict) else p if isinstance(p, str) else None)
            for r, p in zip(requests, prompts, strict=True)
        ]
        return outputs[0] if single else outputs

    def _request(self, prompt: Any, params: SamplingParams) -> Request:
        """Check one prompt against the engine's limits and make it a request."""
        ids = self._token_ids(prompt, params)
        build = self._executor.engine.build_config
        longest, total = build["max_input_len"], build["max_seq_len"]
        if not ids:
            raise ValueError("the prompt is empty (no token ids); give at least one token")
        vocabulary = self._executor.engine.pretrained_config["vocab_size"]
        if min(ids) < 0 or max(ids) >= vocabulary:
            raise ValueError(
                f"token id {min(ids) if min(ids) < 0 else max(ids)} is outside the vocabulary of {vocabulary} tokens"
            )
        if len(ids) > longest:
            raise ValueError(
                f"Prompt length ({len(ids)}) exceeds maximum input length ({longest}) of the engine; shorten the prompt, set "
                "SamplingParams(truncate_prompt_tokens=…), or build with larger --max_seq_len and --max_num_tokens"
            )
        if len(ids) + params.max_tokens > total:
            raise ValueError(
                f"The sum of prompt length ({len(ids)}) and max_tokens ({params.max_tokens}) exceeds max_seq_len ({total}) of "
                f"the engine; ask for at most {total - len(ids)} tokens or build with a larger --max_seq_len"
            )
        gathers = self.args.get("gather_generation_logits") or build["gather_generation_logits"]
        if params.logprobs is not None and not gathers:
            raise ValueError("SamplingParams(logprobs=…) needs LLM(…, gather_generation_logits=True)")
        if params.return_generation_logits and not gathers:
            raise ValueError(
                "SamplingParams(return_generation_logits=True) needs LLM(…, gather_generation_logits=True)"
            )
        if (params.prompt_logprobs is not None or params.return_context_logits) and not build["gather_context_logits"]:
            raise ValueError(
                "prompt_logprobs and return_context_logits need an engine built with --gather_context_logits"
            )
        if self.tokenizer is None and (params.stop or params.bad):
            raise ValueError("stop and bad words need a tokenizer; pass LLM(…, tokenizer=HF_FOLDER) or use *_token_ids")
        if self.tokenizer is None and params.end_id is None:
            params = params.model_copy(update={"end_id": -1})
        rules = stop_rules(params, self.tokenizer, self._generation_config)
        check_bad_words(rules, vocabulary)
        return Request(next(self._ids), ids, params, rules, self.tokenizer)

    def _token_ids(self, prompt: Any, params: SamplingParams) -> list[int]:
        if isinstance(prompt, dict):
            if unknown := sorted(set(prompt) - {"prompt", "prompt_token_ids"}):
                raise ValueError(
                    f"a prompt dictionary has 'prompt' or 'prompt_token_ids'; {', '.join(map(repr, unknown))} is not "
                    "implemented by the reference toolchain"
                )
            prompt = prompt.get("prompt_token_ids", prompt.get("prompt"))
        if isinstance(prompt, str):
            if not prompt:
                raise ValueError("the prompt is an empty text; give at least one character")
            if self.tokenizer is None:
                raise ValueError("a text prompt needs a tokenizer; pass LLM(…, tokenizer=HF_FOLDER), or give token ids")
            if any("\ud800" <= character <= "\udfff" for character in prompt):
                raise ValueError(f"the prompt {prompt!r:.60} has half a surrogate pair, which is no text; remove it")
            prompt = self.tokenizer.encode(prompt, add_special_tokens=params.add_special_tokens)
        if not isinstance(prompt, list | tuple) or not all(
            isinstance(t, int) and not isinstance(t, bool) for t in prompt
        ):
            raise ValueError(f"a prompt must be text or a list of token ids (whole numbers), not {prompt!r:.60}")
        ids = list(prompt)
        return ids[-params.truncate_prompt_tokens :] if params.truncate_prompt_tokens else ids

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
        """Free the engine, the KV cache and the temporary workspace. Safe to call twice."""
        self._loaded = None
        if self._workspace is not None:
            self._workspace.cleanup()
            self._workspace = None
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()
