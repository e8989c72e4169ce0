"""The drop-in reference toolchain: TensorRT-LLM commands, files and Python on PyTorch."""
