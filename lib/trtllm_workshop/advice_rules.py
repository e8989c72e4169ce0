"""Failures of conversion, build and engine load: how each looks, why it happens, what to do."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

from trtllm_workshop.advice_model import Advice, Context, Rule
from trtllm_workshop.command_facts import Command, commands
from trtllm_workshop.flag_hints import unknown_flag_hint

REBUILD = "build the engine again with trtllm-build on this machine"


# Arguments -----------------------------------------------------------------------------------------------------------


def unrecognized_arguments(text: str) -> tuple[str, list[str]] | None:
    """(program, words) of argparse's line ``prog: error: unrecognized arguments: …``; None without such a line."""
    match = re.search(r"([\w.-]+): error: unrecognized arguments:[ \t]*([^\n]*)", text)
    if match is None:
        return None
    try:
        return match.group(1), shlex.split(match.group(2))
    except ValueError:
        return match.group(1), match.group(2).split()


def _recorded(program: str, command: str | None) -> Command | None:
    fitting = [entry for name, entry in commands().items() if entry.program == program]
    named = [entry for entry in fitting if command and entry.name in command]
    return next(iter(named or fitting), None)


def arguments_of_another_stage(context: Context) -> Advice | None:
    """P46, P56: argparse lists flags that were removed or belong to another command."""
    explained = re.search(r"([\w.-]+): error: unrecognized arguments: (--[\w-]+)(?:=\S*)?: ([^\n]+)", context.text)
    if explained:  # a reference command, which says the remedy itself
        program, flag, remedy = explained.groups()
        row = "P46" if flag == "--max_output_len" else "P56"
        return Advice(f"{program} does not know {flag}", remedy, row)
    found = unrecognized_arguments(context.text)
    if found is None:
        return None
    program, words = found
    entry = _recorded(program, context.command)
    flags = [word.split("=", 1)[0] for word in words if word.startswith("--")]
    if not flags:
        return Advice(
            f"{program} got words that belong to no flag: {' '.join(words)}", "quote values with blanks", "P46"
        )
    if entry is None:
        return Advice(f"{program} does not know {', '.join(flags)}", f"compare with {program} --help", "P56")
    # The whole command line holds --max_input_len, which the remedy for --max_output_len needs.
    typed = (context.command or "").split() + words
    hints = [f"{flag}: {unknown_flag_hint(entry, flag, typed)}" for flag in flags]
    row = "P46" if flags[0] == "--max_output_len" else "P56"
    return Advice(f"{program} does not know {', '.join(flags)}", "; ".join(hints), row)


def broken_continuation(context: Context) -> Advice | None:
    """P48: the shell ran the second half of a command as a program named ``--flag``."""
    match = context.search(r"(--[\w-]+): (?:command )?not found")
    if match is None:
        return None
    fix = f"end the line before {match.group(1)} with a backslash as its very last character"
    return Advice("the command line is broken in two: a backslash is missing or has a blank after it", fix, "P48")


# Lengths -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LengthError:
    """The numbers (tokens) of a length error, and the trtllm-build flag that sets the limit."""

    prompt: int
    limit: int
    flag: str
    new_tokens: int = 0


def parse_length_error(text: str) -> LengthError | None:
    """The numbers in TensorRT-LLM's messages about too long requests; None for any other text."""
    match = re.search(r"[Pp]rompt length \((\d+)\) exceeds maximum (sequence|input) length \((\d+)\)", text)
    if match:
        flag = "--max_seq_len" if match.group(2) == "sequence" else "--max_input_len"
        return LengthError(int(match.group(1)), int(match.group(3)), flag)
    match = re.search(r"input length \((\d+)\) \+ maximum new tokens \((\d+)\) exceeds .*?limit \((\d+)\)", text)
    if match:
        return LengthError(int(match.group(1)), int(match.group(3)), "--max_seq_len", int(match.group(2)))
    match = re.search(
        r"prompt(?:'s)? (?:length )?\(?(\d+)(?:\.0)?\)?.*?max_tokens \(?(\d+)\)?.*?max_seq_len \(?(\d+)",
        text,
        re.DOTALL,
    )
    if match and int(match.group(1)) + int(match.group(2)) > int(match.group(3)):
        return LengthError(int(match.group(1)), int(match.group(3)), "--max_seq_len", int(match.group(2)))
    return None


def too_long(context: Context) -> Advice | None:
    """P49: the limit is what the build chose, not what the model could do."""
    found = parse_length_error(context.text)
    if found is None:
        return None
    asked = f"{found.prompt} prompt tokens" + (f" + {found.new_tokens} new tokens" if found.new_tokens else "")
    cause = f"{asked} exceed the engine's limit of {found.limit}, which was fixed when it was built"
    needed = found.prompt + found.new_tokens
    more = f"{needed}" if found.new_tokens or found.flag == "--max_input_len" else f"{needed} + the tokens to generate"
    return Advice(cause, f"build again with {found.flag} of at least {more}, or shorten the request", "P49")


