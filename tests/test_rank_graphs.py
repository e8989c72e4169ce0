"""Engines of several ranks compute what Hugging Face and the engine of one rank compute.

The ranks run in threads here, see rank_threads.py: everything is the real thing but the wire.
"""

from __future__ import annotations

import pytest
import torch
from engines import TOKENS_PER_BLOCK, load_hf, logits_of, prompt_of, quiet
from rank_threads import RankThreads
from tiny_models import tiny_model
from trtllm_workshop.reference.build import build_engine
from trtllm_workshop.reference.configs import BuildConfig, PluginConfig
from trtllm_workshop.reference.convert import convert_checkpoint
from trtllm_workshop.reference.convert_plan import Sharding

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT, ANSWER = prompt_of(19), prompt_of(6, seed=1)
SMALL = {"max_batch_size": 2, "max_seq_len": 96, "plugin_config": PluginConfig(tokens_per_block=TOKENS_PER_BLOCK)}


def split_engine(source, root, sharding, dtype="float32", **build):
    """The folder of an engine of tp_size x pp_size ranks."""
    checkpoint = convert_checkpoint(source, root / "checkpoint", dtype=dtype, sharding=sharding, say=quiet).folder
    return build_engine(checkpoint, BuildConfig(**{**SMALL, **build}), root / "engine", log=quiet)


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference in a row of logits over the row's largest logit."""
    assert found.shape == expected.shape
    return float(((found - expected).abs().amax(-1) / expected.abs().amax(-1)).max())


def model_of(engines, family, tmp_path, changes):
    return tiny_model(tmp_path / "hf", family, **changes) if changes else engines.hf(family)


SPLITS = [
    pytest.param("llama-gqa", 2, 1, {}, id="two ranks"),
    pytest.param("llama-gqa", 4, 1, {}, id="a KV head held twice"),
    pytest.param("llama3", 8, 1, {}, id="a KV head held four times"),
    pytest.param("llama-tied", 3, 1, {}, id="three ranks, tied, a padded vocabulary"),
    pytest.param("qwen2", 2, 1, {}, id="biases"),
    pytest.param("qwen2", 4, 1, {"vocab_size": 513, "tie_word_embeddings": True}, id="biases, tied, padded, KV twice"),
    pytest.param("mistral", 2, 1, {"vocab_size": 515}, id="a head size of its own, padded"),
    pytest.param("llama-gqa", 1, 2, {}, id="two stages of two and one layers"),
    pytest.param("qwen2", 1, 3, {"tie_word_embeddings": True}, id="three stages, tied"),
    pytest.param("llama-gqa", 2, 2, {"num_hidden_layers": 4}, id="two ranks in each of two stages"),
    pytest.param("llama-tied", 3, 2, {"num_hidden_layers": 3}, id="three ranks in each of two stages, tied"),
]


@pytest.mark.parametrize(("family", "tp", "pp", "changes"), SPLITS)
def test_logits_are_hugging_faces(engines, tmp_path, family, tp, pp, changes):
    source = model_of(engines, family, tmp_path, changes)
    ranks = RankThreads(split_engine(source, tmp_path, Sharding(tp, pp)), tp, pp)
    expected = logits_of(load_hf(source, "float32"), PROMPT + ANSWER)
    assert difference(ranks.logits(PROMPT, ANSWER), expected) <= 1e-4


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (4, 1), (1, 2), (1, 3), (2, 2)])
def test_greedy_tokens_are_those_of_one_rank(engines, tmp_path, tp, pp):
    alone = RankThreads(engines.engine())
    ranks = RankThreads(split_engine(engines.hf(), tmp_path, Sharding(tp, pp)), tp, pp)
    for prompt in (PROMPT, ANSWER[:1], prompt_of(40, seed=2)):
        assert ranks.greedy(prompt, 24) == alone.greedy(prompt, 24)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(("family", "tp", "pp", "vocabulary"), [("llama-tied", 3, 1, 512), ("llama-gqa", 2, 2, 515)])
def test_a_split_embedding(tmp_path, family, tp, pp, vocabulary, dim):
    source = tiny_model(tmp_path / "hf", family, vocab_size=vocabulary)
    ranks = RankThreads(split_engine(source, tmp_path, Sharding(tp, pp, True, dim)), tp, pp)
    every = [*range(0, vocabulary, 7), vocabulary - 1]  # tokens of all ranks, the last one included
    expected = logits_of(load_hf(source, "float32"), every)
    assert difference(ranks.step(every), expected) <= 1e-4
