from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from samestate.checks import completion, page_coverage, pages, poison, prefix_identity
from samestate.checks.base import CheckResult, Verdict
from samestate.checks.history import History
from samestate.checks.layout import RankLayout, rank_layouts
from samestate.checks.page_proof import Proof
from samestate.checks.page_sets import PageSet, PageSets, regular
from samestate.checks.verdicts import run_check
from samestate.evidence.records import PageRow, PageSide

from . import builder as b

CHECKS = {
    pages.CHECK: pages.page_bytes,
    page_coverage.CHECK: page_coverage.page_coverage,
    poison.CHECK: poison.poison,
    completion.CHECK: completion.save_completion,
    prefix_identity.CHECK: prefix_identity.prefix_identity,
}


def row(entry: int, block_index: int = 0, digest: str = "d", block: int = 1) -> PageRow:
    return PageRow(entry=entry, block_index=block_index, block=block, digest=digest, nonzero=1, sentinel=0)


@pytest.fixture
def layout(tmp_path: Path) -> RankLayout:
    """One attention entry, and a convolution and a state of one recurrent group."""
    history = History.read(b.build(b.instrumented_plan()).write(tmp_path / "made"))
    return rank_layouts(history.arm("candidate"))[0]


STATE = [row(b.CONV, digest="c"), row(b.RECURRENT, digest="r")]


def test_a_set_is_one_block_of_a_group_and_whole(layout: RankLayout) -> None:
    sets = PageSets(layout).of([row(b.ATTENTION), *STATE, *(row(one.entry, 1) for one in STATE)])
    assert [(one.group, one.block_index, len(one.rows), one.whole) for one in sets] == [
        (0, 0, 1, True),
        (1, 0, 2, True),
        (1, 1, 2, True),
    ]
    assert regular(sets)


def other(rows: list[PageRow], **change: object) -> list[PageRow]:
    return [rows[0], msgspec.structs.replace(rows[1], **change)]


@pytest.mark.parametrize(
    "rows",
    [STATE[:1], [STATE[0], STATE[0]], other(STATE, block=2), other(STATE, block_index=1), [row(9)], [*STATE, *STATE]],
    ids=["one lacks", "one twice", "two blocks", "two places", "never registered", "a block twice"],
)
def test_what_is_not_so_is_not_regular(layout: RankLayout, rows: list[PageRow]) -> None:
    sets = PageSets(layout).of(rows)
    assert not regular(sets)
    assert [one for of_set in sets for one in of_set.rows] == rows


def test_sets_are_found_in_any_order_of_rows(layout: RankLayout) -> None:
    rows = [row(b.CONV), row(b.CONV, 1), row(b.ATTENTION), row(b.RECURRENT), row(b.RECURRENT, 1)]
    sets = PageSets(layout).of(rows)
    assert regular(sets)
    assert [[rows.index(one) for one in of_set.rows] for of_set in sets] == [[0, 3], [1, 4], [2]]


def test_a_block_beyond_the_pool_is_not_regular(layout: RankLayout) -> None:
    assert not regular(PageSets(layout).of([msgspec.structs.replace(one, block=b.BLOCKS) for one in STATE]))


def test_fingerprints_are_equal_for_equal_digests_alone(layout: RankLayout) -> None:
    def fingerprint(rows: list[PageRow]) -> bytes:
        (one,) = PageSets(layout).of(rows)
        return one.digests

    assert fingerprint(STATE) == fingerprint([msgspec.structs.replace(one, nonzero=5, block=3) for one in STATE])
    assert fingerprint(STATE) != fingerprint(other(STATE, digest="x"))
    assert fingerprint(STATE) != fingerprint(STATE[::-1])
    swapped = [msgspec.structs.replace(one, digest=was.digest) for one, was in zip(STATE, STATE[::-1], strict=True)]
    assert fingerprint(STATE) != fingerprint(swapped)


def test_only_wanted_entries_count(layout: RankLayout) -> None:
    sets = PageSets(layout, lambda entry: entry.engine_group == 1).of([row(b.ATTENTION), *STATE])
    assert [one.rows for one in sets] == [STATE]


# --- the quick look, and what it doubts -----------------------------------------------------------


def damage(**change: object) -> Callable[[PageRow], PageRow]:
    def of(page: PageRow) -> PageRow:
        return msgspec.structs.replace(page, **change) if page.entry == b.RECURRENT else page

    return of


