"""The configuration classes of TensorRT-LLM's Python, in the subset that the reference implements.

Every field has its official name and default. A field that exists in TensorRT-LLM but not here is accepted at its
official default and refused by name otherwise; a made-up field is refused with the nearest real one.
"""

from __future__ import annotations

import difflib
from enum import Enum
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

# Above every context length; the rotary table of an engine has a row for each token of max_seq_len.
MOST_TOKENS = 2**24


def official_fields(api_name: str) -> dict[str, Any]:
    """Field name -> default of an official class or method, from the recorded facts."""
    from trtllm_workshop.commands import api

    signature = api(api_name)
    extra = dict.fromkeys(signature.extra_keywords)
    return extra | {name: parameter.default for name, parameter in signature.parameters.items()}


def refuse_unknown(
    owner: str, given: dict[str, Any], implemented: set[str], official: dict[str, Any]
) -> dict[str, Any]:
    """Drop official arguments that stand at their default, refuse every other argument that is not implemented.

    Returns:
        The arguments that are implemented.

    Raises:
        ValueError: naming the argument, and the nearest real one when it is made up.
    """
    kept = {}
    for name, value in given.items():
        if name in implemented:
            kept[name] = value
        elif name in official:
            if value != official[name]:
                raise ValueError(
                    f"{owner}: {name}={value!r} is an official argument that the reference toolchain does not implement; "
                    f"leave it at its default ({official[name]!r}) or run this on a GPU with TensorRT-LLM itself"
                )
        else:
            near = difflib.get_close_matches(name, list(official) or sorted(implemented), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"{owner} got invalid argument: {name}{hint}")
    return kept


def plain_text(problem: Any) -> str:
    """One of pydantic's errors as a sentence: our own text, or the field, its value and what is wrong with it."""
    if problem["type"] == "value_error":
        return str(problem["ctx"]["error"])
    return f"{'.'.join(map(str, problem['loc']))}={problem['input']!r}: {problem['msg']}"


class OfficialConfig(BaseModel):
    """Base of the configuration classes: keyword only, checked on assignment too.

    Raises:
        ValueError: in one plain line, for an unknown name or a value of the wrong type or range.
    """

    model_config = ConfigDict(extra="forbid", validate_assignment=True)
    api_name: ClassVar[str] = ""

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise ValueError("; ".join(map(plain_text, error.errors()))) from None

    @model_validator(mode="before")
    @classmethod
    def _known_fields_only(cls, data: Any) -> Any:
        unknown = isinstance(data, dict) and set(data) - set(cls.model_fields)
        if not unknown:
            return data
        return refuse_unknown(cls.__name__, data, set(cls.model_fields), official_fields(cls.api_name or cls.__name__))


class KvCacheConfig(OfficialConfig):
    """How much memory the KV cache may take.

    On a CPU the pool's size follows the rule that `executor.pool_blocks` prints; `max_tokens` limits it everywhere.
    """

    enable_block_reuse: bool = True
    max_tokens: int | None = None
    free_gpu_memory_fraction: float = 0.9
    tokens_per_block: int = 32

    @model_validator(mode="after")
    def _ranges(self) -> KvCacheConfig:
        if not 0.0 < self.free_gpu_memory_fraction <= 1.0:
            raise ValueError(
                f"free_gpu_memory_fraction={self.free_gpu_memory_fraction} must be above 0 and at most 1: it is a share of "
                "the memory that is free when the engine starts"
            )
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens={self.max_tokens} of KvCacheConfig must be at least 1")
        return self


class CapacitySchedulerPolicy(str, Enum):
    """Who gets KV-cache blocks when not everybody can have them; see `scheduler`."""

    MAX_UTILIZATION = "MAX_UTILIZATION"
    GUARANTEED_NO_EVICT = "GUARANTEED_NO_EVICT"
    STATIC_BATCH = "STATIC_BATCH"


class ContextChunkingPolicy(str, Enum):
    """How long prompts share the tokens of a step, with chunked context; see `context_chunking`."""

    FIRST_COME_FIRST_SERVED = "FIRST_COME_FIRST_SERVED"
    EQUAL_PROGRESS = "EQUAL_PROGRESS"


class SchedulerConfig(OfficialConfig):
    """How requests are admitted to the running batch."""

    capacity_scheduler_policy: CapacitySchedulerPolicy = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT
    context_chunking_policy: ContextChunkingPolicy | None = None


class PluginConfig(OfficialConfig):
    """The plugin switches of `trtllm-build` that have a meaning here."""

    gpt_attention_plugin: str | None = "auto"
    gemm_plugin: str | None = None
    nccl_plugin: str | None = "auto"
    context_fmha: bool = True
    remove_input_padding: bool = True
    tokens_per_block: int = 32
    use_paged_context_fmha: bool = True
    use_fused_mlp: bool = True
    multiple_profiles: bool = False

    @model_validator(mode="after")
    def _ranges(self) -> PluginConfig:
        if not 1 <= self.tokens_per_block <= MOST_TOKENS:
            raise ValueError(f"tokens_per_block={self.tokens_per_block} must be from 1 to {MOST_TOKENS}; 32 is usual")
        return self


class BuildConfig(OfficialConfig):
    """The limits an engine is built for, in tokens and requests."""

    max_input_len: int = 1024
    max_seq_len: int | None = None
    opt_batch_size: int = 8
    max_batch_size: int = 2048
    max_beam_width: int = 1
    max_num_tokens: int = 8192
    opt_num_tokens: int | None = None
    kv_cache_type: str | None = None
    gather_context_logits: bool = False
    gather_generation_logits: bool = False
    strongly_typed: bool = True
    profiling_verbosity: str = "layer_names_only"
    output_timing_cache: str | None = "model.cache"
    plugin_config: PluginConfig = PluginConfig()
    dry_run: bool = False
    visualize_network: str | None = None
    monitor_memory: bool = False

    @model_validator(mode="after")
    def _ranges(self) -> BuildConfig:
        for name in ("max_input_len", "max_seq_len", "max_batch_size", "max_num_tokens", "opt_num_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
            if value is not None and value > MOST_TOKENS:
                raise ValueError(f"{name}={value} is more than any engine holds; give at most {MOST_TOKENS}")
        if self.max_beam_width != 1:
            raise ValueError(
                f"max_beam_width={self.max_beam_width}: the reference toolchain has no beam search; leave it at 1"
            )
        kind = self.kv_cache_type
        if kind is not None and str(kind).lower() != "paged":
            raise ValueError(f"kv_cache_type={kind!r}: the reference engine's KV cache is always paged; leave it out")
        return self

    def saved(self) -> dict[str, Any]:
        """The `build_config` of an engine's config.json."""
        fields = self.model_dump(exclude={"dry_run", "visualize_network"})
        return {**fields, "kv_cache_type": "PAGED"}
