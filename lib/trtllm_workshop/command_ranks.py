"""How many ranks a command line starts, and how many the engine that it names was built for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trtllm_workshop.checkpoint import RankMapping, config_section, read_config
from trtllm_workshop.command_facts import Command
from trtllm_workshop.problem import Problem, error
from trtllm_workshop.shell_words import is_placeholder

LAUNCHERS = ("mpirun", "mpiexec", "srun")
_COUNT = ("-n", "-np", "--np", "--n", "--ntasks")
# Options of the launchers that take no value; every other one takes the next word (--mca takes two).
_SWITCHES = {
    "--allow-run-as-root",
    "--oversubscribe",
    "--use-hwthread-cpus",
    "--tag-output",
    "--timestamp-output",
    "--report-bindings",
    "--display-map",
    "--quiet",
    "-q",
    "-v",
}

Values = Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class Launch:
    """What stands in front of the program: the launcher, the words that it uses up, and its number of ranks.

    `ranks` is None when the number is not known before the run (a placeholder, or what Slurm gives).
    """

    program: str
    words: int
    ranks: int | None
    problems: tuple[Problem, ...] = ()


def read_launcher(words: Sequence[str]) -> Launch:
    """The launcher at the start of `words` and its options. Understood are -n N, -np N, --np=N and the like."""
    program, position, count = Path(words[0]).name, 1, None
    while position < len(words) and words[position].startswith("-"):
        option, equals, value = words[position].partition("=")
        if option in _COUNT:
            count = value if equals else (words[position + 1] if position + 1 < len(words) else "")
        if equals or option in _SWITCHES:
            position += 1
        else:
            position += {"--mca": 3, "-mca": 3, "--prtemca": 3}.get(option, 2)
    if count is None:
        missing = error(f"{program} without -n starts one rank for every core", f"write {program} -n N, N = tp x pp")
        return Launch(program, position, None, () if program == "srun" else (missing,))
    if is_placeholder(count):
        return Launch(program, position, None)
    if not count.isdecimal() or int(count) < 1:
        wrong = error(f"{program} -n {count}: not a number of ranks", "give a whole number from 1, N = tp x pp")
        return Launch(program, position, None, (wrong,))
    return Launch(program, position, int(count))


@dataclass
class WorldSizes:
    """The ranks of the folders that earlier lines make, by the word that names them (also ``{engine}``).

    None stands for a number that is not known. A folder that is on the disk is looked into, whatever the lines said.
    """

    _made: dict[str, int | None] = field(default_factory=dict)

    def note(self, entry: Command, values: Values) -> None:
        """Remembers what this line will write, if it writes a checkpoint or an engine."""
        (target, *_) = values.get("--output_dir", ("",))
        if not target:
            return
        if entry.stage in ("convert", "quantize"):
            tp, pp = (_number(values, flag) for flag in ("--tp_size", "--pp_size"))
            self._made[target] = None if tp is None or pp is None else tp * pp
        elif entry.stage == "build":
            (source, *_) = values.get("--checkpoint_dir", ("",))
            self._made[target] = self.of(source) if source else None

    def of(self, word: str) -> int | None:
        """The number of ranks of the folder that `word` names; None when it is not known."""
        if not is_placeholder(word) and Path(word).is_dir():
            return _stored(word)
        return self._made.get(word)


def check_world_size(entry: Command, values: Values, launch: Launch | None, sizes: WorldSizes) -> list[Problem]:
    """P63: whether run.py is started with as many ranks as its engine has; nothing when either number is not known."""
    (folder, *_) = values.get("--engine_dir", ("",))
    if entry.stage != "run" or not folder:
        return []
    built, started = sizes.of(folder), 1 if launch is None else launch.ranks
    if built is None or started is None or built == started:
        return []
    fix = f"write mpirun -n {built} python run.py …" if built > 1 else "leave mpirun out"
    also = f", or convert again with --tp_size {started}" if started > 1 or launch is None else ""
    message = f"{folder} is an engine for {built} rank{'s' * (built > 1)}, and this line starts {started}"
    return [error(message, fix + also)]


def _number(values: Values, flag: str) -> int | None:
    text = values.get(flag, ("1",))[0]
    return int(text) if text.isdecimal() else None


def _stored(folder: str) -> int | None:
    try:
        config = read_config(folder)
        place = RankMapping.from_config(config_section(config, "pretrained_config") or config)
    except (OSError, ValueError):
        return None  # the command itself says what is wrong with the folder
    return place.tp_size * place.pp_size
