"""`workshop bench URL` from the command line: what it prints, writes, and refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from engines import Engines
from fake_openai import Script, fake_server
from trtllm_workshop import bench_url_cli, cli
from trtllm_workshop.load_client import SERVER_FIELDS
from trtllm_workshop.ports import free_port

SMALL = ["--input-tokens", "12", "--output-tokens", "5", "--requests", "4"]


@pytest.fixture(scope="module")
def tokenizer(engines: Engines) -> str:
    return str(engines.hf())


def test_a_sweep_is_printed_and_kept(tokenizer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "folder"
    with fake_server(Script(ttft_s=0.05, gap_s=0.01)) as url:
        load = ["--concurrency", "1", "2", *SMALL, "--slo-ttft", "0.5", "--out", str(out)]
        assert cli.main(["bench", url, "--tokenizer", tokenizer, *load]) == 0
    said = capsys.readouterr().out
    assert "1 in flight" in said and "2 in flight" in said and said.count("goodput") == 2
    kept = json.loads((out / "02-2-in-flight.json").read_text())
    assert kept["config"]["concurrency"] == 2 and kept["completed"] == 4 and kept["slo"]["ttft"] == 0.5
    assert len((out / "01-1-in-flight.csv").read_text().splitlines()) == 5


def test_json_is_the_whole_of_standard_output(tokenizer: str, capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server(Script(ttft_s=0.02, gap_s=0.005)) as url:
        assert cli.main(["bench", url, "--tokenizer", tokenizer, "--rate", "50", *SMALL, "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["config"]["rate"] == 50 and found["errors"] == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--concurrency", "1", "--tokenizer", "/nowhere"], "--tokenizer /nowhere is no folder"),
        (["--concurrency", "1", "--tokenizer", "{here}"], "holds no tokenizer"),
        (["--concurrency", "1", "--warm-up", "-1"], "--warm-up -1"),
        (["--concurrency", "1", "--api-key-env", "NO_SUCH_KEY"], "NO_SUCH_KEY: there is no such environment variable"),
        (["--trace", "/nowhere.jsonl"], "/nowhere.jsonl"),
        (["--concurrency", "1", "--out", "{file}"], "cannot be a folder (File exists)"),
        (["--concurrency", "1", "--out", "{file}/new"], "cannot be a folder (Not a directory)"),
        (["--concurrency", "1"], "is the server up"),
        (["--concurrency", "1"], "name the model yourself (--model)"),
    ],
)
def test_what_cannot_be_run_is_told_in_a_line(
    words: list[str], message: str, tokenizer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (file := tmp_path / "file").write_text("")
    given = [word.format(here=tmp_path, file=file) for word in words]
    if "--tokenizer" not in given:
        given += ["--tokenizer", tokenizer]
    assert cli.main(["bench", f"http://127.0.0.1:{free_port()}", *SMALL, *given]) == 2
    said = capsys.readouterr().err
    assert message in said and len(said.splitlines()) == 1


def test_requests_that_fail_are_told_from_loads_that_cannot_be_run(
    tokenizer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--tokenizer", tokenizer, "--concurrency", "1", "--warm-up", "0", *SMALL]
    with fake_server(Script(status=503)) as url:
        assert cli.main(["bench", url, *words]) == 1
    assert "4 of 4 requests failed" in capsys.readouterr().err
    with fake_server(Script()) as url:
        assert cli.main(["bench", url, *words, "--seconds", "1e-9"]) == 2
    assert "no request was sent" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["--concurrency", "0"], ["--rate", "nan"], ["--rate", "1", "--concurrency", "1"], []]
)
def test_arguments_without_sense_are_refused(words: list[str], tokenizer: str) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "http://127.0.0.1:1", "--tokenizer", tokenizer, *words])
    assert ended.value.code == 2


def test_the_kinds_of_servers_are_those_of_the_client() -> None:
    assert tuple(SERVER_FIELDS) == bench_url_cli.SERVERS


def test_help_needs_neither_the_client_nor_torch() -> None:
    code = "import sys; from trtllm_workshop import bench_url_cli; print({'torch', 'aiohttp'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
