"""The ``workshop`` command. Every subcommand imports only what it needs, so that ``doctor`` works on a bare machine."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trtllm_workshop.parameters import PROFILES, TOOLCHAINS


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand and returns its exit code: 0 well, 1 a failure that was explained, 2 a wrong command line."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["doctor"]:
        from trtllm_workshop import doctor

        return int(doctor.main(words[1:]) or 0)
    parser = _parser()
    arguments = parser.parse_args(words)
    if not arguments.command:
        parser.print_help()
        return 2
    try:
        return int(arguments.action(arguments))
    except _expected() as problem:
        print(f"workshop {arguments.command}: {problem}", file=sys.stderr)
        return 1
    except OSError as error:
        from trtllm_workshop.reference.output_errors import output_error

        if not hasattr(arguments, "work_dir"):
            raise
        folder = arguments.work_dir or "work"
        print(f"workshop {arguments.command}: {output_error(error, '--work-dir', folder)}", file=sys.stderr)
        return 1


def _expected() -> tuple[type[Exception], ...]:
    """Errors whose text is made for the reader; anything else keeps its traceback."""
    from trtllm_workshop.command_line import CommandLineError
    from trtllm_workshop.course import CourseProblem
    from trtllm_workshop.load_problem import LoadProblem
    from trtllm_workshop.model_spec import UnsupportedModel
    from trtllm_workshop.parameters import ParameterProblem
    from trtllm_workshop.planner_gpus import PlanProblem
    from trtllm_workshop.toolchain import ToolchainNotFound

    return (
        CourseProblem,
        ParameterProblem,
        CommandLineError,
        ToolchainNotFound,
        PlanProblem,
        UnsupportedModel,
        LoadProblem,
    )


def _parser() -> argparse.ArgumentParser:
    from trtllm_workshop import bench_url_cli, planner_cli

    parser = argparse.ArgumentParser(
        prog="workshop", description="From model weights to an API endpoint with TensorRT-LLM."
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    commands.add_parser("doctor", help="look at this machine and say what to fix (--json for scripts)", add_help=False)

    run = commands.add_parser("run", help="execute notebooks headlessly and write the report")
    run.add_argument("notebooks", nargs="*", metavar="NN", help="02, 02-04 or a file name; all without")
    _course_options(run, "full: the lesson as written (default)")
    run.add_argument("--resume", action="store_true", help="skip what passed earlier and has not changed")
    run.add_argument("--keep-going", action="store_true", help="run the later notebooks even after a failure")
    run.add_argument(
        "-p", dest="given", action="append", default=[], metavar="NAME=VALUE", help="a parameter; repeatable"
    )
    run.set_defaults(action=_run)

    catch_up = commands.add_parser("catch-up", help="run what notebook NN builds on, as far as it is missing")
    catch_up.add_argument(
        "notebook", metavar="NN", help="the notebook that you want to begin with; it is not run itself"
    )
    _course_options(catch_up, "the default here; full: the lessons as written")
    catch_up.set_defaults(action=_catch_up)

    check = commands.add_parser("check", help="look again at what the lessons left in the work folder")
    check.add_argument("notebooks", nargs="*", metavar="NN")
    _folders(check)
    check.add_argument("--json", action="store_true")
    check.set_defaults(action=_check)

    execute = commands.add_parser(
        "exec", help="run a command line inside a toolchain: workshop exec -- trtllm-build ..."
    )
    execute.add_argument("--toolchain", choices=TOOLCHAINS, default="auto")
    execute.add_argument("line", nargs=argparse.REMAINDER, metavar="-- COMMAND ...")
    execute.set_defaults(action=_exec)

    planner_cli.add(commands)
    bench_url_cli.add(commands)

    report = commands.add_parser("report", help="write work/report.html again from the recorded results")
    _folders(report)
    report.set_defaults(action=_report)

    stamp = commands.add_parser("stamp", help="write the repository's address into the notebooks' first code cell")
    stamp.add_argument("--repo", required=True, metavar="OWNER/NAME|URL")
    stamp.add_argument("--notebooks-dir", type=Path, metavar="FOLDER")
    stamp.set_defaults(action=_stamp)
    return parser


def _folders(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--notebooks-dir", type=Path, metavar="FOLDER", help="default: this checkout's notebooks")
    parser.add_argument("--work-dir", metavar="FOLDER", help="default: work beside the notebooks' folder")


def _course_options(parser: argparse.ArgumentParser, profiles: str) -> None:
    _folders(parser)
    parser.add_argument("--profile", choices=PROFILES, help=f"smoke: little work; {profiles}")
    parser.add_argument("--toolchain", choices=TOOLCHAINS)
    parser.add_argument("--model", metavar="ORG/NAME")
    parser.add_argument("--timeout", type=_seconds, metavar="SECONDS", help="for each notebook; default 3600")
    parser.add_argument("--json", action="store_true", help="print the state of the run as JSON as well")


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e7:
        raise argparse.ArgumentTypeError(f"{text} is not a time in seconds above 0")
    return value


def _places(arguments: argparse.Namespace) -> tuple[Path, Any]:
    from trtllm_workshop import course
    from trtllm_workshop.parameters import work_folder
    from trtllm_workshop.workspace import Workspace

    folder = course.notebooks_folder(arguments.notebooks_dir)
    chosen = folder.parent / "work" if arguments.work_dir is None else arguments.work_dir
    return folder, Workspace(work_folder(chosen))


def _options(arguments: argparse.Namespace, **further: Any) -> Any:
    from trtllm_workshop import course

    return course.Options(
        profile=arguments.profile,
        toolchain=arguments.toolchain,
        model=arguments.model,
        timeout=arguments.timeout or course.DEFAULT_TIMEOUT,
        **further,
    )


def _run(arguments: argparse.Namespace) -> int:
    from trtllm_workshop import course
    from trtllm_workshop.parameters import ParameterProblem

    given = {}
    for text in arguments.given:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise ParameterProblem(f"-p {text!r} is not NAME=VALUE")
        given[name] = value
    folder, workspace = _places(arguments)
    options = _options(arguments, given=given, resume=arguments.resume, keep_going=arguments.keep_going)
    code, _ = course.run(course.select(folder, arguments.notebooks), options, workspace, _stream(arguments))
    return _finish(arguments, workspace, code)


def _catch_up(arguments: argparse.Namespace) -> int:
    from trtllm_workshop import course

    folder, workspace = _places(arguments)
    (target,) = course.select(folder, [arguments.notebook])
    code, entries = course.catch_up(course.select(folder), target.number, _options(arguments), workspace)
    if not entries:
        print(f"Nothing to do: everything that {target.name} needs is there.", file=_stream(arguments))
        return 0
    return _finish(arguments, workspace, code)


def _stream(arguments: argparse.Namespace) -> Any:
    """Progress leaves standard output to the JSON when that was asked for."""
    return sys.stderr if arguments.json else sys.stdout


def _finish(arguments: argparse.Namespace, workspace: Any, code: int) -> int:
    from trtllm_workshop import course, report

    print(f"Report: {report.write(workspace)}", file=_stream(arguments))
    if arguments.json:
        print(course.state_file(workspace).read_text(encoding="utf-8"))
    return code


def _check(arguments: argparse.Namespace) -> int:
    from trtllm_workshop import course

    folder, workspace = _places(arguments)
    found = {nb.number: course.check(nb.number, workspace) for nb in course.select(folder, arguments.notebooks)}
    if arguments.json:
        print(json.dumps({"ok": not any(found.values()), "lessons": found}, indent=2))
    else:
        for number, problems in found.items():
            print(f"✗ {number}: " + "; ".join(problems) if problems else f"✓ {number}: holds")
            if problems:
                print(f"  Make it again: workshop run {number}")
    return 1 if any(found.values()) else 0


def _exec(arguments: argparse.Namespace) -> int:
    """The child takes over this process's terminal and its exit code; signals reach it directly."""
    from trtllm_workshop.command_line import CommandLineError
    from trtllm_workshop.toolchain import choose

    line = arguments.line[1:] if arguments.line[:1] == ["--"] else arguments.line
    if not line:
        raise CommandLineError("there is no command; write it after --, as in: workshop exec -- trtllm-build --help")
    toolchain = choose(arguments.toolchain, quiet=True)
    print(f"toolchain: {toolchain.name} {toolchain.version} ({toolchain.reason})", file=sys.stderr, flush=True)
    toolchain.exec_command(line)


def _report(arguments: argparse.Namespace) -> int:
    from trtllm_workshop import report

    print(report.write(_places(arguments)[1]))
    return 0


def _stamp(arguments: argparse.Namespace) -> int:
    from trtllm_workshop import course
    from trtllm_workshop.stamp import stamp

    folder = course.notebooks_folder(arguments.notebooks_dir)
    changed = stamp(folder, arguments.repo)
    print(f"Repository {arguments.repo}: {len(changed)} notebooks in {folder} changed.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
