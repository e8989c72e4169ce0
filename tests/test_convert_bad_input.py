"""convert with bad input: each error names the thing, its value and the fix, and nothing half-written stays behind."""

import json
import os
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_convert import convert, hf_state
from tiny_models import edit_config, tiny_model
from trtllm_workshop.checkpoint import verify_checkpoint
from trtllm_workshop.reference.convert import convert_checkpoint


@pytest.fixture
def source(tmp_path):
    return tiny_model(tmp_path / "hf", "llama-gqa", max_shard_size="300KB")


def refused(source, target, *parts, **options):
    """Converts, expects an error with all the parts in it, and that target and surroundings are as before."""
    before = sorted(os.walk(target.parent))
    with pytest.raises(ValueError) as error:
        convert(source, target, **options)
    text = str(error.value)
    assert all(part in text for part in parts), text
    assert sorted(os.walk(target.parent)) == before
    return text


def shard(folder, number=2):
    return sorted(folder.glob("model-*.safetensors"))[number - 1]


def test_missing_shard(source, tmp_path):
    gone = shard(source)
    gone.unlink()
    refused(source, tmp_path / "out", gone.name, "missing", str(source), "download")


def test_missing_shard_without_index(source, tmp_path):
    (source / "model.safetensors.index.json").unlink()
    gone = shard(source)
    gone.unlink()
    refused(source, tmp_path / "out", gone.name, "missing")


def test_truncated_shard(source, tmp_path):
    path = shard(source)
    path.write_bytes(path.read_bytes()[:-100])
    refused(source, tmp_path / "out", path.name, "truncated", "100 are missing")


def test_P17_pointer_shards_are_named_with_the_expected_size(source, tmp_path):
    for path in source.glob("*.safetensors"):
        path.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 123456\n")
    text = refused(source, tmp_path / "out", "Git LFS pointer", "123456 bytes", "git lfs pull")
    assert text.count("Git LFS pointer") == len(list(source.glob("*.safetensors")))


def test_index_that_does_not_match_the_files(source, tmp_path):
    path = source / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    name, other = "model.norm.weight", shard(source, 1).name
    assert index["weight_map"][name] != other
    index["weight_map"][name] = other
    path.write_text(json.dumps(index))
    refused(source, tmp_path / "out", "do not belong together", name)
    path.write_text("{")
    refused(source, tmp_path / "out", path.name, "cannot be read")


def test_two_weight_sets_one_is_chosen_and_named(source, tmp_path):
    state = hf_state(source)
    save_file({name: tensor + 1 for name, tensor in state.items()}, source / "model.safetensors")
    lines = []
    convert_checkpoint(source, tmp_path / "out", say=lines.append)
    assert any("model.safetensors is read, model-00001" in line for line in lines)
    norm = load_file(tmp_path / "out" / "rank0.safetensors")["transformer.ln_f.weight"]
    assert torch.equal(norm, (state["model.norm.weight"] + 1).half())


def test_the_same_tensor_in_two_files(source, tmp_path):
    (source / "model.safetensors.index.json").unlink()
    save_file({"model.norm.weight": torch.zeros(64)}, source / "more.safetensors")
    refused(source, tmp_path / "out", "more.safetensors", "repeats", "model.norm.weight")


def as_bin(folder):
    state = hf_state(folder)
    for path in [*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"]:
        path.unlink()
    torch.save(state, folder / "pytorch_model.bin")
    return state


def test_P40_bin_needs_consent_and_is_then_read(source, tmp_path, monkeypatch):
    plain = convert(source, tmp_path / "safe", tp=2, dtype="float32")
    as_bin(source)
    monkeypatch.delenv("TRTLLM_WORKSHOP_ALLOW_PICKLE", raising=False)
    refused(source, tmp_path / "out", "pytorch_model.bin", "needs consent", "TRTLLM_WORKSHOP_ALLOW_PICKLE=1")
    monkeypatch.setenv("TRTLLM_WORKSHOP_ALLOW_PICKLE", "1")
    pickled = convert(source, tmp_path / "out", tp=2, dtype="float32")
    for rank in range(2):
        assert (plain.folder / f"rank{rank}.safetensors").read_bytes() == (
            pickled.folder / f"rank{rank}.safetensors"
        ).read_bytes()


def test_P40_bin_beside_safetensors_is_left_alone(source, tmp_path):
    (source / "pytorch_model.bin").write_bytes(b"not even a pickle")
    lines = []
    convert_checkpoint(source, tmp_path / "out", say=lines.append)
    assert any("pytorch_model.bin" in line and "left alone" in line for line in lines)


class Runs:
    def __reduce__(self):
        return (os.mkdir, ("made-by-a-pickle",))


def test_P40_a_pickle_that_runs_code_is_refused(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    as_bin(source)
    torch.save({"model.norm.weight": Runs()}, source / "pytorch_model.bin")
    refused(source, tmp_path / "out", "pytorch_model.bin", "run code", allow_pickle=True)
    (source / "pytorch_model.bin").write_bytes(pickle.dumps(Runs()))
    refused(source, tmp_path / "out", "pytorch_model.bin", allow_pickle=True)
    assert not (tmp_path / "made-by-a-pickle").exists()


def test_P40_a_truncated_bin(source, tmp_path):
    as_bin(source)
    path = source / "pytorch_model.bin"
    path.write_bytes(path.read_bytes()[:5000])
    refused(source, tmp_path / "out", "pytorch_model.bin", "5000 bytes", "download it again", allow_pickle=True)


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("model-Q4_K_M.gguf", "GGUF"),
        ("consolidated.safetensors", "other tensor names"),
        ("adapter_model.safetensors", "adapter"),
        ("notes.txt", "no weights"),
    ],
)
def test_folders_without_usable_weights(source, tmp_path, file, said):
    for path in [*source.glob("*.safetensors"), source / "model.safetensors.index.json"]:
        path.unlink()
    (source / file).write_bytes(b"GGUF")
    refused(source, tmp_path / "out", said, str(source))


