"""The recorded Python signatures of TensorRT-LLM 1.2.1, read from ``data/trtllm_api.json``."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from trtllm_workshop.command_facts import DATA

PYTORCH_LLM = "tensorrt_llm.LLM"
ENGINE_LLM = "tensorrt_llm._tensorrt_engine.LLM"


@dataclass(frozen=True)
class Parameter:
    """One parameter of a recorded call."""

    name: str
    required: bool = False
    default: Any = None
    accepts: str | None = None
    status: str | None = None  # NVIDIA's stability tag: prototype, beta or deprecated
    note: str | None = None


@dataclass(frozen=True)
class Signature:
    """A recorded class, method or result of the Python API."""

    name: str
    kind: str  # class, method or result
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    positional: tuple[str, ...] = ()  # what may be given by position, in order
    extra_keywords: tuple[str, ...] = ()  # keywords taken through **kwargs
    open_keywords: bool = False  # True when the list of extra keywords is not complete
    later: tuple[str, ...] = ()  # seen only in versions after 1.2.1
    backend: str | None = None
    only_on: str | None = None  # the one class that has this method
    attributes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    confidence: str = "unknown"

    @property
    def keywords(self) -> tuple[str, ...]:
        return (*self.parameters, *self.extra_keywords)

    def nearest(self, keyword: str) -> str:
        """The real keyword that looks most like `keyword`."""
        return difflib.get_close_matches(keyword, self.keywords, n=1, cutoff=0.0)[0]


def _parameters(entries: list[dict[str, Any]]) -> dict[str, Parameter]:
    known = ("required", "default", "accepts", "status", "note")
    return {e["name"]: Parameter(e["name"], **{key: e[key] for key in known if key in e}) for e in entries}


@lru_cache(maxsize=1)
def apis() -> Mapping[str, Signature]:
    """All recorded signatures by full name, such as ``SamplingParams`` or ``LLM.generate``."""
    data = json.loads((DATA / "trtllm_api.json").read_text(encoding="utf-8"))
    table = {}
    for name, entry in data["entries"].items():
        parameters = _parameters([*data["shared"].get(entry.get("shared"), []), *entry.get("parameters", [])])
        table[name] = Signature(
            name=name,
            kind=entry["kind"],
            parameters=parameters,
            positional=tuple(entry.get("positional", parameters)),
            extra_keywords=tuple(entry.get("extra_keywords", ())),
            open_keywords=bool(entry.get("open_keywords")),
            later=tuple(entry.get("later", ())),
            backend=entry.get("backend"),
            only_on=entry.get("only_on"),
            attributes=tuple(entry.get("attributes", ())),
            notes=tuple(entry.get("notes", ())),
            confidence=entry.get("confidence", "unknown"),
        )
    return table


@lru_cache(maxsize=1)
def enums() -> Mapping[str, tuple[str, ...]]:
    """The recorded enumerations: name -> member names."""
    data = json.loads((DATA / "trtllm_api.json").read_text(encoding="utf-8"))
    return {name: tuple(entry["values"]) for name, entry in data["enums"].items()}


def find_api(dotted: str) -> Signature | None:
    """The signature behind a dotted name as a program spells it, or None when nothing is recorded.

    ``tensorrt_llm.llmapi.KvCacheConfig`` and ``KvCacheConfig`` are the same class; ``LLM`` is the PyTorch class unless
    the name leads through ``_tensorrt_engine``.
    """
    table = apis()
    if dotted in table:
        return table[dotted]
    parts = dotted.split(".")
    if parts[-1] == "LLM":
        return table[ENGINE_LLM if "_tensorrt_engine" in parts else PYTORCH_LLM]
    for length in (2, 1):
        if ".".join(parts[-length:]) in table:
            return table[".".join(parts[-length:])]
    return None


def api(name: str) -> Signature:
    """The recorded signature of `name`; KeyError with the nearest recorded names when there is none."""
    found = find_api(name)
    if found is None:
        near = difflib.get_close_matches(name, apis(), n=3, cutoff=0.3)
        raise KeyError(f"no signature is recorded for {name!r}; the nearest are {', '.join(near) or 'none'}")
    return found
