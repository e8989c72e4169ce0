"""Pictures of the first lesson: number formats by GPU generation, what fits into which memory, and the bandwidth limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trtllm_workshop.figures import style as s

VERDICTS = {True: ("✓", s.GREEN, ""), False: ("✗", s.PALE, "//"), None: ("?", s.YELLOW, "..")}
COMFORTABLE = 0.9  # of the memory; the runtime and its buffers need the rest


def precision_grid(verdicts: Mapping[str, Sequence[bool | None]], formats: Sequence[str]) -> Any:
    """A row per GPU generation, a column per number format; a tick, a cross or a question mark in each cell."""
    with s.canvas(11, 0.72 * len(verdicts) + 1.3) as (figure, axes):
        s.plain(axes)
        axes.set_xlim(-2.1, len(formats))
        axes.set_ylim(len(verdicts), -0.8)
        for column, kind in enumerate(formats):
            axes.text(
                column + 0.5, -0.3, kind.replace("_", " "), ha="center", va="center", fontsize=s.SMALL, weight="bold"
            )
        for row, (name, cells) in enumerate(verdicts.items()):
            axes.text(-0.1, row + 0.5, name, ha="right", va="center", fontsize=s.SMALL, linespacing=1.1)
            for column, verdict in enumerate(cells):
                sign, colour, hatch = VERDICTS[verdict]
                s.box(axes, column + 0.05, row + 0.06, 0.9, 0.88, "", colour, hatch=hatch)
                pad = {"boxstyle": "circle,pad=0.15", "facecolor": "white", "edgecolor": "none"} if hatch else None
                axes.text(
                    column + 0.5,
                    row + 0.5,
                    sign,
                    ha="center",
                    va="center",
                    fontsize=s.LARGE,
                    color=s.INK if hatch else s.text_on(colour),
                    bbox=pad,
                )
    return figure


def fit_grid(shares: Mapping[str, Sequence[float]], memories: Sequence[str], title: str) -> Any:
    """A row per model, a column per memory; each cell says which share of the memory (1.0 = all) the model takes."""
    with s.canvas(11, 0.55 * len(shares) + 1.7) as (figure, axes):
        s.plain(axes)
        axes.set_title(title, fontsize=s.NORMAL)
        axes.set_xlim(-1.6, len(memories))
        axes.set_ylim(len(shares), -1.0)
        for column, name in enumerate(memories):
            axes.text(column + 0.5, -0.45, name, ha="center", va="center", fontsize=s.SMALL, weight="bold")
        for row, (name, cells) in enumerate(shares.items()):
            axes.text(-0.1, row + 0.5, name, ha="right", va="center", fontsize=s.SMALL)
            for column, share in enumerate(cells):
                fits, tight = share <= COMFORTABLE, share <= 1
                colour, hatch = (s.SKY, "") if fits else (s.YELLOW, "..") if tight else (s.PALE, "//")
                percent = f"{share:.1%}" if share < 0.01 else f"{share:.0%}"
                words = percent if fits else f"{percent}: tight" if tight else f"{share:.1f} x the memory"
                s.box(axes, column + 0.04, row + 0.07, 0.92, 0.86, "", colour, hatch=hatch)
                pad = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none"} if hatch else None
                axes.text(column + 0.5, row + 0.5, words, ha="center", va="center", fontsize=s.SMALL, bbox=pad)
    return figure


def memory_split(model: str, parts: Sequence[float], memory: float) -> Any:
    """One bar of weights and KV cache (bytes) against a dashed line at the end of a memory (bytes)."""
    weights, cache = (part / 1e9 for part in parts)
    with s.canvas(11, 2.6) as (figure, axes):
        axes.barh([0], [weights], color=s.BLUE, edgecolor=s.INK, height=0.5, label=f"weights, {weights:.2f} GB")
        axes.barh(
            [0], [cache], left=[weights], color=s.ORANGE, edgecolor=s.INK, height=0.5, hatch="//",
            label=f"KV cache, {cache:.2f} GB",
        )  # fmt: skip
        axes.axvline(memory / 1e9, color=s.RED, linestyle="--", label=f"end of a memory of {memory / 2**30:.0f} GiB")
        axes.set_xlim(0, 1.08 * max(memory / 1e9, weights + cache))
        axes.set_yticks([0], [model])
        axes.set_xlabel("memory in GB (10⁹ bytes)")
        figure.legend(loc="outside lower center", ncols=3)
    return figure


def decode_bound(bounds: Mapping[str, Mapping[str, float]]) -> Any:
    """For each model and machine: the most tokens per second for one request, on a logarithmic axis."""
    machines = list(next(iter(bounds.values())))
    height = 0.8 / len(machines)
    with s.canvas(11, 0.95 * len(bounds) + 1.6) as (figure, axes):
        for number, machine in enumerate(machines):
            places = [row + (number - (len(machines) - 1) / 2) * height for row in range(len(bounds))]
            values = [bounds[name][machine] for name in bounds]
            drawn = axes.barh(
                places, values, height, color=s.CYCLE[number], edgecolor=s.INK, hatch=s.HATCHES[number], label=machine
            )
            axes.bar_label(drawn, [f"{value:,.0f}" if value >= 10 else f"{value:.2g}" for value in values], padding=5)
        axes.set_xscale("log")
        low = min(min(row.values()) for row in bounds.values())
        axes.set_xlim(min(0.1, low / 2), max(max(row.values()) for row in bounds.values()) * 4)
        axes.set_yticks(range(len(bounds)), list(bounds))
        axes.invert_yaxis()
        axes.set_xlabel("tokens per second (each step to the right is ten times more)")
        axes.set_title("At most this fast, one request, float16 weights")
        figure.legend(loc="outside lower center", ncols=len(machines))
        s.grid(axes, "x")
    return figure
