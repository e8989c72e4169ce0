"""Pictures of the engine lesson: what each folder fixes, length limits, memory, and the captured graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trtllm_workshop.figures import style as s


def three_folders(folders: Sequence[tuple[str, str, str]], commands: Sequence[str]) -> Any:
    """Folders from left to right as (title, size, what it fixes), with the command that leads to the next one."""
    count = len(folders)
    with s.canvas(12, 3.6) as (figure, axes):
        s.plain(axes)
        axes.set_xlim(-0.1, 4.2 * count - 1.1)
        axes.set_ylim(0, 3.2)
        for place, (title, size, fixed) in enumerate(folders):
            x = 4.2 * place
            s.box(axes, x, 0.1, 3, 2.6, "", (s.PALE, s.SKY, s.ORANGE)[place % 3])
            axes.text(x + 1.5, 2.35, title, ha="center", va="center", fontsize=s.NORMAL, weight="bold")
            axes.text(x + 1.5, 1.85, size, ha="center", va="center", fontsize=s.NORMAL)
            axes.text(x + 1.5, 1.35, "fixed from here on:", ha="center", va="center", fontsize=s.SMALL, style="italic")
            axes.text(x + 1.5, 0.7, fixed, ha="center", va="center", fontsize=s.SMALL)
        for place, command in enumerate(commands):
            x = 4.2 * place + 3
            s.arrow(axes, (x, 1.6), (x + 1.2, 1.6), linewidth=3)
            axes.text(x + 0.6, 2.95, command, ha="center", va="center", fontsize=s.SMALL, family="monospace")
            axes.plot([x + 0.6, x + 0.6], [1.7, 2.75], color=s.GREY, linewidth=1.2, linestyle=":")
    return figure


def length_budget(max_seq_len: int, prompts: Sequence[int], longest_prompt: int) -> Any:
    """For prompts of several lengths (tokens): how much of ``max_seq_len`` is left for the answer."""
    with s.canvas(11, 0.75 * len(prompts) + 1.9) as (figure, axes):
        places = range(len(prompts))
        fitting = [min(p, longest_prompt) if p <= longest_prompt else 0 for p in prompts]
        rooms = [max_seq_len - p if p else 0 for p in fitting]
        axes.barh(places, fitting, color=s.BLUE, edgecolor=s.INK, height=0.6, label="prompt")
        room = axes.barh(places, rooms, left=fitting, color=s.ORANGE, edgecolor=s.INK, height=0.6, hatch="//")
        room.set_label("room for the answer")
        for place, prompt in enumerate(prompts):
            words = f"{max_seq_len - prompt:,} left" if prompt <= longest_prompt else "refused: the prompt is too long"
            axes.text(max_seq_len * 1.02, place, words, va="center", fontsize=s.SMALL)
        axes.axvline(max_seq_len, color=s.RED, linewidth=2.5, linestyle="--")
        axes.set_yticks(places, [f"{p:,}" for p in prompts])
        axes.invert_yaxis()
        axes.set_xlim(0, max_seq_len * 1.35)
        axes.set_xlabel("tokens")
        axes.set_ylabel("prompt tokens")
        axes.set_title(f"max_seq_len = {max_seq_len:,}: prompt and answer together")
        figure.legend(loc="outside lower center", ncols=2)
    return figure


def readable_bytes(count: float) -> str:
    """Bytes with a decimal unit (1 MB = 10^6 bytes) and three digits."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} TB" if count < 1000 else f"{count:,.0f} TB"


def memory_bars(entries: Sequence[tuple[str, float]], title: str) -> Any:
    """Horizontal bars of byte counts (name, bytes) on a logarithmic axis, each with its size written out."""
    with s.canvas(11, 0.8 * len(entries) + 1.6) as (figure, axes):
        sizes = [size for _, size in entries]
        s.bars(axes, [name for name, _ in entries], sizes, [readable_bytes(size) for size in sizes])
        axes.set_xscale("log")
        low, high = min(sizes) / 10, max(sizes) * 30
        axes.set_xlim(low, high)
        step = 1 if high / low < 1e6 else 3
        ticks = [10.0**power for power in range(0, 19, step) if low < 10.0**power < high]
        axes.set_xticks(ticks, [readable_bytes(tick) for tick in ticks])
        axes.set_xlabel("bytes (logarithmic scale)")
        axes.set_title(title)
        s.grid(axes, "x")
    return figure


