"""Pictures of the streaming lesson: tokens as they come, static against in-flight batching, stalls, and recorded throughput."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trtllm_workshop.figures import style as s
from trtllm_workshop.figures.quantize import LINES, MARKERS
from trtllm_workshop.stream_timing import Span, Stream

CONTEXT, CONTEXT_HATCH = s.ORANGE, "//"
GENERATION = s.SKY
IDLE_HATCH = "\\\\"


def arrivals(streams: Mapping[str, Stream]) -> Any:
    """A row per request: how long it waited for its first token, a tick for every chunk of tokens, and how it ended."""
    begin = min(stream.submitted for stream in streams.values())
    with s.canvas(12, 0.62 * len(streams) + 2.2) as (figure, axes):
        for row, stream in enumerate(streams.values()):
            submitted, times = stream.submitted - begin, [moment - begin for moment in stream.moments]
            first = times[0] if times else submitted
            axes.barh(row, first - submitted, 0.5, left=submitted, color=CONTEXT, hatch=CONTEXT_HATCH, edgecolor=s.INK)
            axes.vlines(times, row - 0.32, row + 0.32, color=s.BLUE, linewidth=2)
            axes.plot(
                [stream.end - begin],
                [row],
                "X" if stream.cancelled else "o",
                color=s.RED if stream.cancelled else s.GREEN,
                markeredgecolor=s.INK,
                markersize=11,
                zorder=3,
            )
        axes.set_yticks(range(len(streams)), list(streams))
        axes.invert_yaxis()
        axes.set_xlim(left=0)
        axes.set_xlabel("seconds since the first request")
        axes.set_title("Tokens as they come")
        s.grid(axes, "x")
        _legend(figure, {"until the first token": (CONTEXT, CONTEXT_HATCH)}, ticks=True, ends=streams.values())
    return figure


def timelines(panels: Mapping[str, Sequence[Span]], slots: int) -> Any:
    """A panel per way of batching, a row per sequence slot: context phase, generation phase, and the slot standing idle.

    All panels share one time axis. Requests are numbered from 1, as people count.
    """
    with s.canvas(13, len(panels) * (0.52 * slots + 1.0) + 1.3, rows=len(panels), sharex=True, squeeze=False) as (
        figure,
        grid,
    ):
        begins = {title: min(span.start for span in spans) for title, spans in panels.items()}
        longest = max(span.end - begins[title] for title, spans in panels.items() for span in spans)
        for (title, spans), (axes,) in zip(panels.items(), grid, strict=True):
            begin, end = begins[title], max(span.end for span in spans)
            for slot in range(slots):
                free = begin
                held = sorted((span for span in spans if span.slot == slot), key=lambda span: span.start)
                for span in held:
                    _idle(axes, slot, free - begin, span.start - begin)
                    _span(axes, span, begin, longest)
                    free = max(free, span.end)
                _idle(axes, slot, free - begin, end - begin)
            axes.axvline(end - begin, color=s.RED, linestyle="--", linewidth=2)
            axes.text(end - begin, (slots - 1) / 2, f" {end - begin:.1f} s", fontsize=s.NORMAL, va="center")
            axes.set_ylim(slots - 0.5, -0.5)
            axes.set_yticks(range(slots), [f"slot {slot + 1}" for slot in range(slots)])
            axes.set_title(title, fontsize=s.NORMAL)
            axes.set_xlim(0, 1.09 * longest)
        grid[-1][0].set_xlabel("seconds since the first request")
        names = {
            "context phase": (CONTEXT, CONTEXT_HATCH),
            "generation phase (number: request)": (GENERATION, ""),
            "slot stands idle": ("#FFFFFF", IDLE_HATCH),
        }
        _legend(figure, names)
    return figure


def _span(axes: Any, span: Span, begin: float, longest: float) -> None:
    for start, end, colour, hatch in (
        (span.start, span.first, CONTEXT, CONTEXT_HATCH),
        (span.first, span.end, GENERATION, ""),
    ):
        axes.barh(span.slot, end - start, 0.72, left=start - begin, color=colour, hatch=hatch, edgecolor=s.INK)
    if span.end - span.first > 0.013 * longest:
        middle = (span.first + span.end) / 2 - begin
        axes.text(middle, span.slot, str(span.request + 1), ha="center", va="center", fontsize=s.SMALL)


def _idle(axes: Any, slot: int, start: float, end: float) -> None:
    if end > start:
        axes.barh(slot, end - start, 0.72, left=start, color="#FFFFFF", hatch=IDLE_HATCH, edgecolor=s.GREY, linewidth=0)


def _legend(figure: Any, boxes: Mapping[str, tuple[str, str]], ticks: bool = False, ends: Any = ()) -> None:
    """One legend below the picture, with the same pattern as in it."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    marks: list[Any] = [Patch(facecolor=colour, hatch=hatch, edgecolor=s.INK) for colour, hatch in boxes.values()]
    words = list(boxes)
    if ticks:
        marks.append(Line2D([], [], color=s.BLUE, marker="|", linestyle="", markersize=14, markeredgewidth=2))
        words.append("a token")
    for cancelled, marker, colour, word in ((False, "o", s.GREEN, "finished"), (True, "X", s.RED, "cancelled")):
        if any(stream.cancelled is cancelled for stream in ends):
            look: dict[str, Any] = {"color": colour, "markeredgecolor": s.INK, "markersize": 11}
            marks.append(Line2D([], [], marker=marker, linestyle="", **look))
            words.append(word)
    figure.legend(marks, words, loc="outside lower center", ncols=len(words))