def arrived(run: b.Run) -> None:
    b.edit_pages(
        run, damage(digest="f" * 32), side=PageSide.DESTINATION, request=b.request_id("candidate", "N32.reload")
    )


def overwritten(run: b.Run) -> None:
    b.edit_pages(run, damage(digest="f" * 32), side=PageSide.SOURCE, moment="completed")


def stored_as_another(run: b.Run) -> None:
    digest = b.page_digest(0, b.RECURRENT, next(iter(run.inputs.values()))[: b.C])
    b.edit_pages(run, damage(digest=digest), side=PageSide.STORED)


def zeros(run: b.Run) -> None:
    b.edit_pages(run, damage(nonzero=0), side=PageSide.DESTINATION)


def lacking(run: b.Run) -> None:
    b.edit_pages(run, lambda page: None if page.entry == b.CONV else page, side=PageSide.SOURCE, moment="completed")


def saved_otherwise(run: b.Run) -> None:
    b.edit_pages(run, damage(digest="e" * 32), direction="save", request=b.request_id("candidate", "N32.cold"))


def turned_round(run: b.Run) -> None:
    worker = run.worker()
    for index, record in enumerate(worker):
        if getattr(record, "side", None) is PageSide.DESTINATION:
            worker[index] = msgspec.structs.replace(record, rows=record.rows[::-1])  # type: ignore[attr-defined]


def beyond(run: b.Run) -> None:
    b.edit_pages(run, damage(block=b.BLOCKS), side=PageSide.DESTINATION)


SPOILED = [arrived, overwritten, stored_as_another, zeros, lacking, saved_otherwise, turned_round, beyond]


def results(history: History) -> list[CheckResult]:
    return [run_check(check_id, check, history) for check_id, check in CHECKS.items()]


def test_a_clean_run_leaves_no_doubt(tmp_path: Path) -> None:
    proof = Proof(History.read(b.build(b.instrumented_plan()).write(tmp_path / "a")))
    assert not proof.doubtful and proof.equal > 0


def test_one_wrong_page_puts_its_own_block_in_doubt_and_no_other(tmp_path: Path) -> None:
    run = b.build(b.instrumented_plan())
    arrived(run)
    proof = Proof(History.read(run.write(tmp_path / "a")))
    assert proof.complete
    ((rank, group, _),) = proof.suspects["candidate"]
    assert (rank, group) == (0, 1)


sets_of = PageSets.of


def single(self: PageSets, rows: list[PageRow]) -> list[PageSet]:
    """No set is whole: every row is judged by itself, in every check."""
    groups = {id(row): one.group for one in sets_of(self, rows) for row in one.rows}
    return [
        PageSet(groups[id(row)], row.block_index, row.block, [row], False, b"") for row in rows if id(row) in groups
    ]


@pytest.mark.parametrize("spoil", [lambda run: None, *SPOILED], ids=["nothing", *(one.__name__ for one in SPOILED)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_looking_at_blocks_comes_to_what_looking_at_every_row_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[b.Run], None], ranks: int
) -> None:
    run = b.build(b.instrumented_plan(), ranks=ranks)
    spoil(run)
    archive = run.write(tmp_path / "a")
    quick = results(History.read(archive))
    monkeypatch.setattr(PageSets, "of", single)
    assert results(History.read(archive)) == quick
    assert spoil not in SPOILED[:5] or {one.verdict for one in quick} != {Verdict.PASS}


def test_rows_that_changed_since_they_were_verified_are_refused(tmp_path: Path) -> None:
    archive = b.build(b.instrumented_plan()).write(tmp_path / "a")
    history = History.read(archive)
    worker = archive.root / "arms/candidate/worker-0.jsonl"
    was = worker.read_bytes()
    digest = b.page_digest(0, b.RECURRENT, next(iter(history.inputs.values()))[: b.C]).encode()
    assert digest in was
    worker.write_bytes(was.replace(digest, b"0" * 32))
    changed = run_check(pages.CHECK, pages.page_bytes, history)
    assert (changed.verdict, changed.findings[0].code) == (Verdict.UNKNOWN, "changed_while_judged")
    worker.write_bytes(was)
    assert run_check(pages.CHECK, pages.page_bytes, History.read(archive)).verdict is Verdict.PASS
