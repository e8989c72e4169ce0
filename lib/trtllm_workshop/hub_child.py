"""The process that talks to the Hub: `python -m trtllm_workshop.hub_child`, one JSON request line in, one JSON answer out.

A process of its own, because huggingface_hub reads its settings when it is imported, a stalled transfer can only be
ended from outside, and its memory is given back. The request comes on standard input, so that the token is in no
command line; when that input closes, the caller is gone and the process ends.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any


def list_files(request: Mapping[str, Any]) -> dict[str, Any]:
    """The commit of a revision and its files: {"sha", "files": [{"name", "size", "sha256"}]} (sha256 of LFS files)."""
    from huggingface_hub import HfApi

    info = HfApi().model_info(
        request["model"],
        revision=request["revision"],
        files_metadata=True,
        timeout=request["timeout"],
        token=request["token"] or False,  # False: do not look for one elsewhere
    )
    files = []
    for entry in info.siblings or []:
        lfs: Any = entry.lfs
        sha256 = lfs.get("sha256") if isinstance(lfs, dict) else getattr(lfs, "sha256", None)
        files.append({"name": entry.rfilename, "size": entry.size, "sha256": sha256})
    return {"sha": info.sha, "files": files}


def fetch(request: Mapping[str, Any]) -> dict[str, Any]:
    """Downloads exactly the named files of a commit into a folder; what is there already is kept or resumed.

    File by file: `snapshot_download` returns a half-filled folder without an error when it cannot list the repository.
    """
    from huggingface_hub import constants, hf_hub_download

    fast = bool(getattr(constants, "HF_HUB_ENABLE_HF_TRANSFER", False))
    _small_pieces(constants, fast)
    options = {"revision": request["revision"], "local_dir": request["folder"], "token": request["token"] or False}
    pool = ThreadPoolExecutor(1 if fast else 4)  # hf_transfer is parallel by itself
    jobs = [pool.submit(hf_hub_download, request["model"], name, **options) for name in request["names"]]
    try:
        for job in as_completed(jobs):
            job.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # one failure is reported at once, not after the largest file
    return {}


def _small_pieces(constants: Any, fast: bool) -> None:
    """Lets bytes reach the disk soon, where they can be resumed and are seen by the watchdog.

    The library (0.36) writes pieces of 10 MB, and hf_transfer fetches 100 of them at once: at 10 MB/s nothing would be on
    disk for more than a minute.
    """
    for name, value in {"DOWNLOAD_CHUNK_SIZE": 4 << 20 if fast else 256 << 10, "HF_TRANSFER_CONCURRENCY": 16}.items():
        if hasattr(constants, name):
            setattr(constants, name, value)


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def describe(error: BaseException) -> dict[str, Any]:
    """{"kind", "status", "text"} of an exception of the Hub's library, whichever HTTP client it uses."""
    errors = list(_chain(error))
    text = f"{type(error).__name__}: {error}"
    root = f"{type(errors[-1]).__name__}: {errors[-1]}"
    if any(getattr(item, "errno", None) in (errno.ENOSPC, errno.EDQUOT) for item in errors):
        return {"kind": "disk full", "status": None, "text": root}
    if any("hf_transfer" in str(item) for item in errors) or any("xet" in type(item).__module__ for item in errors):
        return {"kind": "fast path", "status": None, "text": root}
    responses = (getattr(item, "response", None) for item in errors)
    response = next((found for found in responses if found is not None), None)
    if response is not None:
        return {"kind": _kind(response), "status": response.status_code, "text": text}
    if any(type(item).__name__ == "HFValidationError" for item in errors):
        return {"kind": "bad name", "status": None, "text": str(error)}
    modules = {type(item).__module__.split(".")[0].rstrip("2") for item in errors}  # httpx2 in huggingface_hub 2.x
    offline = any(type(item).__name__ == "OfflineModeIsEnabled" for item in errors)
    cut = isinstance(error, (ConnectionError, TimeoutError)) or "Consistency check failed" in text
    if offline or cut or modules & {"requests", "urllib", "urllib3", "httpx", "httpcore", "socket", "ssl"}:
        return {"kind": "connection", "status": None, "text": "HF_HUB_OFFLINE is set" if offline else root}
    return {"kind": "other", "status": None, "text": text}


def _kind(response: Any) -> str:
    """The Hub's answers by status and its X-Error-Code header; those of a proxy in between count as unreachable."""
    status, code = response.status_code, response.headers.get("X-Error-Code")
    from_hub = any(name.lower().startswith(("x-error-", "x-repo-", "x-request-id")) for name in response.headers)
    if code == "GatedRepo":
        return "gated"
    if code == "RevisionNotFound":
        return "revision"
    if status == 401:
        return "unauthorized"
    if status == 403:
        return "forbidden" if from_hub else "unreachable"
    if status == 404:
        return "not found"
    return "unreachable" if status in (407, 408, 429) or status >= 500 else "other"


def _end_with_the_caller() -> None:
    with contextlib.suppress(Exception):
        sys.stdin.read()
    os._exit(1)


def main() -> int:
    """Answers one request; everything that libraries print goes to standard error."""
    request = json.loads(sys.stdin.readline())
    answer_to, sys.stdout = sys.stdout, sys.stderr
    threading.Thread(target=_end_with_the_caller, daemon=True).start()
    try:
        answer = {"list": list_files, "fetch": fetch}[request["action"]](request)
    except Exception as error:
        answer = {"error": describe(error)}
    print(json.dumps(answer), file=answer_to, flush=True)
    return 0


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # a thread that waits for the network must not keep the process
