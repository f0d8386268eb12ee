from __future__ import annotations

from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from samestate.checks.analyzers import Judgement
from samestate.checks.base import CheckResult, Finding, Verdict
from samestate.checks.each import RepetitionVerdict
from samestate.checks.table import CaseRow
from samestate.reports.terminal import WIDTH, print_judgement

from .made import faulty, judgement, row


def rendered(shown: Judgement) -> str:
    file = StringIO()
    print_judgement(shown, Console(file=file, width=WIDTH, highlight=False))
    lines = [line.rstrip() for line in file.getvalue().splitlines()]
    assert max(map(len, lines)) <= WIDTH
    return "\n".join(lines)


PASSING = """\
    N   first difference       B       p   scheduled   suffix   bytes per rank   verdict
────────────────────────────────────────────────────────────────────────────────────────
3,583                  –   1,792   1,792       1,791    1,791    54,809,600 ×4   pass
3,584                  –   1,792   1,792       1,792    1,792    54,809,600 ×4   pass
  N prompt tokens · B restored prefix · p tokens credited · scheduled in the first batch after the
  reload · suffix N-B · first difference: index of the token, – when all are equal

check      verdict         summary            unit
────────────────────────────────────────────────────────
coverage   pass            90/90 operations   operations
(extra)    not exercised   no salt            records
  (in parentheses: not required)

verdict pass: all required checks pass
  Holds for this plan. (plan efefefefefef)
  compared: control and candidate, both live
  seal cdcdcdcdcdcd · analyzer boundary-v1 abababababab

not shown
  - No performance was measured.
"""

FAILING = """\
fault injected: full-lookup. Not a normal run.

    N   first difference       B       p   scheduled   suffix   bytes per rank   verdict
────────────────────────────────────────────────────────────────────────────────────────────
3,583                  –   1,792   1,792       1,791    1,791    54,809,600 ×4   pass
3,584                  0   3,584   3,583           1        0    69,625,856 ×4   fail
                                                                                 boundary +1
  N prompt tokens · B restored prefix · p tokens credited · scheduled in the first batch after the
  reload · suffix N-B · first difference: index of the token, – when all are equal

check      verdict   summary       unit
──────────────────────────────────────────
boundary   fail      8/9 reloads   reloads

  boundary: fail
    - N3584.reload: rank 0 restored [0, 3584), p=3583; expected B=p=1792
      [retained_lookup_boundary at arms/candidate/worker-0.jsonl:17]
    - N3584.reload: rank 1 restored [0, 3584), p=3583; expected B=p=1792
      [retained_lookup_boundary at arms/candidate/worker-0.jsonl:17]
    - N3584.reload: rank 2 restored [0, 3584), p=3583; expected B=p=1792
      [retained_lookup_boundary at arms/candidate/worker-0.jsonl:17]
    - 1 more; --json lists them all

verdict fail: boundary (fail), transfers (unknown)
  Holds for this plan. (plan efefefefefef)
  compared: a live candidate against an archived control
  not eligible for performance: no time of this run is a measurement
  seal cdcdcdcdcdcd · analyzer boundary-v1 abababababab

not shown
  - No performance was measured.
"""


def test_a_pass() -> None:
    assert rendered(judgement()) == PASSING.rstrip("\n")


def test_a_faulty_run() -> None:
    assert rendered(faulty()) == FAILING.rstrip("\n")


@pytest.mark.parametrize(
    ("changes", "seen"),
    [
        ({"equal": None}, "3,584  ?"),
        ({"first_difference": 12, "equal": False}, "3,584  12"),
        ({"boundary": None, "boundary_reported": False}, "3,584  –  not reported"),
        ({"boundary": None, "boundary_reported": False, "rank_bytes": []}, "3,584  –  no load"),
        ({"boundary": None}, "3,584  –  ranks differ"),
        ({"credited": None, "scheduled": None, "suffix": None}, "3,584  –  1,792  ?  ?  ?"),
        ({"rank_bytes": [5]}, "1,792  5  pass"),
        ({"rank_bytes": [5, 6]}, "1,792  5 / 6  pass"),
        ({"rank_bytes": []}, "1,792  ?  pass"),
        ({"verdict": Verdict.NOT_EXERCISED}, "54,809,600 ×4  not exercised"),
    ],
)
def test_a_cell_says_what_is_known(changes: dict[str, Any], seen: str) -> None:
    line = next(line for line in rendered(judgement(table=[row(3584, **changes)])).splitlines() if "3,584" in line)
    assert seen in "  ".join(cell.strip() for cell in line.split("  ") if cell.strip())


def instrumented() -> Judgement:
    rows = [row(3583, content_boundary=1792), row(3584, content_boundary=None)]
    result = CheckResult(
        check="page-bytes",
        verdict=Verdict.PASS,
        summary="20928/20928 page rows equal along their path; stored copies read",
        unit="page rows (internal checks)",
        examined=20928,
    )
    return judgement(table=rows, results=[result], required=["page-bytes"], performance_eligible=False)


def test_b_by_content_has_a_column_when_bytes_were_read() -> None:
    lines = rendered(instrumented()).splitlines()
    cells = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines]
    assert ["3,583", "–", "1,792", "1,792", "1,792", "1,791", "1,791", "54,809,600 ×4", "pass"] in cells
    assert ["3,584", "–", "1,792", "?", "1,792", "1,792", "1,792", "54,809,600 ×4", "pass"] in cells
    assert any("B by content: the prefix whose state" in line for line in lines)
    assert "B by content" not in rendered(judgement())


