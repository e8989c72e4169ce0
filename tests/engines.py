"""Tiny engines for the tests, each made once per session, and Hugging Face's answers to compare with."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tiny_models import tiny_model
from trtllm_workshop.reference.build import build_engine
from trtllm_workshop.reference.configs import BuildConfig, KvCacheConfig, PluginConfig
from trtllm_workshop.reference.convert import convert_checkpoint
from trtllm_workshop.reference.llm import LLM
from trtllm_workshop.reference.request import Request
from trtllm_workshop.reference.sampling_params import SamplingParams, StopRules

TOKENS_PER_BLOCK = 8


def quiet(*_: object) -> None:
    """A log that keeps nothing."""


def prompt_of(length: int, seed: int = 0, vocabulary: int = 512) -> list[int]:
    """Random token ids without the three special ones."""
    generator = torch.Generator().manual_seed(1000 * length + seed)
    return torch.randint(3, vocabulary, (length,), generator=generator).tolist()


def free_running(tokens: int, **more: Any) -> SamplingParams:
    """Greedy, exactly this many tokens: random models meet their end token at any time."""
    return SamplingParams(max_tokens=tokens, ignore_eos=True, **more)


@dataclass
class Engines:
    """Folders and loaded objects by what they were made from; `root` is a folder of this session."""

    root: Path
    _made: dict[tuple, Any] = field(default_factory=dict)

    def _once(self, key: tuple, make: Any) -> Any:
        key = tuple(map(repr, key))
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def _place(self, kind: str) -> Path:
        return self.root / f"{kind}{len(self._made)}"

    def hf(self, family: str = "llama-gqa", dtype: str = "float32") -> Path:
        """A Hugging Face folder; do not change it."""
        return self._once(("hf", family, dtype), lambda: tiny_model(self._place("hf"), family, dtype=dtype))

    def checkpoint(self, family: str = "llama-gqa", dtype: str = "float32") -> Path:
        """The folder converted to a checkpoint of the same type."""

        def make() -> Path:
            source = self.hf(family, dtype)
            return convert_checkpoint(source, self._place("checkpoint"), dtype=dtype, say=quiet).folder

        return self._once(("checkpoint", family, dtype), make)

    def engine(self, family: str = "llama-gqa", dtype: str = "float32", **build: Any) -> Path:
        """The checkpoint built with small blocks, so that a short prompt already needs several."""
        build = {"max_batch_size": 8, "max_seq_len": 160, "gather_context_logits": True, **build}
        plugins = {"tokens_per_block": TOKENS_PER_BLOCK, **build.pop("plugin_config", {})}

        def make() -> Path:
            config = BuildConfig(**build, plugin_config=PluginConfig(**plugins))
            return build_engine(self.checkpoint(family, dtype), config, self._place("engine"), log=quiet)

        return self._once(("engine", family, dtype, *sorted(build.items()), *sorted(plugins.items())), make)

    def llm(
        self,
        family: str = "llama-gqa",
        dtype: str = "float32",
        pool: int | None = None,
        batch: int | None = None,
        **build: Any,
    ) -> LLM:
        """A loaded LLM with a KV pool of `pool` tokens and at most `batch` requests a step."""

        def make() -> LLM:
            engine, options = self.engine(family, dtype, **build), {} if batch is None else {"max_batch_size": batch}
            return LLM(
                engine,
                tokenizer=str(self.hf(family, dtype)),
                gather_generation_logits=True,
                kv_cache_config=KvCacheConfig(max_tokens=pool),
                **options,
            )

        return self._once(("llm", family, dtype, pool, batch, *sorted(build.items())), make)

    def hf_model(self, family: str = "llama-gqa", dtype: str = "float32", compute: str = "") -> Any:
        """Hugging Face's model of the folder, its weights widened or not to `compute`."""
        return self._once(
            ("model", family, dtype, compute or dtype), lambda: load_hf(self.hf(family, dtype), compute or dtype)
        )

    def hf_logits(self, ids: list[int], family: str = "llama-gqa", dtype: str = "float32", compute: str = "") -> Any:
        """[tokens, vocabulary] float32: Hugging Face's logits after each token."""
        return logits_of(self.hf_model(family, dtype, compute), ids)


def load_hf(folder: Path, dtype: str) -> Any:
    """Hugging Face's model with its plain attention: an implementation that shares nothing with the engine's."""
    from transformers import AutoModelForCausalLM

    kind = getattr(torch, dtype)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=kind, attn_implementation="eager").eval()


@torch.inference_mode()
def logits_of(model: Any, ids: list[int]) -> torch.Tensor:
    return model(torch.tensor([ids]), use_cache=False).logits[0].float()


def divergence(reference: torch.Tensor, candidate: torch.Tensor) -> float:
    """Mean KL(reference || candidate) in nats, in float64."""
    p, q = (torch.log_softmax(logits.double(), -1) for logits in (reference, candidate))
    return float((p.exp() * (p - q)).sum(-1).mean())


class Forced(Request):
    """A request that takes given tokens instead of the chosen ones (teacher forcing), through the real step loop."""

    forced: list[int]

    def accept(self, token: int) -> None:
        super().accept(self.forced[len(self.token_ids)])


def forced_logits(llm: LLM, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """[prompt + answer - 1, vocabulary]: context logits of the prompt, then one step for each token of the answer."""
    executor = llm._executor
    params = free_running(len(answer), return_context_logits=True, return_generation_logits=True, detokenize=False)
    request = Forced(10**6, prompt, params, StopRules())
    request.forced = answer
    executor.submit(request)
    while executor.busy:
        executor.step()
    assert request.token_ids == answer
    return torch.cat((request.context_logits, torch.stack(request.generation_logits[1:])))
