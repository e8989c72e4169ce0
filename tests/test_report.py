"""The report page: complete, self-contained, honest about what did not run, and readable without colour."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import nbformat
import pytest
from trtllm_workshop import course, report
from trtllm_workshop.course import Entry, write_state
from trtllm_workshop.record import now
from trtllm_workshop.workspace import Workspace

ALT = 'One curve that rises & then stays "flat" < 4.'


class Page(HTMLParser):
    """Collects what the tests ask about; fails on tags that do not nest."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.images: list[dict[str, str]] = []
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.text = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = {key: value or "" for key, value in attributes}
        self.ids.add(values.get("id", ""))
        if tag == "img":
            self.images.append(values)
        if tag == "a":
            self.links.append(values["href"])
        if tag not in ("meta", "link", "img", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text += data


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    """Lesson 00 passed, 01 failed after an earlier success, 02 was not run."""
    workspace = Workspace(tmp_path / "work")
    titles = {"00": "What can this machine do?", "01": "Download <a> model", "02": "Convert"}
    entries = []
    for number, title in titles.items():
        path = tmp_path / "notebooks" / f"{number}_x.ipynb"
        path.parent.mkdir(exist_ok=True)
        nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(f"# {title}")]), path)
        entries.append(Entry(number, f"{number}_x", str(path), cells=4))
    for entry in entries[:2]:
        lesson = course.begin(entry.number, toolchain="reference", work_dir=str(workspace.root), profile="smoke")
        lesson.model_source("packaged copy, dequantized from 4 bits")
        lesson.predict("size", 200, "MB")
        lesson.measure("size", 250, "MB")
        lesson.predict("seconds", 1, "s")
        lesson.measure("seconds", unit="s", samples=[90, 100, 110])
        lesson.predict("FP8 speed", 5, "tokens/s")
        lesson.measure("tensors", 272, "")
        lesson.show("<svg xmlns='http://www.w3.org/2000/svg' width='4' height='4'/>", "curve", ALT)
        lesson.exercise("1", None, 3, minutes=2)
        lesson.exercise("1", 3, 3, minutes=2, solution=True)
        lesson.check("every shard is complete", True, "download again")
        lesson.skip("FP8", "no GPU")
        lesson.checkpoint()
    executed = workspace.executed / "00_x.ipynb"
    executed.parent.mkdir(parents=True)
    executed.write_text("{}")
    entries[0].status, entries[0].cells_run, entries[0].seconds, entries[0].peak_memory_mb = "passed", 4, 65, 1234
    entries[0].executed = str(executed)
    entries[1].status, entries[1].started, entries[1].cells_run = "failed", now(), 2
    entries[1].error = {
        "index": 5,
        "cell": 3,
        "name": "ValueError",
        "message": "a < b",
        "advice": "Mend it.",
        "source": "x",
    }
    write_state(workspace, entries, now())
    return workspace


@pytest.fixture
def page(workspace: Workspace) -> Page:
    return Page(report.write(workspace).read_text(encoding="utf-8"))


def test_the_page_asks_for_nothing_from_outside(page: Page, workspace: Workspace) -> None:
    text = workspace.report.read_text(encoding="utf-8")
    assert not re.search(r"(src|href)=\"(?!data:|#|executed/)", text)
    assert "url(" not in text and "@import" not in text and "<script" not in text
    assert all(image["src"].startswith("data:image/svg+xml;base64,") for image in page.images)
    for link in page.links:
        assert link[1:] in page.ids if link.startswith("#") else (workspace.root / link).is_file()


def test_a_lesson_has_its_number_once(workspace: Workspace, tmp_path: Path) -> None:
    path = tmp_path / "notebooks" / "00_x.ipynb"
    nbformat.write(
        nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("# 00 What can it do in 24 h?")]), path
    )
    page = Page(report.write(workspace).read_text(encoding="utf-8"))
    assert "00 · What can it do in 24 h?" in page.text and "00 What can" in page.text and "00 00" not in page.text


def test_recorded_figures_say_so_and_the_footer_does_not_deny_it(workspace: Workspace) -> None:
    page = Page(report.write(workspace).read_text(encoding="utf-8"))
    assert "Recorded earlier" not in page.text and "except where one says" in page.text
    path = workspace.results / "00.json"
    record = json.loads(path.read_text(encoding="utf-8"))
    record["figures"][0]["recorded"] = "one H200, 3 December 2026"
    path.write_text(json.dumps(record), encoding="utf-8")
    page = Page(report.write(workspace).read_text(encoding="utf-8"))
    assert "Recorded earlier, not in this run: one H200, 3 December 2026." in page.text