def operator_counts(counts: Mapping[str, int], layers: int) -> Any:
    """How many operators of each kind a graph has; a dotted line marks one for each of the ``layers``."""
    names = sorted(counts, key=lambda name: -counts[name])
    with s.canvas(11, 0.55 * len(names) + 1.8) as (figure, axes):
        values = [counts[name] for name in names]
        s.bars(axes, names, values, [f"{value:,}" for value in values], colours=[s.SKY] * len(names), hatched=False)
        axes.axvline(layers, color=s.RED, linestyle="--", linewidth=2)
        place = axes.get_xaxis_transform()
        axes.text(layers, 0.02, f" one per layer ({layers})", color=s.INK, fontsize=s.SMALL, transform=place)
        axes.set_xlabel("operators in the captured graph")
        axes.set_title("What the graph is made of")
        s.grid(axes, "x")
    return figure


def layer_flow(steps: Sequence[tuple[str, str, Sequence[int]]], title: str) -> Any:
    """One decoder layer as boxes in the order of computation.

    ``steps`` are (operator, what it reads besides, numbers of the steps that feed it); -1 stands for the layer's input.
    A new row begins after every step that is fed by an earlier row or by the layer's input (the residual additions).
    """
    places = _rows(steps)
    width, gap, height, pitch = 3.5, 0.65, 1.2, 2.7
    columns = max(column for _, column in places.values()) + 1
    rows = max(row for row, _ in places.values()) + 1
    with s.canvas(1.85 * columns + 0.4, 1.7 * rows + 0.8) as (figure, axes):
        s.plain(axes)
        axes.set_title(title)
        axes.set_xlim(-0.2, columns * (width + gap))
        axes.set_ylim(-pitch * (rows - 1) - 0.9, height + 0.9)

        def corner(number: int) -> tuple[float, float]:
            row, column = places[number]
            return column * (width + gap), -pitch * row

        for number, (operator, reads, _) in [(-1, ("layer input", "", ())), *enumerate(steps)]:
            x, y = corner(number)
            colour = s.PALE if number < 0 else _COLOURS.get(operator, s.SKY)
            s.box(axes, x, y, width, height, operator + (f"\n{reads}" if reads else ""), colour, size=s.SMALL)
        for number, (_, _, sources) in enumerate(steps):
            for source in sources:
                _connect(axes, corner(source), corner(number), places[source], places[number], width, height)
    return figure


_COLOURS = {"matrix product": s.ORANGE, "attention": s.GREEN, "add": s.YELLOW}


def _rows(steps: Sequence[tuple[str, str, Sequence[int]]]) -> dict[int, tuple[int, int]]:
    """Row and column of every step; the layer's input is -1."""
    places = {-1: (0, 0)}
    row, column = 0, 1
    for number, (operator, _, _) in enumerate(steps):
        places[number] = (row, column)
        column += 1
        if operator == "add" and number + 1 < len(steps):
            row, column = row + 1, 0
    return places


def _connect(
    axes: Any,
    start: tuple[float, float],
    end: tuple[float, float],
    source: tuple[int, int],
    target: tuple[int, int],
    width: float,
    height: float,
) -> None:
    (x0, y0), (x1, y1) = start, end
    look = {"color": s.INK, "linewidth": 1.8}
    if source[0] != target[0] and source[1] > target[1]:  # back to the left edge, one row down
        below = y0 - 0.45
        axes.plot([x0 + width / 2, x0 + width / 2, x1 + width / 2], [y0, below, below], **look)
        s.arrow(axes, (x1 + width / 2, below), (x1 + width / 2, y1 + height))
    elif source[0] != target[0]:
        above = y1 + height + 0.55
        axes.plot([x0 + width / 2] * 2 + [x1 + width / 2], [y0, above, above], **look)
        s.arrow(axes, (x1 + width / 2, above), (x1 + width / 2, y1 + height))
    elif target[1] == source[1] + 1:
        s.arrow(axes, (x0 + width, y0 + height / 2), (x1, y1 + height / 2))
    else:  # past other boxes
        above = y1 + height + 0.4
        axes.plot([x0 + width / 2] * 2 + [x1 + width / 2], [y0 + height, above, above], **look)
        s.arrow(axes, (x1 + width / 2, above), (x1 + width / 2, y1 + height))
