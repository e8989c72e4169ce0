"""Engines of several ranks compute what Hugging Face and the engine of one rank compute.

The ranks run in threads here, see rank_threads.py: everything is the real thing but the wire.
"""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from engines import TOKENS_PER_BLOCK, load_hf, logits_of, prompt_of, quiet
from rank_threads import Group, RankThreads, ThreadCommunicator
from safetensors.torch import load_file, save_file
from test_equivalence import unexplained
from tiny_models import edit_config, tiny_model
from trtllm_workshop.checkpoint import RankMapping
from trtllm_workshop.reference import collectives, cuda_kernels
from trtllm_workshop.reference.build import BuildError, build_engine
from trtllm_workshop.reference.configs import BuildConfig, PluginConfig
from trtllm_workshop.reference.convert import convert_checkpoint
from trtllm_workshop.reference.convert_plan import Sharding
from trtllm_workshop.reference.engine import Engine, EngineError, load_engine

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


def shared_head(source, folder, sharding):
    """A checkpoint as ModelOpt writes it: lm_head left out, and share_embedding_table said."""
    checkpoint = convert_checkpoint(source, folder, dtype="float32", sharding=sharding, say=quiet).folder
    for file in checkpoint.glob("rank*.safetensors"):
        save_file({name: tensor for name, tensor in load_file(file).items() if "lm_head" not in name}, file)
    edit_config(checkpoint, share_embedding_table=True)
    return checkpoint


@pytest.mark.parametrize("split", [False, True])
def test_a_head_that_is_the_embedding(tmp_path, split):
    """Each rank multiplies its rows of the table."""
    source = tiny_model(tmp_path / "hf", vocab_size=513, tie_word_embeddings=True)
    checkpoint = shared_head(source, tmp_path / "checkpoint", Sharding(2, 1, split, 0))
    ranks = RankThreads(build_engine(checkpoint, BuildConfig(**SMALL), tmp_path / "engine", log=quiet), 2)
    assert difference(ranks.step(PROMPT), logits_of(load_hf(source, "float32"), PROMPT)) <= 1e-4


def test_a_shared_head_of_an_embedding_split_by_columns_is_refused(tmp_path):
    source = tiny_model(tmp_path / "hf", tie_word_embeddings=True)
    checkpoint = shared_head(source, tmp_path / "checkpoint", Sharding(2, 1, True, 1))
    with pytest.raises(BuildError, match=r"split by columns \(32 of 64 on a rank\), lm_head by rows"):
        build_engine(checkpoint, BuildConfig(**SMALL), tmp_path / "engine", log=quiet)
    assert not (tmp_path / "engine").exists()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_stages_compute_bit_by_bit_what_the_whole_model_computes(engines, tmp_path, dtype):
    """Nothing is summed in another order; what travels between stages is not rounded on a processor."""
    alone = RankThreads(engines.engine(dtype=dtype))
    stages = RankThreads(split_engine(engines.hf(dtype=dtype), tmp_path, Sharding(1, 3), dtype), 1, 3)
    assert torch.equal(stages.logits(PROMPT, ANSWER), alone.logits(PROMPT, ANSWER))
    assert [engine.layers for engine in stages.engines] == [1, 1, 1]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_teacher_forced(engines, tmp_path, dtype):
    """As for one rank (test_equivalence.py): another top-1 only where the margin is below the measured noise."""
    ids = PROMPT + ANSWER
    expected = engines.hf_logits(ids, "qwen2", dtype, "float32")
    noise = float((engines.hf_logits(ids, "qwen2", dtype) - expected).abs().max())
    ranks = RankThreads(split_engine(engines.hf("qwen2", dtype), tmp_path, Sharding(2, 2), dtype), 2, 2)
    found = ranks.logits(PROMPT, ANSWER)
    assert unexplained(found, expected, noise) == []
    assert float((found - expected).abs().max()) <= 1.5 * noise


# What lies in the graphs and files of the ranks ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def of_four(engines, tmp_path_factory):
    """An engine of two ranks in each of two stages (of two and one layers); do not change it."""
    return split_engine(engines.hf(), tmp_path_factory.mktemp("split"), Sharding(2, 2, True, 0))


def test_ranks_meet_twice_a_layer_and_once_for_the_logits(of_four):
    ranks = RankThreads(of_four, 2, 2)
    ranks.step(PROMPT)
    first, last = (group.calls for group in ranks.groups)
    assert first == ["allreduce"] * 5, "the split embedding, and two layers"
    assert last == ["allreduce"] * 2 + ["allgather"]
    assert [(engine.layers, engine.heads, engine.kv_heads) for engine in ranks.engines] == [(2, 2, 1)] * 2 + [
        (1, 2, 1)
    ] * 2


def test_a_graph_of_one_rank_has_no_collectives(engines, of_four):
    def collectives(folder, rank):
        graph = bytes(load_file(folder / f"rank{rank}.engine")["graph"].numpy())
        return graph.count(b"allreduce") + graph.count(b"allgather")

    assert collectives(engines.engine(), 0) == 0 < collectives(of_four, 0)


