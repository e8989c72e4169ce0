"""The report of trtllm-bench: a dictionary for `--report_json` and the same figures as text.

Sections, names, units and labels as in TensorRT-LLM's `tensorrt_llm/bench/dataclasses/reporting.py` and `general.py`.
Two figures differ on purpose: the throughput per GPU is null where there is no GPU, and `issue_rate` is what its label
says, requests per second (null when all were issued at the same moment).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trtllm_workshop.quant_mode import QuantMode
from trtllm_workshop.reference.bench_dataset import InferenceRequest
from trtllm_workshop.reference.bench_records import RequestRecord, percentiles
from trtllm_workshop.reference.version import VERSION

MS, S = 1e-6, 1e9  # nanoseconds to milliseconds; a rate per nanosecond to one per second
LINE = "=" * 59
BREAKDOWN = ("minimum", "maximum", "average", "p50", "p90", "p95", "p99")


@dataclass(frozen=True)
class RunSettings:
    """What was run and how; limits in requests and tokens a step, `kv_cache_percentage` as a share of 1."""

    model: str
    model_path: str | None
    engine_dir: str
    pretrained_config: dict[str, Any]
    build_config: dict[str, Any]
    max_batch_size: int
    max_num_tokens: int
    scheduling_policy: str
    kv_cache_percentage: float
    streaming: bool


def gpu_info() -> dict[str, Any] | None:
    """Name, memory in GiB and highest memory clock in GHz (null when the driver does not say) of the GPU; or None."""
    import torch

    if not torch.cuda.is_available():
        return None
    found = torch.cuda.get_device_properties(0)
    return {"name": found.name, "memory.total": found.total_memory / 2**30, "clocks.mem": _memory_clock()}


def _memory_clock() -> float | None:
    import pynvml

    try:
        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetMaxClockInfo(pynvml.nvmlDeviceGetHandleByIndex(0), pynvml.NVML_CLOCK_MEM) / 1000
    except pynvml.NVMLError:
        return None


def dataset_section(requests: Sequence[InferenceRequest], path: str) -> dict[str, Any]:
    """Lengths in a data set: of the prompts (isl), of the answers (osl) and of both together, in tokens."""
    prompts, answers = [len(r.input_ids) for r in requests], [r.output_tokens for r in requests]
    sums = [p + a for p, a in zip(prompts, answers, strict=True)]
    stats = {"isl": percentiles(prompts), "osl": percentiles(answers), "sequence_length": percentiles(sums)}
    return {
        "isl_stats": stats["isl"],
        "osl_stats": stats["osl"],
        "seq_len_stats": stats["sequence_length"],
        "num_requests": len(requests),
        "dataset_path": path,
        **{f"max_{name}": int(values["maximum"]) for name, values in stats.items()},
        **{f"avg_{name}": int(values["average"]) for name, values in stats.items()},
    }


def statistics(records: Sequence[RequestRecord], settings: RunSettings, dataset: dict[str, Any]) -> dict[str, Any]:
    """The report as a dictionary.

    Args:
        records: one for each request, all of them finished.
        settings: of the run.
        dataset: from `dataset_section`.
    """
    count = len(records)
    first, last = min(r.start_timestamp for r in records), max(r.end_timestamp for r in records)
    total = max(last - first, 1)
    issuing = max(r.start_timestamp for r in records) - first
    made, read = sum(r.num_total_output_tokens for r in records), sum(r.num_input_tokens for r in records)
    latencies = [r.end_to_end_latency for r in records]
    quant, gpu = QuantMode.from_config(settings.pretrained_config), gpu_info()
    report: dict[str, Any] = {
        "engine": {
            "model": settings.model,
            "model_path": settings.model_path,
            "engine_dir": settings.engine_dir,
            "version": VERSION,
            "backend": "TRT",
            "dtype": settings.pretrained_config["dtype"],
            "kv_cache_dtype": quant.kv_cache_quant_algo,
            "quantization": quant.quant_algo,
            "max_input_length": settings.build_config["max_input_len"],
            "max_sequence_length": settings.build_config["max_seq_len"],
        },
        "machine": gpu,
        "world_info": {
            "tp_size": 1,
            "pp_size": 1,
            "ep_size": None,
            "world_size": 1,
            "max_batch_size": settings.max_batch_size,
            "max_num_tokens": settings.max_num_tokens,
            "scheduling_policy": settings.scheduling_policy,
            "kv_cache_percentage": settings.kv_cache_percentage,
            "issue_rate": (count - 1) / issuing * S if issuing > 0 else None,
        },
        "request_info": {
            "num_requests": count,
            "avg_num_concurrent_requests": sum(latencies) / total,
            "avg_input_length": read / count,
            "avg_output_length": made / count,
        },
        "performance": {
            "total_latency_ms": total * MS,
            "avg_request_latency_ms": sum(latencies) / count * MS,
            "request_throughput_req_s": count / total * S,
            "system_output_throughput_tok_s": made / total * S,
            "system_total_throughput_tok_s": (made + read) / total * S,
            "output_throughput_per_user_tok_s": sum(r.output_token_throughput for r in records) / count * S,
            "output_throughput_per_gpu_tok_s": made / total * S if gpu else None,
            "request_latency_percentiles_ms": percentiles(latencies, MS),
        },
    }
    if settings.streaming:
        report["streaming_metrics"] = _streaming_section(records)
    return report | {"dataset": dataset}


def _streaming_section(records: Sequence[RequestRecord]) -> dict[str, Any]:
    ttft = percentiles([r.time_to_first_token for r in records], MS)
    tpot = percentiles([r.intertoken_latency for r in records], MS)
    speed = percentiles([r.generation_token_throughput for r in records], S)
    return {
        "token_output_speed_tok_s": speed["average"],
        "avg_ttft_ms": ttft["average"],
        "avg_tpot_ms": tpot["average"],
        "tpot_percentiles": tpot,
        "ttft_percentiles": ttft,
        "gen_tps_percentiles": speed,
    }


# As text --------------------------------------------------------------------------------------------------------------


def _head(title: str) -> list[str]:
    return [LINE, f"= {title}", LINE]


def _rows(pairs: dict[str, Any], width: int) -> list[str]:
    shown = {label: "n/a" if value is None else value for label, value in pairs.items()}
    return [f"{label + ':':<{width}} {value}" for label, value in shown.items()] + [""]


def _number(value: float | None) -> str | None:
    return None if value is None else f"{value:.4f}"


def dataset_text(dataset: dict[str, Any]) -> str:
    """The lengths of a data set as a table."""
    columns = ("isl_stats", "osl_stats", "seq_len_stats")
    names = dict(zip(("MIN", "MAX", "AVG"), BREAKDOWN, strict=False)) | {p.upper(): p for p in BREAKDOWN[3:]}
    rows = [f"{short}:  " + "".join(f"{dataset[c][name]:<19.4f}" for c in columns) for short, name in names.items()]
    lines = _head("DATASET DETAILS")
    lines += _rows({"Dataset Path": dataset["dataset_path"], "Number of Sequences": dataset["num_requests"]}, 21)
    lines += ["-- Percentiles statistics ---------------------------------", ""]
    lines += [f"{'':6}{'Input':<19}{'Output':<19}Seq. Length", "-" * 59, *(row.rstrip() for row in rows), LINE]
    return "\n".join(lines)


def _breakdown(title: str, mark: str, values: dict[str, float]) -> list[str]:
    return [f"-- {title}", "", *(f"[{mark}] {name.upper():<7}: {values[name]:.4f}" for name in BREAKDOWN), ""]


def report_text(report: dict[str, Any]) -> str:
    """The report for people: engine, machine, settings, requests and the figures."""
    engine, machine, world = report["engine"], report["machine"], report["world_info"]
    requests, figures = report["request_info"], report["performance"]
    lines = _head("ENGINE DETAILS") + _rows(
        {
            "Model": engine["model"],
            "Model Path": engine["model_path"],
            "Engine Directory": engine["engine_dir"],
            "TensorRT LLM Version": engine["version"],
            "Dtype": engine["dtype"],
            "KV Cache Dtype": engine["kv_cache_dtype"],
            "Quantization": engine["quantization"],
            "Max Input Length": engine["max_input_length"],
            "Max Sequence Length": engine["max_sequence_length"],
        },
        23,
    )
    lines += _head("MACHINE DETAILS")
    if machine is None:
        lines += ["No GPU info available", ""]
    else:
        clock = "N/A" if machine["clocks.mem"] is None else f"{machine['clocks.mem']:.2f} GHz"
        lines += [f"{machine['name']}, memory {machine['memory.total']:.2f} GB, {clock}", ""]
    lines += _head("WORLD + RUNTIME INFORMATION") + _rows(
        {
            "TP Size": world["tp_size"],
            "PP Size": world["pp_size"],
            "EP Size": world["ep_size"],
            "Max Runtime Batch Size": world["max_batch_size"],
            "Max Runtime Tokens": world["max_num_tokens"],
            "Scheduling Policy": world["scheduling_policy"],
            "KV Memory Percentage": f"{world['kv_cache_percentage']:.2%}",
            "Issue Rate (req/sec)": None if world["issue_rate"] is None else f"{world['issue_rate']:.4E}",
        },
        23,
    )
    lines += _head("REQUEST DETAILS") + _rows(
        {
            "Number of requests": requests["num_requests"],
            "Number of concurrent requests": _number(requests["avg_num_concurrent_requests"]),
            "Average Input Length (tokens)": _number(requests["avg_input_length"]),
            "Average Output Length (tokens)": _number(requests["avg_output_length"]),
        },
        31,
    )
    streaming = report.get("streaming_metrics")
    overview = {
        "Request Throughput (req/sec)": figures["request_throughput_req_s"],
        "Total Output Throughput (tokens/sec)": figures["system_output_throughput_tok_s"],
        "Total Token Throughput (tokens/sec)": figures["system_total_throughput_tok_s"],
        "Total Latency (ms)": figures["total_latency_ms"],
        "Average request latency (ms)": figures["avg_request_latency_ms"],
        "Per User Output Throughput [w/ ctx] (tps/user)": figures["output_throughput_per_user_tok_s"],
        "Per GPU Output Throughput (tps/gpu)": figures["output_throughput_per_gpu_tok_s"],
    }
    if streaming:
        overview |= {
            "Average time-to-first-token [TTFT] (ms)": streaming["avg_ttft_ms"],
            "Average time-per-output-token [TPOT] (ms)": streaming["avg_tpot_ms"],
            "Per User Output Speed (tps/user)": streaming["token_output_speed_tok_s"],
        }
    lines += _head("PERFORMANCE OVERVIEW") + _rows({name: _number(value) for name, value in overview.items()}, 49)
    if streaming:
        for title, mark, key in (
            ("Per-Request Time-per-Output-Token [TPOT] Breakdown (ms)", "TPOT", "tpot_percentiles"),
            ("Per-Request Time-to-First-Token [TTFT] Breakdown (ms)", "TTFT", "ttft_percentiles"),
            ("Per-Request Generation Throughput [GTPS] Breakdown (tps/user)", "GTPS", "gen_tps_percentiles"),
        ):
            lines += _breakdown(title, mark, streaming[key])
    latency = figures["request_latency_percentiles_ms"]
    return "\n".join([*lines, *_breakdown("Request Latency Breakdown (ms)", "Latency", latency), LINE])
