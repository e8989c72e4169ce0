"""Pictures of the KV-cache pool: who owns which block, how full it is over the steps, and what happens when it is too small."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trtllm_workshop.figures import style as s

FREE = "#FFFFFF"


def look_of(request: int) -> tuple[str, str]:
    """Colour and hatch of a request (numbered from 0); pairs repeat only after 8 x 8 requests."""
    colours = len(s.CYCLE)
    return s.CYCLE[request % colours], s.HATCHES[(request // colours + request) % len(s.HATCHES)]


def grid(snapshots: Mapping[str, Sequence[Sequence[int]]], columns: int = 8) -> Any:
    """The pool at several moments: a box per block with the number of the request that owns it, empty when it is free.

    Each snapshot lists the owners of every block (requests numbered from 0, drawn from 1); a shared block names them all.
    """
    from matplotlib.patches import Rectangle

    blocks = max(len(owners) for owners in snapshots.values())
    wide = min(columns, blocks)
    rows = -(-blocks // wide)
    across = min(4, len(snapshots))
    down = -(-len(snapshots) // across)
    size = (13, down * (13 / across * rows / wide + 0.7))
    with s.canvas(*size, rows=down, columns=across, squeeze=False) as (figure, places):
        for axes in places.flat:
            s.plain(axes)
        for (title, owners), axes in zip(snapshots.items(), places.flat, strict=False):
            for block, of in enumerate(owners):
                x, y = block % wide, block // wide
                if not of:
                    axes.add_patch(Rectangle((x, y), 0.92, 0.86, facecolor=FREE, edgecolor=s.GREY, linewidth=1))
                    continue
                colour, _ = look_of(of[0])
                axes.add_patch(Rectangle((x, y), 0.92, 0.86, facecolor=colour, edgecolor=s.INK, linewidth=1))
                label = "+".join(str(owner + 1) for owner in of) if len(of) < 3 else f"{len(of)}x"
                look = {"fontsize": s.SMALL, "fontweight": "bold", "color": s.text_on(colour)}
                axes.text(x + 0.46, y + 0.43, label, ha="center", va="center", **look)
            axes.set_xlim(-0.05, wide)
            axes.set_ylim(rows, -0.05)
            axes.set_aspect("equal")
            axes.set_title(title, fontsize=s.NORMAL)
    return figure


def used_blocks(expected: Mapping[int, Sequence[int]], measured: Sequence[int], pool: int) -> Any:
    """Blocks in use after each step: what each request's tokens need by the formula, stacked, and what was reported.

    ``expected`` has the blocks of each request (numbered from 0) after every step, ``measured`` the sum as the engine
    told it; ``pool`` is the number of blocks that there are.
    """
    with s.canvas(12, 5.0) as (figure, axes):
        bottom = [0] * len(measured)
        places = range(1, len(measured) + 1)
        for request, blocks in expected.items():
            colour, hatch = look_of(request)
            tops = [low + count for low, count in zip(bottom, blocks, strict=True)]
            area = axes.fill_between(places, bottom, tops, step="mid", facecolor=colour, edgecolor=s.INK, linewidth=0.6)
            area.set_hatch(hatch)
            held = [i for i, count in enumerate(blocks) if count]
            if held:
                middle = held[len(held) // 2]
                plate = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
                height = (bottom[middle] + tops[middle]) / 2
                axes.text(middle + 1, height, str(request + 1), ha="center", va="center", fontsize=s.SMALL, bbox=plate)
            bottom = tops
        axes.plot(places, measured, "o", color=s.BLACK, markersize=5, label="reported by get_stats()", zorder=4)
        highest: float = max([1, *measured, *bottom])
        if pool < 2 * highest:
            axes.axhline(pool, color=s.RED, linestyle="--", linewidth=2)
            axes.text(1, pool, f"the pool: {pool} blocks", va="bottom", fontsize=s.SMALL)
            highest = max(pool, highest)
        else:
            axes.text(1, 1.3 * highest, f"the pool: {pool} blocks, far above", va="center", fontsize=s.SMALL)
            highest *= 1.2
        axes.set_ylim(0, 1.15 * highest)
        axes.yaxis.get_major_locator().set_params(integer=True)
        axes.set_xlim(0.5, max(2, len(measured)) + 0.5)
        axes.set_xlabel("step (iteration) of the engine")
        axes.set_ylabel("KV-cache blocks in use")
        axes.set_title("The pool while requests come and go (number: request, by the formula)")
        figure.legend(loc="outside lower center")
        s.grid(axes)
    return figure


def pressure(panels: Mapping[str, Sequence[Mapping[str, int]]], pool: int) -> Any:
    """A column per policy: blocks in use and requests in the step, over the steps, with a cross where a request was paused.

    Each step is a mapping with ``used`` (blocks), ``scheduled``, ``queued`` and ``paused`` (requests).
    """
    with s.canvas(13, 6.2, rows=2, columns=len(panels), sharex=True, sharey="row", squeeze=False) as (figure, places):
        for column, (title, steps) in enumerate(panels.items()):
            above, below = places[0][column], places[1][column]
            numbers = range(1, len(steps) + 1)
            above.fill_between(numbers, [step["used"] for step in steps], step="mid", color=s.SKY, edgecolor=s.INK)
            above.axhline(pool, color=s.RED, linestyle="--", linewidth=2)
            above.text(1, pool, f"the pool: {pool} blocks", va="bottom", fontsize=s.SMALL)
            above.set_ylim(0, 1.2 * pool)
            above.set_title(title, fontsize=s.NORMAL)
            below.step(numbers, [step["scheduled"] for step in steps], where="mid", color=s.BLUE, label="in the step")
            below.step(
                numbers, [step["queued"] for step in steps], where="mid", color=s.ORANGE, linestyle=":", label="waiting"
            )
            hit = [number for number, step in zip(numbers, steps, strict=True) if step["paused"]]
            heights = [steps[number - 1]["scheduled"] for number in hit]
            for number, height in zip(hit, heights, strict=True):
                if steps[number - 1]["paused"] > 1:
                    note = f"{steps[number - 1]['paused']} at once"
                    below.annotate(note, (number, height), xytext=(10, 4), textcoords="offset points", fontsize=s.SMALL)
            below.plot(
                hit, heights, "X", color=s.RED, markeredgecolor=s.INK, markersize=12, label="a request is paused"
            )
            below.set_xlabel("step (iteration) of the engine")
            below.yaxis.get_major_locator().set_params(integer=True)
            s.grid(above)
            s.grid(below)
        places[0][0].set_ylabel("blocks in use")
        places[1][0].set_ylabel("requests")
        marks, words = places[1][0].get_legend_handles_labels()
        figure.legend(marks, words, loc="outside lower center", ncols=len(words))
    return figure
