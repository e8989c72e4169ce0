"""``workshop doctor``: what this machine is and what stands in the way, readable or as JSON."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import asdict

from trtllm_workshop.findings import Finding, doctor, preflight_tensorrt_llm
from trtllm_workshop.machine import GIB, Machine, detect
from trtllm_workshop.parameters import ParameterProblem, existing_part, work_folder
from trtllm_workshop.precision import precision_support


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the report; returns 1 only if an "error" finding exists, else 0."""
    parser = argparse.ArgumentParser(prog="workshop doctor", description="Check this machine for the course.")
    parser.add_argument("--work-dir", default="work", help="folder that a run writes to (default: work)")
    parser.add_argument("--install", action="store_true", help="check for installing TensorRT-LLM 1.2.1 instead")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(argv)
    machine = detect(options.work_dir)
    findings = preflight_tensorrt_llm(machine) if options.install else doctor(machine)
    findings = [*work_dir_findings(options.work_dir), *findings]
    if options.json:
        print(json.dumps({"machine": machine.to_dict(), "findings": [asdict(found) for found in findings]}, indent=2))
    else:
        print(render(machine, findings))
    return int(any(found.severity == "error" for found in findings))


def work_dir_findings(work_dir: str) -> list[Finding]:
    """An error when a run could not make or fill this folder."""
    try:
        there = existing_part(work_folder(work_dir))
    except ParameterProblem as problem:
        return [Finding("error", "work-dir", str(problem), "give --work-dir FOLDER, a new folder or one of your own")]
    if os.access(there, os.W_OK | os.X_OK):
        return []
    text = f"the work folder {work_dir} cannot be written: {there} is read-only for you"
    return [Finding("error", "work-dir", text, "give --work-dir FOLDER, a place where you may write")]


def render(machine: Machine, findings: Sequence[Finding]) -> str:
    """The report as plain text."""
    lines = [f"{'Machine':<10} {machine.summary()}"]
    flags = " ".join(machine.cpu.flags)
    lines.append(
        f"{'CPU':<10} {machine.cpu.model}, {machine.cpu.cores} usable cores, instructions: {flags or 'unknown'}"
    )
    if machine.ram_total and machine.ram_available is not None:
        lines.append(f"{'Memory':<10} {machine.ram_available / GIB:.1f} of {machine.ram_total / GIB:.1f} GB available")
    for gpu in machine.gpus:
        lines.append(f"{'GPU ' + str(gpu.index):<10} {gpu.describe()}")
        for name, support in precision_support(gpu.compute_capability).items():
            verdict = {True: "yes", False: "no", None: "unknown"}[support.supported]
            lines.append(f"{'':<10}   {name:<13} {verdict:<8} {support.reason}")
    if machine.gpus:
        versions = f"{machine.driver_version or 'unknown'}, CUDA up to {machine.cuda_version or 'unknown'}"
        lines.append(f"{'Driver':<10} {versions} (asked through {machine.gpu_source})")
    for folder in machine.folders:
        lines.append(f"{'Disk':<10} {folder.free_bytes / 1e9:.1f} GB free for the {folder.role} folder {folder.path}")
    lines.append(f"{'MPI':<10} mpirun {machine.mpi.mpirun or 'not found'}, mpicc {machine.mpi.mpicc or 'not found'}")
    lines.append(f"{'Packages':<10} {', '.join(f'{name} {version}' for name, version in machine.packages.items())}")
    lines.append("")
    for found in findings:
        lines += [f"{found.severity.upper():<8} {found.message}", f"{'':<8} fix: {found.fix}"]
    if not any(found.severity != "info" for found in findings):
        lines.append("No problem found.")
    return "\n".join(lines)
