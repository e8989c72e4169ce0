"""Where Triton's kernels run in tests: on a GPU for real, elsewhere through Triton's interpreter, if Triton is there."""

from __future__ import annotations

import os
import sys

import pytest
import torch

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
# The interpreter's products of bfloat16 matrices are wrong.
TYPES = ["float16", "bfloat16"] if CUDA else ["float16"]


def require_triton() -> None:
    """Skip the module that calls this without Triton; call it before anything imports Triton."""
    if not CUDA:
        if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
            pytest.skip("Triton was imported without its interpreter", allow_module_level=True)
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
    pytest.importorskip("triton")
