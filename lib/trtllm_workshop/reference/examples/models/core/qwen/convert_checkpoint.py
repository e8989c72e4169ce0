"""Convert a Hugging Face model of the Qwen2 family into a TensorRT-LLM checkpoint (reference toolchain)."""

import sys

from trtllm_workshop.reference.convert_cli import QWEN, main

if __name__ == "__main__":
    sys.exit(main(QWEN))
