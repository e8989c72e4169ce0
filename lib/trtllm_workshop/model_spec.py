"""One model description, from a Hugging Face config.json or a TensorRT-LLM checkpoint config, and its sizes.

Field names are those of the TensorRT-LLM checkpoint config. Nothing heavy is imported: notebooks read a spec in
milliseconds, without transformers.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM")

# RotaryScalingType of tensorrt_llm: everything else would be ignored or guessed at, so it is refused.
ROPE_SCALING_TYPES = ("linear", "dynamic", "yarn", "longrope", "llama3")

# What transformers assumes when a config.json leaves the key out (Llama-, Mistral- and Qwen2Config of 4.57).
_DEFAULTS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"max_position_embeddings": 2048, "num_key_value_heads": None, "sliding_window": None},
    "MistralForCausalLM": {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    "Qwen2ForCausalLM": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096},
}
# More than any model has; the counts that become lists of names are held lower.
_MOST_OF_ALL = 2**31 - 1
_MOST = {"num_hidden_layers": 10_000, "num_attention_heads": 100_000, "num_key_value_heads": 100_000}
_BY_MODEL_TYPE = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM"}


class UnsupportedModel(ValueError):
    """The model description is unknown, contradicts itself, or asks for something that is not implemented."""


def supported_or_raise(architecture: Any, where: str) -> str:
    """Returns a supported architecture; raises UnsupportedModel with the list and the nearest name for others."""
    if architecture in SUPPORTED_ARCHITECTURES:
        return str(architecture)
    near = difflib.get_close_matches(str(architecture), SUPPORTED_ARCHITECTURES, n=1, cutoff=0.5)
    hint = f" The nearest by name is {near[0]}, which is another model." if near else ""
    raise UnsupportedModel(
        f"{where}: architecture {architecture!r} is not supported. Supported are {', '.join(SUPPORTED_ARCHITECTURES)}."
        f"{hint} Choose a model of a supported family, for example TinyLlama/TinyLlama-1.1B-Chat-v1.0."
    )


def check_rope_scaling(scaling: Any, where: str) -> dict[str, Any] | None:
    """Returns the rope_scaling dict unchanged (None stays None); raises UnsupportedModel for an unknown type."""
    if scaling is None:
        return None
    if not isinstance(scaling, Mapping):
        raise UnsupportedModel(f"{where}: rope_scaling is {scaling!r}, expected null or a dictionary")
    kinds = {key: scaling[key] for key in ("rope_type", "type") if key in scaling}
    if not kinds:
        raise UnsupportedModel(f"{where}: rope_scaling {dict(scaling)} has neither 'rope_type' nor 'type'; add one")
    if len(set(map(str, kinds.values()))) > 1:
        raise UnsupportedModel(
            f"{where}: rope_scaling says rope_type {kinds['rope_type']!r} and type {kinds['type']!r}; keep one of them"
        )
    kind = next(iter(kinds.values()))
    if kind not in (*ROPE_SCALING_TYPES, "default"):
        raise UnsupportedModel(
            f"{where}: rope_scaling type {kind!r} is not supported (supported: {', '.join(ROPE_SCALING_TYPES)}); "
            "leaving it out would change every position, so the model is refused"
        )
    return dict(scaling)


@dataclass(frozen=True)
class ModelSpec:
    """Sizes and switches of a decoder model of the Llama family.

    `head_size` is the width of one attention head (not always hidden_size / num_attention_heads), `attn_bias` means
    biases on q, k and v only, `dtype` is the type that the source declares (float16 when it declares none),
    `sliding_window` is None for full attention.
    """

    architecture: str
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_size: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    hidden_act: str = "silu"
    norm_epsilon: float = 1e-5
    rotary_base: float = 10000.0
    rotary_scaling: dict[str, Any] | None = None
    attn_bias: bool = False
    tie_word_embeddings: bool = False
    dtype: str = "float16"
    sliding_window: int | None = None

    @property
    def qkv_rows(self) -> int:
        """Rows of the fused attention.qkv matrix: (heads + 2 * KV heads) * head size."""
        return (self.num_attention_heads + 2 * self.num_key_value_heads) * self.head_size

    def parameter_count(self) -> int:
        """Number of weights; a tied head is counted once."""
        attention = self.hidden_size * (self.qkv_rows + self.num_attention_heads * self.head_size)
        bias = self.qkv_rows if self.attn_bias else 0
        layer = attention + bias + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size
        tables = (1 if self.tie_word_embeddings else 2) * self.vocab_size * self.hidden_size
        return self.num_hidden_layers * layer + tables + self.hidden_size

    def kv_bytes_per_token(self, bytes_per_element: float = 2) -> int:
        """Bytes of KV cache for one token over all layers: a key and a value of every KV head."""
        return int(2 * self.num_hidden_layers * self.num_key_value_heads * self.head_size * bytes_per_element)

    @classmethod
    def from_hf(cls, source: str | Path | Mapping[str, Any]) -> ModelSpec:
        """From a Hugging Face folder, its config.json, or the parsed dictionary. Raises UnsupportedModel."""
        config, where = _load(source)
        if isinstance(config.get("architecture"), str) and "architectures" not in config:
            raise UnsupportedModel(f"{where} is a TensorRT-LLM checkpoint config, not a Hugging Face one")
        architecture = _hf_architecture(config, where)
        defaults = _DEFAULTS[architecture]
        _refuse_biases(config, architecture, where)
        heads = _size(config, "num_attention_heads", where)
        rotary_base, scaling = _rope(config, where)
        window = _window(config, where, defaults["sliding_window"])
        if architecture == "Qwen2ForCausalLM" and not _switch(config, "use_sliding_window", where):
            window = None
        if (share := config.get("partial_rotary_factor")) not in (None, 1):
            raise UnsupportedModel(f"{where}: partial_rotary_factor is {share!r}; only 1 (all of a head) is supported")
        return cls._checked(
            where,
            architecture=architecture,
            hidden_size=_size(config, "hidden_size", where),
            num_hidden_layers=_size(config, "num_hidden_layers", where),
            num_attention_heads=heads,
            num_key_value_heads=_size(config, "num_key_value_heads", where, defaults["num_key_value_heads"] or heads),
            head_size=config.get("head_dim"),
            intermediate_size=_size(config, "intermediate_size", where),
            vocab_size=_size(config, "vocab_size", where),
            max_position_embeddings=_size(
                config, "max_position_embeddings", where, defaults["max_position_embeddings"]
            ),
            hidden_act=config.get("hidden_act", "silu"),
            norm_epsilon=_positive(config, "rms_norm_eps", where, 1e-6),
            rotary_base=rotary_base,
            rotary_scaling=scaling,
            attn_bias=architecture == "Qwen2ForCausalLM",
            tie_word_embeddings=_switch(config, "tie_word_embeddings", where),
            dtype=str(config.get("dtype") or config.get("torch_dtype") or "float16").removeprefix("torch."),
            sliding_window=window,
        )

    @classmethod
    def from_checkpoint_config(cls, config: Mapping[str, Any]) -> ModelSpec:
        """From the config.json of a checkpoint (or `pretrained_config` of an engine). Raises UnsupportedModel."""
        where = "checkpoint config"
        if "architecture" not in config:
            hint = (
                "; this is a Hugging Face config: run convert_checkpoint.py first" if "architectures" in config else ""
            )
            raise UnsupportedModel(f"{where} has no 'architecture' key{hint}")
        architecture = supported_or_raise(config["architecture"], where)
        heads = _size(config, "num_attention_heads", where)
        hidden = _size(config, "hidden_size", where)
        return cls._checked(
            where,
            architecture=architecture,
            hidden_size=hidden,
            num_hidden_layers=_size(config, "num_hidden_layers", where),
            num_attention_heads=heads,
            num_key_value_heads=_size(config, "num_key_value_heads", where, heads),
            head_size=config.get("head_size"),
            intermediate_size=_size(config, "intermediate_size", where, 4 * hidden),
            vocab_size=_size(config, "vocab_size", where),
            max_position_embeddings=_size(config, "max_position_embeddings", where),
            hidden_act=config.get("hidden_act", "silu"),
            norm_epsilon=_positive(config, "norm_epsilon", where, 1e-5),
            rotary_base=_positive(config, "rotary_base", where, 10000.0),
            rotary_scaling=check_rope_scaling(config.get("rotary_scaling"), where),
            # ModelOpt's exports leave the key out; Qwen2 has these biases in any case.
            attn_bias=_switch(config, "attn_bias", where, architecture == "Qwen2ForCausalLM"),
            tie_word_embeddings=_switch(
                config, "tie_word_embeddings", where, _switch(config, "share_embedding_table", where)
            ),
            dtype=str(config.get("dtype", "float16")),
            sliding_window=_window(config, where, None),
        )

    @classmethod
    def _checked(cls, where: str, *, head_size: Any, **fields: Any) -> ModelSpec:
        heads, kv_heads, hidden = (fields[key] for key in ("num_attention_heads", "num_key_value_heads", "hidden_size"))
        if head_size is None:  # `"head_dim": null` and a missing key mean the same
            if hidden % heads:
                raise UnsupportedModel(
                    f"{where}: hidden_size {hidden} is not a multiple of num_attention_heads {heads} and no head_dim "
                    "is given; add head_dim"
                )
            head_size = hidden // heads
        if not isinstance(head_size, int) or head_size < 2 or head_size % 2:
            raise UnsupportedModel(
                f"{where}: head size {head_size!r} must be an even whole number for rotary positions"
            )
        if heads % kv_heads:
            raise UnsupportedModel(
                f"{where}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
            )
        if fields["hidden_act"] != "silu":
            raise UnsupportedModel(f"{where}: hidden_act {fields['hidden_act']!r} is not supported, only 'silu' is")
        return cls(head_size=head_size, **fields)


def _load(source: str | Path | Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    if isinstance(source, Mapping):
        return source, "config"
    path = Path(source)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        what = "is not a file" if path.exists() else "does not exist"
        raise UnsupportedModel(f"{path} {what}: download the model first, a folder needs its config.json")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UnsupportedModel(f"{path} cannot be read ({error.strerror}): look at its permissions") from error
    except (ValueError, RecursionError) as error:
        raise UnsupportedModel(f"{path} is not readable JSON ({error}): download it again") from error
    if not isinstance(config, Mapping):
        raise UnsupportedModel(f"{path} holds a {type(config).__name__}, expected an object")
    return config, str(path)


def _hf_architecture(config: Mapping[str, Any], where: str) -> str:
    names = config.get("architectures")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise UnsupportedModel(f"{where}: architectures is {names!r}, expected a list of class names")
    if not names:
        kind = config.get("model_type")
        if kind in _BY_MODEL_TYPE:
            return _BY_MODEL_TYPE[kind]
        raise UnsupportedModel(f"{where} names no architecture ('architectures' is missing, model_type is {kind!r})")
    return supported_or_raise(names[0], where)


def _refuse_biases(config: Mapping[str, Any], architecture: str, where: str) -> None:
    for key in ("attention_bias", "mlp_bias", "bias"):
        if config.get(key) and not (architecture == "Qwen2ForCausalLM" and key == "attention_bias"):
            raise UnsupportedModel(f"{where}: {key} is {config[key]!r}; for {architecture} it is not supported")


def _rope(config: Mapping[str, Any], where: str) -> tuple[float, dict[str, Any] | None]:
    base, scaling = config, config.get("rope_scaling")
    newer = config.get("rope_parameters")  # how transformers 5 writes both
    if isinstance(newer, Mapping):
        base = newer if "rope_theta" in newer else config
        if newer.get("rope_type", "default") != "default":
            scaling = {key: value for key, value in newer.items() if key != "rope_theta"}
    return _positive(base, "rope_theta", where, 10000.0), check_rope_scaling(scaling, where)


def _size(config: Mapping[str, Any], key: str, where: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise UnsupportedModel(f"{where} has no {key!r}")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UnsupportedModel(f"{where}: {key} is {value!r}, expected a whole number of at least 1")
    most = _MOST.get(key, _MOST_OF_ALL)
    if value > most:  # without this, a damaged number makes tables of names until the memory is gone
        raise UnsupportedModel(f"{where}: {key} is {value}, no model has more than {most}: download config.json again")
    return value


def _positive(config: Mapping[str, Any], key: str, where: str, default: float) -> float:
    value = config.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise UnsupportedModel(f"{where}: {key} is {value!r}, expected a number above 0")
    return float(value)


def _switch(config: Mapping[str, Any], key: str, where: str, default: bool = False) -> bool:
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):  # the text "false" would count as true
        raise UnsupportedModel(f"{where}: {key} is {value!r}, expected true or false")
    return value


def _window(config: Mapping[str, Any], where: str, default: int | None) -> int | None:
    """sliding_window; null means full attention, also where the family's default is a window."""
    value = config.get("sliding_window", default)
    return None if value is None else _size({"sliding_window": value}, "sliding_window", where)
