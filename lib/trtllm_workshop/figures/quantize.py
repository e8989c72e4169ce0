"""Pictures of the FP8 lesson: two 8-bit number formats, calibrated ranges, what a cache holds, and quality with its intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from trtllm_workshop.figures import style as s
from trtllm_workshop.figures.engine import readable_bytes

MARKERS = ("o", "s", "^", "D", "v", "P")
LINES = ("-", "--", ":", "-.", (0, (5, 1)), (0, (1, 1)))
E4M3_LARGEST, E4M3_NORMAL, E4M3_ZERO = 448.0, 2.0**-6, 2.0**-10  # above: cut off; below: fewer digits; below: zero


def number_lines(formats: Mapping[str, Sequence[float]], zoom: float = 32.0) -> Any:
    """The positive numbers of each format as ticks, each format scaled so that its largest number is 1.

    A row per format; on the left the whole range, on the right its lowest ``1 / zoom``, with the count of numbers in it.
    """
    with s.canvas(12, 1.45 * len(formats) + 1.5, rows=len(formats), columns=2, squeeze=False) as (figure, grid):
        for row, (name, values) in enumerate(formats.items()):
            top = max(values)
            share = sorted(value / top for value in values if value >= 0)
            for column, end in enumerate((1.0, 1.0 / zoom)):
                axes = grid[row][column]
                inside = [value for value in share if value <= end * 1.0001]
                axes.vlines(inside, 0, 1, color=s.CYCLE[row], linewidth=1.6)
                axes.axhline(0, color=s.INK, linewidth=1.5)
                axes.set_xlim(-0.01 * end, 1.01 * end)
                axes.set_ylim(0, 1.35)
                axes.set_yticks([])
                axes.spines["left"].set_visible(False)
                where = "whole range" if column == 0 else f"lowest 1/{zoom:g}"
                axes.set_title(f"{name}, {where}: {len(inside)} numbers", fontsize=s.NORMAL)
                axes.set_xticks([0, end / 2, end], ["0", f"{end / 2:.3g}", f"{end:.3g}"])
                if row == len(formats) - 1:
                    axes.set_xlabel("share of the largest number")
    return figure


def relative_error(sizes: Sequence[float], errors: Mapping[str, Sequence[float]]) -> Any:
    """Worst rounding error as a share of the number itself, over the number's size (largest number of the format = 1)."""
    with s.canvas(11, 4.8) as (figure, axes):
        for number, (name, values) in enumerate(errors.items()):
            percent = [100 * value for value in values]
            axes.plot(sizes, percent, color=s.CYCLE[number], linestyle=LINES[number], linewidth=3, label=name)
        axes.axhline(100, color=s.RED, linestyle=":", linewidth=2)
        axes.text(max(sizes), 108, "100 %: the number is lost", ha="right", va="bottom", fontsize=s.SMALL)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_ylim(0.1, 300)
        axes.set_yticks([0.1, 1, 10, 100], ["0.1", "1", "10", "100"])
        axes.set_xlabel("size of a number, as a share of the largest number of the format")
        axes.set_ylabel("worst error in %")
        axes.set_title("What rounding to 8 bits costs")
        figure.legend(loc="outside lower center", ncols=len(errors))
        s.grid(axes, "both")
    return figure


def scaled_product() -> Any:
    """A linear layer in FP8: both factors are divided by their scale, multiplied in 8 bits, and multiplied back."""
    with s.canvas(12, 4.0) as (figure, axes):
        s.plain(axes)
        axes.set_xlim(-0.1, 16.4)
        axes.set_ylim(-0.2, 5.2)
        boxes = [
            (0.0, 3.2, 2.6, "input x\n16 bits", s.PALE),
            (3.7, 3.2, 3.0, "x / scale of x\nrounded to E4M3", s.ORANGE),
            (3.7, 0.4, 3.0, "W / scale of W\nE4M3, in the file", s.ORANGE),
            (7.9, 1.8, 3.2, "product of 8-bit\nnumbers, summed\nin 32 bits", s.SKY),
            (12.4, 1.8, 3.8, "x scale of x\nx scale of W\nresult in 16 bits", s.PALE),
        ]
        for x, y, width, label, colour in boxes:
            s.box(axes, x, y, width, 1.6, label, colour, size=s.SMALL)
        for start, end in (
            ((2.6, 4.0), (3.7, 4.0)),
            ((6.7, 4.0), (7.9, 2.9)),
            ((6.7, 1.2), (7.9, 2.3)),
            ((11.1, 2.6), (12.4, 2.6)),
        ):
            s.arrow(axes, start, end)
        axes.text(5.2, 4.95, "scale from calibration", ha="center", fontsize=s.SMALL, style="italic")
        axes.text(5.2, 0.0, "scale from the weights", ha="center", va="center", fontsize=s.SMALL, style="italic")
    return figure


