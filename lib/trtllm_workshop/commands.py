"""TensorRT-LLM 1.2.1's command lines and Python API as recorded facts, and the checks made before anything runs.

This is the one module that the rest of the package imports; the parts lie in `command_facts` (the data),
`command_parser` (argparse from the data) and `flag_hints` (remedies).
"""

from __future__ import annotations

from trtllm_workshop.command_facts import Command, Flag, command, commands, flags
from trtllm_workshop.command_parser import add_arguments, command_parser

__all__ = ["Command", "Flag", "add_arguments", "command", "command_parser", "commands", "flags"]
