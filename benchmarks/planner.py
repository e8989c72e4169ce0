"""How far off is the planner? Against published runs of TensorRT-LLM, and against this project's own runs on an H200.

The constants are fitted without one GPU and judged on it, for every GPU in turn; B200 and GB200 are near relatives, so both
are left out together as well. Then all published runs are used, and the result is compared with
datasets/measurements/*.json, which the fit has not seen (one step of them gave layer_seconds and is left out). Needs no GPU
and no torch.

What the figures do not say: the form of the model was chosen with all rows in sight. The bandwidth constant ends at its
ceiling. Blackwell in FP4 is predicted too fast in every row, by 20 % in the middle: its products seem to reach a smaller
share of their peak than those in FP8, and there is no constant for that. B200's median would be 0.26 with the 8 TB/s that
many pages give it.

    .venv/bin/python benchmarks/planner.py [--rows]

The last line is one JSON object: median_error and p90_error (|predicted / published - 1|) per held-out GPU and overall.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path

from trtllm_workshop.model_spec import ModelSpec
from trtllm_workshop.planner_fit import CEILINGS, errors, fit, held_out, points, quantile
from trtllm_workshop.planner_gpus import load_gpus
from trtllm_workshop.planner_published import cases, llama
from trtllm_workshop.planner_speed import Constants, seconds
from trtllm_workshop.planner_throughput import Limits, Load, roofline_tokens_per_second, schedule
from trtllm_workshop.planner_work import Engine

MEASUREMENTS = Path(__file__).parent.parent / "datasets" / "measurements"
# The step that layer_seconds was taken from: comparing with it would be comparing with itself.
CALIBRATION = ("llama-3-8b", "fp8-kv8", "generation step", 1)
PRECISIONS = {"fp8-kv8": ("fp8", "fp8"), "fp8": ("fp8", "bfloat16"), "bf16": ("bfloat16", "bfloat16")}


def tinyllama() -> ModelSpec:
    """TinyLlama 1.1B, as its config.json says."""
    return replace(
        llama("8B"),
        hidden_size=2048,
        num_hidden_layers=22,
        num_key_value_heads=4,
        head_size=64,
        intermediate_size=5632,
        vocab_size=32000,
    )


def own_rows(constants: Constants) -> list[tuple[str, float, float]]:
    """(what, predicted, measured) of the project's own runs: milliseconds of a step, answer tokens/s of a whole run."""
    gpu, found = load_gpus()["H200"], []
    shapes = {"llama-3-8b": llama("8B"), "tinyllama": tinyllama()}
    for name in ("2026-12-03-h200-engine.json", "2026-12-03-h200-fp8-context.json"):
        for row in json.loads((MEASUREMENTS / name).read_text(encoding="utf-8"))["rows"]:
            what = row.get("what", "context")
            if "generate" in what or row.get("graph") == "plain":  # Hugging Face; kernels that are not fused
                continue
            if (row["shape"], row["precision"], what, row.get("batch")) == CALIBRATION:
                continue
            engine = Engine(shapes[row["shape"]], gpu, *PRECISIONS[row["precision"]])
            label = f"{row['shape']} {row['precision']} {what}"
            if what == "generation step":
                work = engine.step(0, row["batch"], row["batch"] * row["context"])
                predicted, measured = 1000 * seconds(work, constants).total, row["milliseconds"]
                label += f", batch {row['batch']} x {row['context']} tokens: ms"
            elif what == "context":
                prompt = row["prompt_tokens"]
                work = engine.step(row["tokens"], 0, 0, row["batch"] * prompt * (prompt + 1) / 2, row["batch"])
                predicted, measured = 1000 * seconds(work, constants).total, row["milliseconds"]
                label += f", {row['tokens']} tokens: ms"
            else:
                load = Load(row["prompt_tokens"], row["new_tokens"], row["requests"])
                planned = schedule(engine, load, Limits(max_batch_size=row["requests"]))
                predicted = load.requests * load.answer / seconds(planned.work, constants).total
                measured = row["output_tokens_per_second"]
                label += f", {load.requests} requests of {load.prompt} + {load.answer}: tokens/s"
            found.append((label, predicted, measured))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", action="store_true", help="print every published row with its prediction")
    arguments = parser.parse_args()
    known, left_out = cases()
    print(f"{len(known)} published rows; left out: {len(left_out)}")
    for line in left_out:
        print(f"  {line}")
    shares = [case.tokens_per_second / roofline_tokens_per_second(case.engine, case.load) for case in known]
    above = sum(share > 1 for share in shares)
    print(f"above the roofline: {above}; the nearest row reaches {max(shares):.0%} of it")

    seen = points(known)
    gpus = sorted({point.gpu for point in seen})
    result, together = {}, []
    for name, group in [*((gpu, [gpu]) for gpu in gpus), ("B200 and GB200", ["B200", "GB200"])]:
        _, found = held_out(seen, group)
        result[name] = {
            "rows": len(found),
            "median_error": round(quantile(found, 0.5), 3),
            "p90_error": round(quantile(found, 0.9), 3),
        }
        if len(group) == 1:
            together += found
        print(f"held out {name}: {result[name]}")
    together.sort()
    overall = {"median_error": round(quantile(together, 0.5), 3), "p90_error": round(quantile(together, 0.9), 3)}
    fitted = fit(seen)
    print(f"held out, all together: {overall}; seen by the fit: median {quantile(errors(seen, fitted), 0.5):.3f}")
    print(f"constants fitted on all rows: {fitted}")
    print(f"constants in the library:     {Constants()}")
    if arguments.rows:
        for case, point in zip(known, seen, strict=True):
            lengths = f"{case.load.prompt}/{case.load.answer}"
            print(
                f"  {case.source} {case.model} {point.gpu} tp {case.engine.split.tp} {lengths}: "
                f"published {point.measured:.0f}, predicted {point.measured * point.ratio(fitted):.0f}"
            )

    own = own_rows(fitted)
    for label, predicted, measured in own:
        print(
            f"own H200: {label}: predicted {predicted:.2f}, measured {measured:.2f} ({predicted / measured - 1:+.0%})"
        )
    off = sorted(abs(predicted / measured - 1) for _, predicted, measured in own)
    print(
        json.dumps(
            {
                "benchmark": "planner",
                "rows": len(known),
                "left_out": len(left_out),
                "constants_fitted": len(CEILINGS),
                "constants_measured": 1,
                "constants": {key: float(f"{value:.4g}") for key, value in asdict(fitted).items()},
                "held_out": result,
                "overall": overall,
                "rows_above_roofline": above,
                "nearest_to_roofline": round(max(shares), 3),
                "own_h200": {
                    "rows": len(own),
                    "within_25_percent": sum(error <= 0.25 for error in off),
                    "median_error": round(quantile(off, 0.5), 3),
                    "largest_error": round(off[-1], 3),
                },
            }
        )
    )


if __name__ == "__main__":
    main()
