"""How a TensorRT-LLM checkpoint is quantized, and which tensors that makes of a linear layer. No torch here.

Read from tensorrt_llm/models/modeling_utils.py (QuantConfig, its wildcards) and tensorrt_llm/quantization/mode.py, and
from the exporter of nvidia-modelopt 0.37 (modelopt/torch/export), which TensorRT-LLM 1.2.1 pins.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trtllm_workshop.safetensors_file import BrokenWeights

QUANT_ALGOS = ("FP8", "W8A16", "W4A16", "W4A16_AWQ")
KV_CACHE_QUANT_ALGOS = ("FP8", "INT8")
E4M3_MAX = 448.0  # the largest e4m3 number; an FP8 scale is the largest magnitude / 448
# What stays in the model's own type when the checkpoint names no exceptions.
DEFAULT_EXCLUDED = ("*lm_head", "*vocab_embedding")


class UnsupportedQuantization(ValueError):
    """A quantization that the course does not read; the message names it and lists those it does."""


@dataclass(frozen=True)
class TensorLayout:
    """A tensor of a checkpoint: its shape on one rank and its type, by torch's name."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class QuantMode:
    """The `quantization` section of a checkpoint's config.json.

    Attributes:
        quant_algo: one of QUANT_ALGOS, or None for weights in the model's own type.
        kv_cache_quant_algo: one of KV_CACHE_QUANT_ALGOS, or None for a cache in the model's own type.
        group_size: input channels that share one scale (W4A16_AWQ only).
        exclude_modules: wildcards of the modules that are not quantized.
    """

    quant_algo: str | None = None
    kv_cache_quant_algo: str | None = None
    group_size: int = 128
    exclude_modules: tuple[str, ...] = DEFAULT_EXCLUDED

    @classmethod
    def from_config(cls, pretrained_config: Mapping[str, Any]) -> QuantMode:
        """From a checkpoint's config.json.

        Raises:
            UnsupportedQuantization: for an algorithm that is not one of the lists above.
            BrokenWeights: for a section that is no object or holds values of another kind.
        """
        section = pretrained_config.get("quantization") or {}
        if not isinstance(section, Mapping):
            raise BrokenWeights(f"quantization of config.json is {section!r:.60}, expected an object: make it again")
        algorithm = _named(section, "quant_algo", QUANT_ALGOS)
        cache = _named(section, "kv_cache_quant_algo", KV_CACHE_QUANT_ALGOS)
        group = section.get("group_size") or 128
        if isinstance(group, bool) or not isinstance(group, int) or group < 1:
            raise BrokenWeights(f"quantization of config.json: group_size is {group!r}, expected a number such as 128")
        excluded = section.get("exclude_modules")
        if excluded is None:
            return cls(algorithm, cache, group)
        if not isinstance(excluded, list) or not all(isinstance(name, str) for name in excluded):
            raise BrokenWeights(
                f"quantization of config.json: exclude_modules is {excluded!r:.80}, expected a list of names"
            )
        return cls(algorithm, cache, group, (*excluded, "*vocab_embedding"))

    @property
    def name(self) -> str:
        """What an engine's fingerprint and messages call it: `FP8`, `FP8+FP8-KV`, `16-bit`…; empty for none."""
        parts = [self.quant_algo, self.kv_cache_quant_algo and f"{self.kv_cache_quant_algo}-KV"]
        return "+".join(part for part in parts if part)

    @property
    def joins_fc_and_gate(self) -> bool:
        """Whether mlp.fc and mlp.gate can be one matrix product: AWQ gives each its own factors for the input."""
        return self.quant_algo != "W4A16_AWQ"

    def algorithm_of(self, module: str) -> str | None:
        """The algorithm of one linear module, such as `transformer.layers.0.attention.qkv`; None when it is excluded."""
        if any(fnmatch.fnmatchcase(module, pattern) for pattern in self.exclude_modules):
            return None
        return self.quant_algo

    def linear_tensors(self, module: str, outputs: int, inputs: int, dtype: str) -> dict[str, TensorLayout]:
        """The tensors of a linear layer [outputs, inputs] in a checkpoint, the bias apart: {name: layout}.

        W8A16 and W4A16 checkpoints hold 16-bit matrices: trtllm-build quantizes them.

        Raises:
            BrokenWeights: when the group size or the packing of two values a byte does not divide the shape.
        """
        algorithm, weight = self.algorithm_of(module), f"{module}.weight"
        if algorithm == "FP8":
            return {
                weight: TensorLayout((outputs, inputs), "float8_e4m3fn"),
                f"{module}.weights_scaling_factor": TensorLayout((1,), "float32"),
                f"{module}.activation_scaling_factor": TensorLayout((1,), "float32"),
            }
        if algorithm == "W4A16_AWQ":
            if inputs % self.group_size or outputs % 2:
                raise BrokenWeights(
                    f"{module} is [{outputs}, {inputs}], which groups of {self.group_size} input channels and pairs of "
                    "output channels do not divide: quantize again with another --awq_block_size"
                )
            return {
                weight: TensorLayout((outputs // 2, inputs), "int8"),
                f"{module}.weights_scaling_factor": TensorLayout((outputs, inputs // self.group_size), "float32"),
                f"{module}.prequant_scaling_factor": TensorLayout((inputs,), dtype),
            }
        return {weight: TensorLayout((outputs, inputs), dtype)}


def _named(section: Mapping[str, Any], key: str, known: tuple[str, ...]) -> str | None:
    value = section.get(key)
    if value is None or value in known:
        return value
    raise UnsupportedQuantization(
        f"{key} {value!r} of config.json is not supported here; the reference toolchain runs {', '.join(known)}, or none"
    )
