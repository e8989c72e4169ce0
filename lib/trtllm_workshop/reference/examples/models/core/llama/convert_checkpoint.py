"""Convert a Hugging Face model of the Llama and Mistral family into a TensorRT-LLM checkpoint (reference toolchain)."""

import sys

from trtllm_workshop.reference.convert_cli import LLAMA, main

if __name__ == "__main__":
    sys.exit(main(LLAMA))
