"""What a quantized checkpoint should compute, by fake quantization of the Hugging Face model in plain torch.

Independent of the reference engine: weights are what the checkpoint's bytes stand for, inputs of FP8 layers are rounded to
e4m3 with the exported scale, and keys and values are rounded on their way into the cache. Arithmetic is float32.
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from quantized_checkpoints import round_rows
from safetensors.torch import load_file

E4M3_MAX = 448.0
_COLUMN = {"attention.qkv", "mlp.fc", "mlp.gate", "lm_head"}
Tensors = dict[str, torch.Tensor]


def fake_e4m3(values: torch.Tensor, scale: torch.Tensor | float) -> torch.Tensor:
    """Values [...] as FP8 with this scale gives them back: divided, clamped to 448, rounded to e4m3, multiplied."""
    return (values / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float() * scale


def fake_int8(values: torch.Tensor, scale: torch.Tensor | float) -> torch.Tensor:
    """Values [...] as INT8 with this scale gives them back."""
    return (values / scale).round().clamp(-128, 127) * scale


class _Layer:
    """One linear layer: the weight [out, in] that its bytes stand for, its input's change, and its bias."""

    def __init__(self, tensors: Tensors, module: str, algorithm: str | None, group: int) -> None:
        stored = tensors[f"{module}.weight"]
        self.activation = tensors.get(f"{module}.activation_scaling_factor")
        self.prequant = tensors.get(f"{module}.prequant_scaling_factor")
        self.bias = tensors.get(f"{module}.bias")
        if algorithm == "FP8":
            self.weight = stored.float() * tensors[f"{module}.weights_scaling_factor"]
        elif algorithm == "W4A16_AWQ":
            bits = stored.view(torch.uint8).int()
            nibbles = torch.stack([bits & 15, bits >> 4], 1).flatten(0, 1)
            values = (nibbles - 16 * (nibbles > 7)).float()
            self.weight = values * tensors[f"{module}.weights_scaling_factor"].float().repeat_interleave(group, 1)
        elif algorithm in ("W8A16", "W4A16"):
            self.weight = round_rows(stored.float(), 8 if algorithm == "W8A16" else 4)
        else:
            self.weight = stored.float()


def _algorithm(config: dict[str, Any], module: str) -> str | None:
    section = config["quantization"]
    excluded = section.get("exclude_modules")
    patterns = ["*lm_head"] if excluded is None else excluded
    return None if any(fnmatch.fnmatchcase(module, pattern) for pattern in patterns) else section["quant_algo"]


def _qkv_parts(weight: torch.Tensor, config: dict[str, Any], tp: int) -> tuple[torch.Tensor, ...]:
    size = config["head_size"]
    heads, kv = config["num_attention_heads"] // tp, max(1, config["num_key_value_heads"] // tp)
    return torch.split(weight, [heads * size, kv * size, kv * size])


