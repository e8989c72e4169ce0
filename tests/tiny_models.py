"""Tiny random Hugging Face models of every supported family, made from a seed in well under a second each.

They are shaped to catch mistakes, not to be good: heads differ from KV heads, head sizes are not hidden/heads where a
family allows it, norms are not one and biases are not zero. The tokenizer is trained on tests/data/tiny_corpus.txt.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

CORPUS = Path(__file__).with_name("data") / "tiny_corpus.txt"
VOCAB_SIZE = 512
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-mha": ("llama", {"num_key_value_heads": 4}),
    "llama-gqa": ("llama", {"num_hidden_layers": 3}),
    # The head counts of SmolLM2-135M: three ranks can share them, two cannot.
    "llama-tied": (
        "llama",
        {
            "hidden_size": 144,
            "intermediate_size": 192,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "tie_word_embeddings": True,
        },
    ),
    "llama3": ("llama", {"num_attention_heads": 8, "rope_theta": 500000.0, "rope_scaling": LLAMA3_ROPE}),
    # As in Mistral-Nemo the head size is given and is not hidden / heads.
    "mistral": ("mistral", {"head_dim": 32, "sliding_window": None, "rope_theta": 1e6}),
    "qwen2": ("qwen2", {"head_dim": 32, "rope_theta": 1e6, "rms_norm_eps": 1e-6, "num_hidden_layers": 3}),
}
FAMILIES = tuple(_FAMILIES)


@functools.cache
def _tokenizer_json() -> str:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS.read_text(encoding="utf-8").splitlines(), trainer)
    return tokenizer.to_str()


def tiny_tokenizer() -> Any:
    """A fast byte-level BPE tokenizer of 512 tokens with a ChatML template (transformers' PreTrainedTokenizerFast)."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_tokenizer_json()),
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=list(SPECIAL_TOKENS),
        clean_up_tokenization_spaces=False,
        model_max_length=_COMMON["max_position_embeddings"],
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _torch_dtype(dtype: Any) -> Any:
    import torch

    return getattr(torch, dtype) if isinstance(dtype, str) else dtype


def tiny_model(
    folder: Path | str,
    family: str = "llama-gqa",
    seed: int = 0,
    dtype: Any = "float32",
    *,
    max_shard_size: str = "5GB",
    **config_overrides: Any,
) -> Path:
    """Writes a Hugging Face folder (config, safetensors, tokenizer, chat template, generation_config) and returns it.

    `family` is one of FAMILIES, `dtype` a torch dtype or its name, `config_overrides` go into the HF config
    (`vocab_size=515`, `num_hidden_layers=5` ...). The same arguments give the same weights, bit by bit.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    if family not in _FAMILIES:
        raise ValueError(f"unknown tiny family {family!r}: choose one of {', '.join(FAMILIES)}")
    model_type, overrides = _FAMILIES[family]
    config = AutoConfig.for_model(model_type, **{**_COMMON, **overrides, **config_overrides})
    config.architectures = [
        {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM"}[model_type]
    ]
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            values = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(1.0 + 0.1 * values)
            elif name.endswith(".bias"):
                parameter.copy_(0.2 * values)
            else:  # keeps activations near one, so that logits are spread and a wrong tensor shows
                parameter.copy_(values * parameter.shape[-1] ** -0.5)
    folder = Path(folder)
    model.to(_torch_dtype(dtype)).eval()
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def edit_config(folder: Path | str, **changes: Any) -> None:
    """Changes keys of the folder's config.json; the value `...` removes the key."""
    path = Path(folder) / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    for key, value in changes.items():
        if value is ...:
            config.pop(key, None)
        else:
            config[key] = value
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
