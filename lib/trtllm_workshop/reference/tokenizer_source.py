"""Where a tokenizer and the model's generation_config.json come from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_generation_config(folder: Path | None) -> dict[str, Any] | None:
    """generation_config.json of a model folder, or None: many models have none, and that is no error.

    Raises ValueError for a file that cannot be read.
    """
    path = folder / "generation_config.json" if folder else None
    if path is None or not path.is_file():
        return None
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not readable JSON ({error}): download the model again") from error
    ends = config.get("eos_token_id") if isinstance(config, dict) else config
    whole = [isinstance(end, int) and not isinstance(end, bool) for end in (ends if isinstance(ends, list) else [ends])]
    if not isinstance(config, dict) or not (ends is None or all(whole)):
        raise ValueError(f"{path}: eos_token_id is {ends!r:.60}, expected a token id or a list of them")
    return config


def load_tokenizer(
    source: Any, trust_remote_code: bool = False, mode: str = "auto", revision: str | None = None
) -> tuple[Any, Path | None]:
    """A tokenizer from a folder, a name or an object, and the folder it lies in.

    Raises:
        FileNotFoundError: when a folder has no tokenizer files, or a name is neither a folder nor on the hub.
        ValueError: for damaged files, and for a tokenizer that needs code from its folder.
    """
    if source is None or not isinstance(source, str | Path):
        return source, None
    from transformers import AutoTokenizer

    folder = Path(source)
    if folder.is_dir() and not any(
        (folder / f).is_file() for f in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
    ):
        raise FileNotFoundError(
            f"{folder} has no tokenizer files; pass the Hugging Face model folder as tokenizer (engine and checkpoint folders "
            "do not carry a tokenizer)"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(source), trust_remote_code=trust_remote_code, use_fast=mode != "slow", revision=revision or "main"
        )
    except Exception as error:  # damaged files fail in many ways, none of which names the file
        reason = (str(error).splitlines() or [""])[0]
        if folder.is_dir():
            if "trust_remote_code" in str(error):
                raise
            raise ValueError(
                f"the tokenizer in {folder} cannot be read ({type(error).__name__}: {reason}); download the model again"
            ) from error
        raise FileNotFoundError(
            f"tokenizer {str(source)!r} is no folder here and could not be had from the hub either "
            f"({reason}); pass the Hugging Face model folder as tokenizer"
        ) from error
    return tokenizer, folder if folder.is_dir() else None
