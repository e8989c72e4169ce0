"""What a lesson builds on, read from ``notebooks/syllabus.yml``."""

from __future__ import annotations

from pathlib import Path

NAME = "syllabus.yml"


def prerequisites(folder: Path, number: str) -> set[str] | None:
    """The numbers of all lessons that lesson ``number`` builds on: those of its list ``after``, theirs, and so on.

    None when ``folder`` has no syllabus or the syllabus does not list the lesson. Raises ValueError for a syllabus that
    cannot be read, and for lessons that build on each other in a circle.
    """
    path = folder / NAME
    if not path.is_file():
        return None
    after = _after(path)
    if number not in after:
        return None
    found: set[str] = set()
    open_ends = [number]
    while open_ends:
        for earlier in after.get(open_ends.pop(), []):
            if earlier == number:
                raise ValueError(f"{path}: lesson {number} builds on itself, by way of {', '.join(sorted(found))}")
            if earlier not in found:
                found.add(earlier)
                open_ends.append(earlier)
    return found


def _after(path: Path) -> dict[str, list[str]]:
    """{number: numbers of its list ``after``} of every lesson."""
    import yaml

    try:
        lessons = yaml.safe_load(path.read_text(encoding="utf-8"))["lessons"]
        return {str(lesson["notebook"])[:2]: [str(number) for number in lesson["after"]] for lesson in lessons}
    except (yaml.YAMLError, ValueError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path} cannot be read ({type(error).__name__}: {reason:.200}): mend it") from error
