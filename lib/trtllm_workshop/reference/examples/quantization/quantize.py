"""Quantize a Hugging Face model into a TensorRT-LLM checkpoint (reference toolchain)."""

import sys

from trtllm_workshop.reference.quantize_cli import main

if __name__ == "__main__":
    sys.exit(main())
