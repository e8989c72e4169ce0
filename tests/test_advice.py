"""Known failures: the first real error is found, and the advice names the right cause and one fix."""

from __future__ import annotations

import subprocess
import time

import pytest
from trtllm_workshop.advice import advise, check_artifacts, first_error
from trtllm_workshop.advice_rules import parse_compute_mismatch, parse_length_error, unrecognized_arguments

LLAMA = "examples/models/core/llama/convert_checkpoint.py"


def advice(text: str, row: str, returncode: int | None = 1, command: str | None = None) -> str:
    """The one piece of advice that the row gives for this output, as text."""
    found = [item for item in advise(text, returncode, command) if item.row == row]
    assert len(found) == 1, [str(item) for item in advise(text, returncode, command)]
    assert found[0].cause and found[0].fix
    return str(found[0])


def test_a_plain_failure_gets_no_advice():
    assert advise("everything was fine\n", 1) == [] and first_error("all is well") is None


def test_P08_the_stub_without_a_wheel():
    text = advice(
        "INFO:wheel-stub:Testing wheel tensorrt_llm-1.2.1-cp312 against tag cp311-cp311-linux_x86_64\n", "P08"
    )
    assert "Python 3.11" in text and "Python 3.12" in text
    assert "Python 3.10" not in advice(
        "wheel-stub:Testing wheel tensorrt_llm-0.15.0 against tag cp310-cp310-any", "P08"
    )
    assert advice("nvidia.stub.InstallFailedError: the placeholder cannot be installed", "P08")


@pytest.mark.parametrize("symbol", ["_ZN3c105ErrorC2E", "_ZNK2at6Tensor4dataEv", "_ZN5torch3jit6parseE", "_ZN2at4_ops"])
def test_P10_an_undefined_torch_symbol_means_another_torch(symbol):
    text = advice(f"ImportError: bindings.so: undefined symbol: {symbol}", "P10")
    assert "torch" in text and "restart the kernel" in text and "source" not in text
    assert advise("ImportError: libfoo.so: undefined symbol: cudaGetDevice", 1) == []


def test_P10_missing_cuda_13_libraries():
    text = advice("ImportError: libcublasLt.so.13: cannot open shared object file: No such file or directory", "P10")
    assert "CUDA 13" in text and "cu130" in text


def test_P12_mpi4py_wants_the_mpi_package_first():
    for text in (
        "  ERROR: Failed building wheel for mpi4py",
        "ERROR: Failed to build mpi4py",
        "libmpi.so.40: cannot open shared object file",
    ):
        assert "libopenmpi-dev" in advice(text, "P12")


def test_P17_HeaderTooLarge_means_pointer_files():
    assert "pointers" in advice(
        "safetensors_rust.SafetensorError: Error while deserializing header: HeaderTooLarge", "P17"
    )


def test_P20_hf_transfer_is_switched_off_after_a_cut():
    text = advice("RuntimeError: An error occurred. Consider disabling HF_HUB_ENABLE_HF_TRANSFER for more.", "P20")
    assert "HF_HUB_ENABLE_HF_TRANSFER=0" in text


def test_P46_argparse_output_is_translated_to_a_number():
    log = "usage: trtllm-build [-h]\ntrtllm-build: error: unrecognized arguments: --max_output_len 2048\n"
    command = "trtllm-build --checkpoint_dir c --max_input_len 2048 --max_output_len 2048"
    assert "--max_seq_len 4096 (2048 + 2048)" in advice(log, "P46", 2, command)
    assert "longest prompt you expect + 2048" in advice(log, "P46", 2)


def test_P56_every_flag_of_argparse_list_gets_its_stage():
    words = "--remove_input_padding --use_gemm_plugin float16 --max_batch_size 8 --max_input_len 4096"
    log = f"convert_checkpoint.py: error: unrecognized arguments: {words}"
    assert unrecognized_arguments(log) == ("convert_checkpoint.py", words.split())
    text = advice(log, "P56", 2, f"python {LLAMA} {words}")
    for flag in ("--remove_input_padding", "--max_batch_size", "--max_input_len"):
        assert f"{flag}: it belongs to another command: give this to trtllm-build" in text
    assert "--gemm_plugin to trtllm-build" in text
    assert unrecognized_arguments("prog: error: unrecognized arguments: \n") == ("prog", [])


