from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from urllib.parse import unquote

import pytest

from samestate.checks.base import CheckResult, Finding, Verdict
from samestate.evidence.archive import Archive
from samestate.reports.html import FULL, MAX_BYTES, html, milliseconds

from . import made
from .pages import Reader


def page(archive: Archive, **changes: object) -> str:
    report = made.report_of(archive, made.judgement(**changes) if changes else None)
    return html(report, archive.root, archive.root.parent / "page.html")


def text(reader: Reader) -> str:
    return " ".join(data for _, data in reader.texts)


def test_the_verdict_comes_first_and_every_part_follows(faulted: Archive) -> None:
    reader = Reader(page(faulted))
    assert reader.faults == []
    ids = [attributes["id"] for _, attributes in reader.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    sections = [
        name
        for name in ids
        if name in {"verdict", "cases", "checks", "findings", "requests", "pages", "times", "scope"}
    ]
    assert sections == ["verdict", "cases", "checks", "findings", "requests", "pages", "times", "scope"]
    words = text(reader)
    assert re.search(r"Verdict: .*fail", words)
    assert "Fault injected: full-lookup" in words
    for heading in ("first difference", "scheduled", "suffix", "bytes per rank"):
        assert heading in words
    assert "B belongs at 16" in words and "p 31 ≠ B" in words
    assert "Not shown" in words and "Limitations" in words


def test_links_inside_the_page_lead_somewhere(faulted: Archive) -> None:
    reader = Reader(page(faulted))
    ids = {attributes["id"] for _, attributes in reader.elements if "id" in attributes}
    inside = [link["href"][1:] for link in reader.all("a") if link["href"].startswith("#")]
    assert "request-N32" in inside and "check-boundary" in inside
    assert set(inside) <= ids
    labels = [attributes["aria-labelledby"] for _, attributes in reader.elements if "aria-labelledby" in attributes]
    assert set(labels) <= ids


def test_a_failing_row_names_its_checks_and_leads_to_them(faulted: Archive) -> None:
    row = re.search(r'<tr class="tone-fail">.*?</tr>', page(faulted)[page(faulted).index('class="cases"') :])
    assert row is not None and '<a href="#check-boundary">boundary</a>' in row[0] and "paired-equality" in row[0]
    assert page(faulted).count(">by <a") == 1


def test_evidence_links_lead_to_files_of_the_archive(faulted: Archive, tmp_path: Path) -> None:
    target = tmp_path / "a b" / "page.html"
    target.parent.mkdir()
    reader = Reader(html(made.report_of(faulted), faulted.root, target))
    raw = [link["href"] for link in reader.all("a") if not link["href"].startswith("#")]
    assert raw
    for href in raw:
        assert not re.match(r"[a-z]+:|/", href)
        assert (target.parent / unquote(href)).resolve().is_relative_to(faulted.root.resolve())
        assert (target.parent / unquote(href)).is_file()
    assert re.search(r"arms/candidate/worker-0\.jsonl:\d+", text(reader))


def test_a_cited_record_stands_on_the_page(faulted: Archive) -> None:
    shown = [data for tag, data in Reader(page(faulted)).texts if tag == "pre"]
    assert any('"kind":"load_submitted"' in data and '"boundary":32' in data for data in shown)


def test_without_a_target_there_are_no_links_out(faulted: Archive) -> None:
    reader = Reader(html(made.report_of(faulted), faulted.root, None))
    assert all(link["href"].startswith("#") for link in reader.all("a"))


def test_the_page_asks_for_nothing(instrumented: Archive) -> None:
    reader = Reader(page(instrumented))
    assert reader.all("script") == reader.all("img") == reader.all("iframe") == []
    assert [link["href"] for link in reader.all("link")] == ["data:,"]
    assert not re.search(r"url\(|@import", page(instrumented))
    policy = next(
        meta["content"] for meta in reader.all("meta") if "content" in meta and "default-src" in meta["content"]
    )
    assert policy.startswith("default-src 'none'")


def test_what_an_archive_says_is_shown_and_never_obeyed(clean: Archive) -> None:
    report = made.report_of(clean, made.evil())
    said = html(report, clean.root, clean.root.parent / "page.html")
    reader = Reader(said)
    assert reader.faults == []
    assert reader.all("script") == reader.all("img") == []
    assert "<script>alert(1)</script>" in text(reader)
    assert not {"\x1b", "\u202e", "\x00"} & set(said)
    assert not any(name.startswith("on") for _, attributes in reader.elements for name in attributes)


def test_pages_by_rank_and_group(instrumented: Archive) -> None:
    words = text(Reader(page(instrumented)))
    assert "loaded, equal to what was saved" in words
    assert "block 0 to 1: loaded, equal to what was saved, 1 of 1 entries" in words
    assert "No page was read" not in words


def test_where_no_page_was_read_it_says_so(clean: Archive) -> None:
    assert "No page was read" in text(Reader(page(clean)))


def test_lost_evidence_leaves_gaps_that_say_so(clean: Archive, tmp_path: Path) -> None:
    root = Path(shutil.copytree(clean.root, tmp_path / "lost"))
    for name in ("plan.json", "resolved.json", "seal.json"):
        (root / name).unlink()
    reader = Reader(page(Archive.open(root)))
    assert reader.faults == []
    words = text(reader)
    assert "plan.json is lost" in words and "None can be drawn" in words
    assert re.search(r"Verdict: .*unknown", words)


# --- large archives -----------------------------------------------------------------------------


def big() -> dict[str, object]:
    places = [f"arms/candidate/scheduler.jsonl:{line}" for line in range(1, 9)]
    findings = [Finding(code="c", verdict=Verdict.FAIL, message="m" * 2000, evidence=places) for _ in range(300)]
    results = [
        CheckResult(check=f"check-{i}", verdict=Verdict.FAIL, summary="s", unit="u", examined=1, findings=findings)
        for i in range(40)
    ]
    rows = [made.row(n, verdict=Verdict.FAIL) for n in range(1, 5001)]
    return {"results": results, "table": rows, "verdict": Verdict.FAIL}


def test_a_large_archive_is_shown_in_part_and_the_page_says_what_is_missing(clean: Archive) -> None:
    said = page(clean, **big())
    assert len(said.encode()) < MAX_BYTES
    words = text(Reader(said))
    left = re.search(r"Left out: ([\d,]+) findings, ([\d,]+) rows of the table", words)
    assert left is not None
    findings, rows = (int(number.replace(",", "")) for number in left.groups())
    assert findings >= 40 * (300 - FULL.findings)
    assert 0 < rows < 5000


def test_a_small_archive_is_shown_whole(faulted: Archive) -> None:
    assert "Left out" not in page(faulted)


# --- colours ------------------------------------------------------------------------------------

GROUNDS = ("page", "card", "faint")
ON_EVERY_GROUND = ("ink", "soft", "link")


def colours() -> dict[str, tuple[str, str]]:
    css = (files("samestate.reports") / "templates/report.css").read_text()
    return {name: (a, b) for name, a, b in re.findall(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\);", css)}


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    """As WCAG 2 defines it."""
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def pairs() -> Iterator[tuple[str, str]]:
    yield from ((word, ground) for word in ON_EVERY_GROUND for ground in GROUNDS)
    for tone in ("pass", "fail", "unknown"):
        yield from ((word, f"{tone}-bg") for word in ("ink", "soft", "link", tone))
        yield from ((tone, ground) for ground in ("page", "card"))


@pytest.mark.parametrize(("word", "ground"), list(pairs()))
def test_words_can_be_read_in_light_and_dark(word: str, ground: str) -> None:
    known = colours()
    for scheme in (0, 1):
        assert contrast(known[word][scheme], known[ground][scheme]) >= 4.5


def test_contrast_is_measured() -> None:
    assert contrast("#ffffff", "#000000") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") < 4.5


@pytest.mark.parametrize(("value", "said"), [(0.158, "0.16 ms"), (43.06, "43.1 ms"), (1503.4, "1.50 s")])
def test_times(value: float, said: str) -> None:
    assert milliseconds(value) == said
