"""docs/archive-format.md names every record kind, with exactly its fields, and every value a field may take."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from samestate.evidence import (
    custody_records,
    ground_records,
    latency_records,
    marker_records,
    probe_records,
    record_base,
    records,
)
from samestate.evidence.archive import ArchiveWriter
from samestate.evidence.latency_records import StreamEvent
from samestate.evidence.marker_records import LogitsRow
from samestate.evidence.records import COUNTERS, FORMAT, AnyRecord, BatchRow, Line, PageRow, Record, StorageRow
from samestate.evidence.seal import OUTSIDE, Seal

from .conftest import write_archive

DOCUMENT = (Path(__file__).parents[2] / "docs" / "archive-format.md").read_text(encoding="utf-8")
KINDS: dict[str, type[Record]] = {str(record.__struct_config__.tag): record for record in get_args(AnyRecord)}
SECTIONS = dict(re.findall(r"^#### (\w+)\n(.*?)(?=^#{2,4} |\Z)", DOCUMENT, re.MULTILINE | re.DOTALL))
NESTED = {
    "engine group": records.EngineGroup,
    "transfer group": records.TransferGroup,
    "entry": records.Entry,
    "part": records.TransferPart,
    "patched function": records.PatchedFunction,
    "control": records.Control,
    "argument": records.Argument,
    "patched file": records.PatchedFile,
    "kernel selection": records.KernelSelection,
    "usage": probe_records.ProbeUsage,
}
MODULES = (record_base, records, ground_records, latency_records, marker_records, probe_records)


def fields(table: str) -> list[str]:
    """Names in the first column of a table's first run of rows."""
    rows = re.search(r"\| field \|.*\n\|---.*\n((?:\|.*\n)+)", table)
    return [name for row in rows[1].splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1])] if rows else []


def test_every_kind_has_its_section() -> None:
    assert SECTIONS.keys() == KINDS.keys()


def test_any_record_is_every_record() -> None:
    """Of archives. A swap's journal is none: its records are a union of their own (`custody_journal`)."""
    known = {one for one in Record.__subclasses__() if one.__module__ != custody_records.__name__}
    assert set(KINDS.values()) == known


@pytest.mark.parametrize("kind", KINDS)
def test_a_section_names_exactly_the_fields(kind: str) -> None:
    assert fields(SECTIONS[kind]) == list(KINDS[kind].__struct_fields__)


@pytest.mark.parametrize("name", NESTED)
def test_nested_tables(name: str) -> None:
    [table] = re.findall(rf"^An? {name}\b.*?:\n(\n.*?)(?=\n\n\S|\Z)", DOCUMENT, re.MULTILINE | re.DOTALL)
    assert fields(table + "\n") == list(NESTED[name].__struct_fields__)


def test_line_row_and_seal() -> None:
    def section(title: str) -> list[str]:
        return fields(DOCUMENT.split(f"\n## {title}\n")[1].split("\n## ")[0])

    assert section("Streams") == list(Line.__struct_fields__)
    assert section("The seal") == list(Seal.__struct_fields__)
    assert f"`[{', '.join(BatchRow.__struct_fields__)}]`" in SECTIONS["batch_scheduled"]
    assert f"`[{', '.join(PageRow.__struct_fields__)}]`" in SECTIONS["pages_digested"]
    assert f"`[{', '.join(StorageRow.__struct_fields__)}]`" in SECTIONS["storages_digested"]
    assert f"`[{', '.join(LogitsRow.__struct_fields__)}]`" in SECTIONS["logits_rows"]
    assert f"`[{', '.join(StreamEvent.__struct_fields__)}]`" in SECTIONS["request_timed"]


def test_every_struct_is_in_the_document() -> None:
    structs = {
        kind
        for module in MODULES
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind.__module__ == module.__name__
    }
    assert structs == {
        Record,
        Line,
        BatchRow,
        PageRow,
        StorageRow,
        LogitsRow,
        StreamEvent,
        *KINDS.values(),
        *NESTED.values(),
    }


def test_every_value_of_every_word() -> None:
    words = [member.value for kind in vars(records).values() if isinstance(kind, type) and issubclass(kind, StrEnum)
             for member in kind]  # fmt: skip
    for word in [*words, *COUNTERS, *(f"{folder}/" for folder in OUTSIDE)]:
        assert f"`{word}`" in DOCUMENT
    assert DOCUMENT.startswith(f"# The archive format, version {FORMAT}\n")


def test_every_file_is_in_the_document(tmp_path: Path) -> None:
    writer: ArchiveWriter = write_archive(tmp_path / "a")
    writer.seal()
    for path in writer.root.rglob("*"):
        name = (
            path.relative_to(writer.root).as_posix().replace("arms/control", "arms/ARM").replace("worker-0", "worker-N")
        )
        assert path.is_dir() or f"`{name}`" in DOCUMENT