def gaps(panels: Mapping[str, tuple[Mapping[str, Stream], Stream]]) -> Any:
    """A panel per setting: the time before each token of the short requests, and a strip while a long prompt was read.

    Each panel has the short requests by name and the long one. All panels share both axes.
    """
    longest = 0.0
    with s.canvas(13, 5.2, columns=len(panels), sharey=True, sharex=True, squeeze=False) as (figure, grid):
        for (title, (short, long)), axes in zip(panels.items(), grid[0], strict=True):
            begin = min(stream.submitted for stream in [*short.values(), long])
            longest = max(longest, *(stream.end - begin for stream in [*short.values(), long]))
            first = long.moments[0] if long.moments else long.submitted
            strip = axes.axvspan(
                long.submitted - begin, first - begin, facecolor="#FFFFFF", edgecolor=s.GREY, hatch="//", zorder=0
            )
            strip.set_label("the long prompt, until its first token")
            for number, (name, stream) in enumerate(short.items()):
                values = [1000 * (b - a) for a, b in zip(stream.moments, stream.moments[1:], strict=False)]
                size = max(
                    5, 13 - 3 * number
                )  # requests of one step get their tokens together: smaller marks lie on top
                look = {
                    "marker": MARKERS[number % len(MARKERS)],
                    "markersize": size,
                    "color": s.CYCLE[number % len(s.CYCLE)],
                }
                axes.plot(
                    [m - begin for m in stream.moments[1:]],
                    values,
                    linestyle="",
                    markeredgecolor=s.INK,
                    label=name,
                    **look,
                )
            axes.set_title(title, fontsize=s.NORMAL)
            axes.set_xlabel("seconds since the first request")
            axes.set_ylim(bottom=0)
            s.grid(axes, "both")
        grid[0][0].set_xlim(0, 1.03 * longest)
        grid[0][0].set_ylabel("time before a token in ms")
        grid[0][0].yaxis.set_major_formatter("{x:,.0f}")
        marks, words = grid[0][0].get_legend_handles_labels()
        figure.legend(marks, words, loc="outside lower center", ncols=len(words))
    return figure


