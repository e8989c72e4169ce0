"""Calibration batches: texts from this machine, cut to the limit in tokens, with honest numbers about their lengths."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtllm_workshop.reference.quantize_formats import QuantizeError
from trtllm_workshop.text_dataset import TextDatasetError, TextSet, WrongColumn, read_texts

DEFAULT_DATASET = "cnn_dailymail"
FEW_TOKENS = 1000  # about two pages: largest values that so little text shows are easily exceeded later
_BUNDLED = Path(__file__).resolve().parents[3] / "datasets" / "calibration"  # only in a checkout of the course


@dataclass(frozen=True)
class CalibrationData:
    """Token ids per text, cut to `limit` tokens, in the order of the data set.

    Attributes:
        samples: one list of token ids per text.
        limit: most tokens that a text may have.
        cut: number of texts that were longer.
        batch_size: texts per forward pass.
        pad_token: id that fills shorter texts of a batch, on the right; unused with one text a batch.
    """

    samples: tuple[tuple[int, ...], ...]
    limit: int
    cut: int
    batch_size: int
    pad_token: int | None

    @property
    def tokens(self) -> int:
        """Real tokens of all texts, without padding."""
        return sum(map(len, self.samples))

    @property
    def batches(self) -> int:
        return -(-len(self.samples) // self.batch_size)

    def batch(self, index: int) -> tuple[list[list[int]], list[list[int]]]:
        """(token ids, attention mask) of batch `index`, both [texts, longest of the batch]; 0 in the mask is padding."""
        part = self.samples[index * self.batch_size : (index + 1) * self.batch_size]
        width = max(map(len, part))
        fill = 0 if self.pad_token is None else self.pad_token
        ids = [[*sample, *[fill] * (width - len(sample))] for sample in part]
        return ids, [[1] * len(sample) + [0] * (width - len(sample)) for sample in part]

    @property
    def padding(self) -> int:
        """Tokens that only fill the batches."""
        return sum(len(row) for index in range(self.batches) for row in self.batch(index)[0]) - self.tokens

    def __str__(self) -> str:
        lengths = sorted(map(len, self.samples))
        return (
            f"calibration data: {len(lengths)} texts, {self.tokens} tokens, average {self.tokens / len(lengths):.1f} "
            f"and longest {lengths[-1]} (real tokens, padding not counted), "
            f"{counted(self.batches, 'batch')} with {counted(self.padding, 'padding token')}"
        )


def counted(number: int, thing: str) -> str:
    """`1 batch`, `2 batches`, `0 padding tokens`."""
    ending = "" if number == 1 else "es" if thing.endswith("ch") else "s"
    return f"{number} {thing}{ending}"


def find_dataset(name: str, say: Callable[[str], None]) -> Path:
    """The local file or folder that --calib_dataset means. Never the network.

    The default name cnn_dailymail stands for the course's own texts when HF_HUB_OFFLINE is set and they are there, and
    that is said. Raises QuantizeError for any other name that is nothing on this machine.
    """
    path = Path(name)
    if path.exists():
        return path
    offline = os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")
    bundled = _BUNDLED if (_BUNDLED / "train.jsonl").is_file() else None
    if name == DEFAULT_DATASET and offline and bundled:
        say(f"warning: HF_HUB_OFFLINE is set, so {name} is replaced by the course's own texts in {bundled}")
        return bundled
    where = bundled or "FOLDER (with train.jsonl, one {'text': ...} a line)"
    is_path = name.startswith((".", "/", "~")) or name.count("/") > 1
    what = (
        "does not exist" if is_path else "is the name of a data set on the Hub, and the reference toolchain loads none"
    )
    raise QuantizeError(
        f"--calib_dataset {name} {what}: give a local file or folder, for example --calib_dataset {where}"
    )


def load_calibration(
    source: Path, tokenizer: Any, size: int, limit: int, batch_size: int, say: Callable[[str], None]
) -> CalibrationData:
    """The first `size` texts of the set as token ids, each cut to `limit` tokens.

    Says which file and column was read, what was cut or missing, and what TensorRT-LLM's own script would not read.

    Raises QuantizeError for numbers below 1, for a set without tokens, and for a tokenizer that cannot pad a batch;
    TextDatasetError (a ValueError too) names what is wrong with the set.
    """
    for flag, value in (("--calib_size", size), ("--calib_max_seq_length", limit), ("--batch_size", batch_size)):
        if value < 1:
            raise QuantizeError(f"{flag} is {value}: give 1 or more, or nothing is measured")
    try:
        found = read_texts(source, limit=size)
    except WrongColumn as error:
        raise QuantizeError(f"--calib_dataset: {error.problem}: rename the column with the texts to 'text'") from error
    except TextDatasetError as error:
        raise QuantizeError(f"--calib_dataset: {error}") from error
    texts = found.texts
    say(f"calibration texts: {found.origin}")
    if difference := _not_official(source, found):
        say(f"warning: TensorRT-LLM's own quantize.py {difference}")
    if len(texts) < size:
        say(f"warning: --calib_size {size} asked for more than {source} holds: all {len(texts)} texts are used")
    encoded = [tokenizer(text, truncation=False, verbose=False)["input_ids"] for text in texts]
    cut = sum(len(ids) > limit for ids in encoded)
    samples = tuple(tuple(ids[:limit]) for ids in encoded if ids)
    if not samples:
        raise QuantizeError(f"--calib_dataset {source}: the tokenizer makes no tokens of its texts; give other texts")
    if len(samples) < len(texts):
        say(f"warning: {len(texts) - len(samples)} texts have no tokens and are left out")
    data = CalibrationData(samples, limit, cut, batch_size, _pad_token(tokenizer, batch_size, say))
    say(str(data))
    if cut:
        say(
            f"warning: {cut} of {len(samples)} texts are longer than {limit} tokens and were cut: their rest is not seen"
        )
    if data.tokens < FEW_TOKENS:
        say(
            f"warning: {counted(data.tokens, 'token')} in all is little: values that later texts reach may be missing from "
            "the scales; take more or longer texts"
        )
    if data.padding:
        say("warning: padding tokens are measured like real ones (--batch_size 1 has none)")
    return data


def _not_official(source: Path, found: TextSet) -> str:
    """What TensorRT-LLM's quantize_by_modelopt.py would do otherwise with these texts; '' when it reads the same.

    It reads the split `train` of a folder, with the column `article` when the path has `cnn_dailymail` in it, else `text`.
    """
    expected = "article" if DEFAULT_DATASET in str(source) else "text"
    if source.is_file():
        return f"takes a folder, not a file: put the texts into FOLDER/train.jsonl, column {expected!r}, for it"
    if found.column is None:
        return (
            "" if found.files[0].suffix == ".txt" else f"reads the column {expected!r}, and these rows have no columns"
        )
    if found.column != expected:
        reason = f" of a path with {DEFAULT_DATASET} in it" if expected == "article" else ""
        return f"reads the column {expected!r}{reason}, not {found.column!r}: rename it for a GPU machine"
    return ""


def _pad_token(tokenizer: Any, batch_size: int, say: Callable[[str], None]) -> int | None:
    if batch_size == 1:
        return None
    if tokenizer.pad_token_id is not None:
        return int(tokenizer.pad_token_id)
    if tokenizer.eos_token_id is None:
        raise QuantizeError(
            f"--batch_size {batch_size} needs padding, and the tokenizer has neither a pad token nor an end token: "
            "give --batch_size 1, or add pad_token to tokenizer_config.json"
        )
    say(f"warning: the tokenizer has no pad token: its end token {tokenizer.eos_token!r} fills the batches")
    return int(tokenizer.eos_token_id)
