"""What the Hub's answers mean: one error type with a kind, and messages that say the next step."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from trtllm_workshop.hub_tokens import Token
from trtllm_workshop.shell import ShownError

HUB = "https://huggingface.co"


class HubError(ShownError):
    """A download that did not work. `kind` is a stable word for programs, the text says what to do; it holds no token.

    Kinds: unreachable, unauthorized, gated, forbidden, not found, revision, no weights, disk, stall, damaged,
    bad name, other.
    """

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


def without_password(text: str) -> str:
    """`text` with the password of every address such as https://user:password@host replaced."""
    return re.sub(r"(//[^/@\s:]*):[^/@\s]+@", r"\1:***@", text)


def explain(
    answer: Mapping[str, Any], model: str, revision: str | None, token: Token | None, endpoint: str = HUB
) -> HubError:
    """Turns the child's description of an error (`hub_child.describe`) into a HubError."""
    kind, status, detail = str(answer["kind"]), answer.get("status"), str(answer.get("text", "")).strip()
    if token:
        detail = token.hide(detail)  # before it is cut: half a token is too much as well
    detail = " ".join(without_password(detail).split())[:400]
    endpoint = without_password(endpoint)
    page = f"{endpoint.rstrip('/')}/{model}"
    sent = f"The token from {token.origin} was sent" if token else "No token was sent"
    log_in = "make one at https://huggingface.co/settings/tokens and set HF_TOKEN, or run `hf auth login`"
    if kind == "gated" and status == 401:
        text = (
            f"{model} is gated and the Hub does not know you (401). {sent}: {log_in}; then accept the licence on "
            f"{page} with the same account"
        )
    elif kind == "gated":
        text = (
            f"{model} is gated (403): its licence has not been accepted by this account. {sent}. Open {page}, accept "
            "the licence (the owner may have to approve it), and run again"
        )
    elif kind == "unauthorized":
        step = (
            f"check that it is still valid and may read {model}; if not, {log_in}"
            if token
            else f"check the spelling of the name; for a private or gated model {log_in}"
        )
        text = (
            f"the Hub refuses access to {model} (401): it is private, gated or absent, which the Hub does not tell "
            f"those it does not know. {sent}: {step}"
        )
    elif kind == "forbidden":
        text = (
            f"the Hub forbids access to {model} (403). {sent}: a fine-grained token needs the permission to read this "
            f"repository. The Hub says: {detail}"
        )
    elif kind == "not found":
        text = f"there is no model {model} on the Hub (404): check the spelling at {page}. {sent}"
    elif kind == "bad name":
        text = f"{model!r} can be no model on the Hub: a name looks like organisation/name. The Hub's library says: {detail}"
    elif kind == "revision":
        text = f"{model} has no revision {revision!r}: see the branches and commits at {page}/tree/main"
    elif kind == "disk full":
        kind = "disk"
        text = f"the disk ran full while {model} was downloaded ({detail}): free some space and run again, it resumes"
    elif kind == "stall":
        text = f"the download of {model} stands still ({detail}): check the network and run again, it resumes"
    elif kind in ("unreachable", "connection"):
        kind = "unreachable"
        text = f"the Hub ({endpoint}) cannot be reached: {detail or 'no answer'}"
        if answer.get("begun"):
            text += ". What has arrived is kept: run again, and the download is resumed"
    else:
        kind, text = "other", f"downloading {model} failed: {detail or 'no message'}"
    return HubError(kind, token.hide(text) if token else text)
