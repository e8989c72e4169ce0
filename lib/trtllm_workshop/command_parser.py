"""argparse parsers that accept official flags only, each with the official type, choices and default.

A reference command implements part of the official flags. The rest must neither vanish nor be ignored silently:

* an official flag that is not implemented is refused by name; given with its official default it is accepted,
  since leaving it out would mean the same;
* a flag that exists at another stage, was removed, or is made up is refused with the remedy.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from trtllm_workshop.command_facts import Command, Flag, command
from trtllm_workshop.flag_hints import unknown_flag_hint

TRUE_WORDS = ("yes", "true", "t", "y", "1", "on")
FALSE_WORDS = ("no", "false", "f", "n", "0", "off")


def text_to_bool(text: str) -> bool:
    """Turn yes/true/t/1 and no/false/f/0 into a bool; any other text is an error that names it."""
    if text.lower() in TRUE_WORDS:
        return True
    if text.lower() in FALSE_WORDS:
        return False
    raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false; write one of true, false")


def _at_least(minimum: int) -> Callable[[str], int]:
    def convert(text: str) -> int:
        value = int(text)
        if value < minimum:
            raise argparse.ArgumentTypeError(f"{value} is below the smallest allowed value {minimum}")
        return value

    convert.__name__ = "int"
    return convert


def converter(flag: Flag) -> Callable[[str], Any]:
    """The function that turns the flag's text into its value (str, int, float or bool)."""
    if flag.type == "int":
        return int if flag.minimum is None else _at_least(flag.minimum)
    table: dict[str, Callable[[str], Any]] = {"float": float, "bool": text_to_bool}
    return table.get(flag.type, str)


class _Refuse(argparse.Action):
    """Refuses an official flag that is not implemented, unless its value is the official default."""

    def __init__(self, flag: Flag, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.flag = flag

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        flag = self.flag
        if flag.is_switch:
            values = flag.action == "store_true" or (flag.action == "pair" and option_string not in flag.negative)
        if flag.default_symbol is None and flag.default is not None and values == flag.default:
            return
        shown = "" if flag.is_switch else f" {' '.join(map(str, values)) if isinstance(values, list) else values}"
        parser.error(
            f"{option_string}{shown} is an official flag that the reference toolchain does not implement: "
            + ("leave it out" if flag.default is None else f"leave it out (its default is {flag.default})")
            + ", or run this command with the tensorrt_llm toolchain"
        )


class _SwitchPair(argparse.Action):
    """Two spellings of one on/off choice, as argparse.BooleanOptionalAction and click's --on/--off make them."""

    def __init__(self, negative: Sequence[str], **kwargs: Any) -> None:
        super().__init__(nargs=0, **kwargs)
        self.negative = tuple(negative)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, option_string not in self.negative)


def _help(flag: Flag, text: str) -> str:
    """The line of --help: `text`, and the default where it is a value that the user could have written."""
    plain = flag.default is not None and not (flag.is_switch or flag.required or flag.positional)
    shown = f"(default: {flag.default})" if plain and not flag.absent_unless_given else ""
    return " ".join(part for part in (text, shown) if part).replace("%", "%%")


def _add(parser: argparse.ArgumentParser, flag: Flag, text: str) -> None:
    default = argparse.SUPPRESS if flag.absent_unless_given else flag.default
    common: dict[str, Any] = {"default": default, "help": _help(flag, text)}
    if flag.positional:
        parser.add_argument(flag.dest, metavar=flag.name, type=converter(flag), help=common["help"])
        return
    common.update(dest=flag.dest, required=flag.required)
    if flag.action == "pair":
        parser.add_argument(*flag.spellings, action=_SwitchPair, negative=flag.negative, **common)
    elif flag.is_switch:
        parser.add_argument(*flag.spellings, action=flag.action, **common)
    else:
        extra = {} if flag.nargs != "?" else {"const": flag.const}
        choices = None if flag.choices is None else [c for c in flag.accepted_choices or () if c is not None]
        parser.add_argument(
            *flag.spellings,
            action=flag.action,
            type=converter(flag),
            nargs=flag.nargs,
            choices=choices,
            **extra,
            **common,
        )


def _add_refused(parser: argparse.ArgumentParser, flag: Flag) -> None:
    if flag.positional:
        return
    nargs = 0 if flag.is_switch else flag.nargs
    kind = {} if flag.is_switch else {"type": converter(flag)}
    parser.add_argument(
        *flag.spellings,
        action=_Refuse,
        flag=flag,
        nargs=nargs,
        const=flag.const,
        dest=argparse.SUPPRESS,
        default=argparse.SUPPRESS,
        help=argparse.SUPPRESS,
        **kind,  # type: ignore[arg-type]
    )


def _explain_unknown_flags(parser: argparse.ArgumentParser, entry: Command) -> None:
    original = parser.parse_known_args

    def parse_known_args(args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        given = list(sys.argv[1:] if args is None else args)
        for position, token in enumerate(given):
            if token == "--":
                break
            spelling = token.split("=", 1)[0]
            if len(spelling) < 3 or not spelling.startswith("--") or spelling in parser._option_string_actions:
                continue
            _refuse_unknown(parser, entry, spelling, given, position)
        return original(given, namespace)

    # Shadowing the method on this one parser leaves argparse and other parsers untouched; it has to happen before
    # argparse's own pass, because that pass drops the neighbours of the unknown flag which the remedy needs.
    vars(parser)["parse_known_args"] = parse_known_args


def _refuse_unknown(
    parser: argparse.ArgumentParser, entry: Command, spelling: str, given: list[str], position: int
) -> NoReturn:
    hint = unknown_flag_hint(entry, spelling, given)
    parser.error(f"unrecognized arguments: {given[position]}: {hint}")


def add_arguments(
    parser: argparse.ArgumentParser, name: str, names: Iterable[str], helps: Mapping[str, str] | None = None
) -> None:
    """Add the flags `names` of the official command `name` to `parser`, and refuse all others with a remedy.

    Call it once per parser. `names` are official spellings (``--model_dir``, also without dashes, or a positional
    such as ``MODEL``); a name that is not official raises KeyError. `helps` gives flags (by main spelling) their line of
    --help; others show the recorded note. Refusals end the process with code 2 and argparse's own form
    ``prog: error: …``. Abbreviated flags are switched off, because they make typing errors pass.
    """
    entry = command(name)
    parser.allow_abbrev = False
    wanted = []
    for given in names:
        flag = entry.find(given) or entry.find("--" + given)
        if flag is None:
            raise KeyError(f"{given!r} is not an official flag of {name}: {unknown_flag_hint(entry, given, [])}")
        wanted.append(flag)
    for flag in entry.flags.values():
        if flag in wanted:
            _add(parser, flag, (helps or {}).get(flag.name) or flag.note or "")
        else:
            _add_refused(parser, flag)
    _explain_unknown_flags(parser, entry)


def command_parser(
    name: str, names: Iterable[str], description: str | None = None, helps: Mapping[str, str] | None = None
) -> argparse.ArgumentParser:
    """A parser for the official command `name` that accepts the flags `names`; see `add_arguments`."""
    parser = argparse.ArgumentParser(prog=command(name).program, description=description, allow_abbrev=False)
    add_arguments(parser, name, names, helps)
    return parser