def test_P46_the_remedy_of_a_reference_command_is_passed_on(capsys):
    from trtllm_workshop.commands import command_parser

    with pytest.raises(SystemExit):
        command_parser("trtllm-build", ["max_input_len"]).parse_args(["--max_input_len", "9", "--max_output_len=3"])
    text = advice(capsys.readouterr().err, "P46", 2)
    assert "does not know --max_output_len" in text and text.endswith("write --max_seq_len 12 (9 + 3)")


def test_P48_the_shell_ran_half_of_the_command():
    done = subprocess.run(["bash", "-c", "true \\ \n --max_seq_len 64"], capture_output=True, text=True)
    assert "--max_seq_len" in advice(done.stderr, "P48", done.returncode) and done.returncode == 127


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("Prompt length (5056) exceeds maximum sequence length (2048)", (5056, 2048, "--max_seq_len", 0)),
        ("Prompt length (200) exceeds maximum input length (1)", (200, 1, "--max_input_len", 0)),
        (
            "RuntimeError: Maximum input length (900) + maximum new tokens (200) exceeds the engine or specified limit (1024)",
            (900, 1024, "--max_seq_len", 200),
        ),
        (
            "ValueError: The sum of prompt length (100) and max_tokens (64) should not exceed max_seq_len (128)",
            (100, 128, "--max_seq_len", 64),
        ),
    ],
)
def test_P49_length_errors_are_read_as_numbers(text, numbers):
    found = parse_length_error(text)
    assert found is not None and (found.prompt, found.limit, found.flag, found.new_tokens) == numbers
    said = advice(text, "P49")
    assert all(str(number) in said for number in numbers[:3])
    assert parse_length_error("Prompt length 12 is fine") is None


def test_P53_a_killed_process_is_host_memory():
    for text, code in (
        ("loading\n", -9),
        ("loading\n", 137),
        ("loading\nKilled\n", 1),
        ("bash: line 1: 77 Killed", 137),
    ):
        said = advice(text, "P53", code)
        assert "host memory" in said and "GPU memory is full" not in said


def test_P53_gpu_memory_is_told_apart():
    for text in (
        "[TRT] [E] 2: Error Code 2: OutOfMemory (no further information)",
        "[TRT] [E] Requested amount of GPU memory (24793579520 bytes) could not be allocated",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate",
    ):
        said = advice(text, "P53")
        assert "GPU memory is full" in said and "host" not in said
    assert "23.1 GiB" in advice("amount of GPU memory (24793579520 bytes) could not", "P53")
    assert advise("the word Killed in a sentence\nmore output\n", 1) == []
    assert advise("segfault", -11) == []


def test_P54_a_happy_log_without_files_is_a_failure(tmp_path):
    since = time.time()
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "rank0.engine").write_bytes(b"x")
    assert check_artifacts(tmp_path, since) == []
    (found,) = check_artifacts(tmp_path, since, world_size=2)
    assert found.row == "P54" and "rank1.engine is missing" in found.cause and "rank0" not in found.cause
    (tmp_path / "rank1.engine").touch()
    assert "rank1.engine is empty" in check_artifacts(tmp_path, since, world_size=2)[0].cause
    assert "rank0.engine is older than this run" in check_artifacts(tmp_path, since + 60)[0].cause
    (missing,) = check_artifacts(tmp_path / "nowhere", since)
    assert "config.json is missing" in missing.cause


def test_P58_no_engine_file_is_explained_by_the_backend(tmp_path):
    (found,) = check_artifacts(tmp_path, time.time())
    assert "the default LLM runs on PyTorch and makes none" in found.cause and "_tensorrt_engine" in found.cause
    text = advice("ValueError: Unrecognized model in work/engines/m/float16-tp1. Should have a model_type", "P58")
    assert "--backend tensorrt" in text


BUILD_LOG = """[TensorRT-LLM] TensorRT-LLM version: 0.12.0
[04/09/2024-16:26:40] [TRT-LLM] [I] Set gemm_plugin to auto.
[04/09/2024-16:26:40] [TRT] [W] Unused input
[04/09/2024-16:26:41] [TRT] [E] 9: [standard.cpp::check::2266] Error Code 9: Internal Error (FP8 wants other hardware)
[04/09/2024-16:26:42] [TRT] [E] 4: Network validation failed.
Traceback (most recent call last):
  File "/usr/local/bin/trtllm-build", line 8, in <module>
    sys.exit(main())
TypeError: a bytes-like object is required, not 'NoneType'
"""


