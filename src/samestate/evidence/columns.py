"""An archive's streams as columns: Parquet files for questions over large archives. Never a verdict's basis.

One table for each kind of record, named after it, with the record's fields and ``stream_arm``, ``stream``, ``n`` (line
of the stream, from 0) and ``t_ns`` (monotonic clock, nanoseconds). Page rows, by far the most numerous, have a table of
their own, `PAGE_ROWS`, and ``pages_digested`` then only counts them. docs/evidence.md documents the columns.

Rows are written in row groups of `ROW_GROUP`, from the one reading that verifies the archive, so memory does not grow
with it. What is written gets its name only when the archive was found whole.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import inspect

from samestate import __version__
from samestate.evidence import records as r
from samestate.evidence.archive import ATTEMPTS_NAME, Archive, ArchiveError
from samestate.evidence.canonical import sha256_hex
from samestate.evidence.stream import Passed, utc_now

ROW_GROUP = 1 << 17
"""Page rows of a row group, at most; of other records `RECORD_GROUP`, which are larger."""
RECORD_GROUP = 1 << 14
ABOUT_NAME = "converted.json"
PAGE_ROWS = "page_rows"
NOTE = "Columns for questions. No verdict rests on them: judge the archive with this seal."


class Converted(NamedTuple):
    """What was written."""

    tables: dict[str, int]
    """Rows of each table."""
    bytes: int
    seal_sha256: str


def convert_archive(archive: Archive, out: Path, advance: Callable[[int], None] = lambda size: None) -> Converted:
    """Write the streams of a sealed, undamaged archive as Parquet files into the folder `out`.

    `advance` is told the size of every line read, bytes. ArchiveError for an archive that is unsealed or damaged or
    holds numbers that no column can, where `out` is anything but absent or an empty folder, and without pyarrow.
    Whatever fails, nothing is left at `out`.
    """
    _require_pyarrow()
    _require_room(archive, out)
    draft = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.resolve().parent))
    try:
        tables = _Tables(draft, archive.seal_sha256 or "")
        try:
            defects = archive.verify(lambda name, passed: advance(tables.take(name, passed)))
            counts = tables.close()
        except (OverflowError, ValueError) as error:
            raise ArchiveError(f"{archive.root} is not converted: a number does not fit its column: {error}") from None
        if defects:
            where, what = defects[0]
            raise ArchiveError(f"{archive.root} is not converted: {where}: {what}; convert a sealed, undamaged archive")
        seal = archive.seal_sha256 or ""
        (draft / ABOUT_NAME).write_bytes(_about(archive, seal, counts))
        size = sum(file.stat().st_size for file in draft.iterdir())
        draft.chmod(0o755)
        draft.rename(out)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return Converted(counts, size, seal)


def _require_pyarrow() -> None:
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError:
        raise ArchiveError("Parquet needs another package; pip install 'samestate[columns]'") from None


def _require_room(archive: Archive, out: Path) -> None:
    place = out.resolve()
    if place.is_relative_to(archive.root.resolve()):
        raise ArchiveError(f"{out} lies in the archive, which no file may join; name another folder")
    if out.is_dir():
        if any(out.iterdir()):
            raise ArchiveError(f"{out} is not empty; name a folder that is, or that does not exist yet")
    elif out.exists() or out.is_symlink():
        raise ArchiveError(f"{out} is no folder; name another place")
    elif not place.parent.is_dir():
        raise ArchiveError(f"{out.parent} is no folder; make it, or name another place")


def _about(archive: Archive, seal: str, counts: dict[str, int]) -> bytes:
    import pyarrow

    about = {
        "archive_seal_sha256": seal,
        "plan_sha256": sha256_hex(archive.plan_json or b""),
        "note": NOTE,
        "samestate_version": __version__,
        "pyarrow_version": pyarrow.__version__,
        "wall_time": utc_now(),
        "tables": counts,
    }
    return msgspec.json.format(msgspec.json.encode(about), indent=2) + b"\n"


class _Tables:
    """The tables of a folder, opened as records need them."""

    def __init__(self, folder: Path, seal_sha256: str) -> None:
        self._folder, self._seal = folder, seal_sha256
        self._tables: dict[str, _Table] = {}
        self._layouts: dict[str, _Layout] = {}
        """By stream."""

    def take(self, name: str, passed: Passed) -> int:
        """Add a line of the stream `name`; its size in bytes. Raises OverflowError."""
        line = passed.line
        arm, process = ("-", "attempts") if name == ATTEMPTS_NAME else name.split("/")[1:]
        stem = process.removesuffix(".jsonl")
        kind = type(line.rec).__struct_config__.tag
        at = (arm, stem, line.n, line.t_ns)
        table = self._of(str(kind), lambda: _Columns.of_record(type(line.rec)))
        table.add([*at, *table.columns.values(line.rec)])
        if isinstance(line.rec, r.RankRegistered):
            self._layouts[name] = _Layout(line.rec)
        if isinstance(line.rec, r.PagesDigested):
            rows = self._of(PAGE_ROWS, _Columns.of_page_rows, ROW_GROUP)
            rows.extend(at, line.rec, self._layouts.get(name))
        return len(passed.body)

    def close(self) -> dict[str, int]:
        """Write what waits; the rows of each table."""
        return {name: self._tables[name].close() for name in sorted(self._tables)}

    def _of(self, name: str, columns: Callable[[], _Columns], group: int | None = None) -> _Table:
        if name not in self._tables:
            self._tables[name] = _Table(self._folder / f"{name}.parquet", columns(), group or RECORD_GROUP, self._seal)
        return self._tables[name]


class _Layout:
    """What a rank registered of its entries: whose they are, and how far their pages reach."""

    def __init__(self, registered: r.RankRegistered) -> None:
        tokens = {group.group: group.tokens_per_block for group in registered.engine_groups}
        moved = {group.engine_group: group.group for group in registered.transfer_groups}
        self.of = {
            entry.entry: (moved.get(entry.engine_group), entry.layer, entry.kind.value, tokens.get(entry.engine_group))
            for entry in registered.entries
        }


_NO_ENTRY = (None, None, None, None)


class _Columns:
    """Names and types of a table's columns, and what a record has in its own."""

    def __init__(self, fields: list[tuple[str, Any]], own: list[tuple[str, Callable[[Any], Any]]]) -> None:
        import pyarrow as pa

        at = [("stream_arm", pa.string()), ("stream", pa.string()), ("n", pa.int64()), ("t_ns", pa.int64())]
        self.schema = pa.schema([*at, *fields])
        self._own = own

    @classmethod
    def of_record(cls, kind: type[r.Record]) -> _Columns:
        import pyarrow as pa

        described = inspect.type_info(kind)
        assert isinstance(described, inspect.StructType)
        types = {field.name: field.type for field in described.fields}
        fields = [(name, _arrow(of)) for name, of in types.items()]
        own = [(name, _convert(of)) for name, of in types.items()]
        if kind is r.PagesDigested:
            fields[-1], own[-1] = ("rows", pa.int64()), ("rows", len)
        return cls(fields, own)

    @classmethod
    def of_page_rows(cls) -> _Columns:
        import pyarrow as pa

        text, whole = pa.string(), pa.int64()
        fields = [("rank", whole), ("job", whole), ("request", text), ("direction", text), ("side", text)]
        fields += [("moment", text), ("entry", whole), ("block_index", whole), ("block", whole), ("digest", text)]
        fields += [("nonzero", whole), ("sentinel", whole)]
        fields += [("group", whole), ("layer", text), ("kind", text), ("boundary", whole)]
        return cls(fields, [])

    def values(self, record: r.Record) -> list[Any]:
        """What a record has in the columns after the first four."""
        return [convert(getattr(record, name)) for name, convert in self._own]


