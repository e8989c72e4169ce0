"""One notebook executed by papermill in a process of its own; ``course.py`` starts it as ``python -m``.

A process of its own, because then a dead kernel, a hanging cell or a crash of the client ends one notebook and never
the run. The job arrives as JSON on stdin; events leave as JSON lines on the file descriptor that the job names.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from trtllm_workshop.hub_tokens import known_tokens

KERNEL = "trtllm-workshop"  # a kernel spec that the runner writes for its own interpreter


def main() -> int:
    """Executes the job on stdin and reports; 0 even when the notebook fails, since that is an event, not a crash."""
    job = json.load(sys.stdin)
    with os.fdopen(job["events_fd"], "w", encoding="utf-8") as stream:

        def report(event: str, **fields: Any) -> None:
            stream.write(json.dumps({"event": event, **fields}) + "\n")
            stream.flush()

        report("end", **execute(job, report))
    return 0


def execute(job: dict[str, Any], report: Any) -> dict[str, Any]:
    """Runs the notebook and returns ``{"status": "done"|"failed"|"kernel died", "error": {...} or None}``."""
    from nbclient.exceptions import DeadKernelError
    from papermill import execute_notebook
    from papermill.exceptions import PapermillExecutionError

    engine = _register_engine(report)
    try:
        execute_notebook(
            _literal(job["notebook"]),
            _literal(job["output"]),
            parameters=job["parameters"],
            engine_name=engine,
            kernel_name=KERNEL,
            language="python",
            progress_bar=False,
            cwd=job["cwd"],
        )
    except PapermillExecutionError as error:
        return {"status": "failed", "error": {"name": error.ename, "message": error.evalue}}
    except DeadKernelError as error:
        return {"status": "kernel died", "error": {"name": "DeadKernelError", "message": str(error)}}
    except Exception as error:  # the client itself failed, for example because the kernel did not start
        return {"status": "failed", "error": {"name": type(error).__name__, "message": str(error)}}
    return {"status": "done", "error": None}


def _literal(path: str) -> str:
    """papermill fills ``{name}`` in paths with parameters; a folder may really have braces in its name."""
    return path.replace("{", "{{").replace("}", "}}")


def hide(value: Any, secrets: list[str]) -> Any:
    """Outputs of a cell with every token replaced: executed notebooks and reports are passed on to others."""
    if isinstance(value, str):
        for secret in secrets:
            value = value.replace(secret, "***")
        return value
    if isinstance(value, list):
        return [hide(item, secrets) for item in value]
    if isinstance(value, dict):
        for key in value:
            value[key] = hide(value[key], secrets)
    return value


def _register_engine(report: Any) -> str:
    """papermill's own engine, with an event at the start of every code cell."""
    from papermill.engines import NBClientEngine, papermill_engines

    secrets = known_tokens(os.environ)

    class ReportingEngine(NBClientEngine):
        @classmethod
        def execute_managed_notebook(cls, nb_man: Any, kernel_name: str, **options: Any) -> Any:
            cells = nb_man.nb.cells
            code = [index for index, cell in enumerate(cells) if cell.cell_type == "code"]
            announce = nb_man.cell_start
            report("start", cells=len(code))

            def cell_start(cell: Any, cell_index: int, **rest: Any) -> None:
                if cell.cell_type == "code":
                    report("cell", index=cell_index, position=code.index(cell_index) + 1, source=cell.source[:2000])
                announce(cell, cell_index, **rest)

            complete = nb_man.cell_complete

            def cell_complete(cell: Any, cell_index: int, **rest: Any) -> None:
                if cell.cell_type == "code":  # before papermill saves the cell, or quotes its error
                    cell["outputs"] = hide(cell.outputs, secrets)
                complete(cell, cell_index, **rest)

            nb_man.cell_start, nb_man.cell_complete = cell_start, cell_complete
            # A line that was printed piece by piece stays one line in the executed copy.
            return super().execute_managed_notebook(nb_man, kernel_name, coalesce_streams=True, **options)

    papermill_engines.register("trtllm-workshop", ReportingEngine)
    return "trtllm-workshop"


if __name__ == "__main__":
    sys.exit(main())
