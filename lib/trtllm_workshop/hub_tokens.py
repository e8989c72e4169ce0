"""The Hub access token: found in the environment, the login file or Colab's vault, and never shown."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

from trtllm_workshop.shell import ShownError

VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
VAULT_NAME = "HF_TOKEN"
VAULT_SECONDS = 10.0
SHORTEST = 8  # characters; hiding a shorter text would spoil others


class BadToken(ShownError):
    """What was given as a token can be none; the text says where it came from and nothing of what it is."""


class Token:
    """A token that says where it came from; only `reveal` gives the text, and no form of printing or pickling does."""

    __slots__ = ("_reveal", "origin")

    def __init__(self, text: str, origin: str) -> None:
        if not text.isascii() or not text.isprintable() or " " in text:
            # Sent as it is, it would come back escaped inside somebody's error message, where nothing hides it.
            raise BadToken(
                f"the token from {origin} has a blank, a line break or another character that no token has: copy it "
                "again from https://huggingface.co/settings/tokens, the token alone"
            )
        self.origin = origin
        self._reveal = lambda: text  # a closure: not in a dump of attributes, not picklable

    def reveal(self) -> str:
        """The token itself, to be handed to the Hub's library and to nothing that prints."""
        return self._reveal()

    def hide(self, text: str) -> str:
        """`text` with every occurrence of the token replaced."""
        return text.replace(self.reveal(), "***")

    def __repr__(self) -> str:
        return f"<token from {self.origin}, hidden>"


def token_file(environ: Mapping[str, str]) -> Path:
    """Where `hf auth login` puts the token: HF_TOKEN_PATH, else HF_HOME/token, else the home folder's cache."""
    if environ.get("HF_TOKEN_PATH"):
        return Path(environ["HF_TOKEN_PATH"]).expanduser()
    if environ.get("HF_HOME"):
        return Path(environ["HF_HOME"]).expanduser() / "token"
    caches = environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(caches) / "huggingface" / "token"


def known_tokens(environ: Mapping[str, str]) -> list[str]:
    """The tokens that this machine's programs can read, to be looked for in text that is kept; not for showing."""
    found = [environ.get(name, "").strip() for name in VARIABLES]
    with contextlib.suppress(OSError, UnicodeDecodeError):
        found.append(token_file(environ).read_text(encoding="utf-8").strip())
    return [text for text in found if len(text) >= SHORTEST]


def find_token(
    explicit: str | Token | bool | None = None,
    environ: Mapping[str, str] | None = None,
    vault: Callable[[], str | None] | None = None,
    vault_seconds: float = VAULT_SECONDS,
) -> Token | None:
    """The first token of: `explicit`, environment, login file, Colab's vault. None means anonymous access.

    `explicit` False asks for anonymous access. `vault` reads a secret store and may raise or hang: after
    `vault_seconds` it is given up with one warning. The default is Colab's vault, where this is Colab.

    Raises BadToken for a text that can be no token.
    """
    env = os.environ if environ is None else environ
    if isinstance(explicit, Token):
        return explicit
    if isinstance(explicit, str) and explicit.strip():
        return Token(explicit.strip(), "the token argument")
    if explicit is False or env.get("HF_HUB_DISABLE_IMPLICIT_TOKEN", "").lower() in ("1", "true", "yes", "on"):
        return None
    for name in VARIABLES:
        if text := env.get(name, "").strip():
            return Token(text, f"the environment variable {name}")
    path = token_file(env)
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        text = ""
    if text:
        return Token(text, f"the file {path}")
    return _from_vault(vault or _colab_vault(), vault_seconds)


def _colab_vault() -> Callable[[], str | None] | None:
    try:
        if "google.colab" not in sys.modules and importlib.util.find_spec("google.colab") is None:
            return None
    except (ImportError, ValueError):
        return None
    return lambda: importlib.import_module("google.colab.userdata").get(VAULT_NAME)


def _from_vault(vault: Callable[[], str | None] | None, seconds: float) -> Token | None:
    """Asks the vault in a thread of its own: outside the browser page it answers after a minute or never."""
    if vault is None:
        return None
    answer: list[str | None] = []
    problem: list[str] = []

    def ask() -> None:
        try:
            answer.append(vault())
        except BaseException as error:  # Colab's own kinds: no such secret, no access, timed out
            problem.append(type(error).__name__)

    thread = threading.Thread(target=ask, name="token-vault", daemon=True)
    thread.start()
    thread.join(seconds)
    if answer and answer[0]:
        return Token(answer[0].strip(), "Colab's secrets")
    why = problem[0] if problem else "no such secret" if answer else f"no answer in {seconds:g} s"
    warnings.warn(
        f"Colab's secrets gave no {VAULT_NAME} ({why}); the Hub is asked without a token. For gated models add the "
        f"secret and allow this notebook to read it, or set the environment variable {VAULT_NAME}.",
        stacklevel=3,
    )
    return None
