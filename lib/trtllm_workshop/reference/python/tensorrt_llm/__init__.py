"""`tensorrt_llm` of the reference toolchain: the official names, implemented on PyTorch.

Only the engine workflow of TensorRT-LLM 1.2.1 is here. `tensorrt_llm.LLM`, which is the PyTorch backend in 1.2.1, is
refused with the import to use instead.
"""

from trtllm_workshop.reference.configs import BuildConfig
from trtllm_workshop.reference.sampling_params import SamplingParams
from trtllm_workshop.reference.version import banner

from tensorrt_llm.version import __version__

__all__ = ["BuildConfig", "SamplingParams", "__version__"]

# The same line that TensorRT-LLM prints on import, so that every transcript says which toolchain made it.
print(banner("import tensorrt_llm"), flush=True)


def __getattr__(name: str) -> object:
    if name == "LLM":
        raise ImportError(
            "tensorrt_llm.LLM is the PyTorch backend, which the reference toolchain does not have. The engine workflow "
            "uses: from tensorrt_llm._tensorrt_engine import LLM"
        )
    raise AttributeError(f"module 'tensorrt_llm' of the reference toolchain has no attribute {name!r}")
