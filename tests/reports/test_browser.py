"""The page, opened in a real browser."""

from __future__ import annotations

from pathlib import Path

import pytest

from samestate.checks.analyzers import judge
from samestate.evidence.archive import Archive
from samestate.reports.html import html

from . import made
from .browser import Page

BACKGROUND = "getComputedStyle(document.body).backgroundColor"


def written(archive: Archive, folder: Path, **changes: object) -> Path:
    file = folder / "page.html"
    report = made.report_of(archive, made.evil() if changes.get("evil") else None)
    file.write_text(html(report, archive.root, file))
    return file


@pytest.fixture
def opened(page: Page, faulted: Archive, tmp_path: Path) -> Page:
    page.show(width=1280)
    page.open(written(faulted, tmp_path))
    return page


def test_everything_is_there_and_nothing_is_asked_for(opened: Page, faulted: Archive, tmp_path: Path) -> None:
    assert "fail" in opened.evaluate("document.querySelector('h1').innerText")
    assert opened.evaluate("document.querySelectorAll('table.cases tbody tr').length") == 3
    assert opened.evaluate("document.querySelectorAll('table.checks tbody tr').length") == len(judge(faulted).results)
    assert opened.evaluate("document.querySelectorAll('section.case').length") == 3
    assert opened.evaluate("document.querySelectorAll('.finding').length") >= 4
    assert opened.evaluate("[...document.querySelectorAll('.case svg')].every(s => s.getBBox)")
    assert opened.evaluate("document.querySelector('#request-N32 .strict').getBoundingClientRect().x") > 0
    assert opened.requests() == [(tmp_path / "page.html").as_uri()]
    assert opened.complaints() == []


def test_a_hostile_archive_gets_no_script_and_no_request(page: Page, clean: Archive, tmp_path: Path) -> None:
    page.open(written(clean, tmp_path, evil=True))
    assert page.evaluate("document.scripts.length + document.images.length") == 0
    assert page.requests() == [(tmp_path / "page.html").as_uri()]
    assert page.complaints() == []


def test_requests_and_complaints_are_noticed(page: Page, tmp_path: Path) -> None:
    file = tmp_path / "bad.html"
    file.write_text("<img src='http://127.0.0.1:9/x'><script>console.error('no'); throw Error('worse')</script>")
    page.open(file)
    assert "http://127.0.0.1:9/x" in page.requests()
    assert any("worse" in complaint for complaint in page.complaints())


def test_light_and_dark_follow_the_reader(opened: Page) -> None:
    light = opened.evaluate(BACKGROUND)
    opened.show(width=1280, dark=True)
    assert opened.evaluate(BACKGROUND) != light


def test_the_switch_works_from_the_keyboard(opened: Page) -> None:
    light = opened.evaluate(BACKGROUND)
    opened.evaluate("document.getElementById('theme-auto').focus()")
    opened.press("ArrowRight")
    opened.press("ArrowRight")
    assert opened.evaluate("document.getElementById('theme-dark').checked")
    assert opened.evaluate(BACKGROUND) != light


def test_the_first_key_leads_to_the_verdict_and_shows_where_it_is(opened: Page) -> None:
    opened.press("Tab")
    assert opened.evaluate("document.activeElement.getAttribute('href')") == "#verdict"
    assert opened.evaluate("document.activeElement.getBoundingClientRect().x") >= 0
    assert opened.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"


@pytest.mark.parametrize("width", [360, 800, 1280])
def test_the_page_is_no_wider_than_its_reader(opened: Page, width: int) -> None:
    opened.show(width=width)
    assert opened.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_folded_parts_are_printed(opened: Page) -> None:
    opened.call("Emulation.setEmulatedMedia", media="print")
    folded = "document.querySelector('details:not([open]) pre, details:not([open]) table')"
    try:
        assert opened.evaluate(f"{folded}.getBoundingClientRect().height") > 0
        assert opened.evaluate("getComputedStyle(document.querySelector('.bar')).display") == "none"
    finally:
        opened.call("Emulation.setEmulatedMedia", media="")
    assert opened.evaluate(f"{folded}.checkVisibility({{contentVisibilityAuto: true}})") is False
