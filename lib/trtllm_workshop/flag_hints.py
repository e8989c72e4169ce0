"""What to do about a flag that a command does not have: removed, of another stage, of a later release, or made up."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from trtllm_workshop.command_facts import Command, old_flags, stages_of


def value_of(argv: Sequence[str], spelling: str) -> str | None:
    """The text given for a flag, as ``--flag value`` or ``--flag=value``; the last one counts, None when absent."""
    found = None
    for position, token in enumerate(argv):
        if token == spelling and position + 1 < len(argv):
            found = argv[position + 1]
        elif token.startswith(spelling + "="):
            found = token.split("=", 1)[1]
    return found


def _int(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None


def max_seq_len_hint(argv: Sequence[str]) -> str:
    """What to write instead of the removed ``--max_output_len``: max_seq_len is input plus output."""
    output, inputs = _int(value_of(argv, "--max_output_len")), _int(value_of(argv, "--max_input_len"))
    given = _int(value_of(argv, "--max_seq_len"))
    text = "the flag was removed; --max_seq_len = input + output"
    if output is None:
        return text
    if inputs is None:
        if given is not None:
            return (
                f"{text}. --max_seq_len {given} leaves {given - output} tokens for the prompt: "
                "if that is what you want, leave --max_output_len out"
                if given > output
                else f"{text}, and --max_seq_len {given} does not even hold {output} output tokens: "
                f"write the longest prompt + {output}"
            )
        return f"{text}: write --max_seq_len with the longest prompt you expect + {output}"
    if given is not None and given != inputs + output:
        return (
            f"{text}: {inputs} + {output} = {inputs + output}, but --max_seq_len {given} is given: "
            f"write --max_seq_len {inputs + output} and leave --max_output_len out"
        )
    return f"{text}: write --max_seq_len {inputs + output} ({inputs} + {output})"


def _words(spelling: str) -> str:
    return spelling.lstrip("-").replace("_", "-").lower()


def nearest_flag(entry: Command, spelling: str) -> tuple[str, float]:
    """The command's real flag that looks most like `spelling`, and how alike they are (1 = same words)."""
    known = {_words(name): name for flag in entry.flags.values() for name in flag.spellings}
    wanted = _words(spelling)
    best = difflib.get_close_matches(wanted, known, n=1, cutoff=0.0)[0]
    return known[best], difflib.SequenceMatcher(None, best, wanted).ratio()


def unknown_flag_hint(entry: Command, spelling: str, argv: Sequence[str]) -> str:
    """Why `entry` has no flag `spelling`, and the one thing to do about it."""
    if spelling == "--max_output_len" and entry.stage in ("convert", "quantize"):
        return f"lengths are chosen later, by trtllm-build; there {max_seq_len_hint(argv)}"
    if spelling == "--max_output_len" and spelling in entry.removed:
        return max_seq_len_hint(argv)
    if spelling in entry.removed:
        return f"removed in newer releases; {entry.removed[spelling]}"
    if spelling in old_flags():
        return f"an old flag, from before conversion and build were two commands; {old_flags()[spelling]}"
    if spelling in entry.later:
        return "not proven to exist in 1.2.1, it was seen only in later releases: leave it out"
    near, likeness = nearest_flag(entry, spelling)
    # The same words with another separator are a typing error, even when another command spells it that way.
    if likeness == 1:
        return f"did you mean {near}?"
    owners = [other for other in stages_of(spelling) if other.name != entry.name]
    if owners:
        owned = owners[0].find(spelling)
        note = f" ({owned.note})" if owned is not None and owned.deprecated and owned.note else ""
        return f"it belongs to another command: give this to {owners[0].name}{note}"
    if likeness >= 0.7:
        return f"did you mean {near}?"
    return f"no such flag exists; the nearest real one is {near}, all are listed by {entry.program} --help"
