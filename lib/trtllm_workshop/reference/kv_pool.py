"""The memory of the KV cache: how many blocks it gets, by a rule that is printed, and the tensor that holds them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trtllm_workshop.reference.configs import KvCacheConfig
from trtllm_workshop.reference.engine import Engine
from trtllm_workshop.reference.parallel import Communicator

CPU_POOL_CAP = 1 << 30  # bytes; a laptop keeps the rest of its memory


def free_bytes(device: torch.device) -> int:
    """Memory that is free now on the device, in bytes; on a CPU, what this process may still use.

    In a container that is the smaller of what the system calls available and what is left under the memory limit.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    from trtllm_workshop.host import read_memory

    available = read_memory()[1]
    if available is None:  # a system without /proc
        import psutil

        available = psutil.virtual_memory().available
    return available


def pool_blocks(
    config: KvCacheConfig, block_bytes: int, per_block: int, most_tokens: int, device: torch.device, sharing: int = 1
) -> tuple[int, str]:
    """How many blocks the KV-cache pool gets, and the rule that decided, in words.

    With `max_tokens` exactly as many as hold them, as long as that stays within free_gpu_memory_fraction of the free memory.
    Without, the smallest of: that share (on a CPU capped at 1 GiB), and what the engine can ever use (max_batch_size x
    max_seq_len). `sharing` ranks take their pools from the same memory.

    Raises:
        ValueError: when not even one block fits.
    """
    share = int(free_bytes(device) * config.free_gpu_memory_fraction / sharing)
    shared = f", shared by {sharing} ranks" if sharing > 1 else ""
    rules = [(share // block_bytes, f"{config.free_gpu_memory_fraction:.0%} of the free memory{shared}")]
    if config.max_tokens is not None:
        rules.insert(0, (-(-config.max_tokens // per_block), f"KvCacheConfig(max_tokens={config.max_tokens})"))
    else:
        if device.type == "cpu":
            rules.append((CPU_POOL_CAP // sharing // block_bytes, f"the cap of 1 GiB on a CPU{shared}"))
        rules.append((-(-most_tokens // per_block), "max_batch_size x max_seq_len of the engine"))
    blocks, rule = min(rules, key=lambda r: r[0])
    if blocks < 1:
        raise ValueError(
            f"no room for a single KV-cache block of {block_bytes} bytes ({rule}); free memory or build a smaller engine"
        )
    return blocks, rule


@dataclass(frozen=True)
class KvPool:
    """The pool's tensor ([layers, blocks, tokens_per_block, 2, kv_heads, head_size]) and its size in words.

    Attributes:
        blocks: those that requests may own; `spare` more lie behind them.
    """

    tensor: torch.Tensor
    blocks: int
    tokens_per_block: int
    description: str

    @classmethod
    def allocate(
        cls, engine: Engine, config: KvCacheConfig, spare: int = 0, ranks: Communicator | None = None
    ) -> KvPool:
        """Reserve the memory by the rule of `pool_blocks`; with several ranks, as many blocks as the least of them has.

        Raises:
            ValueError: when not even one block fits.
        """
        model, build = engine.pretrained_config, engine.build_config
        per_block = build["plugin_config"]["tokens_per_block"]
        layers = engine.layers
        shape = (per_block, 2, engine.kv_heads, model["head_size"])
        block_bytes = layers * engine.kv_cache_dtype.itemsize * torch.Size(shape).numel()
        most = build["max_batch_size"] * build["max_seq_len"]
        sharing = 1 if ranks is None else ranks.sharing_device
        blocks, rule = pool_blocks(config, block_bytes, per_block, most, engine.device, sharing)
        each = ""
        if ranks is not None:
            least, each = ranks.least(blocks), " on this rank"
            if least < blocks:
                blocks, rule = least, "the rank with the least room"
        text = (
            f"KV cache: {blocks} blocks of {per_block} tokens = {blocks * per_block} tokens, "
            f"{blocks * block_bytes / 2**20:.1f} MiB{each} (decided by {rule})"
        )
        tensor = torch.zeros(layers, blocks + spare, *shape, dtype=engine.kv_cache_dtype, device=engine.device)
        return cls(tensor, blocks, per_block, text)
