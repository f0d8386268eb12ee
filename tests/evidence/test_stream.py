from __future__ import annotations

import json
import os
import re
import resource
import threading
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from samestate.evidence import stream
from samestate.evidence.records import (
    AnyRecord,
    EngineStopped,
    Line,
    OperationOutput,
    RequestFinished,
    StreamClosed,
    StreamOpened,
)
from samestate.evidence.stream import Defect, Passed, StreamWriter, read_lines, read_stream, walk_stream


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "client.jsonl"


def write(path: Path, *records: AnyRecord) -> Path:
    writer = StreamWriter(path, "control", "client")
    for record in records:
        writer.append(record)
    writer.close()
    return path


def five(path: Path) -> Path:
    """stream_opened, three records, stream_closed."""
    return write(path, *(RequestFinished(request=f"r{i}") for i in range(3)))


def defects(path: Path) -> list[Defect]:
    return [item for item in read_stream(path) if isinstance(item, Defect)]


def rechained(lines: list[dict[str, Any]]) -> bytes:
    """Lines, numbered and chained anew: what a forger would write."""
    out, prev = b"", "0" * 64
    for n, line in enumerate(lines):
        raw = json.dumps({**line, "n": n, "prev": prev}, separators=(",", ":")).encode()
        prev, out = sha256(raw).hexdigest(), out + raw + b"\n"
    return out