class _Table:
    """One Parquet file. Rows wait by column until there are enough for a row group."""

    def __init__(self, path: Path, columns: _Columns, group: int, seal_sha256: str) -> None:
        import pyarrow.parquet as pq

        about = {"samestate.seal_sha256": seal_sha256, "samestate.note": NOTE}
        self.columns = columns
        self._schema = columns.schema.with_metadata(about)
        self._writer = pq.ParquetWriter(path, self._schema, compression="zstd")
        self._waiting: list[list[Any]] = [[] for _ in self._schema]
        self._group, self._rows = group, 0

    def add(self, row: list[Any]) -> None:
        for column, value in zip(self._waiting, row, strict=True):
            column.append(value)
        self._full()

    def extend(self, at: tuple[str, str, int, int], rec: r.PagesDigested, layout: _Layout | None) -> None:
        """Add all page rows of a record."""
        rows = rec.rows
        known = layout.of if layout else {}
        entries = [known.get(row.entry, _NO_ENTRY) for row in rows]
        same = [*at, rec.rank, rec.job, rec.request, rec.direction, rec.side.value, rec.moment]
        columns: list[list[Any]] = [[value] * len(rows) for value in same]
        columns += [
            [row.entry for row in rows],
            [row.block_index for row in rows],
            [row.block for row in rows],
            [row.digest for row in rows],
            [row.nonzero for row in rows],
            [row.sentinel for row in rows],
            [group for group, _, _, _ in entries],
            [layer for _, layer, _, _ in entries],
            [kind for _, _, kind, _ in entries],
            [
                (row.block_index + 1) * tokens if tokens else None
                for row, (_, _, _, tokens) in zip(rows, entries, strict=True)
            ],
        ]
        for waiting, column in zip(self._waiting, columns, strict=True):
            waiting.extend(column)
        self._full()

    def close(self) -> int:
        """Write the rest; how many rows the table has."""
        self._write()
        self._writer.close()
        return self._rows

    def _full(self) -> None:
        if len(self._waiting[0]) >= self._group:
            self._write()

    def _write(self) -> None:
        import pyarrow as pa

        columns = [pa.array(column, field.type) for column, field in zip(self._waiting, self._schema, strict=True)]
        self._rows += len(self._waiting[0])
        self._writer.write_table(pa.table(columns, schema=self._schema), row_group_size=self._group)
        for column in self._waiting:
            column.clear()


