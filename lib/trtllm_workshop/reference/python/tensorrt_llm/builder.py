"""Where 1.2.1 defines BuildConfig."""

from trtllm_workshop.reference.configs import BuildConfig

__all__ = ["BuildConfig"]
