"""The reader of captured graphs, on a graph that the reference toolchain really captured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_models import tiny_model
from trtllm_workshop import graph_file
from trtllm_workshop.figures import engine as figures


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from trtllm_workshop.reference.build import build_engine
    from trtllm_workshop.reference.configs import BuildConfig
    from trtllm_workshop.reference.convert import convert_checkpoint

    root = tmp_path_factory.mktemp("graph")
    convert_checkpoint(tiny_model(root / "hf", "llama-gqa"), root / "checkpoint", say=lambda _: None)
    build = BuildConfig(max_batch_size=2, max_seq_len=64, max_num_tokens=64, visualize_network=str(root / "network"))
    build_engine(root / "checkpoint", build, root / "engine", log=lambda _: None)
    return root / "network"


@pytest.fixture(scope="module")
def graph(network: Path) -> Any:
    return graph_file.load_network(graph_file.find_network(network))


def test_operators_are_counted_by_kind(graph: Any) -> None:
    counts = graph_file.operators(graph)
    layers = 3
    assert counts["attention"] == layers
    assert counts["matrix product"] == 4 * layers + 1  # qkv, dense, fused fc and gate, proj; lm_head
    assert counts["RMSNorm"] == 2 * layers + 1
    assert "getitem" not in counts


def test_a_layer_is_cut_out_with_its_residual_connections(graph: Any) -> None:
    steps = graph_file.layer_steps(graph, 0)
    assert [step.weight for step in steps if step.weight] == [
        "input_layernorm",
        "attention.qkv",
        "attention.dense",
        "post_layernorm",
        "mlp.fused_fc",
        "mlp.proj",
    ]
    additions = [step for step in steps if step.operator == "add"]
    assert len(additions) == 2
    assert additions[0].sources[0] == -1, "the first addition carries the layer's input past the attention"
    assert additions[1].sources[0] == steps.index(additions[0])


def test_all_layers_look_alike_and_others_do_not_exist(graph: Any) -> None:
    assert graph_file.layer_steps(graph, 0) == graph_file.layer_steps(graph, 1) == graph_file.layer_steps(graph, 2)
    assert graph_file.layer_steps(graph, 3) == []


def test_the_layer_can_be_drawn(graph: Any) -> None:
    steps = graph_file.layer_steps(graph, 0)
    figure = figures.layer_flow([(step.operator, step.weight, step.sources) for step in steps], "one layer")
    words = " ".join(text.get_text() for text in figure.axes[0].texts)
    assert all(step.operator in words for step in steps)


def test_a_folder_without_a_network_names_the_flag(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="--visualize_network"):
        graph_file.find_network(tmp_path)
