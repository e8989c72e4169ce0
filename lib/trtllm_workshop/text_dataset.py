"""Texts for calibration and evaluation, and chat prompts, from local files. No network, no torch, no `datasets`.

The schema is found by looking at the rows, never at the path: a copy of a data set works under any folder name.
Formats: .jsonl (one JSON value a line), .json (a list), .txt (one text a line). A folder is read as Hugging Face's
`datasets` reads it: the files named train, or those in train/ or data/; when no file is named after a split, all of them
(https://huggingface.co/docs/datasets/repository_structure).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from trtllm_workshop.safetensors_file import lfs_pointer_size

# In the order in which they are looked for: the columns of common public sets.
TEXT_FIELDS = ("text", "messages", "conversations", "article", "document", "content", "prompt")
PROMPT_FIELDS = ("prompt", "messages", "conversations", "question", "instruction", "text")
_READABLE = (".jsonl", ".json", ".txt")
_OTHER = (".parquet", ".arrow", ".csv", ".tsv", ".gz", ".zst", ".zip", ".xz")
_SPLIT = re.compile(
    r"(?:^|[-_.\s\d])(train|training|validation|valid|val|dev|test|testing|eval|evaluation)(?=$|[-_.\s\d])"
)
_TRAIN = ("train", "training")


class TextDatasetError(ValueError):
    """A text set that cannot be read; the message names the file, the line or the columns, and what to do."""


class WrongColumn(TextDatasetError):
    """The text is not where it was looked for. `problem` is the message without the advice to name another `field`,
    for callers whose users cannot name one."""

    def __init__(self, problem: str, advice: str) -> None:
        super().__init__(f"{problem}: {advice}")
        self.problem = problem


@dataclass(frozen=True)
class TextSet:
    """Texts and where they came from.

    Attributes:
        texts: in file order.
        files: the files that were read from, in order.
        column: the column that holds the texts; None when the rows are bare strings or lines.
    """

    texts: list[str]
    files: tuple[Path, ...]
    column: str | None

    @property
    def origin(self) -> str:
        """For a message: `a/train.jsonl, column 'text'`, or how a file without columns was read."""
        others = len(self.files) - 1
        more = f" and {others} more file{'' if others == 1 else 's'}" if others else ""
        if self.column is not None:
            how = f"column {self.column!r}"
        else:
            how = "one text a line" if self.files[0].suffix == ".txt" else "one text a row"
        return f"{self.files[0]}{more}, {how}"


def load_texts(source: str | Path, field: str | None = None, limit: int | None = None) -> list[str]:
    """The texts of a file or folder, in file order, at most `limit` of them; see `read_texts`."""
    return read_texts(source, field, limit).texts


def read_texts(source: str | Path, field: str | None = None, limit: int | None = None) -> TextSet:
    """The texts of a file or folder, in file order, at most `limit` of them, and where they stood.

    `field` names the column; without it, the first of TEXT_FIELDS that the first row has is taken. A column of chat
    messages becomes one text: the messages' contents, with an empty line between them. Raises TextDatasetError.
    """
    return _load(source, field, limit, TEXT_FIELDS, _joined)


def load_prompts(source: str | Path, field: str | None = None, limit: int | None = None) -> list[str]:
    """What a user says first, one text a row: like load_texts, with PROMPT_FIELDS, and of chat messages the first of
    the user. Raises TextDatasetError."""
    return _load(source, field, limit, PROMPT_FIELDS, _first_of_user).texts


def _load(
    source: str | Path,
    field: str | None,
    limit: int | None,
    fields: tuple[str, ...],
    from_messages: Callable[[list[Any], str], str],
) -> TextSet:
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise TextDatasetError(f"limit is {limit!r}: give a whole number of texts from 1, or None for all of them")
    texts: list[str] = []
    files: dict[Path, None] = {}
    column = field
    for file, place, row in islice(_rows(Path(source)), limit):
        files[file] = None
        if isinstance(row, dict):
            column = column or _column(row, fields, place)
            if column not in row:
                raise WrongColumn(
                    f"{place} has no column {column!r}; its columns are {_listed(row)}",
                    "name one of these as field" if field else "every row needs the same one, or name it as field",
                )
            value = row[column]
        else:
            value = row
        if isinstance(value, list):
            value = from_messages(value, place)
        texts.append(_checked(value, place))
    if not texts:
        raise TextDatasetError(f"{source} holds no rows: it needs at least one text")
    return TextSet(texts, tuple(files), column)


def _column(row: dict[str, Any], fields: tuple[str, ...], place: str) -> str:
    for name in fields:
        if name in row:
            return name
    likely = max(row, key=lambda name: len(row[name]) if isinstance(row[name], str) else 0, default="text")
    raise WrongColumn(
        f"{place}: none of the columns {_listed(row)} is known to hold the text (looked for {', '.join(fields)})",
        f'name it, for example field="{likely}"',
    )


def _listed(row: dict[str, Any]) -> str:
    return ", ".join(repr(name)[:40] for name in list(row)[:20]) or "(none)"


def _checked(value: Any, place: str) -> str:
    if not isinstance(value, str):
        raise WrongColumn(f"{place}: the text is {value!r:.60}, expected a string", "name another column as field")
    if not value.strip():
        raise TextDatasetError(f"{place}: the text is empty: delete the row or fill it")
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise TextDatasetError(f"{place}: the text has half of a surrogate pair (\\ud800 to \\udfff): mend the escape")
    return value


def _contents(messages: list[Any], place: str) -> list[tuple[str, str]]:
    """(role, content) of chat messages, in the two common spellings; content in parts is joined."""
    found = []
    for message in messages:
        if not isinstance(message, dict):
            raise TextDatasetError(f"{place}: {message!r:.60} is no chat message: it needs role and content")
        role = message.get("role", message.get("from"))
        content = message.get("content", message.get("value"))
        if isinstance(content, list):
            parts = [part.get("text") for part in content if isinstance(part, dict)]
            content = "".join(part for part in parts if isinstance(part, str))
        if not isinstance(role, str) or not isinstance(content, str):
            raise TextDatasetError(f"{place}: {message!r:.60} is no chat message: it needs role and content as strings")
        found.append((role, content))
    return found


def _joined(messages: list[Any], place: str) -> str:
    return "\n\n".join(content for _, content in _contents(messages, place) if content.strip())


def _first_of_user(messages: list[Any], place: str) -> str:
    for role, content in _contents(messages, place):
        if role in ("user", "human"):
            return content
    raise TextDatasetError(f"{place}: no message has the role user: delete the row, or name another column as field")


def _rows(source: Path) -> Iterator[tuple[Path, str, Any]]:
    """(file, place for messages, value) of every row, read lazily file by file."""
    for file in _files(source):
        text = _read(file)
        if file.suffix == ".json":
            for place, row in _json_rows(file, text):
                yield file, place, row
            continue
        # Not splitlines(): it also cuts at U+2028 and U+0085, which are legal inside a JSON string.
        for number, line in enumerate(text.split("\n"), 1):
            if not line.strip():
                continue
            place = f"{file}, line {number}"
            if file.suffix == ".txt":
                yield file, place, line.rstrip("\r")
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise TextDatasetError(f"{place} is not JSON ({_fault(error)}): mend or delete the line") from error
            if not isinstance(row, dict | str):
                raise TextDatasetError(f"{place} is {row!r:.60}, expected an object with columns, or a string")
            yield file, place, row


def _fault(error: ValueError | RecursionError) -> str:
    """What json says about one line, without its line number: that one is always 1."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg.removesuffix(' at')} at column {error.colno}"
    return str(error)


