"""Which number formats TensorRT-LLM can use on a GPU, by compute capability, each with its reason.

Sources: the hardware tables of TensorRT-LLM's documentation (legacy support matrix of the TensorRT 10.13 era and
quantization page, neither read at the 1.2.1 tag itself), and users' reports for cards that are not listed there.
"""

from __future__ import annotations

from dataclasses import dataclass

PRECISIONS = ("fp16", "bf16", "int8", "fp8", "fp8_kv_cache", "fp4")


@dataclass(frozen=True)
class Support:
    """A verdict and its reason; ``supported`` is None when it cannot be decided."""

    supported: bool | None
    reason: str


def parse_capability(text: str | None) -> tuple[int, int] | None:
    """(major, minor) of a compute capability such as "8.9", None when absent or malformed."""
    major, _, minor = (text or "").partition(".")
    return (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else None


def runs_tensorrt_llm(compute_capability: str | None) -> Support:
    """Whether TensorRT-LLM 1.2.1 has kernels for the GPU at all."""
    capability = parse_capability(compute_capability)
    if capability is None:
        return Support(None, "the driver does not report the compute capability")
    if capability < (7, 5):
        return Support(False, f"compute capability {compute_capability}: Volta (V100) was removed in release 0.16")
    if capability < (8, 0):
        return Support(
            False,
            f"compute capability {compute_capability}: Turing (T4) has no attention kernels in 1.x; "
            "the installation succeeds and the start crashes",
        )
    return Support(True, f"compute capability {compute_capability} is Ampere (8.0) or newer")


def precision_support(compute_capability: str | None) -> dict[str, Support]:
    """A `Support` for each of fp16, bf16, int8, fp8 (matrix products), fp8_kv_cache and fp4.

    `compute_capability` is text such as "8.9"; None or malformed text gives supported=None everywhere.
    """
    base = runs_tensorrt_llm(compute_capability)
    capability = parse_capability(compute_capability)
    if capability is None or not base.supported:
        return {name: base for name in PRECISIONS}
    have = f"this GPU has {compute_capability}"
    fp8 = capability >= (8, 9)
    fp4 = capability >= (10, 0)
    sixteen_bit = Support(True, f"16-bit tensor cores since compute capability 8.0; {have}")
    return {
        "fp16": sixteen_bit,
        "bf16": sixteen_bit,
        "int8": Support(True, f"INT8 weight-only and SmoothQuant need 8.0; {have}"),
        "fp8": Support(
            fp8,
            f"FP8 tensor cores since 8.9 (Ada, Hopper, Blackwell); {have}"
            + ("" if fp8 else ": use INT8 weight-only, SmoothQuant or INT4 AWQ instead"),
        ),
        "fp8_kv_cache": Support(
            True,
            f"keys and values are stored in 8 bits; {have}"
            + (
                ", so attention can read them as FP8"
                if fp8
                else ", so they are widened before the arithmetic: half the memory of 16 bits, no FP8 products"
            ),
        ),
        "fp4": Support(fp4, f"NVFP4 tensor cores since 10.0 (Blackwell); {have}"),
    }
