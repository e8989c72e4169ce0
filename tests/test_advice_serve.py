"""Servers that do not start: the advice reads the port, tells engine folder from tokenizer, and knows a server's own flags."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path

import pytest
from trtllm_workshop.advice import advise
from trtllm_workshop.ports import LOOPBACK
from trtllm_workshop.server_process import ServerFailed, start_server
from trtllm_workshop.toolchain import choose

ENGINE = "trtllm-serve work/engines/m --port 8000"
TENSORRT = "trtllm-serve work/engines/m \\\n  --backend tensorrt"
UNRECOGNIZED = "ValueError: Unrecognized model in work/engines/m. Should have a `model_type` key in its config.json, or"


def one(text: str, command: str | None = None) -> str:
    """The only piece of advice for this output."""
    found = advise(text, 1, command)
    assert len(found) == 1, [str(item) for item in found]
    return str(found[0])


@pytest.mark.parametrize(
    ("text", "flag"),
    [
        ("RuntimeError: Failed to bind socket to localhost:8123: [Errno 98] Address already in use", "--port"),
        ("[Errno 98] error while attempting to bind on address ('127.0.0.1', 8123): address already in use", "--port"),
        ("[Errno 98] error while attempting to bind on address ('::1', 8123, 0, 0): address already in use", "--port"),
        ("failed to start GRPC service: Unavailable - Socket '0.0.0.0:8123' already in use ", "--grpc-port"),
    ],
)
def test_a_port_in_use_is_named(text: str, flag: str) -> None:
    said = one(text)
    assert "port 8123 is in use" in said and "sport = :8123" in said and flag in said


@pytest.mark.parametrize(
    "text",
    [
        "RuntimeError: Failed to bind socket to localhost:80: [Errno 13] Permission denied",
        "[Errno 99] error while attempting to bind on address ('10.9.9.9', 8000): cannot assign requested address",
        "[c10d] The server socket has failed to bind to [::]:29500 (errno: 98 - Address already in use).",
    ],
)
def test_other_reasons_not_to_listen_are_not_taken_for_a_port_in_use(text: str) -> None:
    assert advise(text, 1) == []


def test_the_words_of_python_and_asyncio_are_the_ones_that_are_read() -> None:
    with socket.socket() as holder:
        holder.bind((LOOPBACK, 0))
        holder.listen()
        port = holder.getsockname()[1]

        async def listen() -> None:
            await asyncio.get_running_loop().create_server(asyncio.Protocol, LOOPBACK, port)

        with pytest.raises(OSError) as refused:
            asyncio.run(listen())
        assert f"port {port} is in use" in one(str(refused.value))
        with socket.socket() as second, pytest.raises(OSError) as refused:
            second.bind((LOOPBACK, port))
        assert f"port {port} is in use" in one(f"Failed to bind socket to {LOOPBACK}:{port}: {refused.value}")


def test_P58_an_engine_folder_needs_the_backend() -> None:
    assert "add" not in one(UNRECOGNIZED, ENGINE) and "--backend tensorrt" in one(UNRECOGNIZED, ENGINE)
    assert "--backend tensorrt" in one(UNRECOGNIZED)


def test_P58_an_engine_folder_of_any_name_is_looked_into(tmp_path: Path) -> None:
    text = UNRECOGNIZED.replace("work/engines/m", str(folder := tmp_path / "float16"))
    folder.mkdir()
    assert advise(text, 1, f"trtllm-serve {folder}") == []
    (folder / "rank0.engine").touch()
    assert "--backend tensorrt" in one(text, f"trtllm-serve {folder}")


def test_with_the_right_backend_it_is_the_tokenizer_that_is_missing() -> None:
    said = one(UNRECOGNIZED, TENSORRT)
    assert "no tokenizer in work/engines/m." in said and "add --tokenizer FOLDER" in said and "PyTorch" not in said
    said = one(UNRECOGNIZED, f"{TENSORRT} --tokenizer work/engines/m")
    assert "give --tokenizer the Hugging Face folder" in said


@pytest.mark.parametrize(
    "text",
    [
        "OSError: Can't load tokenizer for '/m/x'. If you were trying to load it from 'https://huggingface.co/models'",
        "Repo id must be in the form 'repo_name' or 'namespace/repo_name': '/m/x'. Use `repo_type` argument if needed.",
    ],
)
def test_a_folder_without_a_tokenizer_is_named(text: str) -> None:
    assert "there is no tokenizer in /m/x" in one(text, f"{TENSORRT} --tokenizer /m/x")
    assert advise(text, 1, "python train.py") == []


def test_transformers_words_for_an_engine_folder_are_the_ones_that_are_read(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = tmp_path / "engine"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"version": "1.2.1", "pretrained_config": {}, "build_config": {}}))
    with pytest.raises(ValueError, match="Unrecognized model") as refused:
        AutoTokenizer.from_pretrained(folder, local_files_only=True)
    assert f"no tokenizer in {folder}" in one(str(refused.value), f"trtllm-serve {folder} --backend tensorrt")


@pytest.mark.parametrize(
    "text",
    [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 48.00 MiB.",
        "RuntimeError: Executor creation failed due to insufficient GPU memory.",
    ],
)
def test_P53_a_server_without_memory_gets_its_own_flags_and_only_those(text: str) -> None:
    assert "--free_gpu_memory_fraction" in one(text, ENGINE) and "--max_seq_len" not in one(text, ENGINE)
    assert "kv_cache_free_gpu_mem_fraction" in one(text, "tritonserver --model-repository=r")
    assert "--max_seq_len" in one(text, "trtllm-build --checkpoint_dir c")
    assert "--free_gpu_memory_fraction" in one(f'  File "/usr/local/bin/trtllm-serve", line 8\n{text}')


def test_the_advice_is_in_the_error_of_a_server_that_does_not_start(tmp_path: Path) -> None:
    program = tmp_path / "trtllm-serve"
    program.write_text("#!/bin/sh\necho 'torch.OutOfMemoryError: CUDA out of memory.' >&2\nexit 1\n")
    program.chmod(0o755)
    with pytest.raises(ServerFailed, match="fix: end what else uses the GPU"):
        start_server(choose("reference", quiet=True), f"{program} m --port {{port}}", log=tmp_path / "log", quiet=True)
