"""Two tiny tokenizers, one of each kind of vocabulary, and what the text of an answer is by the tokenizer's own decode."""

from __future__ import annotations

import functools
import json
from typing import Any

from tiny_models import CORPUS, tiny_tokenizer

KINDS = ("byte-level", "metaspace")


@functools.cache
def tokenizer_of(kind: str) -> Any:
    return tiny_tokenizer() if kind == "byte-level" else metaspace_tokenizer()


def metaspace_tokenizer(strip: bool = True) -> Any:
    """As SentencePiece models are in transformers: a mark for blanks, and bytes for what the vocabulary lacks."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.pre_tokenizer = pre_tokenizers.Split("\u2581", behavior="merged_with_next")  # marks begin tokens
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(CORPUS.read_text(encoding="utf-8").splitlines(), trainer)
    # The trainer marks the bytes as special tokens; in a real model they are ordinary ones, so rebuild without the marks.
    parts = json.loads(tokenizer.to_str())
    parts["added_tokens"] = [entry for entry in parts["added_tokens"] if not entry["content"].startswith("<0x")]
    plain = Tokenizer.from_str(json.dumps(parts))
    made = PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    made.clean_up_tokenization_spaces = False
    return made


class DecodeOnly:
    """A tokenizer that shows nothing of its inside, so that only its own decode can be used."""

    def __init__(self, tokenizer: Any) -> None:
        self.decode = tokenizer.decode


def byte_ids(kind: str, data: bytes) -> list[int]:
    """The tokens that are one byte each."""
    from transformers.models.gpt2.tokenization_gpt2 import bytes_to_unicode

    vocabulary = tokenizer_of(kind).get_vocab()
    names = bytes_to_unicode()
    return [vocabulary[names[byte] if kind == "byte-level" else f"<0x{byte:02X}>"] for byte in data]


def full_text(tokenizer: Any, ids: list[int], skip: bool = True) -> str:
    return tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)


def answer_text(kind: str, prompt: list[int], answer: list[int], skip: bool = True) -> str:
    """What the decode of prompt and answer has more than that of the prompt, where the seam may be inside a character."""
    tokenizer = tokenizer_of(kind)
    whole, before = full_text(tokenizer, prompt + answer, skip), full_text(tokenizer, prompt, skip)
    if kind == "byte-level":
        if whole.startswith(before):
            return whole[len(before) :]
        assert before.endswith("\ufffd") and whole.startswith(before[:-1]), "only half a character may change"
        return whole[len(before) - 1 :]
    start, own = _byte_run(tokenizer, list(reversed(prompt)), skip)
    rest = _byte_run(tokenizer, answer, skip)[1]
    try:
        (own[::-1] + rest).decode()
    except UnicodeDecodeError:  # every byte of the run is a U+FFFD, also those of good characters of the prompt
        at = len(full_text(tokenizer, prompt[: len(prompt) - start], skip)) + len(own)
        return whole[at:]
    while own and len((own[::-1]).decode(errors="ignore").encode()) < len(own):  # the answer completes this character
        own, prompt = own[1:], _without_last_byte(tokenizer, prompt, skip)
    before = full_text(tokenizer, prompt, skip)
    assert whole.startswith(before)
    return whole[len(before) :]


def _byte_run(tokenizer: Any, ids: list[int], skip: bool) -> tuple[int, bytes]:
    """How many of the tokens belong to a run of bytes at the start of `ids`, and its bytes."""
    run = bytearray()
    for count, token in enumerate(ids):
        name = _name(tokenizer, token, skip)
        if name is not None and not (name.startswith("<0x") and len(name) == 6):
            return count, bytes(run)
        if name is not None:
            run.append(int(name[3:5], 16))
    return len(ids), bytes(run)


def _without_last_byte(tokenizer: Any, ids: list[int], skip: bool) -> list[int]:
    last = max(at for at, token in enumerate(ids) if _name(tokenizer, token, skip) is not None)
    return ids[:last]


def _name(tokenizer: Any, token: int, skip: bool) -> str | None:
    return None if skip and token in tokenizer.all_special_ids else tokenizer.convert_ids_to_tokens(token)