def _json_rows(file: Path, text: str) -> Iterator[tuple[str, Any]]:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        hint = "; one JSON value a line belongs in a file named .jsonl" if "Extra data" in str(error) else ""
        raise TextDatasetError(f"{file} is not JSON ({error}){hint}: mend the file") from error
    if isinstance(content, dict):
        content = next((content[key] for key in ("train", "data") if isinstance(content.get(key), list)), content)
    if not isinstance(content, list):
        raise TextDatasetError(
            f"{file} holds a {type(content).__name__}, expected a list of rows, or {{'train': [...]}}"
        )
    for number, row in enumerate(content, 1):
        if not isinstance(row, dict | str):
            raise TextDatasetError(f"{file}, row {number} is {row!r:.60}, expected an object with columns, or a string")
        yield f"{file}, row {number}", row


def _read(file: Path) -> str:
    try:
        raw = file.read_bytes()
    except OSError as error:
        raise TextDatasetError(
            f"{file} cannot be read ({error.strerror or error}): check the path and its permissions"
        ) from error
    if lfs_pointer_size(raw[:512]) is not None:
        raise TextDatasetError(f"{file} is a Git LFS pointer, not the data: run `git lfs pull` in that folder")
    try:
        return raw.decode("utf-8-sig")  # some editors put a byte order mark first
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise TextDatasetError(
            f"{file}, line {line} is not UTF-8 (byte 0x{raw[error.start]:02x} at {error.start}): save the file as UTF-8"
        ) from error


def _files(source: Path) -> list[Path]:
    if source.is_file():
        if source.suffix not in _READABLE:
            raise TextDatasetError(f"{source} is of a kind that is not read here: make it {', '.join(_READABLE)}")
        return [source]
    if not source.is_dir():
        raise TextDatasetError(
            f"{source} is neither a file nor a folder: data sets are read from this machine only, so give a .jsonl "
            "file, or a folder with train.jsonl"
        )
    here = _named(source, source)
    for folder in (source, source / "train", source / "data"):
        files = here if folder == source else _named(folder, source)
        chosen = [file for file in files if _split(file, folder) == "train"]
        if not chosen and all(_split(file, folder) is None for file in files):
            chosen = files
        if chosen:
            return chosen
    seen = ", ".join(sorted(entry.name for entry in source.iterdir())[:8]) or "nothing"
    unreadable = any(file.suffix in _OTHER for file in source.rglob("*"))
    raise TextDatasetError(
        f"{source} has no training texts (it has {seen}): "
        + ("write them as train.jsonl first" if unreadable else "put a train.jsonl there")
        + ', one {"text": ...} a line'
    )


def _named(folder: Path, source: Path) -> list[Path]:
    """The readable files of a folder, without metadata that is no rows."""
    if not folder.is_dir():
        return []
    files = [file for file in sorted(folder.iterdir()) if file.suffix in _READABLE and file.is_file()]
    skipped = (
        "dataset_info.json",
        "dataset_infos.json",
        "dataset_dict.json",
        "state.json",
        "readme.txt",
        "license.txt",
    )
    return [file for file in files if file.name.lower() not in skipped]


def _split(file: Path, folder: Path) -> str | None:
    """ "train", "other" or None for a file's name; a file in a folder named train belongs to train."""
    found = _SPLIT.search(file.stem.lower())
    if found:
        return "train" if found.group(1) in _TRAIN else "other"
    return "train" if folder.name == "train" else None
