"""Small things that the tests of quantize.py share: calibration texts, a run without a command line, tensors by rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import CORPUS
from trtllm_workshop.reference.quantize import Quantized, QuantizeOptions, quantize


def calibration_set(folder: Path, texts: list[str] | None = None) -> Path:
    """A folder with train.jsonl: `texts`, or twelve pieces of the tiny corpus."""
    if texts is None:
        corpus = " ".join(CORPUS.read_text(encoding="utf-8").split())
        texts = [corpus[start : start + 200] for start in range(0, 1200, 100)]
    folder.mkdir(parents=True, exist_ok=True)
    rows = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (folder / "train.jsonl").write_text(rows, encoding="utf-8")
    return folder


def run(source: Path, target: Path, data: Path | None, qformat: str = "fp8", **options: Any) -> tuple[Quantized, str]:
    """(result, everything that was said) of one run on the processor."""
    lines: list[str] = []
    given = {"calib_dataset": str(data)} if data else {}
    result = quantize(source, target, QuantizeOptions(qformat, device="cpu", **given, **options), lines.append)
    return result, "\n".join(lines)


def ranks(folder: Path) -> list[dict[str, torch.Tensor]]:
    """The tensors of every rank, in order."""
    return [load_file(folder / f"rank{n}.safetensors") for n in range(len(list(folder.glob("rank*.safetensors"))))]


def hf_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a Hugging Face folder, in float32."""
    state: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        state |= {name: tensor.float() for name, tensor in load_file(file).items()}
    return state


def scale_rows(source: Path, factors: dict[str, float]) -> None:
    """Multiplies tensors of a Hugging Face folder (one file), so that their outputs leave the usual range."""
    from safetensors.torch import save_file

    file = source / "model.safetensors"
    state = load_file(file)
    for name, factor in factors.items():
        state[name] = state[name] * factor
    save_file(state, file, metadata={"format": "pt"})


def refused(source: Path, target: Path, data: Path | str, *words: str, qformat: str = "fp8", **options: Any) -> None:
    """The run fails before any batch, its message holds the words, and the folder of the target is as before."""
    before = sorted(target.parent.iterdir()) if target.parent.is_dir() else None
    said: list[str] = []
    given = QuantizeOptions(qformat, device="cpu", calib_dataset=str(data), **options)
    with pytest.raises(ValueError) as caught:
        quantize(source, target, given, said.append)
    for word in words:
        assert word in str(caught.value), str(caught.value)
    assert not any(line.startswith("calibrating") for line in said)
    assert (sorted(target.parent.iterdir()) if target.parent.is_dir() else None) == before