def parsed(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_round_trip(path: Path) -> None:
    five(path)
    lines = list(read_stream(path))
    assert all(isinstance(line, Line) for line in lines)
    assert lines == list(read_lines(path))
    kinds = [type(line.rec) for line in lines if isinstance(line, Line)]
    assert kinds == [StreamOpened, *[RequestFinished] * 3, StreamClosed]


def test_chain_is_what_the_document_says(path: Path) -> None:
    raw = five(path).read_bytes().splitlines()
    assert path.read_bytes() == rechained(parsed(path))
    assert json.loads(raw[1])["prev"] == sha256(raw[0]).hexdigest()


def test_opened_is_on_disk_at_once(path: Path) -> None:
    StreamWriter(path, "control", "client")
    assert [d.what for d in defects(path)] == ["no stream_closed at the end: its process died, or the file was cut"]


def test_flush_hands_over_and_close_is_idempotent(path: Path) -> None:
    writer = StreamWriter(path, "control", "client")
    writer.append(EngineStopped())
    assert len(path.read_bytes().splitlines()) == 1
    writer.flush()
    assert len(path.read_bytes().splitlines()) == 2
    writer.close()
    writer.close()
    assert not defects(path)
    with pytest.raises(ValueError, match="after the stream was closed"):
        writer.append(EngineStopped())


def test_large_streams_do_not_wait_for_flush(path: Path) -> None:
    writer = StreamWriter(path, "control", "client")
    writer.append(RequestFinished(request="r" * stream.BUFFER_BYTES))
    assert path.stat().st_size > stream.BUFFER_BYTES


def test_threads_share_a_writer(path: Path) -> None:
    writer = StreamWriter(path, "control", "client")

    def work() -> None:
        for _ in range(200):
            writer.append(RequestFinished(request="r"))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.close()
    assert not defects(path)
    assert len(list(read_lines(path))) == 802


@pytest.mark.parametrize("tolerant", [False, True])
def test_a_second_writer_is_refused(path: Path, tolerant: bool) -> None:
    StreamWriter(path, "control", "client").close()
    with pytest.raises(FileExistsError):
        StreamWriter(path, "control", "client", tolerant=tolerant)
    assert not defects(path)


# --- damage -------------------------------------------------------------------------------------


def swap(lines: list[bytes]) -> list[bytes]:
    return [lines[0], lines[2], lines[1], *lines[3:]]


TAMPERED: dict[str, tuple[Callable[[list[bytes]], list[bytes]], str, str]] = {
    "lost": (lambda lines: lines[:2] + lines[3:], r":3", "numbered 3 where 2 was due"),
    "reordered": (swap, r":2", "numbered 2 where 1 was due"),
    "repeated": (lambda lines: [*lines[:2], lines[1], *lines[2:]], r":3", "numbered 1 where 2 was due"),
    "edited": (lambda lines: [lines[0], lines[1].replace(b"r0", b"rX"), *lines[2:]], r":3", "chain is broken"),
    "last line lost": (lambda lines: lines[:-1], "", "no stream_closed"),
    "first line lost": (lambda lines: lines[1:], r":1", "numbered 1 where 0 was due"),
    "cut off": (lambda lines: [*lines[:-1], lines[-1][:-9]], r":5", "cut off"),
    "only the line end lost": (lambda lines: [*lines[:-1], lines[-1][:-1]], r":5", "cut off"),
    "empty": (lambda lines: [], "", "empty"),
    "not JSON": (lambda lines: [lines[0], b"{nonsense}\n", *lines[2:]], r":2", "not a record"),
    "not UTF-8": (lambda lines: [lines[0], lines[1].replace(b"r0", b"\xff0"), *lines[2:]], r":2", "not a record"),
    "an empty line": (lambda lines: [lines[0], b"\n", *lines[1:]], r":2", "not a record"),
    "unknown kind": (
        lambda lines: [lines[0], lines[1].replace(b"request_finished", b"request_vanished"), *lines[2:]],
        r":2",
        "not a record",
    ),
}


@pytest.mark.tamper
@pytest.mark.parametrize("case", TAMPERED)
def test_tampering_is_named(path: Path, case: str) -> None:
    tamper, place, word = TAMPERED[case]
    path.write_bytes(b"".join(tamper(five(path).read_bytes().splitlines(keepends=True))))
    first = defects(path)[0]
    assert first.where == f"client.jsonl{place}"
    assert word in first.what


FORGED: dict[str, tuple[Callable[[list[dict[str, Any]]], object], str, str]] = {
    "clock goes back": (lambda lines: lines[2].update(t_ns=1), ":3", "monotonic clock went back"),
    "opened late": (lambda lines: lines.insert(0, lines.pop(1)), ":1", "must be the first"),
    "opened twice": (lambda lines: lines.insert(1, lines[0]), ":2", "and only the first"),
    "after closed": (lambda lines: lines.insert(3, lines[-1]), ":5", "after stream_closed"),
    "never closed": (lambda lines: lines.pop(), "", "no stream_closed"),
    "dropped": (lambda lines: lines[-1]["rec"].update(dropped=2), ":5", "2 records could not be written"),
    "newer": (lambda lines: lines[0]["rec"].update(format=2), ":1", "format 2 is newer"),
    "newer, other fields": (lambda lines: lines[0]["rec"].update(format=2, extra=1), ":1", "format 2 is newer"),
    "no such format": (lambda lines: lines[0]["rec"].update(format=0), ":1", "no such format"),
}


@pytest.mark.tamper
@pytest.mark.parametrize("case", FORGED)
def test_a_good_chain_does_not_hide_what_the_records_say(path: Path, case: str) -> None:
    forge, place, word = FORGED[case]
    lines = parsed(five(path))
    now = lines[-1]["t_ns"]
    for line in lines:
        line["t_ns"] = now
    forge(lines)
    path.write_bytes(rechained(lines))
    found = defects(path)
    assert found[0].where == f"client.jsonl{place}"
    assert word in found[0].what
    assert {d.what for d in found} == {found[0].what}


def test_damage_leaves_the_rest_readable(path: Path) -> None:
    lines = five(path).read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], b"?\n", *lines[2:]]))
    assert [item.rec for item in read_stream(path) if isinstance(item, Line)] == [r.rec for r in read_lines(path)]
    assert len(list(read_lines(path))) == 4


def test_a_missing_file_is_a_defect(path: Path) -> None:
    assert defects(path) == [Defect("client.jsonl", "cannot be read: No such file or directory")]
    assert list(read_lines(path)) == []


# --- errors while writing ----------------------------------------------------------------------


def output(**changes: Any) -> OperationOutput:
    fields: dict[str, Any] = dict(
        op="o", request="r", token_ids=[1], logprobs=None, finish_reason=None, cached_tokens=None
    )
    return OperationOutput(**{**fields, **changes})


BAD_RECORDS = [output(logprobs=[float("nan")]), output(token_ids=["x"]), output(op="\ud800"), output(cached_tokens={1})]