def first_tokens(series: Mapping[str, Sequence[float]], predicted: Mapping[str, float] | None = None) -> Any:
    """Time to first token in ms, of the same questions under several settings; a dashed line where it was predicted."""
    most = max(len(values) for values in series.values())
    width = 0.8 / len(series)
    with s.canvas(12, 4.6) as (figure, axes):
        for number, (name, values) in enumerate(series.items()):
            places = [question + (number - (len(series) - 1) / 2) * width for question in range(len(values))]
            colour, hatch = ((s.ORANGE, "//"), (s.BLUE, ""), (s.GREEN, ".."))[number % 3]
            drawn = axes.bar(places, values, width, color=colour, hatch=hatch, edgecolor=s.INK, label=name)
            plate = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
            axes.bar_label(drawn, [f"{value:,.0f}" for value in values], padding=3, fontsize=s.SMALL, bbox=plate)
        for number, (name, value) in enumerate((predicted or {}).items()):
            axes.axhline(value, color=s.RED, linestyle=LINES[number + 1], linewidth=2, label=f"predicted, {name}")
        axes.set_xticks(range(most), [str(question + 1) for question in range(most)])
        axes.set_xlabel("question")
        axes.set_ylabel("time to first token in ms")
        axes.margins(y=0.15)
        axes.set_title("The same long instruction, asked again and again")
        axes.yaxis.set_major_formatter("{x:,.0f}")
        figure.legend(loc="outside lower center", ncols=3)
        s.grid(axes)
    return figure


def recorded_rates(record: Mapping[str, Any]) -> tuple[dict[str, list[tuple[int, float, float]]], str]:
    """The generation steps in a record of benchmarks/engine_gpu.py, and the words for its source.

    Returns (requests, tokens per second, limit by memory bandwidth in tokens per second) of each engine by its name, and
    machine, date and kind of weights. Raises KeyError for a file of another kind.
    """
    names = {"tinyllama": "TinyLlama", "llama-3-8b": "Llama 3 8B", "bf16": "bfloat16", "fp8-kv8": "FP8 + FP8 cache"}
    rates: dict[str, list[tuple[int, float, float]]] = {}
    for row in record["rows"]:
        if row["what"] == "generation step":
            name = ", ".join(names.get(row[part], row[part]) for part in ("shape", "precision"))
            limit = 1000 * row["batch"] / row["limit_milliseconds"]
            rates.setdefault(name, []).append((row["batch"], row["tokens_per_second"], limit))
    return rates, f"one {record['machine']['gpu']}, {record['date']}, reference engine, random weights"


def recorded_throughput(rows: Mapping[str, Sequence[tuple[int, float, float]]], source: str) -> Any:
    """Tokens per second over the number of requests at once, beside the limit by memory bandwidth, on logarithmic axes.

    ``rows`` has (requests, measured, limit) for each engine; ``source`` names machine and date, and may not be empty.
    """
    if not source.strip():
        raise ValueError("a recorded measurement needs its source: machine and date")
    with s.canvas(12, 5.6) as (figure, axes):
        ticks = sorted({requests for points in rows.values() for requests, _, _ in points})
        for number, (name, points) in enumerate(rows.items()):
            ordered = sorted(points)
            places = [requests for requests, _, _ in ordered]
            colour, marker = s.CYCLE[number], MARKERS[number]
            limits = [limit for _, _, limit in ordered]
            axes.plot(places, limits, color=colour, linestyle="--", marker=marker, markerfacecolor="white")
            axes.plot(places, [value for _, value, _ in ordered], color=colour, marker=marker, label=name)
        axes.plot([], [], color=s.INK, linestyle="--", label="limit by memory bandwidth (open marks)")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.minorticks_off()
        axes.set_xlabel(f"requests at once\n\nRecorded: {source}")
        axes.set_ylabel("tokens per second, all together")
        axes.set_title("Generation on a GPU")
        figure.legend(loc="outside lower center", ncols=2)
        s.grid(axes, "both")
    return figure
