"""Which number formats TensorRT-LLM can use on a GPU, by compute capability, each with its reason.

Sources: the hardware tables of TensorRT-LLM's documentation (legacy support matrix of the TensorRT 10.13 era and
quantization page, neither read at the 1.2.1 tag itself), and users' reports for cards that are not listed there.
"""

from __future__ import annotations

import re
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


# Compute capabilities by product name, for when the driver reports a name only. The first pattern that fits decides: the
# RTX A6000 is Ampere (8.6) and the RTX 6000 Ada Generation is Ada (8.9), although the names differ by little.
_BY_NAME = (
    (r"\b(?:B200|B100|GB200)\b", "10.0"),
    (r"\b(?:H100|H200|H800|H20|GH200)[A-Z]*\b", "9.0"),
    (r"\bRTX 50\d\d\b|\bRTX PRO \d000 Blackwell\b", "12.0"),
    (r"\bAda Generation\b|\b6000 Ada\b|\bRTX 40\d\d\b|\bL40S?\b|\bL4\b|\bL20\b", "8.9"),
    (r"\bRTX A\d000\b|\bA6000\b|\bRTX 30\d\d\b|\bA10G?\b|\bA40\b|\bA16\b|\bA2\b", "8.6"),
    (r"\bA100\b|\bA800\b|\bA30\b", "8.0"),
    (r"\bT4\b|\bRTX 20\d\d\b|\bQuadro RTX \d000\b", "7.5"),
    (r"\bV100\b|\bTITAN V\b", "7.0"),
)


def capability_of(name: str) -> str | None:
    """The compute capability that a product's name stands for, such as "8.9" for "NVIDIA L4"; None for unknown names.

    What the driver reports is better: use this only when it reports nothing.
    """
    return next((capability for pattern, capability in _BY_NAME if re.search(pattern, name)), None)


def fp8_support(compute_capability: str | None, name: str = "") -> Support:
    """Whether FP8 engines run on a GPU, with what to take instead when they do not.

    Without a compute capability the product's `name` decides, if it is known.
    """
    capability = compute_capability if parse_capability(compute_capability) else capability_of(name)
    support = precision_support(capability)["fp8"]
    if support.supported is not False:
        return support
    trap = ""
    if re.search(r"\bA6000\b", name):
        trap = "; the RTX A6000 is an Ampere card, the RTX 6000 Ada Generation is another one and has FP8"
    if (parse_capability(capability) or (0, 0)) < (8, 0):
        return Support(False, support.reason + trap)
    instead = "take --qformat int8_wo (INT8 weights) or int4_awq (INT4 weights)"
    return Support(False, f"{support.reason}{trap}; with quantize.py {instead}")


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


def _int8(capability: tuple[int, int], have: str) -> Support:
    # tensorrt_llm/builder.py stops the build from 10.0 up to 12.0: INT8 and INT4 weights, INT8 KV cache, SmoothQuant.
    if (10, 0) <= capability < (12, 0):
        return Support(False, f"INT8 and INT4 engines are refused on 10.x and 11.x (B200): use FP8; {have}")
    return Support(True, f"INT8 weight-only and SmoothQuant need 8.0; {have}")


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
        "int8": _int8(capability, have),
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
