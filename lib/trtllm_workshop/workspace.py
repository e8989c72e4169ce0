"""Where a run puts its files: every path of the course, derived from one root folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


def short_name(model: str) -> str:
    """The part of a hub id (`org/name`) or folder path that names the model; ValueError when there is none."""
    parts = [part for part in str(model).strip().replace("\\", "/").split("/") if part not in ("", ".", "..")]
    if not parts:
        raise ValueError(f"model is {model!r}, which names no model: give a hub id such as 'org/name' or a folder")
    return parts[-1]


@dataclass(frozen=True)
class Workspace:
    """The folders below `root`. Methods only compute paths; nothing is created or read here."""

    root: Path

    def __post_init__(self) -> None:
        # Absolute, so that a later os.chdir in a notebook does not move the run's files.
        object.__setattr__(self, "root", Path(self.root).expanduser().absolute())

    def model_dir(self, model: str) -> Path:
        """The folder with the Hugging Face files of `model` (a hub id)."""
        short_name(model)
        return self.root / "models" / str(model).strip().strip("/").replace("/", "--")

    def checkpoint_dir(self, model: str, precision: str = "float16", tp: int = 1) -> Path:
        """The TensorRT-LLM checkpoint of `model` in `precision`, split over `tp` ranks."""
        return self.root / "checkpoints" / short_name(model) / f"{precision}-tp{tp}"

    def engine_dir(self, model: str, precision: str = "float16", tp: int = 1) -> Path:
        """The engine that is built from `checkpoint_dir` with the same arguments."""
        return self.root / "engines" / short_name(model) / f"{precision}-tp{tp}"

    @property
    def results(self) -> Path:
        """One JSON file of predictions, measurements and checks per notebook."""
        return self.root / "results"

    @property
    def executed(self) -> Path:
        """The notebooks with their outputs."""
        return self.root / "executed"

    @property
    def logs(self) -> Path:
        """Full output of long commands."""
        return self.root / "logs"

    @property
    def report(self) -> Path:
        """The page that sums up a run."""
        return self.root / "report.html"