def layer_ranges(
    panels: Mapping[str, Mapping[str, Sequence[float]]],
    limit: float | None = None,
    ylabel: str = "largest absolute value",
) -> Any:
    """A line per kind over the layers, on a logarithmic axis; a panel for weights, for activations, and so on, two in a row.

    ``limit`` draws a line across every panel: the largest number that can be stored with the scale 1.
    """
    columns, rows = min(2, len(panels)), -(-len(panels) // 2)
    kinds = list(dict.fromkeys(name for series in panels.values() for name in series))
    with s.canvas(12, 3.6 * rows + 0.9, rows=rows, columns=columns, squeeze=False) as (figure, grid):
        drawn: dict[str, Any] = {}
        for place, (title, series) in enumerate(panels.items()):
            axes = grid[place // columns][place % columns]
            for name, values in series.items():
                number = kinds.index(name)
                look = {"color": s.CYCLE[number], "linestyle": LINES[number], "marker": MARKERS[number]}
                (drawn[name],) = axes.plot(range(len(values)), values, markersize=7, **look)
            if limit is not None:
                axes.axhline(limit, color=s.RED, linestyle="--", linewidth=2)
                axes.text(0, limit * 1.08, f"{limit:g}", color=s.INK, fontsize=s.SMALL, va="bottom")
            axes.set_yscale("log")
            _plain_log_ticks(axes, [value for values in series.values() for value in values], limit)
            axes.set_title(title, fontsize=s.NORMAL)
            axes.xaxis.get_major_locator().set_params(integer=True)
            s.grid(axes, "both")
            if place >= len(panels) - columns:
                axes.set_xlabel("layer")
        for row in grid:
            row[0].set_ylabel(ylabel)
        for place in range(len(panels), rows * columns):
            s.plain(grid[-1][place % columns])
        if list(panels) != kinds:  # a panel's title says it all when it has one line of the same name
            figure.legend(drawn.values(), kinds, loc="outside lower center", ncols=len(kinds))
    return figure


def _plain_log_ticks(axes: Any, values: Sequence[float], limit: float | None) -> None:
    """Ticks at 1, 2 and 5 times powers of ten when the range is short, at powers of ten otherwise, as plain numbers."""
    known = [value for value in [*values, limit] if value and value > 0 and math.isfinite(value)]
    if not known:
        return
    low, high = min(known) / 1.3, max(known) * (1.6 if limit else 1.3)
    steps = (1, 2, 5) if high / low < 300 else (1,)
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    ticks = [step * 10.0**power for power in range(first, last + 1) for step in steps]
    ticks = [tick for tick in ticks if low <= tick <= high]
    axes.set_ylim(low, high)
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.yaxis.set_minor_locator(_no_ticks())


def _no_ticks() -> Any:
    from matplotlib.ticker import NullLocator

    return NullLocator()


def stored_values(counts: Mapping[str, Mapping[int, int]], scale: float = 1.0) -> Any:
    """How large the numbers of a cache are, by powers of two, against what E4M3 can hold with this scale.

    ``counts`` is {name: {e: how many numbers of at least 2^(e-1) and below 2^e}}; one panel for each name.
    """
    shares = {
        name: {e: 100 * count / sum(histogram.values()) for e, count in histogram.items()}
        for name, histogram in counts.items()
    }
    top = max((share for histogram in shares.values() for share in histogram.values()), default=1.0) * 1.35
    with s.canvas(12, 4.4, columns=len(counts), squeeze=False, sharey=True) as (figure, grid):
        for place, (name, histogram) in enumerate(shares.items()):
            axes = grid[0][place]
            axes.bar(
                [exponent - 0.5 for exponent in histogram],
                list(histogram.values()),
                width=0.9,
                color=s.CYCLE[place],
                edgecolor=s.INK,
                hatch=s.HATCHES[place],
            )
            marks = ((E4M3_ZERO, "zero"), (E4M3_NORMAL, "fewer digits"), (E4M3_LARGEST, "cut off"))
            for size, words in marks:
                x = math.log2(size * scale)
                axes.axvline(x, color=s.RED, linestyle="--", linewidth=2)
                right = size == E4M3_LARGEST
                axes.text(
                    x + (0.2 if right else -0.2), top, words, rotation=90, va="top", ha="left" if right else "right",
                    fontsize=s.SMALL,
                )  # fmt: skip
            axes.set_ylim(0, top)
            axes.set_xlim(max(min([*histogram, -13]), -16) - 1.5, max([*histogram, 10]) + 1.5)
            ticks = range(-20, 13, 4)
            low, high = axes.get_xlim()
            shown = [tick for tick in ticks if low <= tick <= high]
            axes.set_xticks(shown, [f"$2^{{{tick}}}$" for tick in shown])
            axes.set_title(f"{name}, with scale {scale:g}", fontsize=s.NORMAL)
            axes.set_xlabel("absolute value")
            s.grid(axes)
        grid[0][0].set_ylabel("share of the numbers in %")
    return figure


def sizes(rows: Mapping[str, tuple[float | None, float]], title: str) -> Any:
    """Bytes predicted (None: not predicted) and measured, two bars for each row."""
    with s.canvas(11, 0.95 * len(rows) + 1.9) as (figure, axes):
        most = max(max(predicted or 0, measured) for predicted, measured in rows.values())
        for column, (label, colour, hatch) in enumerate(
            (("predicted", s.PREDICTED, s.PREDICTED_HATCH), ("measured", s.MEASURED, ""))
        ):
            pairs = [(row, value) for row, pair in enumerate(rows.values()) if (value := pair[column]) is not None]
            places = [row + (column - 0.5) * 0.36 for row, _ in pairs]
            values = [value for _, value in pairs]
            drawn = axes.barh(places, values, 0.36, color=colour, edgecolor=s.INK, hatch=hatch, label=label)
            axes.bar_label(drawn, [readable_bytes(value) for value in values], padding=5, fontsize=s.SMALL)
        axes.set_xlim(0, most * 1.18)
        axes.set_yticks(range(len(rows)), list(rows))
        axes.invert_yaxis()
        ticks = _round_ticks(most)
        axes.set_xticks(ticks, [readable_bytes(tick) for tick in ticks])
        axes.set_title(title)
        figure.legend(loc="outside lower center", ncols=2)
        s.grid(axes, "x")
    return figure


def _round_ticks(most: float, count: int = 5) -> list[float]:
    """From 0 up to `most` in steps of 1, 2 or 5 times a power of ten, at most `count` of them behind the zero."""
    if most <= 0:
        return [0.0]
    power = 10.0 ** math.floor(math.log10(most / count))
    step = next(factor * power for factor in (1, 2, 5, 10, 20) if most / (factor * power) <= count)
    return [step * number for number in range(math.floor(most / step * (1 + 1e-9)) + 1)]


def answer_scores(
    rows: Mapping[str, Sequence[float | None]], tolerance: float, scorer: str, reference: str = "bfloat16"
) -> Any:
    """How an engine's answers score against the reference's: a row per engine, a dot per prompt, the tie as a pale strip.

    ``rows`` holds score differences in nats per token, None where an answer is degenerate; these are counted at the left.
    A vertical line marks each row's mean.
    """
    known = [value for values in rows.values() for value in values if value is not None]
    low, high = min([*known, -3 * tolerance]), max([*known, 3 * tolerance])
    room = (high - low) * 0.08
    with s.canvas(12, 1.1 * len(rows) + 2.3) as (figure, axes):
        axes.axvspan(-tolerance, tolerance, color=s.PALE, zorder=0, label=f"tie: within {tolerance:g}")
        axes.axvline(0, color=s.INK, linewidth=1.5)
        for row, values in enumerate(rows.values()):
            scored = [value for value in values if value is not None]
            # Dots that would lie on each other are spread over the row's height, the same way in every run.
            places = [row + 0.3 * ((7 * number % 11) / 10 - 0.5) for number in range(len(scored))]
            look = {"edgecolor": s.INK, "linewidth": 0.8, "s": 90, "marker": MARKERS[row % len(MARKERS)]}
            axes.scatter(scored, places, color=s.CYCLE[row % len(s.CYCLE)], **look)
            if scored:
                mean = sum(scored) / len(scored)
                axes.plot([mean, mean], [row - 0.36, row + 0.36], color=s.RED, linewidth=4)
            if stopped := len(values) - len(scored):
                axes.text(low - room, row, f"{stopped} x broken", fontsize=s.SMALL, va="center", ha="left")
        axes.plot([], [], color=s.RED, linewidth=4, label="mean of the row")
        axes.set_yticks(range(len(rows)), list(rows))
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_xlim(low - room * 1.2, high + room)
        axes.locator_params(axis="x", nbins=6)
        axes.set_xlabel(f"score less that of {reference}'s answer, nats per token (by {scorer})")
        axes.set_title("One mark for each prompt: left of the strip is worse")
        figure.legend(loc="outside lower center", ncols=2)
        s.grid(axes, "x")
    return figure


def margin_noise(margin: Sequence[float], noise: Sequence[float], agrees: Sequence[bool], bins: int = 8) -> Any:
    """Where the best token changed: margin against noise for each place, and the changed share by size of the margin."""
    known = [value for value in margin if value > 0]
    floor = min(known, default=1.0) / 4  # where ties are drawn: a logarithmic axis has no zero
    points = [(max(m, floor), max(n, 1e-6), bool(ok)) for m, n, ok in zip(margin, noise, agrees, strict=True)]
    with s.canvas(12, 5.4, columns=2) as (figure, (left, right)):
        for ok, marker, colour, size, label in (
            (True, "o", s.SKY, 26, "same best token"),
            (False, "X", s.RED, 80, "another best token"),
        ):
            chosen = [(m, n) for m, n, same in points if same is ok]
            if chosen:
                x, y = zip(*chosen, strict=True)
                look = {"edgecolor": s.INK, "linewidth": 0.6, "zorder": 3 - ok, "label": f"{label} ({len(chosen)})"}
                left.scatter(x, y, marker=marker, s=size, color=colour, **look)
        if any(m <= 0 for m in margin):
            left.axvspan(floor / 1.4, floor * 1.4, color=s.PALE, zorder=0)
            place = left.get_xaxis_transform()
            left.text(floor * 1.5, 0.02, "ties: margin 0", fontsize=s.SMALL, transform=place)
        ends = [min(m for m, _, _ in points) / 1.5, max(m for m, _, _ in points) * 1.5]
        left.plot(ends, [end / 2 for end in ends], color=s.INK, linestyle="--", label="margin = 2 x noise")
        left.set_xscale("log")
        left.set_yscale("log")
        low, high = min(n for _, n, _ in points), max(n for _, n, _ in points)
        left.set_ylim(low / 1.8, high * 1.8)
        left.set_xlabel("margin: best logit over the second")
        left.set_ylabel("noise: largest change of a logit")
        left.set_title("Each place of the texts", fontsize=s.NORMAL)
        _power_ticks(left.xaxis, ends)
        _power_ticks(left.yaxis, [low / 1.8, high * 1.8])
        s.grid(left, "both")

        ordered = sorted(points)
        groups = [ordered[len(ordered) * i // bins : len(ordered) * (i + 1) // bins] for i in range(bins)]
        groups = [group for group in groups if group]
        shares = [100 * sum(not same for _, _, same in group) / len(group) for group in groups]
        drawn = right.bar(range(len(groups)), shares, color=s.BLUE, edgecolor=s.INK, hatch="//")
        right.bar_label(drawn, [f"{share:.0f}" for share in shares], padding=3, fontsize=s.SMALL)
        right.set_xticks(
            range(len(groups)),
            [f"≤ {group[-1][0] if group[-1][0] > floor else 0:.2g}" for group in groups],
            rotation=45,
            ha="right",
        )
        right.margins(y=0.15)
        right.set_ylim(bottom=0)
        right.set_xlabel("margin (as many places in each group)")
        right.set_ylabel("another best token, in %")
        right.set_title("By size of the margin", fontsize=s.NORMAL)
        figure.legend(loc="outside lower center", ncols=3)
    return figure


def _power_ticks(axis: Any, ends: Sequence[float]) -> None:
    powers = range(math.floor(math.log10(ends[0])), math.ceil(math.log10(ends[1])) + 1)
    steps = (1, 3) if len(powers) < 4 else (1,)
    ticks = [step * 10.0**power for power in powers for step in steps if ends[0] <= step * 10.0**power <= ends[1]]
    axis.set_ticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.set_minor_locator(_no_ticks())


def quality_intervals(
    names: Sequence[str],
    panels: Mapping[str, Sequence[tuple[float, float, float]]],
    neutral: Mapping[str, float] | None = None,
    noise: str = "",
    logarithmic: Sequence[str] = (),
) -> Any:
    """Estimates with their intervals (low, estimate, high): a row per engine, a panel per measure.

    ``neutral`` marks in a panel the value of "no difference"; the interval of the row ``noise`` is drawn as a pale strip
    through all rows, since a difference inside it is no more than what another number type does alone. Panels named in
    ``logarithmic`` get such an axis; all their values must be above zero, otherwise the axis stays as it is.
    """
    with s.canvas(12.5, 0.75 * len(names) + 2.2, columns=len(panels), squeeze=False, sharey=True) as (figure, grid):
        for place, (title, values) in enumerate(panels.items()):
            axes = grid[0][place]
            for row, (name, (low, middle, high)) in enumerate(zip(names, values, strict=True)):
                if name == noise:
                    axes.axvspan(low, high, color=s.PALE, zorder=0)
                look = {"color": s.GREY if name == noise else s.CYCLE[row % len(s.CYCLE)], "linewidth": 3, "capsize": 7}
                bounds = [[max(middle - low, 0.0)], [max(high - middle, 0.0)]]
                axes.errorbar([middle], [row], xerr=bounds, marker=MARKERS[row % len(MARKERS)], markersize=10, **look)
                pad = {"boxstyle": "round,pad=0.1", "facecolor": "white", "edgecolor": "none"}
                above = {"xytext": (0, 13), "textcoords": "offset points", "ha": "center", "bbox": pad}
                axes.annotate(f"{middle:.4g}", (middle, row), fontsize=s.SMALL, **above)
            if neutral and title in neutral:
                axes.axvline(neutral[title], color=s.RED, linestyle="--", linewidth=2)
            axes.set_yticks(range(len(names)), list(names))
            axes.set_ylim(len(names) - 0.5, -0.75)
            axes.margins(x=0.15)
            if title in logarithmic and all(low > 0 for low, _, _ in values):
                axes.set_xscale("log")
                ends = (min(low for low, _, _ in values) / 2, max(high for _, _, high in values) * 2)
                axes.set_xlim(ends)
                _power_ticks(axes.xaxis, ends)
            else:
                axes.locator_params(axis="x", nbins=4)
            axes.set_title(title, fontsize=s.NORMAL)
            s.grid(axes, "x")
    return figure


def recorded_bars(panels: Mapping[str, Mapping[str, float]], title: str, source: str) -> Any:
    """Bars of a recorded measurement, a panel per quantity (its unit in the name); ``source`` names machine and date."""
    if not source.strip():
        raise ValueError("a recorded measurement needs its source: the machine and the date")
    most = max(len(values) for values in panels.values())
    with s.canvas(12, 0.75 * most + 2.4, columns=len(panels), squeeze=False) as (figure, grid):
        for place, (quantity, values) in enumerate(panels.items()):
            axes = grid[0][place]
            labels = [f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in values.values()]
            s.bars(axes, list(values), list(values.values()), labels)
            axes.set_xlim(0, max(values.values()) * 1.3)
            axes.set_xlabel(quantity)
            axes.locator_params(axis="x", nbins=4)
            s.grid(axes, "x")
        figure.suptitle(title, x=0.01, ha="left", fontsize=s.LARGE, weight="bold")
        figure.supxlabel(f"Recorded: {source}", fontsize=s.SMALL, style="italic")
    return figure
