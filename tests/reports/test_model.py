from __future__ import annotations

import shutil
from pathlib import Path

from samestate.checks.base import Verdict
from samestate.evidence.archive import Archive
from samestate.reports.model import RECORD_CHARACTERS, UNNAMED, cite

from . import made


def test_required_checks_come_first_and_one_without_a_result_is_unknown(clean: Archive) -> None:
    report = made.report_of(clean, made.faulty())
    assert [result.check for result in report.checks] == ["boundary", "transfers"]
    absent = report.checks[1]
    assert (absent.verdict, absent.examined) == (Verdict.UNKNOWN, 0)
    assert report.why == "boundary (fail), transfers (unknown)"


def test_it_says_what_the_verdict_holds_for(clean: Archive) -> None:
    report = made.report_of(clean)
    facts = dict(report.facts)
    assert report.plan == "boundary"
    assert facts["C"] == "16 tokens"
    assert facts["arm control"] == "sim 1, no connector"
    assert facts["arm candidate"].endswith("audited at metadata, 1 rank(s)")
    assert report.judgement.seal_sha256 is not None and facts["seal"] == report.judgement.seal_sha256[:12]


def test_an_archive_without_a_plan_still_has_a_report(clean: Archive, tmp_path: Path) -> None:
    root = Path(shutil.copytree(clean.root, tmp_path / "lost"))
    (root / "plan.json").unlink()
    report = made.report_of(Archive.open(root))
    assert (report.plan, report.judgement.verdict) == (UNNAMED, Verdict.UNKNOWN)


def test_nothing_that_a_terminal_or_browser_obeys_is_left(clean: Archive) -> None:
    assert not {"\x1b", "\u202e", "\x00"} & set(repr(made.report_of(clean, made.evil()).judgement).replace("\\x", ""))


# --- cited records ------------------------------------------------------------------------------


def test_a_cited_record_is_its_line(clean: Archive) -> None:
    where = "arms/candidate/client.jsonl:3"
    cited = cite(made.report_of(clean), clean.root, [where]).cited[where]
    line = (clean.root / "arms/candidate/client.jsonl").read_text().splitlines()[2]
    assert cited.file == "arms/candidate/client.jsonl"
    assert line.startswith(cited.text.removesuffix("…"))
    assert 0 < len(cited.text) <= RECORD_CHARACTERS + 1


def test_a_place_that_is_not_there_is_no_link(clean: Archive) -> None:
    (clean.root.parent / "secret.txt").write_text("secret\n")
    outside = ["../secret.txt:1", str(clean.root.parent / "secret.txt:1"), "nosuch.jsonl:1", "arms", ""]
    cited = cite(made.report_of(clean), clean.root, outside).cited
    assert {where: (one.file, one.text) for where, one in cited.items()} == dict.fromkeys(outside, (None, ""))


def test_a_file_without_a_line_is_a_link_alone(clean: Archive) -> None:
    beyond = ["arms/candidate/client.jsonl:99999", f"seal.json:{'9' * 5000}"]
    cited = cite(made.report_of(clean), clean.root, ["seal.json", *beyond]).cited
    assert cited[beyond[1]].file is None
    assert (cited["seal.json"].file, cited["seal.json"].text) == ("seal.json", "")
    assert cited["arms/candidate/client.jsonl:99999"].text == ""
