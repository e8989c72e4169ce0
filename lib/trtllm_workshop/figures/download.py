"""Pictures of the download lesson: where the bytes go, a sentence in pieces, and how much text is in one token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trtllm_workshop.figures import style as s


def shares(sizes: Mapping[str, float]) -> Any:
    """Bars with the bytes of each part of a model, with its share of the whole."""
    whole = sum(sizes.values())
    ordered = dict(sorted(sizes.items(), key=lambda item: -item[1]))
    with s.canvas(11, 0.7 * len(sizes) + 1.5) as (figure, axes):
        values = [size / 1e6 for size in ordered.values()]
        labels = [f"{size / 1e6:,.2f} MB, {size / whole:.1%}" for size in ordered.values()]
        s.bars(axes, list(ordered), values, labels)
        axes.set_xlim(0, max(values) * 1.4)
        axes.set_xlabel("size in the file in MB (10⁶ bytes)")
        axes.set_title(f"Where the bytes go: {whole / 1e6:,.0f} MB of weights")
        s.grid(axes, "x")
    return figure


def pieces(texts: Sequence[str], ids: Sequence[int], per_row: int = 44) -> Any:
    """The pieces of a text as boxes in reading order, with the token number under each; blanks are shown as ␣."""
    rows: list[list[tuple[str, int, float, float]]] = [[]]
    x = 0.0
    for text, number in zip(texts, ids, strict=True):
        shown = text.replace("\n", "⏎").replace("$", r"\$")
        shown = "␣" + shown[1:] if shown.startswith(" ") else shown
        width = max(len(shown), len(str(number))) + 1.2
        if x + width > per_row and rows[-1]:
            rows.append([])
            x = 0.0
        rows[-1].append((shown or "·", number, x, width))
        x += width
    with s.canvas(12, 1.15 * len(rows) + 0.2) as (figure, axes):
        s.plain(axes)
        axes.set_xlim(0, per_row)
        axes.set_ylim(1.5 * len(rows), 0)
        count = 0
        for row, boxes in enumerate(rows):
            for shown, number, left, width in boxes:
                s.box(
                    axes,
                    left + 0.1,
                    1.5 * row + 0.1,
                    width - 0.2,
                    0.75,
                    shown,
                    (s.SKY, s.ORANGE)[count % 2],
                    size=s.NORMAL,
                )
                axes.text(left + width / 2, 1.5 * row + 1.15, str(number), ha="center", va="center", fontsize=s.SMALL)
                count += 1
    return figure


def density(characters_per_token: Mapping[str, float]) -> Any:
    """Bars with characters per token for several kinds of text."""
    with s.canvas(11, 0.62 * len(characters_per_token) + 1.5) as (figure, axes):
        names, values = list(characters_per_token), list(characters_per_token.values())
        s.bars(axes, names, values, [f"{value:.1f}" for value in values], colours=[s.SKY] * len(names), hatched=False)
        axes.set_xlabel("characters in one token (more is cheaper)")
        axes.set_title("How much text is in one token")
        s.grid(axes, "x")
    return figure
