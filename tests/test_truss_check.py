"""The checker of Truss configurations: contradictions and misspelt fields are named with both values."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from trtllm_workshop.deploy.truss_check import check_truss

GOOD: dict[str, Any] = {
    "resources": {"accelerator": "H100:2"},
    "trt_llm": {
        "build": {
            "base_model": "decoder",
            "checkpoint_repository": {"source": "HF", "repo": "some/model"},
            "max_seq_len": 4096,
            "max_batch_size": 64,
            "quantization_type": "fp8_kv",
            "tensor_parallel_count": 2,
        },
        "runtime": {"kv_cache_free_gpu_mem_fraction": 0.85, "enable_chunked_context": True},
    },
}


def checked(folder: Path, changes: dict[str, Any]) -> str:
    """Problems of the good file with some values changed; keys are paths with dots."""
    config = copy.deepcopy(GOOD)
    for path, value in changes.items():
        *parents, last = path.split(".")
        part = config
        for parent in parents:
            part = part[parent]
        part[last] = value
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    return "\n".join(map(str, check_truss(file)))


def test_a_good_file_has_no_problem(tmp_path: Path) -> None:
    assert checked(tmp_path, {}) == ""
    assert checked(tmp_path, {"resources.accelerator": "L40S", "trt_llm.build.tensor_parallel_count": 1}) == ""


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"resources.accelerator": "H100:4"}, ["2 GPUs", "H100:4", "has 4", "H100:2"]),
        ({"trt_llm.build.tensor_parallel_count": 1}, ["1 GPU ", "tensor_parallel_count to 2"]),
        ({"trt_llm.build.max_batch_size": 0}, ["max_batch_size is 0", "from 1 to 2048"]),
        ({"trt_llm.build.max_seq_len": "4k"}, ["max_seq_len is '4k'"]),
        ({"trt_llm.build.max_input_len": 8192}, ["max_input_len is 8192, max_seq_len 4096"]),
        ({"trt_llm.runtime.request_default_max_tokens": 4096}, ["is 4096, max_seq_len 4096"]),
        ({"resources.accelerator": "A100:2"}, ["fp8_kv does not run on A100", "L4, H100"]),
        ({"trt_llm.build.quantization_type": "fp4"}, ["fp4 does not run on H100", "B200"]),
        ({"trt_llm.build.quantization_type": "int4_awq"}, ["'int4_awq'", "no_quant"]),
        ({"resources.accelerator": "T4:2", "trt_llm.build.quantization_type": "no_quant"}, ["T4 is too old"]),
        ({"resources.accelerator": "H100:two"}, ["'H100:two'"]),
        ({"resources.accelerator": None}, ["accelerator is missing"]),
        ({"trt_llm.build.max_num_token": 8192}, ["no field 'max_num_token'", "mean max_num_tokens"]),
        ({"trt_llm.runtime.kv_cache_free_gpu_memory_fraction": 0.9}, ["mean kv_cache_free_gpu_mem_fraction"]),
        ({"trt_llm.runtime.kv_cache_free_gpu_mem_fraction": 90}, ["is 90", "at most 1"]),
        ({"trt_llm.build": [1]}, ["trt_llm.build is no mapping"]),
        ({"trt_llm": None}, ["no section trt_llm"]),
    ],
)
def test_P118_fields_that_contradict_each_other_are_named(
    tmp_path: Path, changes: dict[str, Any], words: list[str]
) -> None:
    found = checked(tmp_path, changes)
    assert all(word in found for word in words), found


def test_a_file_that_is_no_yaml_is_told(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    for text in ("a: [", "just words", "", "\x00"):
        file.write_text(text)
        assert len(check_truss(file)) == 1
