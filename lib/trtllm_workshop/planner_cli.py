"""`workshop plan`: from a model's config.json and the name of a GPU to memory, speed and cost, without running anything."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from trtllm_workshop.checkpoint import RankMapping, config_section
from trtllm_workshop.model_spec import ModelSpec
from trtllm_workshop.planner import BYTES
from trtllm_workshop.planner_gpus import TABLE, PlanProblem, find_gpu, load_gpus
from trtllm_workshop.planner_memory import Split
from trtllm_workshop.planner_throughput import MAX_BATCH_SIZE, MAX_NUM_TOKENS, Limits, Load
from trtllm_workshop.planner_work import Engine
from trtllm_workshop.safetensors_file import BrokenWeights

KV_TYPES = ("float32", "float16", "bfloat16", "fp8", "int8")
# quant_algo of a checkpoint's config.json -> the planner's name for its weights.
QUANT_ALGOS = {"FP8": "fp8", "W8A16": "int8", "W4A16": "int4", "W4A16_AWQ": "int4_awq", "NVFP4": "nvfp4"}


def add(commands: Any) -> None:
    """Adds `plan` to the subcommands of `workshop`."""
    plan = commands.add_parser("plan", help="predict memory, speed and cost of a model on a GPU, before anything runs")
    plan.add_argument(
        "model", type=Path, metavar="MODEL", help="folder of a model, checkpoint or engine, or a config.json"
    )
    where = plan.add_mutually_exclusive_group(required=True)
    where.add_argument("--gpu", metavar="NAME", help="a GPU of the table, for example H100")
    where.add_argument("--measure", action="store_true", help="time this machine and predict with that")
    plan.add_argument(
        "--gpus", type=Path, metavar="FILE", help=f"another GPU table; default: {TABLE.name} of the library"
    )
    plan.add_argument("--tp", type=int, default=None, metavar="N", help="ranks that share every layer")
    plan.add_argument("--pp", type=int, default=None, metavar="N", help="stages of layers")
    plan.add_argument("--dtype", choices=list(BYTES), help="of the weights; default: what the model declares")
    plan.add_argument("--kv-dtype", choices=KV_TYPES, help="of the KV cache; default: that of 16- and 32-bit weights")
    plan.add_argument("--input", type=_count, default=1000, metavar="TOKENS", help="of a prompt (1000)")
    plan.add_argument("--output", type=_count, default=1000, metavar="TOKENS", help="of an answer (1000)")
    plan.add_argument("--requests", type=_count, default=3000, metavar="N", help="queued at once (3000)")
    plan.add_argument("--max-batch-size", type=_count, default=MAX_BATCH_SIZE, metavar="N")
    plan.add_argument("--max-num-tokens", type=_count, default=MAX_NUM_TOKENS, metavar="N")
    plan.add_argument("--kv-fraction", type=float, default=0.9, metavar="F", help="of the free memory (0.9)")
    plan.add_argument("--used-gb", type=float, default=0.0, metavar="GB", help="held by other processes on each GPU")
    plan.add_argument(
        "--price", type=float, metavar="DOLLARS", help="for one GPU and hour; default: the table's example"
    )
    plan.add_argument("--json", action="store_true")
    plan.set_defaults(action=run)


def _count(given: str) -> int:
    try:
        value = int(given)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{given!r} is not a whole number of at least 1")
    return value


def run(arguments: argparse.Namespace) -> int:
    """Prints the plan; raises PlanProblem or UnsupportedModel with what to do next."""
    from trtllm_workshop.planner_plan import make_plan, text

    for value, flag in ((arguments.used_gb, "--used-gb"), (arguments.price or 0, "--price")):
        if not 0 <= value < 1e9:
            raise PlanProblem(f"{flag} {value} makes no sense: give a number of at least 0")
    if arguments.measure and arguments.gpus is not None:
        raise PlanProblem(
            f"--gpus {arguments.gpus} is for --gpu: with --measure this machine is timed; leave one of them out"
        )
    spec, found = read_model(arguments.model)
    dtype = arguments.dtype or found["dtype"]
    if dtype not in BYTES:
        raise PlanProblem(f"the model declares dtype {dtype!r}, which is not planned for: choose one with --dtype")
    kv_dtype = arguments.kv_dtype or (found["kv_dtype"] if dtype == found["dtype"] else None)
    kv_dtype = kv_dtype or (dtype if BYTES[dtype] >= 2 else "float16")
    tp, pp = (found[name] if getattr(arguments, name) is None else getattr(arguments, name) for name in ("tp", "pp"))
    split = Split(tp, pp)
    split.check(spec)
    constants, note, used = None, "", arguments.used_gb * 1e9
    if arguments.measure:
        from trtllm_workshop.planner_measure import measure, with_link

        here = measure(dtype, threads=1 if split.ranks > 1 else None)
        here = with_link(here, split.ranks) if split.ranks > 1 else here
        gpu, constants, note, used = here.gpu, here.constants, here.words, used or here.used_by_others
    else:
        gpu = find_gpu(arguments.gpu, load_gpus(arguments.gpus))
    plan = make_plan(
        Engine(spec, gpu, dtype, kv_dtype, split),
        Load(arguments.input, arguments.output, arguments.requests),
        Limits(arguments.max_batch_size, arguments.max_num_tokens, arguments.kv_fraction),
        constants,
        model=arguments.model.resolve().name if arguments.model.is_dir() else str(arguments.model),
        price=arguments.price,
        used_by_others=used,
    )
    if arguments.json:
        print(json.dumps(plan.to_json() | {"rates": {"memory": gpu.bandwidth, **gpu.flops}, "note": note}, indent=2))
        for warning in plan.warnings:
            print(f"Warning: {warning}", file=sys.stderr)
    else:
        print(text(plan, note))
    return 0


def read_model(path: Path) -> tuple[ModelSpec, dict[str, Any]]:
    """(description, defaults of dtype, kv_dtype, tp and pp) of a Hugging Face model, or of a TensorRT-LLM checkpoint or engine,
    whose config.json says how it was quantized and split. Raises UnsupportedModel."""
    file = path / "config.json" if path.is_dir() else path
    defaults: dict[str, Any] = {"dtype": None, "kv_dtype": None, "tp": 1, "pp": 1}
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):  # ModelSpec says what is wrong with it
        spec = ModelSpec.from_hf(path)
        return spec, defaults | {"dtype": spec.dtype}
    try:
        config = config_section(config, "pretrained_config") or config
        if "architecture" not in config:
            spec = ModelSpec.from_hf(path)
            return spec, defaults | {"dtype": spec.dtype}
        spec = ModelSpec.from_checkpoint_config(config)
        quantization, mapping = config_section(config, "quantization"), RankMapping.from_config(config)
    except BrokenWeights as error:
        raise PlanProblem(f"{file}: {error}") from error
    return spec, {
        "dtype": QUANT_ALGOS.get(str(quantization.get("quant_algo")), spec.dtype),
        "kv_dtype": {"FP8": "fp8", "INT8": "int8"}.get(str(quantization.get("kv_cache_quant_algo"))),
        "tp": mapping.tp_size,
        "pp": mapping.pp_size,
    }