def test_gguf_alone_without_config(tmp_path):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "model.gguf").write_bytes(b"GGUF")
    refused(tmp_path / "hf", tmp_path / "out", "only GGUF weights", "model.gguf")


def test_P43_unknown_architecture(source, tmp_path):
    edit_config(source, architectures=["Phi3ForCausalLM"])
    refused(source, tmp_path / "out", "Phi3ForCausalLM", "LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM")


def test_P43_checkpoint_or_engine_given_as_model(source, tmp_path):
    checkpoint = convert(source, tmp_path / "checkpoint").folder
    refused(checkpoint, tmp_path / "out", "TensorRT-LLM checkpoint", "trtllm-build --checkpoint_dir")
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "config.json").write_text(json.dumps({"pretrained_config": {}, "build_config": {}}))
    refused(tmp_path / "engine", tmp_path / "out", "TensorRT-LLM engine", "run.py")
    refused(tmp_path / "nowhere", tmp_path / "out", "nowhere", "not there")


def test_quantized_source(source, tmp_path):
    edit_config(source, quantization_config={"quant_method": "awq", "bits": 4})
    refused(source, tmp_path / "out", "awq", "unquantized")


def test_P28_tensor_parallel_against_heads(tmp_path):
    nine = tiny_model(tmp_path / "nine", "llama-tied")
    refused(nine, tmp_path / "out", "--tp_size 2", "9 attention heads", "2 ranks", "Possible are 1, 3", tp=2)
    few = tiny_model(tmp_path / "few", "qwen2", num_attention_heads=12, intermediate_size=96)  # 2 KV heads
    for tp in (1, 2, 4):
        convert(few, tmp_path / "fits", tp=tp)
    refused(few, tmp_path / "out", "--tp_size 3", "2 KV heads", "3 ranks", tp=3)
    refused(few, tmp_path / "out", "--tp_size is 0", tp=0)
    refused(few, tmp_path / "out", "--pp_size 4", "3 layers", pp=4)


def test_P30_n_kv_head_against_the_weights(source, tmp_path):
    refused(source, tmp_path / "out", "--n_kv_head is 4", "weights prove 2", "32 rows", n_kv_head=4)
    assert convert(source, tmp_path / "fits", n_kv_head=2).config["num_key_value_heads"] == 2
    edit_config(source, num_key_value_heads=4)
    refused(source, tmp_path / "out", "num_key_value_heads in config.json is 4", "weights prove 2")


def test_P28_the_split_is_judged_from_the_config_alone(tmp_path):
    """A folder whose weights are not there yet: the refusal comes first, with both numbers."""
    sizes = {"num_attention_heads": 12, "num_key_value_heads": 2, "hidden_size": 96, "intermediate_size": 96}
    folder = tiny_model(tmp_path / "hf", "qwen2", **sizes, head_dim=8)
    (folder / "model.safetensors").unlink()
    refused(folder, tmp_path / "out", "--tp_size 3", "2 KV heads", "3 ranks", "Possible are 1, 2, 4, 6, 12", tp=3)
    refused(folder, tmp_path / "out", "--tp_size 5", "12 attention heads", "5 ranks", tp=5)


