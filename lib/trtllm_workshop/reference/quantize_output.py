"""What happens to ModelOpt's export: config.json is completed, and scales are checked, before anybody sees the folder."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trtllm_workshop.checkpoint import read_config, read_tensor, tensor_index, verify_checkpoint
from trtllm_workshop.model_spec import ModelSpec
from trtllm_workshop.quant_mode import E4M3_MAX
from trtllm_workshop.reference.quantize_formats import Format

INT8_MAX = 127.0


def mend_config(folder: Path, spec: ModelSpec, form: Format) -> dict[str, Any]:
    """Completes config.json as TensorRT-LLM's quantize_by_modelopt.py does, and returns it.

    Weight-only formats get their quant_algo (the tensors stay 16-bit until the build), rotary settings and head size come
    from the model, and Qwen2 gets the keys of its own family.
    """
    config = read_config(folder)
    quantization = dict(config.get("quantization") or {})
    if not form.calibrates:
        quantization["quant_algo"] = form.quant_algo
    quantization.setdefault("kv_cache_quant_algo", None)
    config["quantization"] = quantization
    config["rotary_base"], config["rotary_scaling"] = spec.rotary_base, spec.rotary_scaling
    config["norm_epsilon"], config["head_size"] = spec.norm_epsilon, spec.head_size
    config["intermediate_size"], config["vocab_size"] = spec.intermediate_size, spec.vocab_size
    if spec.architecture == "Qwen2ForCausalLM":
        config |= {"qwen_type": "qwen2", "attn_bias": spec.attn_bias, "seq_length": 8192}
    config["architecture"] = spec.architecture
    (folder / "quant_cfg.json").unlink(missing_ok=True)  # per-layer formats, of which there are none here
    (folder / "config.json").write_text(json.dumps(config, indent=4), encoding="utf-8")
    return config


def verify_quantized(folder: Path, spec: ModelSpec) -> list[str]:
    """Everything wrong with the folder, as sentences: names, shapes, types, the model's sizes, and every scale."""
    problems = verify_checkpoint(folder)
    if problems:
        return problems
    written = ModelSpec.from_checkpoint_config(read_config(folder))
    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_size"):
        if getattr(written, name) != getattr(spec, name):
            problems.append(f"config.json has {name} {getattr(written, name)}, the model has {getattr(spec, name)}")
    for file in sorted(folder.glob("rank*.safetensors")):
        for name in tensor_index(file):
            if name.endswith("scaling_factor"):
                scale = read_tensor(file, name).float()
                if not bool(scale.isfinite().all()) or not bool((scale > 0).all()):
                    problems.append(
                        f"{file.name}: {name} has a value that is zero, negative or not finite (smallest "
                        f"{float(scale.min())}, largest {float(scale.max())}): the calibration did not reach it"
                    )
    return problems


def kv_report(model: Any, kv_cache_dtype: str) -> Iterator[str]:
    """Lines about the measured KV scales (largest |key| or |value| of a layer / 448 or 127), and what is written of them."""
    limit = E4M3_MAX if kv_cache_dtype == "fp8" else INT8_MAX
    measured = []
    for layer in model.model.layers:
        peaks = [getattr(layer.self_attn, f"{letter}_bmm_quantizer").amax for letter in "kv"]
        measured.append(max((float(peak.max()) for peak in peaks if peak is not None), default=math.nan) / limit)
    yield (
        f"KV cache ({kv_cache_dtype.upper()}): measured scales of {len(measured)} layers from {min(measured):.4g} to "
        f"{max(measured):.4g} (largest value of the layer / {limit:.0f})"
    )
    low = sum(scale < 1.0 for scale in measured)
    if kv_cache_dtype == "fp8" and low:
        yield (
            f"KV cache (FP8): {low} of {len(measured)} layers below 1.0, written as 1.0: ModelOpt's export never writes "
            "less. A float format needs no scale for small values: e4m3 keeps its relative precision down to 0.016"
        )
