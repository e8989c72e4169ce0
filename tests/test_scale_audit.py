"""Scales that cannot be right are named."""

import json

import pytest
import torch
from engines import quiet
from quantized_checkpoints import quantized_checkpoint
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model
from trtllm_workshop.reference.convert import convert_checkpoint
from trtllm_workshop.scale_audit import audit_scales, saturated_share


@pytest.fixture
def checkpoint(tmp_path):
    plain = convert_checkpoint(tiny_model(tmp_path / "hf"), tmp_path / "plain", dtype="float32", say=quiet).folder
    return quantized_checkpoint(plain, tmp_path / "fp8", "FP8", "FP8")


def change(checkpoint, edit):
    tensors = load_file(checkpoint / "rank0.safetensors")
    edit(tensors)
    save_file(tensors, checkpoint / "rank0.safetensors")


LAYER = "transformer.layers.1."
KV = "attention.kv_cache_scaling_factor"


def test_measured_scales_pass(checkpoint):
    audit = audit_scales(checkpoint)
    assert audit.passed and len([row for row in audit.rows if row.kind == "KV cache"]) == 3
    assert {row.layer for row in audit.rows} == {0, 1, 2} and "plausible" in str(audit)


def test_P72_all_cache_scales_are_one(checkpoint):
    def ones(tensors):
        for layer in range(3):
            tensors[f"transformer.layers.{layer}.{KV}"].fill_(1.0)

    change(checkpoint, ones)
    audit = audit_scales(checkpoint)
    assert len(audit.problems) == 1 and "which is fine; or they were never measured" in str(audit)
    (row,) = [line for line in str(audit).splitlines() if line.startswith("KV cache")]
    assert row.endswith("all 1.0, see below") and "plausible" not in row
    change(checkpoint, lambda tensors: tensors[LAYER + KV].fill_(1.5))
    assert audit_scales(checkpoint).passed


def test_P72_separate_names_for_keys_and_values(checkpoint):
    def split(tensors):
        for layer in range(3):
            joint = f"transformer.layers.{layer}.{KV}"
            for part in "kv":
                tensors[joint.replace("kv_", f"{part}_")] = tensors[joint].clone()
            del tensors[joint]

    change(checkpoint, split)
    assert audit_scales(checkpoint).passed


@pytest.mark.parametrize(
    ("value", "said"), [(0.0, "zero"), (float("nan"), "NaN"), (float("inf"), "infinite"), (-1.0, "negative")]
)
@pytest.mark.parametrize("name", [KV, "mlp.proj.weights_scaling_factor", "attention.dense.activation_scaling_factor"])
def test_P72_values_that_cannot_be_right(checkpoint, name, value, said):
    change(checkpoint, lambda tensors: tensors[LAYER + name].fill_(value))
    assert audit_scales(checkpoint).problems == [f"{LAYER}{name}: {said}"]


def test_P72_a_layer_without_scales(checkpoint):
    change(checkpoint, lambda tensors: tensors.pop(LAYER + KV))
    assert audit_scales(checkpoint).problems == [
        "scales of the KV cache are missing for transformer.layers.1.attention"
    ]


def test_P72_one_of_two_separate_scales_is_missing(checkpoint):
    def split(tensors):
        for layer in range(3):
            scale = tensors.pop(f"transformer.layers.{layer}.{KV}")
            tensors[f"transformer.layers.{layer}.attention.k_cache_scaling_factor"] = scale.clone()
            if layer != 1:
                tensors[f"transformer.layers.{layer}.attention.v_cache_scaling_factor"] = scale.clone()

    change(checkpoint, split)
    assert audit_scales(checkpoint).problems == [
        "scales of the KV cache are missing for transformer.layers.1.attention"
    ]


def test_P72_all_three_names_are_one_sentence(checkpoint):
    def ones(tensors):
        for layer in range(3):
            for part in ("kv", "k", "v"):
                tensors[f"transformer.layers.{layer}.attention.{part}_cache_scaling_factor"] = torch.ones(1)

    change(checkpoint, ones)
    assert len(audit_scales(checkpoint).problems) == 1
    config = json.loads((checkpoint / "config.json").read_text())
    config["quantization"]["kv_cache_quant_algo"] = "INT8"
    (checkpoint / "config.json").write_text(json.dumps(config))
    (problem,) = audit_scales(checkpoint).problems
    assert "amax / 127 and is not clamped" in problem and "448" not in problem


@pytest.mark.parametrize("suffix", ["weights_scaling_factor", "activation_scaling_factor"])
def test_one_linear_without_its_scale(checkpoint, suffix):
    change(checkpoint, lambda tensors: tensors.pop(f"{LAYER}mlp.fc.{suffix}"))
    (problem,) = audit_scales(checkpoint).problems
    assert "missing for transformer.layers.1.mlp.fc" in problem


def test_a_rank_that_is_missing(checkpoint):
    (checkpoint / "rank0.safetensors").unlink()
    assert audit_scales(checkpoint).problems[0].startswith("rank0.safetensors is missing")


def test_activation_scales_of_one_are_not_calibrated(checkpoint):
    def ones(tensors):
        for name, tensor in tensors.items():
            if name.endswith("activation_scaling_factor"):
                tensor.fill_(1.0)

    change(checkpoint, ones)
    assert "scales of activations are exactly 1.0: not calibrated" in str(audit_scales(checkpoint))


def test_a_checkpoint_without_scales_has_nothing_to_audit(checkpoint, tmp_path):
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    assert config["quantization"]["quant_algo"] is None and audit_scales(tmp_path / "plain").rows == []


def test_P74_the_saturated_share_of_a_layer():
    keys = torch.tensor([100.0, -300.0, 500.0, 2000.0])
    assert saturated_share(keys, 1.0) == 0.5 and saturated_share(keys, 2000 / 448) == 0.0
