"""Quantized engines of several ranks: what the ranks multiply and add is what one rank multiplies."""

from __future__ import annotations

import pytest
import torch
from engines import TOKENS_PER_BLOCK, load_hf, logits_of, prompt_of, quiet
from quantized_checkpoints import round_rows
from quantized_models import calibration_set, run
from rank_threads import RankThreads
from test_rank_graphs import difference
from tiny_models import tiny_model
from trtllm_workshop.reference.build import build_engine
from trtllm_workshop.reference.configs import BuildConfig, PluginConfig
from trtllm_workshop.reference.convert import convert_checkpoint
from trtllm_workshop.reference.convert_plan import Sharding

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT, ANSWER = prompt_of(33), prompt_of(5, seed=1)
ROW_PARALLEL = ("o_proj", "down_proj")


def built(checkpoint, folder, paged=True):
    plugins = PluginConfig(tokens_per_block=TOKENS_PER_BLOCK, use_paged_context_fmha=paged)
    return build_engine(checkpoint, BuildConfig(max_batch_size=2, max_seq_len=64, plugin_config=plugins), folder, quiet)


def rounded_model(folder, tp, bits):
    """Hugging Face's model with the weights that `tp` ranks round: each its own columns of a row-parallel matrix."""
    model = load_hf(folder, "float32")
    for name, module in model.named_modules():
        if ".layers." in name and isinstance(module, torch.nn.Linear):
            parts = module.weight.data.chunk(tp if name.endswith(ROW_PARALLEL) else 1, dim=1)
            module.weight.data = torch.cat([round_rows(part, bits) for part in parts], dim=1)
    return model


@pytest.mark.parametrize(("algorithm", "bits"), [("W8A16", 8), ("W4A16", 4)])
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (4, 1), (2, 2)])
def test_each_rank_rounds_its_own_part_of_weight_only_matrices(engines, tmp_path, algorithm, bits, tp, pp):
    source = engines.hf("qwen2")
    sharding = Sharding(tp, pp)
    checkpoint = convert_checkpoint(
        source, tmp_path / "checkpoint", dtype="float32", sharding=sharding, quant_algo=algorithm, say=quiet
    ).folder
    ranks = RankThreads(built(checkpoint, tmp_path / "engine"), tp, pp)
    expected = logits_of(rounded_model(source, tp, bits), PROMPT + ANSWER)
    assert difference(ranks.step(PROMPT), expected[: len(PROMPT)]) <= 1e-4
    # Single tokens run on kernels that read int8 weights and compute in bfloat16.
    after = torch.cat([ranks.step([token], len(PROMPT) + index) for index, token in enumerate(ANSWER)])
    assert difference(after, expected[len(PROMPT) :]) <= (0.03 if algorithm == "W8A16" else 1e-4)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    pytest.importorskip("modelopt")
    return calibration_set(tmp_path_factory.mktemp("calibration"))


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Biases, head size 32; sizes that groups of 32 divide on two ranks."""
    sizes = {"num_hidden_layers": 2, "intermediate_size": 128}
    return tiny_model(tmp_path_factory.mktemp("source") / "hf", "qwen2", dtype="bfloat16", **sizes)


@pytest.mark.parametrize(("qformat", "kv"), [("fp8", "fp8"), ("int4_awq", "int8")])
def test_calibrated_formats_against_one_rank(source, data, tmp_path, qformat, kv):
    """The difference is a small share of what the quantization itself costs: all weights and scales are the same numbers.

    Another order of sums may round a value to its other neighbour in FP8 or in the INT8 cache, nothing more.
    """
    options = {"kv_cache_dtype": kv} | ({"awq_block_size": 32} if qformat == "int4_awq" else {})
    found = {}
    for tp, pp in ((1, 1), (2, 1), (2, 2)):
        root = tmp_path / f"{tp}x{pp}"
        run(source, root / "checkpoint", data, qformat, tp_size=tp, pp_size=pp, **options)
        ranks = RankThreads(built(root / "checkpoint", root / "engine", paged=kv != "int8"), tp, pp)
        found[tp, pp] = ranks.step(PROMPT)
    cost = difference(found[1, 1], logits_of(load_hf(source, "float32"), PROMPT))
    assert cost > 0.01
    for several in ((2, 1), (2, 2)):
        assert difference(found[several], found[1, 1]) <= 0.05 * cost
