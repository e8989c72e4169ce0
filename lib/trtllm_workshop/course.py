"""The course as a whole. Notebooks use ``course.begin``."""

from __future__ import annotations

from trtllm_workshop.lesson import Lesson, begin

__all__ = ["Lesson", "begin"]
