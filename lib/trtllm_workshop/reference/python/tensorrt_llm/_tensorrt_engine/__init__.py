"""The LLM class that runs engines."""

from trtllm_workshop.reference.llm import LLM

__all__ = ["LLM"]
