"""Readable output: one call shows HTML in a notebook and plain text in a terminal."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any


def present(rich: str, plain: str) -> None:
    """Shows ``rich`` (HTML) with ``plain`` as its text form inside a notebook; prints ``plain`` anywhere else."""
    try:
        from IPython import get_ipython
        from IPython.display import display
    except ImportError:
        print(plain)
        return
    if get_ipython() is None:
        print(plain)
    else:
        display({"text/html": rich, "text/plain": plain}, raw=True)


def number(value: float, unit: str = "") -> str:
    """A number as people read it: whole numbers with separators, others with four significant digits, then the unit."""
    if float(value).is_integer() and abs(value) < 1e15:
        text = f"{int(value):,}"
    elif abs(value) >= 1000:
        text = f"{value:,.0f}"
    else:
        text = f"{value:.4g}"
    return f"{text} {unit}".rstrip()


class Table:
    """Rows under headings: ``str(table)`` is aligned text, ``_repr_html_`` an HTML table, both with the caption."""

    def __init__(
        self, rows: Sequence[Mapping[str, Any] | Sequence[Any]], caption: str = "", header: Sequence[str] = ()
    ):
        """``rows`` are mappings (their keys are the headings) or sequences with ``header`` given."""
        mappings = [row for row in rows if isinstance(row, Mapping)]
        if mappings and len(mappings) != len(rows):
            raise TypeError("the rows of a table must be all mappings or all sequences")
        self.header = [str(name) for name in header] or list(dict.fromkeys(str(key) for row in mappings for key in row))
        self.caption = caption
        values = [
            [row.get(name, "") for name in self.header] if isinstance(row, Mapping) else list(row) for row in rows
        ]
        for row in values:
            if len(row) != len(self.header):
                raise ValueError(f"a row has {len(row)} values but there are {len(self.header)} headings: {row!r}")
        self.numeric = [bool(values) and all(_is_number(row[i]) for row in values) for i in range(len(self.header))]
        self.rows = [[number(cell) if _is_number(cell) else str(cell) for cell in row] for row in values]

    def __str__(self) -> str:
        widths = [max(map(len, column)) for column in zip(self.header, *self.rows, strict=True)]

        def line(cells: list[str]) -> str:
            pairs = zip(cells, widths, self.numeric, strict=True)
            return "  ".join(cell.rjust(width) if right else cell.ljust(width) for cell, width, right in pairs).rstrip()

        body = [line(self.header), "  ".join("-" * width for width in widths), *map(line, self.rows)]
        return "\n".join([self.caption, *body] if self.caption else body)

    def _repr_html_(self) -> str:
        def cell(tag: str, text: str, right: bool) -> str:
            return f'<{tag} style="text-align:{"right" if right else "left"}">{html.escape(text)}</{tag}>'

        def line(tag: str, cells: list[str]) -> str:
            pairs = zip(cells, self.numeric, strict=True)
            return f"<tr>{''.join(cell(tag, text, right) for text, right in pairs)}</tr>"

        caption = f'<caption style="text-align:left">{html.escape(self.caption)}</caption>' if self.caption else ""
        rows = "".join(line("td", row) for row in self.rows)
        return f"<table>{caption}<thead>{line('th', self.header)}</thead><tbody>{rows}</tbody></table>"

    def show(self) -> None:
        """Displays the table once, as HTML or as text."""
        present(self._repr_html_(), str(self))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
