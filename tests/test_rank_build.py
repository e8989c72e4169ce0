"""trtllm-build for several ranks: what each rank's graph expects is what its file holds, and nothing half-built stays."""

from __future__ import annotations

import errno
import shutil
import socket

import pytest
import torch
from engines import quiet
from hypothesis import given, settings
from hypothesis import strategies as st
from trtllm_workshop.checkpoint import RankMapping, expected_layout
from trtllm_workshop.model_spec import ModelSpec
from trtllm_workshop.quant_mode import QuantMode
from trtllm_workshop.reference import build as build_module
from trtllm_workshop.reference.build import BuildError, build_engine
from trtllm_workshop.reference.build_output import clear_leftovers, engine_files
from trtllm_workshop.reference.configs import BuildConfig
from trtllm_workshop.reference.convert import convert_checkpoint
from trtllm_workshop.reference.convert_config import checkpoint_config
from trtllm_workshop.reference.convert_plan import Sharding
from trtllm_workshop.reference.engine_tensors import embedding_dim
from trtllm_workshop.reference.leftovers import alive
from trtllm_workshop.reference.network import NetworkConfig, input_names, make_network
from trtllm_workshop.reference.trtllm_build import main

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = BuildConfig(max_batch_size=2, max_seq_len=32)


@st.composite
def split_models(draw):
    """A model, how it is split, and its quantization; KV heads may be fewer than ranks."""
    tp, pp = draw(st.sampled_from([1, 2, 3, 4, 6])), draw(st.integers(1, 4))
    kv_heads = draw(st.sampled_from([n for n in (1, 2, 3, 4, 6, 12) if n % tp == 0 or tp % n == 0]))
    heads = kv_heads * tp * draw(st.integers(1, 2))
    spec = ModelSpec(
        architecture="LlamaForCausalLM",
        hidden_size=12 * draw(st.integers(1, 3)),
        num_hidden_layers=pp + draw(st.integers(0, 3)),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_size=draw(st.sampled_from([4, 8])),
        intermediate_size=8 * tp * draw(st.integers(1, 3)),
        vocab_size=draw(st.integers(tp, 50)),
        max_position_embeddings=32,
        attn_bias=draw(st.booleans()),
    )
    sharding = Sharding(tp, pp, draw(st.booleans()), draw(st.sampled_from([0, 1])))
    return spec, sharding, draw(st.sampled_from([None, "FP8"])), draw(st.sampled_from([None, "FP8", "INT8"]))


@given(split_models())
@settings(max_examples=60, deadline=None)
def test_graphs_expect_the_tensors_of_the_checkpoint(model):
    spec, sharding, algorithm, cache = model
    config = checkpoint_config(spec, "bfloat16", sharding, algorithm)
    config["quantization"]["kv_cache_quant_algo"] = cache
    layers = 0
    for rank in range(sharding.tp_size * sharding.pp_size):
        place, wanted = RankMapping.from_config(config, rank), {}
        for name, tensor in expected_layout(config, rank).items():
            if ".mlp.gate." not in name:
                joined = 2 if ".mlp.fc." in name and len(tensor.shape) == 2 else 1
                shape = (joined * tensor.shape[0], *tensor.shape[1:])
                wanted[name.replace(".mlp.fc.", ".mlp.fused_fc.")] = (shape, tensor.dtype)
        network = NetworkConfig(
            spec, torch.bfloat16, 16, QuantMode.from_config(config), True, place, embedding_dim(config)
        )
        with torch.device("meta"):
            module = make_network(network)
        found = {n: (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in module.state_dict().items()}
        assert found.pop("transformer.rotary_table") == ((16, 2, spec.head_size), "float32")
        if sharding.use_parallel_embedding and sharding.embedding_sharding_dim == 0 and sharding.tp_size > 1:
            assert ("transformer.vocab_embedding.first_row" in found) == place.is_first_stage
            found.pop("transformer.vocab_embedding.first_row", None)
        assert found == wanted
        layers += len(module.transformer.layers)
    assert layers == sharding.tp_size * spec.num_hidden_layers


def test_what_a_stage_takes():
    first, middle, last = (input_names(RankMapping(1, 3, rank)) for rank in range(3))
    assert first[:3] == ("input_ids", "position_ids", "kv_cache_pool")
    assert middle[:3] == ("hidden_states_input", "position_ids", "kv_cache_pool")
    assert last[:4] == ("hidden_states_input", "position_ids", "last_token_ids", "kv_cache_pool")
    assert input_names(RankMapping(4, 1, 3))[:3] == ("input_ids", "position_ids", "last_token_ids")


@pytest.fixture(scope="module")
def checkpoint(engines, tmp_path_factory):
    """Two ranks; do not change it."""
    folder = tmp_path_factory.mktemp("two") / "checkpoint"
    return convert_checkpoint(engines.hf(), folder, dtype="float32", sharding=Sharding(2), say=quiet).folder


def test_the_command_builds_all_ranks(checkpoint, tmp_path, capsys):
    out = tmp_path / "engine"
    flags = ("--max_batch_size", "2", "--max_seq_len", "32", "--output_dir", str(out))
    assert main(["--checkpoint_dir", str(checkpoint), *flags]) == 0
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "rank0.engine", "rank1.engine"]
    assert capsys.readouterr().out.count("captured a graph") == 1


def test_a_disk_that_is_full_at_the_second_rank_leaves_nothing(checkpoint, tmp_path, monkeypatch):
    write = build_module.write_engine_file

    def fails_later(path, *rest):
        write(path, *rest)
        if path.name == "rank1.engine":
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(build_module, "write_engine_file", fails_later)
    with pytest.raises(BuildError, match=r"is full .*the engine needs"):
        build_engine(checkpoint, SMALL, tmp_path / "engine", log=quiet)
    assert list(tmp_path.iterdir()) == []


def test_damaged_weights_of_a_later_rank_are_seen_before_anything_is_built(checkpoint, tmp_path):
    copy = shutil.copytree(checkpoint, tmp_path / "checkpoint")
    later = copy / "rank1.safetensors"
    later.write_bytes(later.read_bytes()[:-100])
    lines = []
    with pytest.raises(ValueError, match=r"rank1.safetensors is truncated"):
        build_engine(copy, SMALL, tmp_path / "engine", log=lines.append)
    assert lines == [] and not (tmp_path / "engine").exists()


def test_the_rest_of_a_killed_build_of_several_ranks_is_removed(tmp_path):
    gone = next(pid for pid in range(4_000_000, 3_000_000, -1) if not alive(pid))
    left = tmp_path / f".engine.building-{socket.gethostname()}-{gone}"
    left.mkdir()
    for name in engine_files(12):
        (left / name).touch()
    assert clear_leftovers(tmp_path / "engine") == [left] and not left.exists()
    left.mkdir()
    (left / "rank0.engine.notes").touch()
    assert clear_leftovers(tmp_path / "engine") == [] and left.exists()


def test_engines_are_placed_before_the_config_that_they_belong_to():
    assert engine_files(3) == ("rank0.engine", "rank1.engine", "rank2.engine", "config.json")
