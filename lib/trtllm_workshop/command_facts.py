"""The recorded flags of TensorRT-LLM 1.2.1's commands, read from the JSON files in ``data/``.

Every file ``data/trtllm_cli*.json`` is read, so a new model family brings its converter as one more file.
What a field means and where the facts come from is written in ``data/README.md``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

DATA = Path(__file__).with_name("data")

# The order in which a learner meets the commands; a misplaced flag is sent to the first stage that knows it.
STAGES = ("convert", "quantize", "build", "run", "serve", "bench")


@dataclass(frozen=True)
class Flag:
    """One official flag (or positional argument) of one command."""

    name: str
    aliases: tuple[str, ...] = ()
    negative: tuple[str, ...] = ()  # spellings that switch an on/off pair off
    type: str = "str"  # str, int, float, bool (takes a text value) or path
    action: str = "store"  # store, append, store_true, store_false or pair
    nargs: str | int | None = None
    const: Any = None
    dest: str = ""
    choices: tuple[Any, ...] | None = None
    more_choices: tuple[Any, ...] = ()  # accepted spellings that the help text does not list
    default: Any = None
    default_symbol: str | None = None  # the official default is a Python name, not a literal
    absent_unless_given: bool = False  # argparse.SUPPRESS: the attribute does not exist by default
    minimum: int | None = None
    required: bool = False
    positional: bool = False
    deprecated: bool = False
    group: str | None = None
    note: str | None = None
    confidence: str | None = None

    @property
    def is_switch(self) -> bool:
        """True when the flag takes no value on the command line."""
        return self.action in ("store_true", "store_false", "pair")

    @property
    def spellings(self) -> tuple[str, ...]:
        return (self.name, *self.aliases, *self.negative)

    @property
    def accepted_choices(self) -> tuple[Any, ...] | None:
        return None if self.choices is None else (*self.choices, *self.more_choices)


@dataclass(frozen=True)
class Command:
    """One official command: its flags by main spelling, what was removed, and which stage of the course it serves."""

    name: str
    stage: str
    flags: Mapping[str, Flag]
    later: Mapping[str, Flag] = field(default_factory=dict)  # seen only in versions after 1.2.1
    removed: Mapping[str, str] = field(default_factory=dict)  # old flag -> what to do instead
    one_of: tuple[tuple[str, ...], ...] = ()  # of each group at least one must be given
    subcommands: tuple[str, ...] = ()
    default_subcommand: bool = False
    siblings: tuple[str, ...] = ()  # sub-commands whose flags are not recorded
    rules: tuple[str, ...] = ()
    sources: tuple[Mapping[str, str], ...] = ()
    confidence: str = "unknown"

    def find(self, spelling: str) -> Flag | None:
        """The flag with this spelling, main, alias or negative; None when the command has no such flag."""
        return next((flag for flag in self.flags.values() if spelling in flag.spellings), None)

    @property
    def program(self) -> str:
        """What argparse prints before the colon: the program, or the script's file name."""
        return self.name if " " in self.name else Path(self.name).name


def _dest(name: str) -> str:
    return name.lstrip("-").replace("-", "_").lower()


def _flag(entry: Mapping[str, Any]) -> Flag:
    name = str(entry["flag"])
    action = entry.get("action", "store")
    if entry.get("is_flag") and action == "store":
        action = "store_false" if entry.get("default") is True else "store_true"
    default = entry.get("default")
    if action == "store_true" and default is None:
        default = False
    choices = entry.get("choices")
    kind = str(entry.get("type", "str"))
    nargs = entry.get("nargs")
    if kind.endswith(" list"):
        kind, nargs = kind.removesuffix(" list"), nargs or "+"
    return Flag(
        name=name,
        aliases=tuple(entry.get("aliases", ())),
        negative=tuple(entry.get("negative", ())),
        type=kind if kind in ("str", "int", "float", "bool", "path") else "str",
        action=action,
        nargs=nargs,
        const=entry.get("const"),
        dest=entry.get("dest") or _dest(name),
        choices=tuple(choices) if isinstance(choices, list) else None,
        more_choices=tuple(entry.get("more_choices", ())),
        default=default,
        default_symbol=entry.get("default_symbol"),
        absent_unless_given=bool(entry.get("absent_unless_given")),
        minimum=entry.get("minimum"),
        required=bool(entry.get("required")),
        positional=bool(entry.get("positional")) or not name.startswith("-"),
        deprecated=bool(entry.get("deprecated")),
        group=entry.get("group"),
        note=entry.get("note"),
        confidence=entry.get("confidence"),
    )


def _table(entries: Iterable[Mapping[str, Any]]) -> dict[str, Flag]:
    return {flag.name: flag for flag in map(_flag, entries)}


def _stage(name: str, entry: Mapping[str, Any]) -> str:
    return str(entry.get("stage") or ("convert" if name.endswith("convert_checkpoint.py") else "bench"))


@lru_cache(maxsize=1)
def commands() -> Mapping[str, Command]:
    """All recorded commands by official name, for example ``trtllm-build`` or ``examples/run.py``."""
    table: dict[str, Command] = {}
    for path in sorted(DATA.glob("trtllm_cli*.json")):
        for name, entry in json.loads(path.read_text(encoding="utf-8"))["commands"].items():
            if name in table:
                raise ValueError(f"{path.name} records {name} a second time; keep one entry per command")
            sources = entry.get("sources") or entry.get("source") or ()
            table[name] = Command(
                name=name,
                stage=_stage(name, entry),
                flags=_table(entry["flags"]),
                later=_table(entry.get("later", ())),
                removed=dict(entry.get("removed", {})),
                one_of=tuple(tuple(group) for group in entry.get("one_of", ())),
                subcommands=tuple(entry.get("subcommands", ())),
                default_subcommand=bool(entry.get("default_subcommand")),
                siblings=tuple(entry.get("siblings", ())),
                rules=tuple(entry.get("rules", ())),
                sources=tuple(sources),
                confidence=str(entry.get("confidence", "unknown")),
            )
    return table


@lru_cache(maxsize=1)
def old_flags() -> Mapping[str, str]:
    """Flags of the time before the convert/build split -> what to do instead."""
    table: dict[str, str] = {}
    for path in sorted(DATA.glob("trtllm_cli*.json")):
        entries = json.loads(path.read_text(encoding="utf-8")).get("old_flags", {})
        table.update({name: entry["remedy"] for name, entry in entries.items()})
    return table


def command(name: str) -> Command:
    """The recorded command `name`; KeyError with the nearest names when there is none."""
    table = commands()
    if name not in table:
        raise KeyError(f"no facts are recorded for the command {name!r}; recorded are: {', '.join(sorted(table))}")
    return table[name]


def flags(name: str) -> Mapping[str, Flag]:
    """The flag table of one command: main spelling -> `Flag`, in the official order."""
    return command(name).flags


def stages_of(spelling: str) -> list[Command]:
    """Every command that has a flag with this spelling, in the order of the course's stages."""
    found = [entry for entry in commands().values() if entry.find(spelling)]
    return sorted(found, key=lambda entry: STAGES.index(entry.stage) if entry.stage in STAGES else len(STAGES))