def test_P30_as_many_kv_heads_as_gpus_is_refused(tmp_path):
    """32 KV heads in the weights and --n_kv_head 2, said for two GPUs: an engine of it would talk nonsense."""
    source = tiny_model(tmp_path / "hf", "mistral", num_attention_heads=32, num_key_value_heads=32, head_dim=4)
    refused(source, tmp_path / "out", "--n_kv_head is 2", "weights prove 32", "128 rows", n_kv_head=2, tp=2)
    assert convert(source, tmp_path / "fits", tp=2).config["num_key_value_heads"] == 32


def test_P31_head_dim_lost_from_the_config(tmp_path):
    source = tiny_model(tmp_path / "hf", "mistral", num_key_value_heads=4)  # head_dim 32, hidden / heads = 16
    assert convert(source, tmp_path / "fits").config["head_size"] == 32
    edit_config(source, head_dim=None)
    text = refused(source, tmp_path / "out", "config.json")
    assert "128" in text and "16" in text


def test_P33_head_and_embedding(tmp_path):
    tied = tiny_model(tmp_path / "tied", "llama-tied")
    written = load_file(convert(tied, tmp_path / "one").folder / "rank0.safetensors")
    assert torch.equal(written["lm_head.weight"], written["transformer.vocab_embedding.weight"])
    edit_config(tied, tie_word_embeddings=False)
    refused(tied, tmp_path / "out", "lm_head.weight", "tie_word_embeddings")
    edit_config(tied, tie_word_embeddings=True)
    state = hf_state(tied)
    for head, warned in ((state["model.embed_tokens.weight"], False), (state["model.embed_tokens.weight"] + 1, True)):
        save_file({**state, "lm_head.weight": head.clone()}, tied / "model.safetensors")
        result = convert(tied, tmp_path / "two")
        assert any("lm_head" in warning for warning in result.warnings) == warned
        again = load_file(result.folder / "rank0.safetensors")
        assert torch.equal(again["lm_head.weight"], written["lm_head.weight"])


def test_P35_unknown_rope_scaling(source, tmp_path):
    edit_config(source, rope_scaling={"rope_type": "wavelets", "factor": 2.0})
    refused(source, tmp_path / "out", "wavelets", "linear")


def test_P39_missing_names_are_summarised(source, tmp_path):
    (source / "model.safetensors.index.json").unlink()
    for path in source.glob("*.safetensors"):
        state = {name: tensor for name, tensor in load_file(path).items() if "up_proj" not in name}
        save_file(state, path)
    refused(source, tmp_path / "out", "1 pattern x 3 layers: model.layers.*.mlp.up_proj.weight")


def test_tensors_that_the_architecture_does_not_have(source, tmp_path):
    save_file({"model.layers.0.self_attn.q_norm.weight": torch.ones(16)}, source / "model-00099-of-00099.safetensors")
    (source / "model.safetensors.index.json").unlink()
    for number, path in enumerate(sorted(source.glob("*.safetensors"))):
        path.rename(source / f"part{number}.safetensors")
    refused(source, tmp_path / "out", "q_norm", "LlamaForCausalLM")


def test_old_rotary_tables_are_harmless(source, tmp_path):
    state = hf_state(source)
    save_file({**state, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}, source / "model.safetensors")
    assert verify_checkpoint(convert(source, tmp_path / "out").folder) == []


def test_quantized_tensor_type(source, tmp_path):
    state = hf_state(source)
    state["model.layers.0.mlp.up_proj.weight"] = state["model.layers.0.mlp.up_proj.weight"].to(torch.int8)
    save_file(state, source / "model.safetensors")
    refused(source, tmp_path / "out", "model.layers.0.mlp.up_proj.weight", "int8")


def test_P45_overflow_is_counted_and_refused(source, tmp_path):
    state = hf_state(source)
    state["model.layers.1.mlp.down_proj.weight"][0, :3] = torch.tensor([7e4, -7e4, 65504.0])
    save_file(state, source / "model.safetensors")
    refused(source, tmp_path / "out", "2 values", "model.layers.1.mlp.down_proj.weight: 2", "--dtype bfloat16")
    result = convert(source, tmp_path / "fine", dtype="bfloat16")
    assert load_file(result.folder / "rank0.safetensors")["transformer.layers.1.mlp.proj.weight"].isfinite().all()


def test_P45_bfloat16_source_as_float16_is_warned_about(tmp_path):
    source = tiny_model(tmp_path / "hf", "qwen2", dtype="bfloat16")
    assert convert(source, tmp_path / "one").warnings == ()
    (warning,) = convert(source, tmp_path / "two", dtype="float16").warnings
    assert "bfloat16" in warning and "65504" in warning


def test_sliding_window_is_not_lost_silently(tmp_path):
    source = tiny_model(tmp_path / "hf", "mistral", sliding_window=128)
    (warning,) = convert(source, tmp_path / "one").warnings
    assert "--max_attention_window_size 128" in warning
