"""The simulation of quantized checkpoints: exact without quantization, near ModelOpt's own fake quantization with it."""

import json

import pytest
import torch
from engines import divergence
from modelopt_simulation import simulated_logits
from quantized_models import calibration_set, run
from tiny_models import tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from trtllm_workshop.reference.quantize_formats import FORMATS, modelopt_config

pytest.importorskip("modelopt")

TOKENS = [5, 300, 17, 42, 5, 99, 256, 400, 33, 8, 120, 77]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return calibration_set(tmp_path_factory.mktemp("calibration"))


def plain_logits(source):
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.tensor([TOKENS])).logits[0]


@pytest.mark.parametrize(("family", "tp"), [("llama-gqa", 1), ("qwen2", 2), ("llama-tied", 3), ("llama-gqa", 4)])
def test_without_quantization_it_is_the_model(data, tmp_path, family, tp):
    source = tiny_model(tmp_path / "hf", family, dtype="bfloat16", vocab_size=515 if tp == 3 else 512)
    run(source, tmp_path / "out", None, "full_prec", tp_size=tp)
    torch.testing.assert_close(
        simulated_logits(source, tmp_path / "out", TOKENS), plain_logits(source), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(
    ("qformat", "options", "ranks"),
    [("fp8", {"kv_cache_dtype": "fp8"}, (2, 4)), ("int4_awq", {"awq_block_size": 16, "calib_size": 2}, (2,))],
)
def test_ranks_change_nothing(data, tmp_path, qformat, options, ranks):
    source = tiny_model(tmp_path / "hf", "llama-gqa", dtype="bfloat16", intermediate_size=128)
    for tp in (1, *ranks):
        run(source, tmp_path / str(tp), data, qformat, tp_size=tp, **options)
    one, *others = (simulated_logits(source, tmp_path / str(tp), TOKENS) for tp in (1, *ranks))
    for many in others:
        torch.testing.assert_close(many, one, rtol=1e-5, atol=1e-5)


def test_it_agrees_with_modelopts_own_fake_quantization(data, tmp_path):
    """ModelOpt's quantizers, given the scales that the export merged (q, k and v; fc and gate; keys and values)."""
    import modelopt.torch.quantization as mtq

    source = tiny_model(tmp_path / "hf", "llama-gqa", dtype="bfloat16")
    run(source, tmp_path / "out", data, kv_cache_dtype="fp8")
    simulated = simulated_logits(source, tmp_path / "out", TOKENS)
    tokenizer = AutoTokenizer.from_pretrained(source)
    texts = [json.loads(line)["text"] for line in (data / "train.jsonl").read_text().splitlines()]
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()

    def loop(model):
        for text in texts:
            model(torch.tensor([tokenizer(text)["input_ids"]]), use_cache=False)

    with torch.no_grad():
        mtq.quantize(model, modelopt_config(FORMATS["fp8"], "fp8", 128, False), loop)
        for block in model.model.layers:
            attention, mlp = block.self_attn, block.mlp
            for group in ((attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj)):
                merged = max(linear.weight_quantizer.amax.max() for linear in group)
                for linear in group:
                    linear.weight_quantizer.amax = merged
            for quantizer in (attention.k_bmm_quantizer, attention.v_bmm_quantizer):
                quantizer.amax = quantizer.amax.new_tensor(448.0)  # the export's least scale is 1.0
        theirs = model(torch.tensor([TOKENS]), use_cache=False).logits[0]
    cost = divergence(plain_logits(source), theirs)
    assert divergence(theirs, simulated) < cost / 100


@pytest.mark.parametrize(
    ("qformat", "options"),
    [
        ("fp8", {}),
        ("int8_wo", {}),
        ("int4_wo", {}),
        ("int4_awq", {"awq_block_size": 16}),
        ("full_prec", {"kv_cache_dtype": "int8"}),
    ],
)
def test_every_format_costs_something_and_not_much(data, tmp_path, qformat, options):
    source = tiny_model(tmp_path / "hf", "llama-gqa", dtype="bfloat16", intermediate_size=128)
    run(source, tmp_path / "out", data, qformat, **options)
    cost = divergence(plain_logits(source), simulated_logits(source, tmp_path / "out", TOKENS))
    assert 0 < cost < (0.2 if "int4" in qformat else 0.02), cost
