"""The table of what each token stands for: made once, trusted only when it agrees, and asked instead of decode."""

from __future__ import annotations

import gc
import pickle
import weakref

import pytest
from text_tokenizers import KINDS, DecodeOnly, full_text, metaspace_tokenizer
from tiny_models import tiny_tokenizer
from trtllm_workshop.reference.detokenizer import IncrementalDetokenizer
from trtllm_workshop.reference.token_bytes import TokenBytes, byte_alphabet

BOTH = pytest.mark.parametrize("kind", KINDS)


def fresh(kind):
    return tiny_tokenizer() if kind == "byte-level" else metaspace_tokenizer()


def text_of(tokenizer, prompt, ids, skip=True):
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip)
    return "".join([detokenizer.add(token) for token in ids]) + detokenizer.flush()


def with_decoder(decoder):
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    inside = Tokenizer.from_str(metaspace_tokenizer().backend_tokenizer.to_str())
    inside.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=inside, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


@BOTH
@pytest.mark.parametrize("skip", [True, False])
def test_every_token_stands_for_what_decode_says(kind, skip):
    tokenizer = fresh(kind)
    start = tokenizer.encode("a")
    before = full_text(tokenizer, start, skip)
    for token in range(len(tokenizer) + 3):
        assert before + text_of(tokenizer, start, [token], skip) == full_text(tokenizer, [*start, token], skip), token


def test_the_byte_alphabet_is_that_of_the_tokenizers_library():
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers.models.gpt2.tokenization_gpt2 import bytes_to_unicode

    assert byte_alphabet() == {character: byte for byte, character in bytes_to_unicode().items()}
    assert set(byte_alphabet()) == set(ByteLevel.alphabet())


@BOTH
def test_decode_is_never_called_once_the_table_is_there(kind, monkeypatch):
    tokenizer = fresh(kind)
    prompt, ids = tokenizer.encode("Say:"), tokenizer.encode("a \U0001f600 cat")
    assert TokenBytes.of(tokenizer) is not None
    expected = full_text(tokenizer, prompt + ids)[len(full_text(tokenizer, prompt)) :]
    monkeypatch.setattr(tokenizer, "decode", lambda *_, **__: pytest.fail("decode is what makes streaming slow"))
    assert text_of(tokenizer, prompt, ids) == expected


@BOTH
def test_a_table_is_made_once_and_goes_with_its_tokenizer(kind):
    tokenizer = fresh(kind)
    table = TokenBytes.of(tokenizer)
    assert table is not None and TokenBytes.of(tokenizer) is table and TokenBytes.of(fresh(kind)) is not table
    gone = weakref.ref(table)
    del table, tokenizer
    gc.collect()
    assert gone() is None


@BOTH
def test_a_tokenizer_with_a_table_can_be_saved_and_sent_to_another_process(kind, tmp_path):
    tokenizer = fresh(kind)
    ids = tokenizer.encode("one \U0001f600 cat")
    text = text_of(tokenizer, [], ids)
    tokenizer.save_pretrained(tmp_path)
    assert text_of(pickle.loads(pickle.dumps(tokenizer)), [], ids) == text == full_text(tokenizer, ids)


@BOTH
def test_a_decode_that_does_more_than_its_decoder_says_is_not_replaced(kind):
    tokenizer = fresh(kind)

    class Shouting(type(tokenizer)):
        def decode(self, *args, **options):
            return super().decode(*args, **options).upper()

    tokenizer.__class__ = Shouting
    assert TokenBytes.of(tokenizer) is None
    assert text_of(tokenizer, tokenizer.encode("Say:"), tokenizer.encode("the cat"))[-7:] == "THE CAT"


def test_added_tokens_with_any_characters():
    """The characters of an added token's name count as bytes if all of them are in the alphabet, and as text if not."""
    from transformers import AddedToken

    tokenizer = tiny_tokenizer()
    names = ["<a b>", "<|\u00e9|>", "\u65e5\u672c", "\u0120word", "\u00c3\u00a9"]
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in names])
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<|think hard|>"]}, replace_additional_special_tokens=False
    )
    assert TokenBytes.of(tokenizer) is not None
    ids = tokenizer.convert_tokens_to_ids([*names, "<|think hard|>", *names])
    for skip in (True, False):
        assert text_of(tokenizer, [], ids, skip) == full_text(tokenizer, ids, skip)
    assert "<|think hard|>" in text_of(tokenizer, [], ids, False) and "think" not in text_of(tokenizer, [], ids, True)


def test_decoders_of_other_kinds_use_the_tokenizers_own_decode():
    from tokenizers import decoders

    replace, strip = decoders.Replace("\u2581", " "), decoders.Strip(" ", 1, 0)
    others = [
        decoders.Metaspace(),
        decoders.WordPiece(),
        decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), replace, strip]),
        decoders.Sequence([replace, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
        decoders.Sequence([replace, decoders.ByteFallback(), strip]),
    ]
    for decoder in others:
        assert TokenBytes.of(with_decoder(decoder)) is None, decoder
    tokenizer = with_decoder(decoders.Metaspace())
    prompt, ids = tokenizer.encode("Animals:"), tokenizer.encode("one cat and one dog")
    assert text_of(tokenizer, prompt, ids) == " one cat and one dog"
    assert TokenBytes.of(DecodeOnly(tokenizer)) is None
    none = with_decoder(decoders.Fuse())
    none.backend_tokenizer.decoder = None
    assert TokenBytes.of(none) is None
