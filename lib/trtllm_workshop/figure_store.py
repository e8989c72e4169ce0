"""Figures on disk and in a notebook's output, always with their alternative text."""

from __future__ import annotations

import base64
import html
import io
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_INLINE_SVG = 300_000  # bytes; a notebook with larger pictures becomes slow to open
_EMPTY_ALT = re.compile(r"^(a |an |the )?(figure|image|picture|plot|chart|graph|diagram)\b[\W\d]*$", re.IGNORECASE)


@dataclass(frozen=True)
class StoredFigure:
    path: Path
    alt: str
    inline: bytes
    mime: str

    def html(self) -> str:
        """An ``img`` element that needs no file: the picture is inside it."""
        data = base64.b64encode(self.inline).decode("ascii")
        alt = html.escape(self.alt, quote=True)
        return f'<img style="max-width:100%" src="data:{self.mime};base64,{data}" alt="{alt}">'


def check_alt(name: str, alt: str) -> str:
    """The alternative text, trimmed. Raises ValueError when it does not tell what the picture shows."""
    text = " ".join(alt.split()) if isinstance(alt, str) else ""
    if len(text) < 20 or len(text.split()) < 4 or _EMPTY_ALT.match(text):
        raise ValueError(
            f"figure {name!r} needs an alternative text that says in a sentence what it shows "
            f"(at least 20 characters and 4 words), not {alt!r}"
        )
    return text


def store_figure(figure: Any, folder: Path, stem: str, alt: str) -> StoredFigure:
    """Writes ``folder/stem.svg`` (or ``.png`` for PNG bytes) and returns it ready to be shown.

    ``figure``: a matplotlib figure (closed afterwards, so that Jupyter does not show it twice), SVG text or PNG bytes.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", stem):
        raise ValueError(f"figure name {stem!r} must consist of letters, digits, - and _")
    text = check_alt(stem, alt)
    folder.mkdir(parents=True, exist_ok=True)
    if hasattr(figure, "savefig"):
        return _from_matplotlib(figure, folder / f"{stem}.svg", text)
    if isinstance(figure, str) and "<svg" in figure[:1000]:
        path, data, mime = folder / f"{stem}.svg", figure.encode("utf-8"), "image/svg+xml"
    elif isinstance(figure, bytes) and figure.startswith(b"\x89PNG"):
        path, data, mime = folder / f"{stem}.png", figure, "image/png"
    else:
        raise TypeError(f"show() takes a matplotlib figure, SVG text or PNG bytes, not {type(figure).__name__}")
    path.write_bytes(data)
    return StoredFigure(path, text, data, mime)


def _from_matplotlib(figure: Any, path: Path, alt: str) -> StoredFigure:
    import matplotlib.pyplot as plt

    vector = io.BytesIO()
    # A fixed salt and no date make the same picture the same bytes.
    with plt.rc_context({"svg.hashsalt": path.stem}):
        figure.savefig(vector, format="svg", bbox_inches="tight", metadata={"Date": None, "Title": path.stem})
    data, mime = vector.getvalue(), "image/svg+xml"
    path.write_bytes(data)
    if len(data) > MAX_INLINE_SVG:
        raster = io.BytesIO()
        figure.savefig(raster, format="png", dpi=144, bbox_inches="tight")
        data, mime = raster.getvalue(), "image/png"
    plt.close(figure)
    return StoredFigure(path, alt, data, mime)
