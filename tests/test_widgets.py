"""Try-it cells: one plain run without a frontend, sliders with one, and mistakes named at once."""

from __future__ import annotations

from typing import Any

import pytest
from trtllm_workshop import widgets


def double(value: int = 3, times: int = 2) -> str:
    """The product of two numbers, as text."""
    return f"{value * times} is the product"


def test_headless_it_runs_once_with_the_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    widgets.try_it(double, value=[1, 3, 5], times=[2, 4])
    out = capsys.readouterr().out
    assert "double(value=3, times=2)" in out and "6 is the product" in out


def test_a_figure_is_shown_with_the_docstring_as_its_alternative_text(capsys: pytest.CaptureFixture[str]) -> None:
    def bars(height: int = 2) -> Any:
        """Two bars whose height can be chosen with a slider.

        More about it.
        """
        from trtllm_workshop.figures import style

        with style.canvas() as (figure, axes):
            style.bars(axes, ["a", "b"], [height, 1])
        return figure

    widgets.try_it(bars, height=[1, 2])
    out = capsys.readouterr().out
    assert "[Figure: Two bars whose height can be chosen with a slider.]" in out and "More about it" not in out


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"valu": [3]}, "no parameter 'valu'; it has value, times"),
        ({"value": []}, "'value' has no values"),
        ({"value": [1, 2]}, "default 3 of 'value' is not among"),
    ],
)
def test_mistakes_are_named(choices: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        widgets.try_it(double, **choices)


def test_live_means_a_kernel_in_a_known_frontend_and_not_our_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in widgets._FRONTENDS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv(widgets.HEADLESS_VARIABLE, raising=False)
    monkeypatch.setitem(widgets.sys.modules, "ipykernel", object())
    assert not widgets.is_live(), "a kernel alone may belong to any headless runner"
    monkeypatch.setenv("JPY_SESSION_NAME", "notebooks/02.ipynb")
    assert widgets.is_live()
    monkeypatch.setenv(widgets.HEADLESS_VARIABLE, "1")
    assert not widgets.is_live()


def test_live_there_is_a_slider_for_every_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    import IPython.display

    shown: list[Any] = []
    monkeypatch.setattr(widgets, "is_live", lambda: True)
    monkeypatch.setattr(IPython.display, "display", shown.append)
    widgets.try_it(double, value=[1, 3, 5], times=[2, 4])
    sliders = shown[0].children[:-1]
    assert [(slider.description, slider.value) for slider in sliders] == [("value", 3), ("times", 2)]