def _joined(layers: Sequence[_Layer], name: str, config: dict[str, Any]) -> _Layer:
    """The layer of all ranks together; copies of a KV head on neighbouring ranks are taken once."""
    first, tp = layers[0], len(layers)
    if tp == 1:
        return first
    if name == "attention.qkv":
        copies = max(1, tp // config["num_key_value_heads"])
        for kind in ("weight", "bias"):
            parts = [
                _qkv_parts(getattr(layer, kind), config, tp) for layer in layers if getattr(layer, kind) is not None
            ]
            if parts:
                chosen = ([p[0] for p in parts], [p[1] for p in parts][::copies], [p[2] for p in parts][::copies])
                setattr(first, kind, torch.cat([torch.cat(section) for section in chosen]))
    elif name in _COLUMN:
        first.weight = torch.cat([layer.weight for layer in layers])
    else:
        first.weight = torch.cat([layer.weight for layer in layers], 1)
        if first.prequant is not None:
            first.prequant = torch.cat([layer.prequant for layer in layers if layer.prequant is not None])
    return first


def _hook(layer: _Layer) -> Callable[..., Any]:
    def before(_: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        values = inputs[0]
        if layer.prequant is not None:
            values = values * layer.prequant.float()
        if layer.activation is not None:
            values = fake_e4m3(values, layer.activation)
        return (values, *inputs[1:])

    return before


def simulated_model(model_dir: Path, checkpoint_dir: Path) -> tuple[Any, list[torch.Tensor | None], str | None]:
    """(Hugging Face model with fake quantization in its linear layers, KV scale per layer, the KV cache's format).

    The norms, the embedding and everything else come from the checkpoint as well. One pipeline stage, any tp_size.
    """
    from transformers import AutoModelForCausalLM

    config = json.loads((checkpoint_dir / "config.json").read_text())
    if config["mapping"]["pp_size"] != 1:
        raise ValueError("only one pipeline stage is simulated")
    tp, group = config["mapping"]["tp_size"], config["quantization"].get("group_size") or 128
    ranks = [load_file(checkpoint_dir / f"rank{rank}.safetensors") for rank in range(tp)]
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    body = model.model
    vocabulary = config["vocab_size"]
    embedding = ranks[0]["transformer.vocab_embedding.weight"]
    if embedding.shape[0] < vocabulary:
        embedding = torch.cat([rank["transformer.vocab_embedding.weight"] for rank in ranks])[:vocabulary]
    model.lm_head.weight = torch.nn.Parameter(
        model.lm_head.weight.detach().clone()
    )  # a tied head is a matrix of its own
    scales: list[torch.Tensor | None] = []
    with torch.no_grad():
        body.embed_tokens.weight.copy_(embedding)
        body.norm.weight.copy_(ranks[0]["transformer.ln_f.weight"])
        _install(model.lm_head, ranks, "lm_head", config, group)
        for number, block in enumerate(body.layers):
            prefix = f"transformer.layers.{number}."
            block.input_layernorm.weight.copy_(ranks[0][prefix + "input_layernorm.weight"])
            block.post_attention_layernorm.weight.copy_(ranks[0][prefix + "post_layernorm.weight"])
            qkv = _joined(_ranks(ranks, prefix + "attention.qkv", config, group), "attention.qkv", config)
            weights = _qkv_parts(qkv.weight, config, 1)
            biases = (None,) * 3 if qkv.bias is None else _qkv_parts(qkv.bias, config, 1)
            targets = (block.self_attn.q_proj, block.self_attn.k_proj, block.self_attn.v_proj)
            for target, weight, bias in zip(targets, weights, biases, strict=True):
                target.weight.copy_(weight)
                if bias is not None:
                    target.bias.copy_(bias)
                target.register_forward_pre_hook(_hook(qkv))
            for target, name in (
                (block.self_attn.o_proj, "attention.dense"),
                (block.mlp.gate_proj, "mlp.fc"),
                (block.mlp.up_proj, "mlp.gate"),
                (block.mlp.down_proj, "mlp.proj"),
            ):
                _install(target, ranks, name, config, group, prefix)
            scales.append(ranks[0].get(prefix + "attention.kv_cache_scaling_factor"))
    return model, scales, config["quantization"]["kv_cache_quant_algo"]


def _ranks(ranks: Sequence[Tensors], module: str, config: dict[str, Any], group: int) -> list[_Layer]:
    return [_Layer(tensors, module, _algorithm(config, module), group) for tensors in ranks]


def _install(
    target: Any, ranks: Sequence[Tensors], name: str, config: dict[str, Any], group: int, prefix: str = ""
) -> None:
    layer = _joined(_ranks(ranks, prefix + name, config, group), name, config)
    target.weight.copy_(layer.weight[: target.weight.shape[0]])  # rows beyond the vocabulary are padding
    target.register_forward_pre_hook(_hook(layer))


def _cache(scales: list[torch.Tensor | None], kind: str | None) -> Any:
    """A cache that hands back what it stores, so that attention sees rounded keys and values in the context too."""
    from transformers import DynamicCache

    fake = {"FP8": fake_e4m3, "INT8": fake_int8}

    class Rounding(DynamicCache):
        def update(self, key_states: Any, value_states: Any, layer_idx: int, cache_kwargs: Any = None) -> Any:
            scale = scales[layer_idx]
            if kind is not None and scale is not None:
                key_states, value_states = fake[kind](key_states, scale), fake[kind](value_states, scale)
            return super().update(key_states, value_states, layer_idx, cache_kwargs)

    return Rounding()


def simulated_logits(model_dir: Path | str, checkpoint_dir: Path | str, token_ids: Sequence[int]) -> torch.Tensor:
    """Logits [tokens, vocabulary], float32, of the quantized checkpoint for one text, with the exported scales.

    Keys and values are rounded in the context phase, as with paged context attention.
    """
    model, scales, kind = simulated_model(Path(model_dir), Path(checkpoint_dir))
    with torch.inference_mode():
        ids = torch.tensor([list(token_ids)])
        return model(ids, past_key_values=_cache(scales, kind), use_cache=True).logits[0].float()
