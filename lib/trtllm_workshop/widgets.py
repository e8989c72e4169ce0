"""Cells that invite tweaking: controls where somebody can move them, one plain run where nobody can.

A headless run must not make widgets: their state would be saved in the notebook without the programs behind it.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from trtllm_workshop.lesson import HEADLESS_VARIABLE

# What the programs that show notebooks to people set for their kernels: Jupyter Server 2, VS Code, Colab.
_FRONTENDS = ("JPY_SESSION_NAME", "VSCODE_PID", "VSCODE_CWD", "COLAB_RELEASE_TAG", "COLAB_JUPYTER_IP")


def is_live() -> bool:
    """True when this code runs in a kernel whose output somebody watches in a known frontend with ipywidgets."""
    if os.environ.get(HEADLESS_VARIABLE) or "ipykernel" not in sys.modules:
        return False
    if not any(os.environ.get(name) for name in _FRONTENDS):
        return False
    try:
        import ipywidgets  # noqa: F401
    except ImportError:
        return False
    return True


def defaults(function: Callable[..., Any], choices: dict[str, Sequence[Any]]) -> dict[str, Any]:
    """The start value of every choice: the function's own default, else the first of the values.

    Raises ValueError for a choice without values, for a default that is not among them, and for a name that the function
    does not have.
    """
    known = inspect.signature(function).parameters
    found = {}
    for name, values in choices.items():
        if name not in known:
            raise ValueError(f"{function.__name__}() has no parameter {name!r}; it has {', '.join(known)}")
        if not values:
            raise ValueError(f"the choice {name!r} has no values")
        own = known[name].default
        found[name] = values[0] if own is inspect.Parameter.empty else own
        if found[name] not in values:
            raise ValueError(f"the default {found[name]!r} of {name!r} is not among its values {list(values)!r}")
    return found


def try_it(function: Callable[..., Any], **choices: Sequence[Any]) -> None:
    """Calls ``function(name=value, ...)``, with a slider for every choice in a live notebook, once with defaults elsewhere.

    ``choices`` are sequences of values. The function prints, or returns a matplotlib figure, whose alternative text is
    the first line of the function's docstring.
    """
    start = defaults(function, choices)

    def call(**values: Any) -> None:
        _show(function(**values), (function.__doc__ or "").strip().split("\n")[0])

    if not is_live():
        given = ", ".join(f"{name}={value!r}" for name, value in start.items())
        print(f"{function.__name__}({given})  # without sliders: call it with other values in a cell of your own")
        call(**start)
        return
    import ipywidgets
    from IPython.display import display

    controls = {
        name: ipywidgets.SelectionSlider(
            options=list(values), value=start[name], description=name, style={"description_width": "initial"}
        )
        for name, values in choices.items()
    }
    output = ipywidgets.interactive_output(call, controls)
    display(ipywidgets.VBox([*controls.values(), output]))


def _show(result: Any, alt: str) -> None:
    """Shows a figure inline, anything else by printing it; None shows nothing."""
    if not hasattr(result, "savefig"):
        if result is not None:
            print(result)
        return
    import tempfile
    from pathlib import Path

    from trtllm_workshop.figure_store import store_figure
    from trtllm_workshop.showing import present

    with tempfile.TemporaryDirectory() as folder:  # for looking at only: the report keeps what lesson.show stores
        stored = store_figure(result, Path(folder), "try-it", alt)
    present(stored.html(), f"[Figure: {stored.alt}]")