@pytest.mark.parametrize("bad", BAD_RECORDS)
def test_a_record_that_no_reader_would_accept_is_refused(path: Path, bad: OperationOutput) -> None:
    writer = StreamWriter(path, "control", "client")
    with pytest.raises(ValueError, match="OperationOutput refused"):
        writer.append(bad)
    assert writer.dropped == 1
    writer.close()
    assert [d.what for d in defects(path)] == ["incomplete: 1 records could not be written"]


@pytest.mark.parametrize("bad", BAD_RECORDS)
def test_a_tolerant_writer_counts_refused_records(path: Path, bad: OperationOutput) -> None:
    writer = StreamWriter(path, "control", "client", tolerant=True)
    writer.append(bad)
    writer.append(EngineStopped())
    writer.close()
    writer.append(EngineStopped())
    assert writer.dropped == 2
    assert writer.failure is not None and "refused" in writer.failure and "\n" not in writer.failure
    assert [d.what for d in defects(path)] == ["incomplete: 1 records could not be written"]


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every stream opened from now on writes to /dev/full."""
    real = os.open
    monkeypatch.setattr(os, "open", lambda path, *rest: real("/dev/full", os.O_WRONLY))


def test_full_disk_is_an_error_for_a_strict_writer(path: Path, full_disk: None) -> None:
    with pytest.raises(OSError, match="No space left"):
        StreamWriter(path, "control", "client")


def test_full_disk_is_counted_by_a_tolerant_writer(path: Path, full_disk: None) -> None:
    writer = StreamWriter(path, "control", "client", tolerant=True)
    writer.append(EngineStopped())
    writer.flush()
    writer.close()
    assert writer.dropped == 3
    assert writer.failure is not None and re.search("No space left", writer.failure)


def limited(limit: int, work: Callable[[], None]) -> None:
    """Run `work` while no file may grow beyond `limit` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        work()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_fills_half_way_leaves_whole_lines_and_says_what_is_lost(path: Path) -> None:
    writer = StreamWriter(path, "control", "client", tolerant=True)

    def overfill() -> None:
        for _ in range(20):
            writer.append(RequestFinished(request="r" * 100))
        writer.flush()

    limited(1000, overfill)
    assert writer.dropped == 20
    writer.append(EngineStopped())
    writer.close()
    assert [type(line.rec) for line in read_lines(path)] == [StreamOpened, EngineStopped, StreamClosed]
    assert defects(path) == [Defect("client.jsonl:3", "incomplete: 20 records could not be written")]


def test_a_strict_writer_that_cannot_close_says_so_and_lets_go(path: Path) -> None:
    writer = StreamWriter(path, "control", "client")
    writer.append(EngineStopped())

    def close() -> None:
        with pytest.raises(OSError, match="too large"):
            writer.close()

    limited(10, close)
    writer.close()
    assert defects(path)


# --- one reading for all ------------------------------------------------------------------------


def walked(path: Path) -> tuple[list[Passed], str]:
    whole = sha256()
    return [item for item in walk_stream(path, whole=whole) if isinstance(item, Passed)], whole.hexdigest()


@pytest.mark.parametrize("case", [*TAMPERED, "nothing"])
def test_a_walk_passes_every_readable_line_once_and_every_byte(path: Path, case: str) -> None:
    tamper = TAMPERED[case][0] if case in TAMPERED else list
    path.write_bytes(b"".join(tamper(five(path).read_bytes().splitlines(keepends=True))))
    passed, whole = walked(path)
    assert [one.line for one in passed] == list(read_lines(path))
    assert whole == sha256(path.read_bytes()).hexdigest()
    assert [one.line for one in passed if not one.beyond] == [one for one in read_stream(path) if isinstance(one, Line)]


def test_a_line_is_read_again_from_where_it_lies(path: Path) -> None:
    passed, _ = walked(five(path))
    assert [one.stored.read() for one in passed] == [one.line for one in passed]


@pytest.mark.tamper
def test_a_line_that_changed_is_not_read_again(path: Path) -> None:
    passed, _ = walked(five(path))
    path.write_bytes(path.read_bytes().replace(b"r1", b"rX"))
    assert [one.stored.read() is None for one in passed] == [False, False, True, False, False]
    path.unlink()
    assert passed[0].stored.read() is None
