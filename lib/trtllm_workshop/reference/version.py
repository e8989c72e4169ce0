"""What the reference toolchain calls itself: never to be mistaken for an installed TensorRT-LLM."""

VERSION = "1.2.1+reference"


def banner(command: str) -> str:
    """The one line that every command of the reference toolchain prints first."""
    return f"[TensorRT-LLM] TensorRT-LLM version: {VERSION} (reference toolchain, {command})"
