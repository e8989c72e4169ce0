"""The version that the reference toolchain answers with."""

from trtllm_workshop.reference.version import VERSION as __version__

__all__ = ["__version__"]