def _arrow(kind: inspect.Type) -> Any:
    """The column type for a field's type. A value of several types (settings, options) is JSON text."""
    import pyarrow as pa

    match kind:
        case inspect.UnionType(types=types):
            plain = [one for one in types if not isinstance(one, inspect.NoneType)]
            return _arrow(plain[0]) if len(plain) == 1 else pa.string()
        case inspect.IntType():
            return pa.int64()
        case inspect.FloatType():
            return pa.float64()
        case inspect.BoolType():
            return pa.bool_()
        case inspect.ListType(item_type=item):
            return pa.list_(_arrow(item))
        case inspect.DictType(value_type=value):
            return pa.map_(pa.string(), _arrow(value))
        case inspect.StructType(fields=fields):
            return pa.struct([(field.name, _arrow(field.type)) for field in fields])
        case _:
            return pa.string()


def _convert(kind: inspect.Type) -> Callable[[Any], Any]:
    """What makes of a field's value what pyarrow takes for `_arrow` of its type."""
    match kind:
        case inspect.DictType(value_type=inspect.UnionType()):
            return lambda value: [(key, msgspec.json.encode(one).decode()) for key, one in value.items()]
        case inspect.DictType():
            return lambda value: list(value.items())
        case inspect.IntType() | inspect.StrType() | inspect.BoolType():
            return lambda value: value
        case _:
            return _plain


def _plain(value: Any) -> Any:
    """Structs by field name, also those that JSON writes as lists."""
    if isinstance(value, msgspec.Struct):
        return {name: _plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return value.value if isinstance(value, Enum) else value
