"""One look for every picture of the course: colours that stay apart for colour-blind eyes, fonts for the back row.

Every figure is made with :func:`canvas`, so that nothing is changed in matplotlib's global settings. Colour alone never
carries meaning: bars and boxes get a label or a hatch as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

# Okabe and Ito, "Color Universal Design" (2008): eight colours that stay apart with every common colour deficiency.
BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
YELLOW, BLUE, RED, PURPLE = "#F0E442", "#0072B2", "#D55E00", "#CC79A7"
GREY, PALE, INK = "#8A8A8A", "#ECECEC", "#222222"
CYCLE = (BLUE, ORANGE, GREEN, PURPLE, SKY, RED, YELLOW, GREY)
HATCHES = ("", "//", "..", "xx", "\\\\", "++", "oo", "--")

PREDICTED, MEASURED = SKY, BLUE  # the same pair in every lesson; PREDICTED_HATCH goes with the first
PREDICTED_HATCH = "//"

SMALL, NORMAL, LARGE = 13, 15, 18  # points, for a figure about 10 inches wide

SETTINGS: dict[Any, Any] = {
    "figure.facecolor": "white",
    "figure.dpi": 100,
    "savefig.facecolor": "white",
    "axes.facecolor": "white",
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.labelsize": NORMAL,
    "axes.titlesize": LARGE,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "font.family": "DejaVu Sans",
    "font.size": NORMAL,
    "xtick.labelsize": SMALL,
    "ytick.labelsize": SMALL,
    "legend.fontsize": SMALL,
    "legend.frameon": False,
    "hatch.linewidth": 0.8,
    "lines.linewidth": 2.5,
    "lines.markersize": 8,
}


@contextmanager
def style() -> Iterator[None]:
    """The course's settings inside a ``with`` block; outside of it matplotlib is as it was."""
    import matplotlib
    from cycler import cycler

    with matplotlib.rc_context({**SETTINGS, "axes.prop_cycle": cycler(color=CYCLE)}):
        yield


@contextmanager
def canvas(width: float = 10.0, height: float = 4.5, rows: int = 1, columns: int = 1, **options: Any) -> Iterator[Any]:
    """``(figure, axes)`` in the course's style, in inches; the figure never enters pyplot, so nothing has to be closed.

    ``axes`` is one Axes for a 1 x 1 grid and an array otherwise. ``options`` go to ``Figure.subplots``.
    """
    from matplotlib.figure import Figure

    with style():
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure, figure.subplots(rows, columns, **options)


def plain(axes: Any) -> None:
    """Turns an Axes into an empty drawing area, without axis lines and ticks."""
    axes.set_axis_off()


def grid(axes: Any, axis: str = "y") -> None:
    """A light grid behind the data, along one axis."""
    axes.grid(True, axis=axis, color="#CFCFCF", linewidth=0.8)


def text_on(colour: str) -> str:
    """Black or white, whichever is easier to read on ``colour`` (``#RRGGBB``; relative luminance of WCAG 2.1)."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    r, g, b = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    luminance = 0.2126 * r + 0.7152 * g + 0.0722 * b
    return BLACK if (luminance + 0.05) ** 2 > 0.05 * 1.05 else "#FFFFFF"


def box(
    axes: Any,
    x: float,
    y: float,
    width: float,
    height: float,
    label: str = "",
    colour: str = PALE,
    *,
    hatch: str = "",
    size: float = SMALL,
    rounded: bool = True,
    **text: Any,
) -> Any:
    """A labelled box with its lower left corner at (x, y), in the units of the axes; returns the patch."""
    from matplotlib.patches import FancyBboxPatch, Rectangle

    look: dict[str, Any] = {"facecolor": colour, "edgecolor": INK, "linewidth": 1.4, "hatch": hatch}
    if rounded:
        shape = f"round,pad=0,rounding_size={0.12 * min(width, height)}"
        patch: Any = FancyBboxPatch((x, y), width, height, boxstyle=shape, **look)
    else:
        patch = Rectangle((x, y), width, height, **look)
    axes.add_patch(patch)
    if label:
        options = {"ha": "center", "va": "center", "fontsize": size, "color": text_on(colour), **text}
        axes.text(x + width / 2, y + height / 2, label, **options)
    return patch


def arrow(axes: Any, start: tuple[float, float], end: tuple[float, float], label: str = "", **look: Any) -> None:
    """An arrow from ``start`` to ``end`` in the units of the axes, with a label beside its middle."""
    options = {"arrowstyle": "-|>", "color": INK, "linewidth": 1.8, "mutation_scale": 18, **look}
    axes.annotate("", xy=end, xytext=start, arrowprops={**options, "shrinkA": 0, "shrinkB": 0})
    if label:
        middle = ((start[0] + end[0]) / 2, (start[1] + end[1]) / 2)
        axes.annotate(label, middle, xytext=(6, 4), textcoords="offset points", fontsize=SMALL, color=INK)


def bars(
    axes: Any,
    names: Sequence[str],
    values: Sequence[float],
    labels: Sequence[str] = (),
    *,
    colours: Any = None,
    hatched: bool = True,
) -> Any:
    """Horizontal bars, first on top, with the value written beside each; ``labels`` replaces the written values."""
    chosen = list(colours) if colours is not None else [CYCLE[i % len(CYCLE)] for i in range(len(names))]
    drawn = axes.barh(range(len(names)), values, color=chosen, edgecolor=INK, height=0.62)
    for patch, hatch in zip(drawn, HATCHES * (1 + len(names) // len(HATCHES)), strict=False):
        patch.set_hatch(hatch if hatched else "")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.bar_label(drawn, labels=list(labels) or None, padding=6, fontsize=SMALL)
    axes.margins(x=0.18)
    return drawn