def test_two_engines_of_one_process_have_their_own_ranks(engines, of_four, tmp_path):
    one, other = RankThreads(of_four, 2, 2), RankThreads(split_engine(engines.hf("qwen2"), tmp_path, Sharding(2)), 2)
    before = one.logits(PROMPT, ANSWER), other.logits(PROMPT, ANSWER)
    counts = [len(group.calls) for ranks in (one, other) for group in ranks.groups]
    one.step(PROMPT)
    assert [len(group.calls) for ranks in (one, other) for group in ranks.groups][2:] == counts[2:]
    again = one.logits(PROMPT, ANSWER), other.logits(PROMPT, ANSWER)
    assert all(torch.equal(a, b) for a, b in zip(before, again, strict=True))


def test_one_graph_for_the_ranks_of_a_stage(engines, tmp_path):
    lines = []
    checkpoint = convert_checkpoint(engines.hf(), tmp_path / "checkpoint", sharding=Sharding(2, 3), say=quiet).folder
    build = BuildConfig(**SMALL, visualize_network=str(tmp_path / "network"), dry_run=True)
    build_engine(checkpoint, build, tmp_path / "engine", log=lines.append)
    captured = [line for line in lines if "captured a graph" in line]
    assert [line[line.index("pipeline") :] for line in captured] == [
        f"pipeline stage {stage} (1 layers)" for stage in range(3)
    ]
    assert sorted(path.name for path in (tmp_path / "network").iterdir()) == [f"rank{rank}.onnx" for rank in range(6)]
    assert not (tmp_path / "engine").exists(), "a dry run"


def refused(folder, *parts, **options):
    with pytest.raises(EngineError) as caught:
        load_engine(folder, **options)
    assert all(part in str(caught.value) for part in parts), str(caught.value)


def test_an_engine_of_several_ranks_needs_them_connected(of_four):
    refused(of_four, "Engine world size (4) != Runtime world size (1)", "mpirun -n 4")
    x = torch.ones(2, 3)
    for call in (lambda: collectives.allreduce(x), lambda: collectives.allgather(x, 2)):
        with pytest.raises(RuntimeError, match=r"one rank of several and no ranks are connected.*communicator"):
            call()


def test_files_of_ranks_that_are_mixed_up_or_missing(of_four, tmp_path):
    folder = shutil.copytree(of_four, tmp_path / "engine")
    wire = ThreadCommunicator(Group(2), 0)
    shutil.copy(folder / "rank1.engine", folder / "rank0.engine")
    refused(folder, "rank0.engine was built as rank 1 and stands where rank 0 belongs", communicator=wire)
    (folder / "rank3.engine").unlink()
    refused(folder, "rank3.engine is missing", "trtllm-build again", rank=3, communicator=wire)
    with pytest.raises(ValueError, match=r"rank 4 does not exist.*ranks 0 to 3"):
        load_engine(of_four, rank=4, communicator=wire)


def test_a_build_of_fewer_ranks_leaves_no_engine_of_the_last_one(engines, of_four, tmp_path):
    folder = shutil.copytree(of_four, tmp_path / "engine")
    (folder / "notes.txt").write_text("kept")
    build_engine(engines.checkpoint(), BuildConfig(**SMALL), folder, log=quiet)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "notes.txt", "rank0.engine"]
    assert RankThreads(folder).greedy(PROMPT, 4) == RankThreads(engines.engine()).greedy(PROMPT, 4)


def test_ranks_together_hold_each_weight_once(engines, of_four):
    """Sizes: what is split adds up, norms and rotary tables are on every rank of their stage."""
    whole = load_file(engines.checkpoint() / "rank0.safetensors")
    layer = sum(t.numel() for name, t in whole.items() if ".layers.0." in name and t.dim() == 2)
    files = [load_file(of_four / f"rank{rank}.engine") for rank in range(4)]
    for rank, layers in enumerate((2, 2, 1, 1)):
        split = sum(t.numel() for name, t in files[rank].items() if ".layers." in name and t.dim() == 2)
        assert split == layers * layer // 2
    rows = [file["transformer.vocab_embedding.first_row"].item() for file in files[:2]]
    assert rows == [0, 256] and all("transformer.vocab_embedding.first_row" not in file for file in files[2:])
    assert json.loads((of_four / "config.json").read_text())["pretrained_config"]["mapping"]["world_size"] == 4


def test_cuda_graphs_are_for_ranks_whose_calls_can_be_recorded(monkeypatch, of_four):
    monkeypatch.setattr(cuda_kernels, "_paged_attention", lambda: SimpleNamespace(serves=lambda *sizes: True))
    ends = [ThreadCommunicator(Group(2), 0, capturable) for capturable in (True, False)]

    def possible(mapping, communicator):
        config = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_size": 16}
        half, device = torch.bfloat16, torch.device("cuda")
        engine = Engine({"pretrained_config": config}, of_four, device, half, lambda: None, half, mapping, communicator)
        return cuda_kernels.can_capture(engine)

    assert possible(RankMapping(), None) and possible(RankMapping(2, 1), ends[0])
    assert not possible(RankMapping(2, 1), ends[1]) and not possible(RankMapping(1, 2), ends[0])