def test_P55_the_first_error_line_and_what_the_traceback_raised():
    first, last = str(first_error(BUILD_LOG)).splitlines()
    assert first.endswith("Internal Error (FP8 wants other hardware)")
    assert last == "TypeError: a bytes-like object is required, not 'NoneType'"
    assert "FP8 wants other hardware" in advice(BUILD_LOG, "P55")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "[TensorRT-LLM][WARNING] x\n[TensorRT-LLM][ERROR] Assertion failed: y\n[TensorRT-LLM][ERROR] z",
            "Assertion failed: y",
        ),
        (
            "[TRT] [E] IBuilder::buildSerializedNetwork: Error Code 9: API Usage Error (a)\n[TRT] [E] b",
            "API Usage Error (a)",
        ),
        ("[TRT-LLM] [E] Failed\n", "Failed"),
        ("usage: x\ntrtllm-build: error: unrecognized arguments: --q", "unrecognized arguments: --q"),
        ("Traceback (most recent call last):\n  File 'a'\nKeyError: 'x'\n", "KeyError: 'x'"),
        (
            "Traceback (most recent call last):\n  File 'a'\nKeyError: 'x'\n\nDuring handling of it\n\n"
            "Traceback (most recent call last):\n  File 'b'\n    raise\npkg.errors.LoadError: no file\nmore\n",
            "pkg.errors.LoadError: no file",
        ),
        (
            "[1,0]<stderr>:Traceback (most recent call last):\n[1,0]<stderr>:  File 'a'\n[1,0]<stderr>:ValueError: q",
            "ValueError: q",
        ),
        ("step 1\nbash: line 3: 4242 Killed    trtllm-build", "Killed"),
    ],
)
def test_P55_both_spellings_tracebacks_and_last_words(text, expected):
    assert str(first_error(text)).splitlines()[0].endswith(expected)


@pytest.mark.parametrize(
    "spelling", ["stdVersionRead == kSERIALIZATION_VERSION", "serializationVersion", "safeSerializationVersion"]
)
def test_P59_both_version_numbers_and_which_is_newer(spelling):
    log = f"Serialization assertion {spelling} failed. Version tag does not match. "
    numbers = "Note: Current Version: {}, Serialized Engine Version: {}"
    newer = advice(log + numbers.format(228, 237), "P59")
    assert "the engine is newer" in newer and "228" in newer and "237" in newer
    assert "the TensorRT here is newer" in advice(log + numbers.format(237, 228), "P59")
    assert "another TensorRT version" in advice(log, "P59")


def test_P61_running_and_built_are_not_swapped():
    log = "The engine plan file is generated on an incompatible device, expecting compute 9.0 got compute 8.9, please rebuild."
    assert parse_compute_mismatch(log) == ("9.0", "8.9")
    assert "built for compute capability 8.9, this GPU has 9.0" in advice(log, "P61")


def test_P63_the_world_size_decides_between_two_fixes():
    log = "Engine world size (2 * 1) != Runtime world size (1)"
    assert "mpirun -n 2" in advice(log, "P63")
    mixed = advice(log, "P63", command="mpirun -n 2 python examples/run.py")
    assert "different MPI installations" in mixed and "mpi4py" in mixed
    assert "mpirun -n 2" in advice(log, "P63", command="mpirun -n 4 python examples/run.py")


def test_P66_a_checkpoint_folder_given_as_engine():
    text = advice("  runner = runner_cls.from_dir(**kwargs)\nKeyError: 'build_config'\n", "P66")
    assert "rank0.safetensors" in text and "trtllm-build --checkpoint_dir THAT_FOLDER" in text
    assert "run convert_checkpoint.py first" in advice("KeyError: 'architecture'", "P43")


def test_P100_slots_and_root():
    text = advice(
        "There are not enough slots available in the system to satisfy the 4\nslots that were requested", "P100"
    )
    assert "with 4 GPUs" in text and "--oversubscribe" in text and "--tp_size" in text
    assert "--allow-run-as-root" in advice("mpirun has detected an attempt to run as root.", "P100")


def test_one_failure_is_not_explained_twice():
    found = advise("libmpi.so.40: cannot open shared object file\nERROR: Failed to build mpi4py\n" * 2, 1)
    assert len({item.fix for item in found}) == len(found)
