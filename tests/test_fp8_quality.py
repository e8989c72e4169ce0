"""FP8 on a real model, end to end: calibrated by ModelOpt, built, and judged against the simulation with the same scales.

The packaged SmolLM2 was born from 4-bit weights: its figures are not those of the model on the Hub.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engines import free_running, load_hf, logits_of, quiet
from modelopt_simulation import simulated_logits
from quantized_models import run
from transformers import AutoTokenizer
from trtllm_workshop.quality import compare_logits, quality_report
from trtllm_workshop.reference.build import build_engine
from trtllm_workshop.reference.configs import BuildConfig, KvCacheConfig
from trtllm_workshop.reference.llm import LLM
from trtllm_workshop.text_dataset import load_texts

pytest.importorskip("modelopt")
DATASETS = Path(__file__).parents[1] / "datasets"
TEXTS, TOKENS = 5, 72


@pytest.mark.slow
def test_the_engines_loss_is_that_of_the_simulation_with_the_exported_scales(smollm2, tmp_path):
    run(
        smollm2,
        tmp_path / "fp8",
        DATASETS / "calibration",
        kv_cache_dtype="fp8",
        calib_size=16,
        calib_max_seq_length=128,
    )
    limits = BuildConfig(max_batch_size=1, max_seq_len=TOKENS + 8, gather_context_logits=True)
    build_engine(tmp_path / "fp8", limits, tmp_path / "engine", log=quiet)
    llm = LLM(tmp_path / "engine", skip_tokenizer_init=True, kv_cache_config=KvCacheConfig(max_tokens=128))
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    texts = [tokenizer(text)["input_ids"][:TOKENS] for text in load_texts(DATASETS / "evaluation.jsonl")[:TEXTS]]
    exact = load_hf(smollm2, "float32")
    reference = [logits_of(exact, ids) for ids in texts]
    del exact
    found = [llm.generate(ids, free_running(1, return_context_logits=True)).context_logits for ids in texts]
    del llm
    simulated = [simulated_logits(smollm2, tmp_path / "fp8", ids) for ids in texts]
    engine, simulation = (
        quality_report(
            [compare_logits(r, c, ids) for r, c, ids in zip(reference, made, texts, strict=True)], "16-bit", name
        )
        for made, name in ((found, "FP8 engine"), (simulated, "simulation"))
    )
    print(f"{engine}\n{simulation}")
    assert engine.kl.estimate <= 1.1 * simulation.kl.estimate
    assert 0 < engine.kl.estimate < 0.5 and 0.9 < engine.ratio.estimate < 1.5
    between = [compare_logits(s, f, ids).kl.mean() for s, f, ids in zip(simulated, found, texts, strict=True)]
    assert float(torch.tensor(between).mean()) < simulation.kl.estimate / 2
