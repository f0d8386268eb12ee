from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow")
duckdb = pytest.importorskip("duckdb")

import msgspec
import pyarrow.parquet as pq

from checks import builder as b
from samestate.evidence import columns
from samestate.evidence import records as r
from samestate.evidence.archive import Archive, ArchiveError
from samestate.evidence.columns import ABOUT_NAME, PAGE_ROWS, convert_archive

DOCUMENT = Path(__file__).parents[2] / "docs" / "evidence.md"


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    return b.build(b.instrumented_plan()).write(tmp_path / "a")


def lines(archive: Archive) -> list[tuple[str, str, Any]]:
    """Arm, process and line of every record."""
    found: list[tuple[str, str, Any]] = [("-", "attempts", line) for line in archive.attempts()]
    for arm in archive.arms:
        found += [(arm, name, line) for name in archive.streams(arm) for line in archive.records(arm, name)]
    return found


def table(out: Path, name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(out / f"{name}.parquet").to_pylist()
    return rows


def test_every_record_is_a_row_of_its_kind(archive: Archive, tmp_path: Path) -> None:
    done = convert_archive(archive, tmp_path / "out")
    kinds = Counter(str(type(line.rec).__struct_config__.tag) for _, _, line in lines(archive))
    page_rows = sum(len(line.rec.rows) for _, _, line in lines(archive) if isinstance(line.rec, r.PagesDigested))
    assert done.tables == {**kinds, PAGE_ROWS: page_rows}
    assert {name: len(table(tmp_path / "out", name)) for name in done.tables} == done.tables
    assert done.bytes == sum(path.stat().st_size for path in (tmp_path / "out").iterdir())


def test_fields_keep_their_names_and_values(archive: Archive, tmp_path: Path) -> None:
    convert_archive(archive, tmp_path / "out")
    for kind in (r.Lookup, r.OperationOutput, r.LoadSubmitted, r.OperationStarted, r.StateComputed):
        expected = [
            {"stream_arm": arm, "stream": process, "n": line.n, "t_ns": line.t_ns}
            | {key: value for key, value in msgspec.to_builtins(line.rec).items() if key != "kind"}
            for arm, process, line in lines(archive)
            if type(line.rec) is kind
        ]
        assert table(tmp_path / "out", str(kind.__struct_config__.tag)) == expected


def test_settings_are_json_text_and_rows_of_a_batch_have_names(archive: Archive, tmp_path: Path) -> None:
    convert_archive(archive, tmp_path / "out")
    engine = table(tmp_path / "out", "engine_started")[0]
    assert ("cache_config.block_size", "16") in engine["settings"]
    assert engine["versions"] == [("sim", "1")]
    (first,) = table(tmp_path / "out", "batch_scheduled")[0]["rows"]
    assert first.keys() == {"request", "start", "scheduled", "drafted"}


def test_page_rows_say_where_they_stood_and_what_they_are_of(archive: Archive, tmp_path: Path) -> None:
    convert_archive(archive, tmp_path / "out")
    rows = table(tmp_path / "out", PAGE_ROWS)
    digested = [line for _, _, line in lines(archive) if isinstance(line.rec, r.PagesDigested)]
    flat = [(line, page) for line in digested for page in line.rec.rows]
    assert len(rows) == len(flat)
    for row, (line, page) in zip(rows, flat, strict=True):
        rec = line.rec
        assert {name: row[name] for name in page.__struct_fields__} == msgspec.structs.asdict(page)
        assert (row["n"], row["t_ns"], row["rank"], row["job"]) == (line.n, line.t_ns, rec.rank, rec.job)
        assert (row["request"], row["side"], row["moment"]) == (rec.request, rec.side.value, rec.moment)
        assert row["boundary"] == (page.block_index + 1) * b.C
    of_entry = {(row["entry"], row["group"], row["layer"], row["kind"]) for row in rows}
    assert of_entry == {(0, 0, "a", "attention"), (1, 1, "b", "conv"), (2, 1, "b", "recurrent")}
    counted = table(tmp_path / "out", "pages_digested")
    assert [one["rows"] for one in counted] == [len(line.rec.rows) for line in digested]


def test_the_folder_says_where_it_came_from_and_what_it_is_not(archive: Archive, tmp_path: Path) -> None:
    done = convert_archive(archive, tmp_path / "out")
    about = json.loads((tmp_path / "out" / ABOUT_NAME).read_bytes())
    assert about["archive_seal_sha256"] == archive.seal_sha256 == done.seal_sha256
    assert "No verdict rests on them" in about["note"] and about["tables"] == done.tables
    for path in (tmp_path / "out").glob("*.parquet"):
        metadata = pq.read_schema(path).metadata
        assert metadata[b"samestate.seal_sha256"].decode() == archive.seal_sha256


def test_row_groups_are_bounded(archive: Archive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = convert_archive(archive, tmp_path / "one").tables
    monkeypatch.setattr(columns, "ROW_GROUP", 10)
    monkeypatch.setattr(columns, "RECORD_GROUP", 7)
    assert convert_archive(archive, tmp_path / "many").tables == whole
    for name, most in ((PAGE_ROWS, 10), ("batch_scheduled", 7)):
        assert table(tmp_path / "many", name) == table(tmp_path / "one", name)
        file = pq.ParquetFile(tmp_path / "many" / f"{name}.parquet").metadata
        assert file.num_row_groups > 1
        assert max(file.row_group(at).num_rows for at in range(file.num_row_groups)) <= most


# --- questions, as the document asks them ---------------------------------------------------------


def asked(number: int, out: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    section = DOCUMENT.read_text(encoding="utf-8").partition("## Large archives")[2].partition("\n## ")[0]
    queries = re.findall(r"```sql\n(.*?)```", section, re.DOTALL)
    assert len(queries) == 2
    monkeypatch.chdir(out)
    with duckdb.connect() as connection:
        found: list[tuple[Any, ...]] = connection.sql(queries[number]).fetchall()
    return found


@pytest.mark.parametrize("query", [0, 1])
def test_nothing_is_found_in_a_clean_run(
    archive: Archive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, query: int
) -> None:
    convert_archive(archive, tmp_path / "out")
    assert asked(query, tmp_path / "out", monkeypatch) == []


@pytest.mark.parametrize("query", [0, 1])
def test_a_page_that_arrived_otherwise_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, query: int) -> None:
    run = b.build(b.instrumented_plan())
    request = b.request_id("candidate", "N32.reload")

    def wrong(page: r.PageRow) -> r.PageRow:
        return msgspec.structs.replace(page, digest="f" * 32) if page.entry == b.RECURRENT else page

    b.edit_pages(run, wrong, side=r.PageSide.DESTINATION, request=request)
    convert_archive(run.write(tmp_path / "a"), tmp_path / "out")
    (found,) = asked(query, tmp_path / "out", monkeypatch)
    assert {"candidate", request, "b", "recurrent", b.C} <= set(found)


# --- what is refused ------------------------------------------------------------------------------


def refused(archive: Archive, out: Path, word: str) -> None:
    with pytest.raises(ArchiveError, match=word):
        convert_archive(archive, out)
    assert [path.name for path in out.parent.iterdir() if path.name.startswith(f".{out.name}")] == []


def test_an_empty_folder_is_filled_and_any_other_left_alone(archive: Archive, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    convert_archive(archive, out)
    held = sorted(out.iterdir())
    refused(archive, out, "is not empty")
    assert sorted(out.iterdir()) == held
    refused(archive, archive.root / "out", "lies in the archive")
    (tmp_path / "file").touch()
    refused(archive, tmp_path / "file", "is no folder")


@pytest.mark.tamper
def test_a_damaged_archive_is_not_converted(archive: Archive, tmp_path: Path) -> None:
    worker = archive.root / "arms/candidate/worker-0.jsonl"
    worker.write_bytes(worker.read_bytes().replace(b'"nonzero"', b'"nonzero"', 1)[:-1])
    refused(archive, tmp_path / "out", "is not converted: arms/candidate/worker-0.jsonl")
    assert not (tmp_path / "out").exists()


def test_an_unsealed_archive_is_not_converted(tmp_path: Path) -> None:
    run = b.build()
    run.sealed = False
    refused(run.write(tmp_path / "a"), tmp_path / "out", "the archive is incomplete")


def test_a_number_that_no_column_holds_is_named(tmp_path: Path) -> None:
    run = b.build(b.instrumented_plan())
    b.edit_pages(run, lambda page: msgspec.structs.replace(page, nonzero=2**64), side=r.PageSide.STORED)
    refused(run.write(tmp_path / "a"), tmp_path / "out", "a number does not fit its column")


def test_without_pyarrow_it_says_what_to_install(
    archive: Archive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    refused(archive, tmp_path / "out", r"pip install 'samestate\[columns\]'")
