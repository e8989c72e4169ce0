"""What an engine's config.json says about how it can be served, and the values for Triton that follow from it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtllm_workshop.checkpoint import RankMapping, config_section, read_config, require_kind
from trtllm_workshop.deploy.model_files import RepositoryProblem

WAITING_PER_SLOT = 8  # requests that may wait for each one that runs, before Triton refuses more


@dataclass(frozen=True)
class EngineLimits:
    """An engine's limits: requests a step, tokens a prompt, tokens a request (prompt and answer), tokens a step, tokens a
    KV-cache block, ranks; whether it can reuse blocks and cut long prompts (paged context attention)."""

    folder: Path
    max_batch_size: int
    max_input_len: int
    max_seq_len: int
    max_num_tokens: int
    max_beam_width: int
    tokens_per_block: int
    world_size: int
    paged_context: bool

    @classmethod
    def of(cls, engine: str | Path) -> EngineLimits:
        """Read them. Raises WrongFolderKind for another folder, RepositoryProblem for a config.json without a limit."""
        folder = require_kind(engine, "engine").resolve()
        config = read_config(folder)
        build, model = config_section(config, "build_config"), config_section(config, "pretrained_config")
        plugins, mapping = config_section(build, "plugin_config"), RankMapping.from_config(model)

        def number(name: str) -> int:
            value = build.get(name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise RepositoryProblem(
                    f"{folder / 'config.json'}: build_config.{name} is {value!r}, expected a whole number from 1 on; "
                    "build the engine again with trtllm-build"
                )
            return value

        return cls(
            folder=folder,
            max_batch_size=number("max_batch_size"),
            max_input_len=number("max_input_len"),
            max_seq_len=number("max_seq_len"),
            max_num_tokens=number("max_num_tokens"),
            max_beam_width=number("max_beam_width"),
            tokens_per_block=int(plugins.get("tokens_per_block") or 32),
            world_size=mapping.tp_size * mapping.pp_size,
            paged_context=bool(plugins.get("use_paged_context_fmha")),
        )

    @property
    def most_cache_tokens(self) -> int:
        """Tokens of KV cache that the engine can use at once: every slot full to max_seq_len, in whole blocks."""
        blocks = -(-self.max_seq_len // self.tokens_per_block)
        return self.max_batch_size * blocks * self.tokens_per_block


def planned_cache_tokens(limits: EngineLimits, gpu: Any, fraction: float) -> int:
    """Tokens that the KV cache of one rank holds on `gpu` (a planner `Gpu`), as the planner predicts it.

    Raises:
        RepositoryProblem: when not one request of max_seq_len fits.
    """
    from trtllm_workshop.planner_cli import read_model
    from trtllm_workshop.planner_memory import Split
    from trtllm_workshop.planner_throughput import Limits, pool_tokens
    from trtllm_workshop.planner_work import Engine

    spec, found = read_model(limits.folder)
    planned = Engine(spec, gpu, found["dtype"], found["kv_dtype"] or "float16", Split(found["tp"], found["pp"]))
    tokens = pool_tokens(planned, Limits(limits.max_batch_size, limits.max_num_tokens, fraction))
    if tokens < limits.max_seq_len:
        raise RepositoryProblem(
            f"the planner leaves {tokens} tokens of KV cache on {gpu.name}, less than one request of max_seq_len "
            f"({limits.max_seq_len}) needs; build with a smaller --max_seq_len or --max_batch_size, quantize, or use more ranks"
        )
    return tokens // limits.tokens_per_block * limits.tokens_per_block
