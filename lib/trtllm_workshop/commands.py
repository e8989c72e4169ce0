"""TensorRT-LLM 1.2.1's command lines and Python API as recorded facts, and the checks made before anything runs.

This is the one module the rest of the package imports. Its parts: `command_facts` and `api_facts` (the data),
`command_parser` (argparse from the data), `flag_hints` (remedies), `command_find`, `command_check` and `command_rules`
(whole command lines), `python_check` (calls of the Python API), `command_extract` (commands in cells and Markdown).
"""

from __future__ import annotations

from trtllm_workshop.api_facts import Parameter, Signature, api, apis, enums
from trtllm_workshop.command_check import check_command
from trtllm_workshop.command_extract import FoundCommand, commands_in_code, commands_in_markdown, extract_commands
from trtllm_workshop.command_facts import Command, Flag, command, commands, flags
from trtllm_workshop.command_parser import add_arguments, command_parser
from trtllm_workshop.problem import Problem
from trtllm_workshop.python_check import check_python

__all__ = [
    "Command",
    "Flag",
    "FoundCommand",
    "Parameter",
    "Problem",
    "Signature",
    "add_arguments",
    "api",
    "apis",
    "check_command",
    "check_python",
    "command",
    "command_parser",
    "commands",
    "commands_in_code",
    "commands_in_markdown",
    "enums",
    "extract_commands",
    "flags",
]
