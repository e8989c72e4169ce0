"""Pictures of the checkpoint lesson: renamed tensors, the fused QKV matrix, ranks, and what float16 can hold."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from trtllm_workshop.figures import style as s

# Powers of two where float16 (IEEE 754 binary16) rounds to zero, has all its digits, and ends (65504).
ZERO, NORMAL, LARGEST = -25, -14, 16


def name_map(
    links: Sequence[tuple[str, str]],
    left_shapes: Mapping[str, Sequence[int]],
    right_shapes: Mapping[str, Sequence[int]],
    trap: Sequence[str] = (),
) -> Any:
    """Lines from Hugging Face names (left) to TensorRT-LLM names (right), top to bottom in the order of ``links``.

    ``links`` are (left name, right name) pairs; a name may occur several times. Lines that end in a name of ``trap`` are
    drawn thick and dashed. The shapes stand beside the names.
    """
    left = list(dict.fromkeys(name for name, _ in links))
    right = list(right_shapes)
    rows = max(len(left), len(right))
    places = [{name: (i + 0.5) * rows / len(side) for i, name in enumerate(side)} for side in (left, right)]
    with s.canvas(12, 0.62 * rows + 0.9) as (figure, axes):
        s.plain(axes)
        axes.set_xlim(0, 12)
        axes.set_ylim(rows + 0.2, -0.9)
        axes.text(2.4, -0.45, "Hugging Face", ha="center", fontsize=s.LARGE, weight="bold")
        axes.text(9.6, -0.45, "TensorRT-LLM checkpoint", ha="center", fontsize=s.LARGE, weight="bold")
        for name, target in links:
            marked = target in trap
            shared = sum(target == other for _, other in links) > 1 or sum(name == other for other, _ in links) > 1
            axes.plot(
                [4.6, 7.4],
                [places[0][name], places[1][target]],
                color=s.RED if marked else s.BLUE if shared else s.GREY,
                linewidth=4 if marked else 2.5,
                linestyle=(0, (3, 1)) if marked else "-",
                solid_capstyle="round",
            )
        for x, side, shapes, place in ((0.1, left, left_shapes, places[0]), (7.4, right, right_shapes, places[1])):
            for name in side:
                label = f"{name}   {' x '.join(map(str, shapes[name]))}"
                colour = s.ORANGE if name in trap else s.PALE
                s.box(axes, x, place[name] - 0.37, 4.5, 0.74, label, colour, size=s.SMALL)
    return figure


def layer_map(recipe: Mapping[str, Sequence[str]], left: Mapping[str, Any], right: Mapping[str, Any]) -> Any:
    """The name map of layer 0 and of everything outside the layers.

    ``recipe``: TensorRT-LLM name -> the Hugging Face names it is made of; ``left`` and ``right`` are the tensor indices
    of the two folders (name -> something with a ``shape``).
    """

    def short(name: str) -> str:
        return re.sub(r"^(model|transformer)\.(layers\.0\.)?", "", name).removesuffix(".weight")

    chosen = {ours: theirs for ours, theirs in recipe.items() if ".layers." not in ours or ".layers.0." in ours}
    links = sorted(
        ((short(theirs), short(ours)) for ours, parts in chosen.items() for theirs in parts),
        key=lambda link: _ORDER.get(link[1], 99),
    )
    left_shapes = {short(name): left[name].shape for parts in chosen.values() for name in parts}
    # mlp.gate stands above mlp.fc here, as its namesake gate_proj does on the left: the crossing lines are the point.
    order = sorted(chosen, key=lambda name: _ORDER.get(short(name), 99) - 1.5 * (short(name) == "mlp.gate"))
    right_shapes = {short(name): right[name].shape for name in order}
    return name_map(links, left_shapes, right_shapes, trap=("mlp.fc", "mlp.gate"))


_ORDER = {
    name: place
    for place, name in enumerate(
        (
            "vocab_embedding",
            "input_layernorm",
            "attention.qkv",
            "attention.dense",
            "post_layernorm",
            "mlp.fc",
            "mlp.gate",
            "mlp.proj",
            "ln_f",
            "lm_head",
        )
    )
}


def fused_qkv(heads: int, kv_heads: int, head_size: int, hidden: int) -> Any:
    """The rows of attention.qkv to scale, and beside it which query heads read which key and value head."""
    parts = [("Q", heads, s.SKY, ""), ("K", kv_heads, s.ORANGE, "//"), ("V", kv_heads, s.GREEN, "..")]
    rows = (heads + 2 * kv_heads) * head_size
    with s.canvas(12, 6, columns=2, width_ratios=(1, 1.35)) as (figure, (left, right)):
        left.set_title(f"One matrix, {rows:,} x {hidden:,}")
        left.set_xlim(0, 1)
        left.set_ylim(rows, 0)
        left.set_xticks([])
        left.set_ylabel("row of attention.qkv.weight")
        ticks, start = [0], 0
        for letter, count, colour, hatch in parts:
            for head in range(count):
                s.box(left, 0, start + head * head_size, 1, head_size, "", colour, hatch=hatch, rounded=False)
            middle = start + count * head_size / 2
            words = f"{letter}: {count} head{'s' * (count > 1)} x {head_size} rows"
            pad = {"boxstyle": "round,pad=0.25", "facecolor": "white", "edgecolor": s.INK}
            left.text(0.5, middle, words, ha="center", va="center", fontsize=s.NORMAL, bbox=pad)
            start += count * head_size
            ticks.append(start)
        left.set_yticks(ticks)
        _sharing(right, heads, kv_heads)
    return figure


def _sharing(axes: Any, heads: int, kv_heads: int) -> None:
    group = heads // kv_heads
    axes.set_title("Every query head has its own K and V" if group == 1 else f"{group} query heads share one K and V")
    s.plain(axes)
    axes.set_xlim(-0.5, heads - 0.5)
    axes.set_ylim(0, 3)
    numbered = heads <= 16
    for head in range(heads):
        s.box(axes, head - 0.4, 2.1, 0.8, 0.5, f"Q{head}" if numbered else "", s.SKY, size=s.SMALL)
    for kv in range(kv_heads):
        first, last = kv * group, (kv + 1) * group - 1
        centre, width = (first + last) / 2, 0.8 if group == 1 else min(2.2, 0.8 * group)
        label = f"K{kv} V{kv}" if heads <= 12 else f"{kv}" if kv_heads <= 16 else ""
        s.box(axes, centre - width / 2, 0.5, width, 0.5, label, s.ORANGE, hatch="" if label else "//", size=s.SMALL)
        for head in range(first, last + 1):
            axes.plot([head, centre], [2.1, 1.0], color=s.INK, linewidth=1.6)
    axes.text((heads - 1) / 2, 2.78, f"{heads} query heads", ha="center", fontsize=s.NORMAL)
    axes.text(
        (heads - 1) / 2,
        0.2,
        f"{kv_heads} key and value heads: the KV cache stores these",
        ha="center",
        fontsize=s.NORMAL,
    )


def swapped_mlp(reference: Sequence[float], right: Sequence[float], swapped: Sequence[float]) -> Any:
    """Outputs of one MLP: Hugging Face's on the x axis, the checkpoint's on the y axis, for both readings of the names."""
    with s.canvas(10, 5.6) as (figure, axes):
        axes.axline((0, 0), slope=1, color=s.GREY, linewidth=1.5, linestyle="--")
        axes.scatter(reference, swapped, marker="x", color=s.RED, s=46, label="swapped: fc ← up_proj, gate ← gate_proj")
        axes.scatter(
            reference, right, marker="o", color=s.BLUE, s=40, label="as stored: fc ← gate_proj, gate ← up_proj"
        )
        axes.set_xlabel("output of the Hugging Face MLP")
        axes.set_ylabel("output from the checkpoint")
        axes.set_title("Right names lie on the line")
        axes.legend(loc="best")
        s.grid(axes, "both")
    return figure


def weight_range(counts: Mapping[int, int]) -> Any:
    """How many weights there are of each size. ``counts``: exponent e -> weights with 2^(e-1) <= |w| < 2^e."""
    exponents = sorted(counts)
    low, high = min(exponents[0] - 2, -34), max(exponents[-1] + 1, 22)
    bands = [(low, ZERO, "becomes\nzero"), (ZERO, NORMAL, "loses\ndigits")]
    bands += [(NORMAL, LARGEST, "11 binary digits"), (LARGEST, high, "becomes\ninfinite")]
    with s.canvas(11, 5) as (figure, axes):
        axes.bar([e - 0.5 for e in exponents], [counts[e] for e in exponents], color=s.BLUE, edgecolor=s.INK)
        axes.set_yscale("log")
        axes.set_xlim(low, high)
        axes.set_ylim(0.5, max(counts.values()) * 60)
        for start, stop, words in bands:
            if words != "11 binary digits":
                axes.axvspan(start, stop, color=s.PALE, zorder=-1)
                axes.axvline(stop if start == low else start, color=s.RED, linewidth=2, linestyle="--")
            place = axes.get_xaxis_transform()
            axes.text((start + stop) / 2, 0.97, words, ha="center", va="top", fontsize=s.SMALL, transform=place)
        axes.axvline(NORMAL, color=s.RED, linewidth=2, linestyle="--")
        ticks = [t for t in range(-80, high + 1, 8) if t >= low]
        axes.set_xticks(ticks, [f"$2^{{{t}}}$" for t in ticks])
        axes.set_xlabel("size of a weight (absolute value)")
        axes.set_ylabel("number of weights")
        axes.set_title("Where the weights lie in float16's range")
        s.grid(axes)
    return figure


def rank_rows(heads: int, kv_heads: int, tp: int) -> list[tuple[str, int, int]] | None:
    """(part, head, rank) of every head of the fused matrix for ``tp`` ranks; None when the heads cannot be shared.

    With fewer KV heads than ranks several ranks hold the same head; the first of them is given.
    """
    if heads % tp or (kv_heads % tp and tp % kv_heads):
        return None
    found = [("Q", head, head * tp // heads) for head in range(heads)]
    return found + [(part, head, head * tp // kv_heads) for part in "KV" for head in range(kv_heads)]


def tp_split(heads: int, kv_heads: int, tp: int) -> Any:
    """The heads of the fused matrix, coloured and numbered by the rank that gets them."""
    owners = rank_rows(heads, kv_heads, tp)
    with s.canvas(11, 3.4) as (figure, axes):
        s.plain(axes)
        total = heads + 2 * kv_heads
        axes.set_xlim(-0.5, total + 1.5)
        doubled = bool(owners) and kv_heads < tp
        axes.set_ylim(-0.8 if doubled else -0.4, 1.9)
        verdict = "" if owners else ": not possible"
        axes.set_title(f"{heads} query heads and {kv_heads} key/value heads on {tp} rank{'s' * (tp > 1)}{verdict}")
        starts = {"Q": 0.0, "K": heads + 0.75, "V": heads + kv_heads + 1.5}
        parts = (("Q", heads), ("K", kv_heads), ("V", kv_heads))
        for part, head, rank in owners or [(part, head, -1) for part, count in parts for head in range(count)]:
            colour = s.PALE if rank < 0 else s.CYCLE[rank % len(s.CYCLE)]
            label = "?" if rank < 0 else f"{rank}" if total <= 60 else ""
            s.box(axes, starts[part] + head - 0.45, 0.3, 0.9, 1, label, colour, size=s.SMALL)
        for part, count in parts:
            axes.text(starts[part] + (count - 1) / 2, -0.05, part, ha="center", va="top", fontsize=s.LARGE)
        axes.text(-0.45, 1.5, "number in a box: the rank that gets the head", fontsize=s.NORMAL)
        if doubled:
            axes.text(-0.45, -0.7, f"each key/value head lies on {tp // kv_heads} ranks", fontsize=s.NORMAL)
    return figure
