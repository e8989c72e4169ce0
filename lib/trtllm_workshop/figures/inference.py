"""Pictures of the inference lesson: speed against the limit, next-token probabilities, margins and noise, streaming."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trtllm_workshop.figures import style as s


def speed(limits: Mapping[int, float], measured: Mapping[int, float]) -> Any:
    """Tokens per second by number of requests: the limit by memory bandwidth beside what was measured."""
    with s.canvas(11, 4) as (figure, axes):
        for offset, (label, values, colour, hatch) in enumerate(
            [
                ("limit by memory bandwidth", limits, s.PREDICTED, s.PREDICTED_HATCH),
                ("measured", measured, s.MEASURED, ""),
            ]
        ):
            places = [row + (offset - 0.5) * 0.36 for row in range(len(limits))]
            heights = [values[requests] for requests in limits]
            drawn = axes.barh(places, heights, 0.36, color=colour, edgecolor=s.INK, hatch=hatch, label=label)
            labels = [f"{value:,.0f}" if value >= 100 else f"{value:,.1f}" for value in heights]
            axes.bar_label(drawn, labels, padding=5, fontsize=s.SMALL)
        axes.set_yticks(range(len(limits)), [f"{n} request{'s' * (n > 1)}" for n in limits])
        axes.invert_yaxis()
        axes.margins(x=0.15)
        axes.set_xlabel("tokens per second, all requests together")
        axes.set_title("How near to the limit")
        figure.legend(loc="outside lower center", ncols=2)
        s.grid(axes, "x")
    return figure


def next_token(
    tokens: Sequence[str], panels: Mapping[str, Sequence[float]], kept: Sequence[bool], rule: str = "these settings"
) -> Any:
    """Probabilities (0 to 1) of the same tokens under several settings; ``kept`` tells which ones ``rule`` leaves."""
    with s.canvas(12, 0.42 * len(tokens) + 1.7, columns=len(panels), sharex=True, sharey=True, squeeze=False) as (
        figure,
        axes,
    ):
        for number, (label, values) in enumerate(panels.items()):
            place = axes[0][number]
            colours = [s.BLUE if ok else s.PALE for ok in kept]
            drawn = place.barh(
                range(len(tokens)), [100 * v for v in values], color=colours, edgecolor=s.INK, height=0.7
            )
            for patch, ok in zip(drawn, kept, strict=True):
                patch.set_hatch("" if ok else "//")
            place.bar_label(drawn, [f"{100 * v:.1f}" for v in values], padding=4, fontsize=s.SMALL)
            place.margins(x=0.25)
            place.set_title(label, fontsize=s.NORMAL)
            place.set_xlabel("probability in %")
            if len(panels) > 1:
                place.set_xticks([0, 50, 100])
            place.set_yticks(range(len(tokens)), [_short(token) for token in tokens])
            s.grid(place, "x")
        axes[0][0].invert_yaxis()
        axes[0][0].set_ylabel("next token")
        if not all(kept):
            from matplotlib.patches import Patch

            marks = [Patch(facecolor=s.BLUE, edgecolor=s.INK), Patch(facecolor=s.PALE, edgecolor=s.INK, hatch="//")]
            words = [f"can be chosen with {rule}", "cannot"]
            figure.legend(marks, words, loc="outside lower center", ncols=2)
    return figure


def margins(tokens: Sequence[str], margin: Sequence[float], noise: Sequence[float], agrees: Sequence[bool]) -> Any:
    """For each token: how far the best logit lies above the second, and twice the largest difference between the engines."""
    floor = 1e-6
    with s.canvas(12, 5.4) as (figure, axes):
        places = range(len(tokens))
        axes.step(
            places,
            [max(2 * n, floor) for n in noise],
            where="mid",
            color=s.RED,
            linestyle="--",
            label="2 x noise: largest difference of a logit, both ways",
        )
        for ok, marker, colour, label in (
            (True, "o", s.BLUE, "margin, same token as Hugging Face"),
            (False, "X", s.ORANGE, "margin, another token"),
        ):
            chosen = [i for i in places if bool(agrees[i]) is ok]
            if chosen:
                heights = [max(margin[i], floor) for i in chosen]
                axes.scatter(
                    chosen, heights, marker=marker, s=110, color=colour, edgecolor=s.INK, label=label, zorder=3
                )
        axes.set_yscale("log")
        axes.set_xticks(places, [_short(token, 10) for token in tokens], rotation=90, fontsize=s.SMALL)
        axes.set_xlabel("token of the engine's answer")
        axes.set_ylabel("difference of logits")
        axes.set_title("Can rounding change the token?")
        figure.legend(loc="outside lower center", ncols=2)
        s.grid(axes)
    return figure


def stream(steps: Sequence[tuple[float, int]]) -> Any:
    """Tokens so far over time, from (seconds since the request, tokens) of each step."""
    with s.canvas(11, 4) as (figure, axes):
        times, counts = [moment for moment, _ in steps], [count for _, count in steps]
        axes.step([0, *times], [0, *counts], where="post", color=s.BLUE)
        axes.plot(times, counts, "o", color=s.BLUE, markeredgecolor=s.INK)
        axes.axvline(times[0], color=s.RED, linestyle="--")
        axes.text(times[0], max(counts) * 0.98, " first token", color=s.INK, va="top", fontsize=s.NORMAL)
        axes.set_xlim(0, times[-1] * 1.05)
        axes.set_ylim(0, max(counts) * 1.1)
        axes.set_xlabel("seconds since the request")
        axes.set_ylabel("tokens so far")
        axes.set_title("A stream: wait for the prompt, then step by step")
        s.grid(axes, "both")
    return figure


def _short(text: str, longest: int = 14) -> str:
    """A token for an axis: line ends made visible, dollar signs kept from matplotlib, long ones cut."""
    clean = text.replace("\n", "\\n").replace("$", r"\$")
    clean = clean if clean.strip() else "␣" * max(1, len(clean))
    return clean if len(clean) <= longest else clean[: longest - 1] + "…"
