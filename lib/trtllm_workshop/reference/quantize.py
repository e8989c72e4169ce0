"""Hugging Face weights -> quantized TensorRT-LLM checkpoint, with NVIDIA ModelOpt doing the quantization.

The steps: check everything that can be checked without the weights, load the model, run the calibration batches, let
ModelOpt export into a hidden folder, mend config.json, verify names, shapes and scales, rename. An interrupted run leaves
no folder behind.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trtllm_workshop.model_spec import ModelSpec
from trtllm_workshop.reference import quantize_checks as checks
from trtllm_workshop.reference.convert import choose_dtype, hf_spec
from trtllm_workshop.reference.convert_output import check_space, check_target, clear_leftovers, replacing
from trtllm_workshop.reference.convert_plan import Sharding, check_sharding
from trtllm_workshop.reference.quantize_data import (
    DEFAULT_DATASET,
    CalibrationData,
    counted,
    find_dataset,
    load_calibration,
)
from trtllm_workshop.reference.quantize_formats import (
    AWQ_CALIB_SIZE,
    KV_CACHE_DTYPES,
    Format,
    QuantizeError,
    check_block_size,
    find_format,
    modelopt_config,
)
from trtllm_workshop.reference.quantize_output import kv_report, mend_config, verify_quantized


@dataclass(frozen=True)
class QuantizeOptions:
    """What quantize.py is asked for; names and defaults are those of its flags."""

    qformat: str = "full_prec"
    kv_cache_dtype: str | None = None
    dtype: str = "auto"
    device: str = "cuda"
    calib_dataset: str = DEFAULT_DATASET
    calib_size: int = 512
    calib_max_seq_length: int = 512
    tokenizer_max_seq_length: int = 2048
    batch_size: int = 1
    awq_block_size: int = 128
    quantize_lm_head: bool = False
    tp_size: int = 1
    pp_size: int = 1
    seed: int = 1234


@dataclass(frozen=True)
class Quantized:
    """What was written: the folder, its config, the data that was measured (None without calibration), wall seconds."""

    folder: Path
    config: dict[str, Any]
    data: CalibrationData | None
    seconds: float


@dataclass
class _Loop:
    """The forward loop that ModelOpt calls, once or (AWQ) twice: every batch with a progress line."""

    data: CalibrationData
    device: str
    say: Callable[[str], None]
    batches: int = 0
    passes: int = 0
    started: float = field(default_factory=time.monotonic)

    def __call__(self, model: Any) -> None:
        import torch

        self.passes += 1
        seen, count = 0, self.data.batches
        label = "calibrating" if self.passes == 1 else f"calibrating, pass {self.passes}"
        for index in range(count):
            ids, mask = (torch.tensor(rows, device=self.device) for rows in self.data.batch(index))
            model(input_ids=ids, attention_mask=mask, use_cache=False)
            self.batches += 1
            seen += int(mask.sum())
            self.say(
                f"{label}: batch {index + 1} of {count}, {seen} tokens seen, {time.monotonic() - self.started:.1f} s"
            )


def quantize(
    model_dir: str | Path, output_dir: str | Path, options: QuantizeOptions, say: Callable[[str], None] = print
) -> Quantized:
    """Quantizes the model in `model_dir` and writes a checkpoint with one rankN.safetensors per rank to `output_dir`.

    Progress and warnings go to `say`. Raises WrongFolderKind, UnsupportedModel, BrokenWeights, ConversionError,
    QuantizeError (all of them ValueError) or OSError; the output folder is then as it was before.
    """
    started = time.monotonic()
    folder, target = Path(model_dir), Path(output_dir).resolve()
    form = find_format(options.qformat)
    _check_options(form, options)
    spec = hf_spec(folder)
    _check_sharding(spec, form, options)
    stored = _stored_type(options.dtype, spec, say)
    check_target(target)
    for line in clear_leftovers(target):
        say(line)
    checks.check_writable(target)
    checks.check_weights(spec, folder)
    checks.check_device(options.device)
    say(f"ModelOpt {checks.check_modelopt(say)}, {spec.architecture}, --qformat {form.name}, device {options.device}")
    data = _calibration(folder, form, options, spec, say)
    checks.check_memory(spec, options.device, options.batch_size * data.limit if data else 1)
    needed = 2 * spec.parameter_count() + 2 * spec.vocab_size * spec.hidden_size
    check_space(target, needed)
    model = _load(folder, stored, options, say)
    _run_modelopt(model, form, options, data, say)
    if options.kv_cache_dtype:
        for line in kv_report(model, options.kv_cache_dtype):
            say(line)
    with replacing(target, lambda work: verify_quantized(work, spec), needed) as work:
        _export(model, work, stored, options)
        config = mend_config(work, spec, form)
    return Quantized(target, config, data, time.monotonic() - started)


def _check_options(form: Format, options: QuantizeOptions) -> None:
    if options.kv_cache_dtype not in (None, *KV_CACHE_DTYPES):
        raise QuantizeError(f"--kv_cache_dtype {options.kv_cache_dtype} is not one of {', '.join(KV_CACHE_DTYPES)}")
    if options.quantize_lm_head and form.name != "fp8":
        raise QuantizeError(f"--quantize_lm_head goes with --qformat fp8 only, not with {form.name}: leave it out")
    if options.tokenizer_max_seq_length < 1:
        raise QuantizeError(f"--tokenizer_max_seq_length is {options.tokenizer_max_seq_length}: give 1 or more")


def _check_sharding(spec: ModelSpec, form: Format, options: QuantizeOptions) -> None:
    check_sharding(spec, Sharding(options.tp_size, options.pp_size))
    if spec.num_hidden_layers % options.pp_size:
        raise QuantizeError(
            f"--pp_size {options.pp_size} does not divide the {spec.num_hidden_layers} layers, which ModelOpt's export "
            "needs: choose a divisor"
        )
    if form.name == "int4_awq":
        check_block_size(spec, options.tp_size, options.awq_block_size)


def _stored_type(asked: str, spec: ModelSpec, say: Callable[[str], None]) -> str:
    stored = choose_dtype(asked, spec.dtype)
    if stored == "float32":
        say("warning: ModelOpt exports 16-bit checkpoints only: float16 is written instead of --dtype float32")
        return "float16"
    return stored


def _calibration(
    folder: Path, form: Format, options: QuantizeOptions, spec: ModelSpec, say: Callable[[str], None]
) -> CalibrationData | None:
    if not form.calibrates and options.kv_cache_dtype is None:
        say(f"no calibration: --qformat {form.name} measures nothing" + _wo_note(form))
        return None
    source = find_dataset(options.calib_dataset, say)
    size = options.calib_size
    if form.name == "int4_awq" and size > AWQ_CALIB_SIZE:
        say(f"int4_awq: {AWQ_CALIB_SIZE} texts instead of --calib_size {size}, as TensorRT-LLM's script does")
        size = AWQ_CALIB_SIZE
    limits = {
        "--calib_max_seq_length": options.calib_max_seq_length,
        "--tokenizer_max_seq_length": options.tokenizer_max_seq_length,
        "max_position_embeddings": spec.max_position_embeddings,
    }
    name, limit = min(limits.items(), key=lambda item: item[1])
    if name != "--calib_max_seq_length":
        say(f"warning: texts are cut to {limit} tokens, as {name} is below --calib_max_seq_length")
    return load_calibration(source, _tokenizer(folder), size, limit, options.batch_size, say)


def _wo_note(form: Format) -> str:
    return f"; weights stay 16-bit here, trtllm-build makes {form.quant_algo} of them" if form.quant_algo else ""


def _tokenizer(folder: Path) -> Any:
    checks.check_tokenizer(folder)
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # transformers raises whatever its parsers do
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise QuantizeError(
            f"{folder}: the tokenizer cannot be loaded ({reason:.200}): calibration needs it, download the model again"
        ) from error


def _load(folder: Path, stored: str, options: QuantizeOptions, say: Callable[[str], None]) -> Any:
    """The model on the device, in float32 on a processor: there 16-bit products are slower and less exact."""
    import torch
    from transformers import AutoModelForCausalLM

    started = time.monotonic()
    torch.manual_seed(options.seed)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, stored), local_files_only=True).eval()
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise QuantizeError(f"{name} was off-loaded (meta device): the model does not fit into the memory")
        if not bool(torch.isfinite(parameter).all()):
            raise QuantizeError(f"{name} has values that are infinite or NaN as {stored}: try --dtype bfloat16")
    model = model.float() if options.device == "cpu" else model.to(options.device)
    model.config.use_cache = False
    say(f"model loaded in {time.monotonic() - started:.1f} s, {model.num_parameters() / 1e6:.1f} million weights")
    return model


def _run_modelopt(
    model: Any, form: Format, options: QuantizeOptions, data: CalibrationData | None, say: Callable[[str], None]
) -> None:
    if data is None:
        return
    import torch

    with warnings.catch_warnings():
        # ModelOpt's hf extra wants an older transformers; that it works with this one is tested here.
        warnings.filterwarnings("ignore", message="transformers version")
        import modelopt.torch.quantization as mtq
    loop = _Loop(data, options.device, say)
    config = modelopt_config(form, options.kv_cache_dtype, options.awq_block_size, options.quantize_lm_head)
    with torch.inference_mode(False), torch.no_grad():
        mtq.quantize(model, config, loop)
    if loop.batches == 0:
        raise QuantizeError("the calibration loop never ran (0 batches), so no scale was measured: nothing is written")
    say(f"calibrated with {counted(loop.batches, 'batch')} in {time.monotonic() - loop.started:.1f} s")


@contextmanager
def _without_tensorrt_llm() -> Iterator[None]:
    """Hides `tensorrt_llm` from ModelOpt, which otherwise asks it for config.json; the reference package has no models."""
    before = sys.modules.get("tensorrt_llm", ...)
    sys.modules["tensorrt_llm"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if before is ...:
            del sys.modules["tensorrt_llm"]
        else:
            sys.modules["tensorrt_llm"] = before  # type: ignore[assignment]


def _export(model: Any, work: Path, stored: str, options: QuantizeOptions) -> None:
    import torch

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="transformers version")
        warnings.filterwarnings("ignore", message="Cannot export tensorrt_llm checkpoint config")  # mend_config does it
        warnings.filterwarnings("ignore", message="Enable lm_head quantization")  # said although it stays 16-bit
        from modelopt.torch.export import export_tensorrt_llm_checkpoint

        try:
            with torch.inference_mode(), _without_tensorrt_llm():
                # The dense models of this course all have Llama's layers, whatever their family is called.
                export_tensorrt_llm_checkpoint(
                    model,
                    "llama",
                    getattr(torch, stored),
                    export_dir=work,
                    inference_tensor_parallel=options.tp_size,
                    inference_pipeline_parallel=options.pp_size,
                )
        except (NotImplementedError, AssertionError, RuntimeError, KeyError, AttributeError) as error:
            raise QuantizeError(f"ModelOpt cannot export this model ({type(error).__name__}: {error})") from error