def test_page_rows_are_internal_checks_and_the_run_no_measurement() -> None:
    text = " ".join(rendered(instrumented()).split())
    assert "page rows (internal checks)" in text
    assert "not eligible for performance" in text
    assert "not eligible for performance" not in rendered(judgement())


def test_without_cases_there_is_no_table_of_them() -> None:
    assert "first difference" not in rendered(judgement(table=[]))


def test_without_a_seal_it_says_so() -> None:
    assert "seal none · analyzer boundary-v1 abababababab" in rendered(judgement(seal_sha256=None))


def test_markup_in_messages_is_text() -> None:
    result = CheckResult(check="[red]", verdict=Verdict.PASS, summary="[0, 1792) [bold]", unit="[x]", examined=1)
    text = rendered(judgement(results=[result]))
    assert "[red]" in text
    assert "[0, 1792) [bold]" in text


REPEATED = """\
    N   repeat   first difference       p   scheduled   suffix   verdict
────────────────────────────────────────────────────────────────────────
1,250        1                  0   1,024         128      226   fail
1,250        2                  –   1,024         226      226   pass
  N prompt tokens · p tokens hit in the local cache · scheduled in the first batch after the hit ·
  suffix N-p · first difference from cold: index of the token, – when all are equal
"""


def test_repeats_have_a_table_of_their_own() -> None:
    hit = {"boundary": None, "boundary_reported": False, "credited": 1024, "suffix": 226, "rank_bytes": []}
    wrong = row(1250, **hit, repeat=1, first_difference=0, equal=False, scheduled=128, verdict=Verdict.FAIL)
    shown = rendered(
        judgement(comparison_kind="within_one_arm", table=[wrong, row(1250, **hit, repeat=2, scheduled=226)])
    )
    assert shown.startswith(REPEATED)
    assert "compared: repeats against cold, in one live engine" in shown


def test_a_terminal_obeys_nothing_that_an_archive_says() -> None:
    evil = "\x1b[2J\u202e\r[bold]x[/]"
    finding = Finding(code="x", verdict=Verdict.FAIL, message=evil, evidence=[evil])
    result = CheckResult(
        check="coverage", verdict=Verdict.FAIL, summary=evil, unit=evil, examined=1, findings=[finding]
    )
    text = rendered(judgement(fault=evil, results=[result], scope=evil, not_shown=[evil], limitations=[evil]))
    assert not {"\x1b", "\u202e", "\r"} & set(text)
    assert text.count(r"\x1b[2J\u202e\r[bold]x[/]") >= 4


def generation(op: str, **changes: Any) -> CaseRow:
    """A generation of a scenario."""
    fields = {"case": op.partition(".")[0], "arm": "candidate", "op": op, "path": "external", "planned_path": "any"}
    return row(3593, **(fields | {"local": 0, "external": 3584} | changes))


def test_generations_of_a_scenario_say_which_path_they_took() -> None:
    rows = [
        generation("two.1"),
        generation("two.2", path="local", local=3584, boundary=None, boundary_reported=False, rank_bytes=[]),
        generation("two.3", path="cold", planned_path="external", together="a", salted=True, verdict=Verdict.FAIL),
    ]
    lines = [" ".join(line.split()) for line in rendered(judgement(table=rows)).splitlines()]
    assert any(line.startswith("two.1 external 3,593 – 0 3,584 3,584 9 pass") for line in lines)
    assert any(line.startswith("two.2 local 3,593 – 3,584 – 3,584 9 pass") for line in lines)
    text = " ".join(lines)
    assert "(planned" in text and "(batch)" in text and "(salted)" in text
    assert "where reused tokens came from" in text


def test_generations_of_several_arms_say_whose_they_are() -> None:
    rows = [generation("two.1"), generation("two.1", arm="restarted")]
    text = rendered(judgement(table=rows))
    assert "candidate two.1" in text and "restarted two.1" in text


def test_cases_of_series_are_named_and_every_repetition_has_its_own_table() -> None:
    table = [
        row(3583, case=case, repetition=number, verdict=Verdict.FAIL if number == 2 else Verdict.PASS)
        for number in (1, 2)
        for case in ("N3583", "ledger-N3583")
    ]
    told = [
        {"repetition": 1, "order": "forward", "arms": ["control", "candidate"], "verdict": "pass", "against": []},
        {"repetition": 2, "order": "reverse", "arms": ["candidate-2", "control-2"], "verdict": "fail"}
        | {"against": ["boundary"]},
    ]
    lines = rendered(judgement(table=table, repetitions=[RepetitionVerdict(**one) for one in told])).splitlines()
    headings = [at for at, line in enumerate(lines) if line.startswith("repetition ")]
    assert [lines[at] for at in headings] == [
        "repetition 1: pass (forward: control, candidate)",
        "repetition 2: fail by boundary (reverse: candidate-2, control-2)",
    ]
    first, second = lines[headings[0] : headings[1]], lines[headings[1] :]
    for part, verdict in ((first, "pass"), (second, "fail")):
        rows = [line.split() for line in part if "3,583" in line]
        assert [(cells[0], cells[-1]) for cells in rows] == [("N3583", verdict), ("ledger-N3583", verdict)]
    assert sum("N prompt tokens" in line for line in lines) == 1


def test_without_series_no_column_names_the_case() -> None:
    assert "case" not in rendered(judgement(table=[row(3583)])).splitlines()[0]


def test_repetitions_are_told_without_a_table_too() -> None:
    one = RepetitionVerdict(
        repetition=1, order="forward", arms=["control"], verdict=Verdict.UNKNOWN, against=["integrity"]
    )
    assert "repetition 1: unknown by integrity (forward: control)" in rendered(judgement(table=[], repetitions=[one]))