# Memory --------------------------------------------------------------------------------------------------------------


def gpu_memory_error(context: Context) -> re.Match[str] | None:
    """Where the output says that the GPU's memory ran out; its group is the number of bytes, if that is told."""
    return context.search(
        r"OutOfMemory \(no further information\)|amount of GPU memory \((\d+) bytes\)|CUDA out of memory|"
        r"cudaErrorMemoryAllocation|CUDA error: out of memory|creation failed due to insufficient GPU memory"
    )


def gpu_memory(context: Context) -> Advice | None:
    """P53: the GPU's memory ran out, which the error text says. A server has flags of its own: see `advice_serve`."""
    match = gpu_memory_error(context)
    if match is None or context.server:
        return None
    size = f" ({int(match.group(1)) / 2**30:.1f} GiB in one piece)" if match.group(1) else ""
    fix = (
        "lower --max_batch_size, --max_num_tokens or --max_seq_len, or choose a smaller precision; free other processes"
    )
    return Advice(f"the GPU memory is full{size}", fix, "P53")


def host_memory(context: Context) -> Advice | None:
    """P53: the operating system killed the process because the machine's own memory was full."""
    lines = context.text.rstrip().splitlines()
    killed_line = bool(lines) and re.search(r"(^|\s)Killed\s*(\S.*)?$", lines[-1]) is not None
    if context.returncode not in (-9, 137) and not killed_line:
        return None
    if gpu_memory_error(context) is not None and not killed_line:
        return None
    cause = "the process was killed from outside, most likely because the host memory (RAM, not the GPU) ran out"
    fix = "close other programs, take a machine or container with more RAM, or build with --workers 1"
    return Advice(cause, fix, "P53")


# Engines that do not fit ---------------------------------------------------------------------------------------------


def version_tag(context: Context) -> Advice | None:
    """P59: the engine was written by another TensorRT version. Three spellings of the assertion are in use."""
    spelling = context.search(r"kSERIALIZATION_VERSION|\bserializationVersion\b|safeSerializationVersion")
    numbers = context.search(r"Current Version: (\d+), Serialized Engine Version: (\d+)")
    if spelling is None and numbers is None:
        return None
    if numbers is None:
        return Advice("the engine was written by another TensorRT version than the one that loads it", REBUILD, "P59")
    current, engine = int(numbers.group(1)), int(numbers.group(2))
    newer = (
        "the engine is newer than the TensorRT here"
        if engine > current
        else "the TensorRT here is newer than the engine"
    )
    cause = f"{newer}: the engine has serialization version {engine}, this TensorRT has {current}"
    return Advice(cause, "build and load with the same TensorRT-LLM release: " + REBUILD, "P59")


def parse_compute_mismatch(text: str) -> tuple[str, str] | None:
    """(running, built) compute capability from ``expecting compute A got compute B``: A is the GPU you run on."""
    match = re.search(r"expecting compute ([\w.-]*\w),? got compute ([\w.-]*\w)", text)
    return (match.group(1), match.group(2)) if match else None


def compute_capability(context: Context) -> Advice | None:
    """P61: the engine was built for another GPU architecture."""
    found = parse_compute_mismatch(context.text)
    if found is None:
        return None
    running, built = found
    cause = f"the engine was built for compute capability {built}, this GPU has {running}"
    return Advice(cause, "engines do not move between GPU architectures: " + REBUILD, "P61")


def world_size(context: Context) -> Advice | None:
    """P63: the engine wants another number of ranks than are running. TensorRT-LLM writes tp * pp, the reference W."""
    match = context.search(r"Engine world size \((\d+)(?: \* (\d+))?\) != Runtime world size \((\d+)\)")
    if match is None:
        return None
    tp, pp, runtime = int(match.group(1)), int(match.group(2) or 1), int(match.group(3))
    wanted = tp * pp
    cause = f"the engine was built for {wanted} rank{'s' * (wanted > 1)}"
    cause += f" (tp {tp} x pp {pp})" if match.group(2) else ""
    cause += f", {runtime} {'is' if runtime == 1 else 'are'} running"
    launched = context.launched_ranks
    if launched == wanted and runtime == 1 and wanted > 1:
        cause += f", although mpirun started {launched}: mpirun and mpi4py belong to different MPI installations"
        fix = "use the mpirun of the MPI that mpi4py was built with: reinstall mpi4py with that mpirun first on PATH"
        return Advice(cause, fix, "P63")
    return Advice(cause, f"start it with mpirun -n {wanted}" if wanted > 1 else "start it without mpirun", "P63")


def triton_world_size(context: Context) -> Advice | None:
    """P64: the launch script of Triton was given another world size than the engine has."""
    if context.search(r"communicationMode kLEADER.*?world\s?[sS]ize") is None:
        return None
    fix = "give the launcher world_size = tp_size x pp_size of the engine's config.json"
    return Advice("the server was started with another number of ranks than the engine has", fix, "P64")


