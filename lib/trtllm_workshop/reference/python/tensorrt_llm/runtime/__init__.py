"""The runners: token ids in, token ids out."""

from trtllm_workshop.reference.runner import ModelRunner, ModelRunnerCpp

PYTHON_BINDINGS = True

__all__ = ["PYTHON_BINDINGS", "ModelRunner", "ModelRunnerCpp"]