def test_conditions_that_differ_name_their_lessons() -> None:
    def record(lesson: str, profile: str, source: str) -> dict:
        return {"lesson": lesson, "profile": profile, "model": {"name": "a/b", "source": source}, "python": "3.11"}

    records = [record("00", "smoke", ""), record("01", "full", "the Hub"), record("02", "smoke", "the Hub")]
    facts = dict(report._facts(records))
    assert facts["Profile"] == ["smoke (lessons 00, 02)", "full (lesson 01)"]
    assert facts["Model"] == ["a/b: the Hub"] and facts["Python"] == ["3.11"]


def test_what_was_not_predicted_comes_last(page: Page, workspace: Workspace) -> None:
    (lesson, *_) = report.content(workspace)["lessons"]
    assert [item["name"] for item in lesson["quantities"]] == ["size", "seconds", "FP8 speed", "tensors"]
    record = json.loads((workspace.results / "00.json").read_text(encoding="utf-8"))
    record["quantities"].reverse()
    (workspace.results / "00.json").write_text(json.dumps(record), encoding="utf-8")
    (lesson, *_) = report.content(workspace)["lessons"]
    assert [item["name"] for item in lesson["quantities"]] == ["FP8 speed", "seconds", "size", "tensors"]


def test_status_and_error_come_in_words(page: Page) -> None:
    assert "✗ 1 of 3 notebooks ran to their last cell and held their checkpoint." in page.text
    for part in ("✓ passed", "✗ failed", "· not run", "1:05 min", "1,234 MB", "4 of 4", "2 of 4"):
        assert part in page.text
    assert "code cell 3 of 4 (cell 5 of the file)" in page.text and "ValueError: a < b" in page.text
    assert "What to do: Mend it." in page.text
    assert "Download <a> model" in page.text  # text from a notebook is not markup


def test_predictions_stand_beside_measurements(page: Page, workspace: Workspace) -> None:
    for part in ("200 MB", "250 MB", "1.25", "median of 3, from 90 to 110 s", "not measured", "not predicted", "272"):
        assert part in page.text
    text = workspace.report.read_text(encoding="utf-8")
    assert 'aria-label="1.25 times the prediction"' in text and 'aria-label="100 times the prediction"' in text
    assert text.count("<circle") == 1 and text.count("<path") == 1  # one on the scale, one beyond its end


def test_figures_keep_their_alternative_text_and_the_model_its_source(page: Page) -> None:
    assert [image["alt"] for image in page.images] == [ALT]
    assert "SmolLM2-135M-Instruct: packaged copy, dequantized from 4 bits" in page.text
    assert "1: not answered yet; the course's own solution passes its check" in page.text
    assert "Skipped on this machine: FP8. Reason: no GPU" in page.text


def test_an_earlier_result_does_not_stand_under_a_notebook_that_failed_now(workspace: Workspace) -> None:
    lessons = report.content(workspace)["lessons"]
    assert [bool(lesson["record"]) for lesson in lessons] == [True, False, False]


def test_a_mark_lies_where_its_ratio_is() -> None:
    def mark(ratio: float) -> dict:
        return report._quantity({"unit": "", "ratio": ratio, "samples": {}})["mark"]

    assert [mark(ratio)["x"] for ratio in (0.25, 0.5, 1, 2, 4)] == [0, 0.25, 0.5, 0.75, 1]
    assert not mark(4)["beyond"] and mark(4.1) == {"x": 1, "beyond": True, "text": "4.1 times the prediction"}
    assert mark(-1) is None and mark(0) is None


def test_an_empty_work_folder_gives_a_page_too(tmp_path: Path) -> None:
    page = Page(report.write(Workspace(tmp_path / "work")).read_text(encoding="utf-8"))
    assert "No notebook has been run headlessly yet." in page.text


def test_lessons_run_by_hand_and_damaged_files_do_not_break_it(workspace: Workspace) -> None:
    (workspace.results / "run.json").write_text("{")
    (workspace.results / "01.json").write_text('{"half": ')
    page = Page(report.write(workspace).read_text(encoding="utf-8"))
    assert "by hand" in page.text and "250 MB" in page.text and "There is no result of this run." in page.text