def wrong_folder(context: Context) -> Advice | None:
    """P66, P43: a checkpoint, engine or Hugging Face folder given where another kind is expected."""
    match = context.search(r"KeyError: ['\"](\w+)['\"]")
    key = match.group(1) if match else ""
    if key == "architecture":
        cause = "the folder holds a Hugging Face model, and the builder wants a TensorRT-LLM checkpoint"
        return Advice(cause, "run convert_checkpoint.py first and give its --output_dir to trtllm-build", "P43")
    loading = context.search(r"engine_dir|runner|from_dir|run\.py|Engine") is not None
    if loading and key in ("builder_config", "build_config", "pretrained_config", "version", "plugin_config"):
        cause = (
            "the folder holds a checkpoint (rank0.safetensors), not an engine (rank0.engine); both have a config.json"
        )
        fix = "run trtllm-build --checkpoint_dir THAT_FOLDER --output_dir ENGINE first, then give ENGINE as the engine"
        return Advice(cause, fix, "P66")
    return None


# Weights and builder -------------------------------------------------------------------------------------------------


def fp8_unsupported(context: Context) -> Advice | None:
    """P67: FP8 needs compute capability 8.9 or higher."""
    if context.search(r"FP8 precision require hardware with FP8 support|FP8.{0,60}not supported on this") is None:
        return None
    fix = (
        "use INT8 or INT4 weights on this GPU (quantize.py --qformat int8_wo or int4_awq), or a GPU of compute capability 8.9 "
        "or higher: L4, L40S, RTX 4090, RTX 6000 Ada, H100; not A100 or RTX A6000"
    )
    return Advice("this GPU has no FP8 matrix products", fix, "P67")


def integer_unsupported(context: Context) -> Advice | None:
    """P67, the other way round: no INT8 or INT4 engines on the first Blackwell servers."""
    if context.search(r"INT8/INT4 quantization is not supported on SM>=100") is None:
        return None
    fix = "quantize.py --qformat fp8 --kv_cache_dtype fp8, or 16 bits; INT8 and INT4 need another GPU (8.0 to 9.x, or 12.x)"
    return Advice("TensorRT-LLM builds no INT8 or INT4 engines for compute capability 10.x and 11.x", fix, "P67")


def context_attention(context: Context) -> Advice | None:
    """P69: paged context attention and an eight-bit KV cache that do not go together.

    Older releases stop the build; 1.2.1 switches the attention off with a warning, which is no failure and needs no advice.
    """
    if context.search(r"Paged Context FMHA doesn't work with int8 kv cache") is not None:
        cause, other = "paged context attention cannot read an INT8 KV cache", "quantize with --kv_cache_dtype fp8"
    elif context.search(r"FP8 Paged Context FMHA only works with fp8 quantization") is not None:
        cause, other = (
            "paged context attention reads an FP8 KV cache only under FP8 weights",
            "quantize with --qformat fp8",
        )
    else:
        return None
    return Advice(cause, f"build with --use_paged_context_fmha disable, or {other}", "P69")


def data_set_name(context: Context) -> Advice | None:
    """P70: a calibration set that only a network could bring, or a bare name that the Hub no longer knows."""
    if context.search(r"Repository id must be|namespace/name', got|Couldn't reach '?[\w/-]+'? on the Hub") is None:
        return None
    fix = "give a local folder with train.jsonl: quantize.py --calib_dataset FOLDER"
    return Advice("the calibration set is not on this machine and cannot be loaded from the Hub", fix, "P70")


def builder_returned_nothing(context: Context) -> Advice | None:
    """P55: the traceback only says that there is no engine; the reason stands further up."""
    if context.search(r"a bytes-like object is required, not '?NoneType'?") is None:
        return None
    match = re.search(r"^.*(?:\[TRT(?:-LLM)?\]\s*\[E\]|\[TensorRT-LLM\]\[ERROR\]).*$", context.text, re.MULTILINE)
    reason = f"the reason is: {match.group(0).strip()}" if match else "no error line was printed before"
    fix = "mend what that line names" if match else "run again with --log_level verbose and read the first [E] line"
    return Advice(f"the builder returned nothing, and the TypeError only follows from it; {reason}", fix, "P55")


def header_too_large(context: Context) -> Advice | None:
    """P17: pointer files of Git LFS where weights should be."""
    if context.search(r"HeaderTooLarge|git-lfs\.github\.com/spec") is None:
        return None
    cause = "a weight file holds no weights; files of about 135 bytes are Git LFS pointers, left by a clone without LFS"
    return Advice(cause, "download the model again with hf download, or run git lfs pull in its folder", "P17")


BUILD_RULES: tuple[Rule, ...] = (
    fp8_unsupported,
    integer_unsupported,
    context_attention,
    data_set_name,
    arguments_of_another_stage,
    broken_continuation,
    too_long,
    gpu_memory,
    host_memory,
    version_tag,
    compute_capability,
    world_size,
    triton_world_size,
    wrong_folder,
    header_too_large,
    builder_returned_nothing,
)
