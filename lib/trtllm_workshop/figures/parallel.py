"""Pictures of the lesson on several ranks: who holds what of a matrix, two ways to cut, and what splitting pays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trtllm_workshop.figures import style as s

# Which entries of a whole tensor one rank holds: slices of rows (outputs) and of columns (inputs).
Runs = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Held:
    """A tensor of a checkpoint and what each rank holds of it.

    `shape` is that of the whole tensor as stored, [outputs, inputs] or [outputs]. `rows` and `columns` have an entry for
    every rank: the (start, stop) pieces that it holds; None where every rank holds all of them.
    """

    name: str
    shape: tuple[int, ...]
    rows: Sequence[Runs] | None = None
    columns: Sequence[Runs] | None = None

    @property
    def kind(self) -> str:
        """What the cut is called: "column split", "row split" or "on every rank"."""
        return "column split" if self.rows else "row split" if self.columns else "on every rank"


def _look(rank: int) -> tuple[str, str]:
    return s.CYCLE[rank % len(s.CYCLE)], s.HATCHES[rank % len(s.HATCHES)]


def _badge(axes: Any, x: float, y: float, words: str, size: float = s.SMALL) -> None:
    pad = {"boxstyle": "round,pad=0.2", "facecolor": "white", "edgecolor": s.INK}
    axes.text(x, y, words, ha="center", va="center", fontsize=size, bbox=pad)


def held_tensors(tensors: Sequence[Held], ranks: int) -> Any:
    """A rectangle for each tensor as it lies in the file, outputs downwards and inputs across, in the ranks' colours.

    Each tensor fills its own place; a thin side keeps a width that can be seen.
    """
    columns = min(4, len(tensors))
    rows = -(-len(tensors) // columns)
    with s.canvas(13.5, 3.9 * rows + 0.5, rows=rows, columns=columns, squeeze=False) as (figure, grid):
        places = [axes for line in grid for axes in line]
        for axes in places:
            s.plain(axes)
        for axes, tensor in zip(places, tensors, strict=False):
            _one_tensor(axes, tensor, ranks)
    return figure


def _one_tensor(axes: Any, tensor: Held, ranks: int) -> None:
    outputs = tensor.shape[0]
    inputs = tensor.shape[1] if len(tensor.shape) > 1 else 1
    largest = max(outputs, inputs)
    high = 2.6 * max(0.16, min(1.0, outputs / largest))
    wide = 2.6 * max(0.16, min(1.0, inputs / largest))
    left, top = (3.2 - wide) / 2, 3.0
    axes.set_xlim(-0.1, 3.3)
    axes.set_ylim(-0.1, 3.95)
    axes.text(1.6, 3.72, tensor.name, ha="center", fontsize=s.NORMAL, weight="bold")
    axes.text(1.6, 3.32, f"{' x '.join(f'{n:,}' for n in tensor.shape)}, {tensor.kind}", ha="center", fontsize=s.SMALL)
    if not (tensor.rows or tensor.columns):
        s.box(axes, left, top - high, wide, high, "", s.PALE, rounded=False)
        _badge(axes, 1.6, top - high / 2, f"all {ranks}" if wide < 1 else f"all {ranks} ranks")
        return
    for rank in range(ranks):
        colour, hatch = _look(rank)
        for start, stop in (tensor.rows or tensor.columns or [])[rank]:
            if tensor.rows:
                y, height = top - high * stop / outputs, high * (stop - start) / outputs
                s.box(axes, left, y, wide, height, "", colour, hatch=hatch, rounded=False)
                # Thin pieces, such as those of K and V, get their numbers side by side, not on top of each other.
                share = (rank + 0.5) / ranks if height < 0.3 else 0.5
                place = (left + wide * share, y + height / 2)
            else:
                x, width = left + wide * start / inputs, wide * (stop - start) / inputs
                s.box(axes, x, top - high, width, high, "", colour, hatch=hatch, rounded=False)
                place = (x + width / 2, top - high / 2)
            _badge(axes, *place, str(rank), 11)


def two_matrices(ranks: int, hidden: int, inner: int) -> Any:
    """A column split followed by a row split: each rank computes a whole-size partial sum, and one sum makes the result.

    ``hidden`` and ``inner`` are the widths before and between the two matrices.
    """
    step, each = 1.15, f"{inner // ranks:,}"
    with s.canvas(13.5, step * ranks + 1.7) as (figure, axes):
        s.plain(axes)
        axes.set_xlim(0, 13.5)
        axes.set_ylim(0, step * ranks + 1.0)
        heads = (
            (0.9, f"input\n{hidden:,}, on all"),
            (3.5, f"columns of A\n{hidden:,} x {each}"),
            (6.0, f"own values\n{each}"),
            (8.5, f"rows of B\n{each} x {hidden:,}"),
        )
        for x, words in (*heads, (11.9, f"all-reduce: sum\n{hidden:,}, on all")):
            axes.text(x, step * ranks + 0.5, words, ha="center", va="center", fontsize=s.SMALL)
        middle = step * ranks / 2
        for rank in range(ranks):
            colour, hatch = _look(rank)
            y = step * (ranks - 1 - rank) + step / 2
            s.box(axes, 0.3, y - 0.2, 1.2, 0.4, "x", s.PALE, size=s.NORMAL)
            for x, width, height in ((3.0, 1.0, 0.8), (5.4, 1.2, 0.4), (7.5, 2.0, 0.5)):
                s.box(axes, x, y - height / 2, width, height, "", colour, hatch=hatch, rounded=False)
                _badge(axes, x + width / 2, y, f"rank {rank}" if width > 1 else str(rank))
            for begin, end in ((1.5, 3.0), (4.0, 5.4), (6.6, 7.5)):
                s.arrow(axes, (begin, y), (end, y))
            s.arrow(axes, (9.5, y), (11.2, middle + 0.12 * (y - middle)))
            axes.text(9.75, y + 0.2, "partial", fontsize=s.SMALL) if rank == 0 else None
        s.box(axes, 11.2, middle - 0.45, 1.4, 0.9, "+", s.YELLOW, size=26)
    return figure


def ways_to_split(gpus: int = 2, layers: int = 4, experts: int = 4) -> Any:
    """Tensor, pipeline and expert parallelism side by side: which part of which layer each GPU holds."""
    with s.canvas(13.5, 5.4, columns=3) as (figure, places):
        drawings = (
            ("Tensor parallel", "each layer cut: all work on every token", _tensor_way),
            ("Pipeline parallel", "whole layers: a token goes from GPU to GPU", _pipeline_way),
            ("Expert parallel", "whole experts: a token goes to the few it needs", _expert_way),
        )
        for axes, (title, words, draw) in zip(places, drawings, strict=True):
            s.plain(axes)
            axes.set_xlim(0, 4)
            axes.set_ylim(-0.75, 4.3)
            axes.set_title(title)
            draw(axes, gpus, layers, experts)
            axes.text(2, -0.45, words, ha="center", fontsize=12)
    return figure


def _tensor_way(axes: Any, gpus: int, layers: int, experts: int) -> None:
    high, wide = 3.9 / layers, 3.4 / gpus
    for layer in range(layers):
        y = 3.95 - high * (layer + 1)
        for gpu in range(gpus):
            colour, hatch = _look(gpu)
            s.box(axes, 0.3 + gpu * wide, y + 0.22, wide - 0.05, high - 0.3, "", colour, hatch=hatch, rounded=False)
            _badge(axes, 0.3 + gpu * wide + wide / 2, y + high / 2 + 0.07, f"GPU {gpu}")
        axes.plot([0.3, 3.65], [y + 0.1, y + 0.1], color=s.RED, linewidth=4)
    axes.text(2, 4.05, "red: all-reduces", ha="center", fontsize=s.SMALL)


def _pipeline_way(axes: Any, gpus: int, layers: int, experts: int) -> None:
    high = 3.9 / layers
    for layer in range(layers):
        y, gpu = 3.95 - high * (layer + 1), layer * gpus // layers
        colour, hatch = _look(gpu)
        s.box(axes, 0.3, y + 0.22, 3.35, high - 0.3, "", colour, hatch=hatch, rounded=False)
        _badge(axes, 2, y + high / 2 + 0.07, f"layer {layer} on GPU {gpu}")
        if layer + 1 < layers and (layer + 1) * gpus // layers != gpu:
            axes.plot([1.6, 2.4], [y + 0.1, y + 0.1], color=s.RED, linewidth=4)
    axes.text(2, 4.05, "red: hidden states handed on", ha="center", fontsize=s.SMALL)


def _expert_way(axes: Any, gpus: int, layers: int, experts: int) -> None:
    s.box(axes, 0.3, 3.15, 3.35, 0.65, "attention (split or copied)", s.PALE, rounded=False)
    s.box(axes, 1.25, 2.2, 1.5, 0.5, "router", s.YELLOW, size=s.NORMAL)
    s.arrow(axes, (2, 3.15), (2, 2.7))
    wide = 3.4 / experts
    for expert in range(experts):
        gpu = expert * gpus // experts
        colour, hatch = _look(gpu)
        x = 0.3 + expert * wide
        s.box(axes, x, 0.3, wide - 0.06, 1.1, "", colour, hatch=hatch, rounded=False)
        _badge(axes, x + wide / 2 - 0.03, 0.85, f"E{expert}\nGPU {gpu}", 11)
        chosen = expert in (1, 2)
        look = {"color": s.RED, "linewidth": 3.5} if chosen else {"color": s.GREY, "linestyle": ":"}
        s.arrow(axes, (2, 2.2), (x + wide / 2 - 0.03, 1.4), **look)
    axes.text(2, 4.05, "red: sent to the chosen experts", ha="center", fontsize=s.SMALL)


def planned(lines: Mapping[str, Sequence[tuple[int, float | None, float | None]]], title: str) -> Any:
    """Two panels over the number of GPUs: milliseconds to the next token, and tokens/s for each GPU.

    ``lines``: name -> (GPUs, milliseconds, tokens/s per GPU); None where it does not fit. All of it is predicted, which
    the title says.
    """
    counts = sorted({gpus for points in lines.values() for gpus, *_ in points})
    with s.canvas(13, 5.2, columns=2) as (figure, (left, right)):
        for place, (name, points) in enumerate(lines.items()):
            look: dict[str, Any] = {
                "color": s.CYCLE[place],
                "marker": "osD^"[place % 4],
                "linestyle": ("-", "--", ":", "-.")[place % 4],
                "label": name,
            }
            for axes, column in ((left, 1), (right, 2)):
                found = [(point[0], point[column]) for point in points if point[column] is not None]
                axes.plot(*zip(*found, strict=True), **look) if found else None
        for axes, words in ((left, "Next token, alone (ms)"), (right, "Tokens/s for each GPU")):
            axes.set_xscale("log", base=2)
            axes.set_xticks(counts, [str(count) for count in counts])
            axes.set_xlabel("GPUs")
            axes.set_title(words, fontsize=s.NORMAL)
            axes.set_ylim(bottom=0)
            s.grid(axes)
        handles, labels = left.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(lines), fontsize=s.SMALL)
        figure.suptitle(f"Predicted, not measured: {title}", fontsize=s.LARGE, weight="bold")
    return figure


def step_parts(rows: Mapping[str, tuple[float, float, float]], measured: Mapping[str, float]) -> Any:
    """Milliseconds of one token: predicted parts (weights and products, small operations, all-reduces) above the measured.

    ``rows``: name -> the three parts; ``measured``: the same names -> milliseconds.
    """
    parts = (("weights and products", s.SKY, "//"), ("small operations", s.YELLOW, ".."), ("all-reduces", s.RED, "xx"))
    with s.canvas(12, 1.5 * len(rows) + 2.0) as (figure, axes):
        longest = max(*measured.values(), *(sum(row) for row in rows.values()))
        names = []
        for place, (name, row) in enumerate(rows.items()):
            start = 0.0
            for value, (part, colour, hatch) in zip(row, parts, strict=True):
                label = f"predicted: {part}" if place == 0 else None
                axes.barh(3 * place, value, 0.8, left=start, color=colour, hatch=hatch, edgecolor=s.INK, label=label)
                start += value
            axes.text(start + 0.01 * longest, 3 * place, f"{start:.1f} ms predicted", va="center", fontsize=s.SMALL)
            axes.barh(
                3 * place + 1,
                measured[name],
                0.8,
                color=s.MEASURED,
                edgecolor=s.INK,
                label="measured" if place == 0 else None,
            )
            axes.text(
                measured[name] + 0.01 * longest,
                3 * place + 1,
                f"{measured[name]:.1f} ms measured",
                va="center",
                fontsize=s.SMALL,
            )
            names.append((3 * place + 0.5, name))
        axes.set_yticks([place for place, _ in names], [name for _, name in names])
        axes.invert_yaxis()
        axes.set_xlim(0, 1.3 * longest)
        axes.set_xlabel("milliseconds for one token")
        s.grid(axes, "x")
        figure.legend(loc="outside lower center", ncols=4, fontsize=s.SMALL)
    return figure
