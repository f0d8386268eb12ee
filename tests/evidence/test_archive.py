from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samestate.evidence import archive as archive_module
from samestate.evidence.archive import Archive, ArchiveError, ArchiveWriter, Defect
from samestate.evidence.canonical import canonical_json, token_digest
from samestate.evidence.records import AttemptEnded, AttemptStarted, BatchScheduled
from samestate.evidence.stream import StreamWriter

from .conftest import PLAN, TOKENS, reseal_folder, write_archive

SEALED_FILES = [
    "arms/control/client.jsonl",
    "arms/control/engine.log",
    "arms/control/scheduler.jsonl",
    "arms/control/worker-0.jsonl",
    "attempts.jsonl",
    "inputs.json",
    "plan.json",
    "resolved.json",
    "verify.py",
]


def named(defects: list[Defect]) -> dict[str, str]:
    return {defect.where: defect.what for defect in defects}


# --- undamaged ----------------------------------------------------------------------------------


def test_round_trip(archive: Path) -> None:
    read = Archive.open(archive)
    assert read.defects == [] == read.verify()
    assert read.plan_json == PLAN
    assert read.resolved_json == canonical_json({"checkpoint_interval": 4})
    assert read.inputs == {token_digest(TOKENS): TOKENS}
    assert read.arms == ["control"]
    assert read.streams("control") == ["client", "scheduler", "worker-0"]
    assert read.imported_from("control") is None
    attempts = [line.rec for line in read.attempts()]
    assert isinstance(attempts[1], AttemptStarted)
    assert isinstance(attempts[2], AttemptEnded)
    steps = [line.rec.step for line in read.records("control", "scheduler") if isinstance(line.rec, BatchScheduled)]
    assert steps == [0, 1, 2]
    assert list(read.records("control", "nobody")) == [] == list(read.records("nobody", "client"))


def test_the_sealed_folder_is_what_the_document_says(archive: Path) -> None:
    assert sorted(p.relative_to(archive).as_posix() for p in archive.rglob("*") if p.is_file()) == sorted(
        [*SEALED_FILES, "SHA256SUMS", "seal.json"]
    )
    raw = (archive / "seal.json").read_bytes()
    seal = json.loads(raw)
    assert raw == json.dumps(seal, sort_keys=True, separators=(",", ":")).encode()
    own = seal.pop("self_sha256")
    assert own == hashlib.sha256(json.dumps(seal, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    assert seal["sha256sums_sha256"] == hashlib.sha256((archive / "SHA256SUMS").read_bytes()).hexdigest()
    assert seal["plan_sha256"] == hashlib.sha256(PLAN).hexdigest()
    assert (seal["format"], seal["files"]) == (1, len(SEALED_FILES))
    assert [line[66:] for line in (archive / "SHA256SUMS").read_text().splitlines()] == SEALED_FILES


def test_seal_returns_its_hash(tmp_path: Path) -> None:
    writer = write_archive(tmp_path / "a")
    assert writer.seal() == Archive.open(writer.root).seal_sha256
    assert writer.plan_sha256 == hashlib.sha256(PLAN).hexdigest()
    with pytest.raises(ArchiveError, match="already sealed"):
        writer.seal()
    writer.abandon()
    assert not Archive.open(writer.root).defects


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="needs sha256sum")
def test_sha256sum_accepts_the_list(archive: Path) -> None:
    subprocess.run(["sha256sum", "--strict", "--quiet", "-c", "SHA256SUMS"], cwd=archive, check=True)


def test_folders_outside_the_seal_may_change(archive: Path) -> None:
    for folder in ("verdicts", "amendments", "signatures"):
        (archive / folder).mkdir()
        (archive / folder / "x.json").write_text("{}")
    assert not Archive.open(archive).defects


def test_the_tests_own_sealer_agrees(archive: Path) -> None:
    sums = (archive / "SHA256SUMS").read_bytes()
    reseal_folder(archive)
    assert (archive / "SHA256SUMS").read_bytes() == sums
    assert not Archive.open(archive).defects


# --- writing ------------------------------------------------------------------------------------


def test_two_writers_on_one_folder(tmp_path: Path) -> None:
    ArchiveWriter.create(tmp_path / "a", PLAN)
    with pytest.raises(ArchiveError, match="another writer"):
        ArchiveWriter.create(tmp_path / "a", PLAN)


def test_a_writer_that_loses_the_race_for_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".lock").touch()
    monkeypatch.setattr(os, "scandir", lambda path: iter(()))
    monkeypatch.setattr(Path, "exists", lambda path: False)
    with pytest.raises(ArchiveError, match="another writer"):
        ArchiveWriter.create(tmp_path, PLAN)
    assert os.listdir(tmp_path) == [".lock"]


def test_folders_that_cannot_take_an_archive(archive: Path, tmp_path: Path) -> None:
    with pytest.raises(ArchiveError, match="not empty"):
        ArchiveWriter.create(archive, PLAN)
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ArchiveError, match="not a folder"):
            ArchiveWriter.create(place, PLAN)


def test_an_empty_folder_will_do(tmp_path: Path) -> None:
    write_archive(tmp_path).seal()
    assert not Archive.open(tmp_path).defects


def test_nothing_is_written_twice(tmp_path: Path) -> None:
    writer = write_archive(tmp_path / "a")
    with pytest.raises(ArchiveError, match=r"resolved\.json is there already"):
        writer.write_resolved(b"{}")
    with pytest.raises(ArchiveError, match=r"inputs\.json is there already"):
        writer.write_inputs({})


@pytest.mark.parametrize("arm", ["", "..", "a/b", "A", ".lock"])
def test_arm_names(tmp_path: Path, arm: str) -> None:
    with pytest.raises(ArchiveError, match="cannot name an arm"):
        ArchiveWriter.create(tmp_path / "a", PLAN).arm_dir(arm)


@pytest.mark.parametrize("name", ["verdicts", "a\nb", "arms/control/.hidden", "arms/control/a b"])
def test_names_that_no_list_can_hold_stop_the_seal(tmp_path: Path, name: str) -> None:
    writer = write_archive(tmp_path / "a")
    (writer.root / name).touch()
    with pytest.raises(ArchiveError, match="name that no archive may list"):
        writer.seal()
    assert not (writer.root / "seal.json").exists()


def test_a_symlink_stops_the_seal(tmp_path: Path) -> None:
    writer = write_archive(tmp_path / "a")
    (writer.root / "link").symlink_to("plan.json")
    with pytest.raises(ArchiveError, match="link: is a symlink"):
        writer.seal()


def test_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file opened for writing is /dev/full: nothing half-written stays, and the folder is free again."""
    real = Path.open
    monkeypatch.setattr(Path, "open", lambda path, mode: (path.touch(), real(Path("/dev/full"), "wb"))[1])
    with pytest.raises(OSError, match="No space left"):
        ArchiveWriter.create(tmp_path / "a", PLAN)
    monkeypatch.undo()
    assert os.listdir(tmp_path / "a") == []


def test_full_disk_at_the_seal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = write_archive(tmp_path / "a")

    def refuse(path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(archive_module, "_fsync", refuse)
    with pytest.raises(OSError, match="No space left"):
        writer.seal()
    writer.abandon()
    assert named(Archive.open(writer.root).defects) == {"seal.json": "missing: the archive is incomplete"}


# --- incomplete ---------------------------------------------------------------------------------


def test_abandoned_is_incomplete_and_nothing_else(tmp_path: Path) -> None:
    writer = write_archive(tmp_path / "a")
    writer.abandon()
    writer.abandon()
    read = Archive.open(writer.root)
    assert read.defects == [Defect("seal.json", "missing: the archive is incomplete")]
    assert read.seal_sha256 is None
    assert read.streams("control") == ["client", "scheduler", "worker-0"]
    with pytest.raises(ArchiveError, match="already sealed or abandoned"):
        writer.seal()


def test_a_running_or_killed_writer(tmp_path: Path) -> None:
    writer = ArchiveWriter.create(tmp_path / "a", PLAN)
    found = named(Archive.open(writer.root).defects)
    assert found.keys() == {"seal.json", ".lock", "attempts.jsonl"}
    assert "left behind" in found[".lock"]


def test_what_is_no_archive(tmp_path: Path) -> None:
    with pytest.raises(ArchiveError, match="no such folder"):
        Archive.open(tmp_path / "nowhere")
    with pytest.raises(ArchiveError, match=r"no plan\.json"):
        Archive.open(tmp_path)


# --- damaged ------------------------------------------------------------------------------------


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.tamper
@pytest.mark.parametrize("name", SEALED_FILES)
def test_a_changed_byte(archive: Path, name: str) -> None:
    flip(archive / name, -2)
    found = Archive.open(archive).defects
    assert Defect(name, "changed after sealing: its SHA-256 is not the listed one") in found


@pytest.mark.tamper
@pytest.mark.parametrize("name", SEALED_FILES)
def test_a_missing_file(archive: Path, name: str) -> None:
    (archive / name).unlink()
    assert named(Archive.open(archive).defects)[name] == "missing"


@pytest.mark.tamper
@pytest.mark.parametrize("name", SEALED_FILES)
def test_a_truncated_file(archive: Path, name: str) -> None:
    os.truncate(archive / name, 1)
    assert any(d.where == name and "changed after sealing" in d.what for d in Archive.open(archive).defects)


@pytest.mark.tamper
@pytest.mark.parametrize("name", ["extra", ".lock", ".seal.json", "verdicts", "arms/control/worker-1.jsonl", "a\nb"])
def test_an_unlisted_file(archive: Path, name: str) -> None:
    (archive / name).write_bytes(b"")
    where = name.replace("\n", "\\n")
    assert any(where in d.where and d.what == "not listed in SHA256SUMS" for d in Archive.open(archive).defects)


@pytest.mark.tamper
def test_every_byte_of_seal_and_list(archive: Path) -> None:
    for name in ("seal.json", "SHA256SUMS"):
        whole = (archive / name).read_bytes()
        for at in range(len(whole)):
            flip(archive / name, at)
            assert any(d.where.startswith(name) for d in Archive.open(archive).verify()), (name, at)
            (archive / name).write_bytes(whole)


@pytest.mark.tamper
@pytest.mark.parametrize("name", ["seal.json", "SHA256SUMS"])
def test_a_lost_seal_or_list(archive: Path, name: str) -> None:
    (archive / name).unlink()
    found = Archive.open(archive).defects
    assert [d.where for d in found] == [name]
    assert "missing" in found[0].what


@pytest.mark.tamper
def test_symlinks_and_odd_files(archive: Path) -> None:
    (archive / "plan.json").rename(archive.parent / "plan.json")
    (archive / "plan.json").symlink_to("../plan.json")
    (archive / "verdicts").symlink_to("arms")
    os.mkfifo(archive / "pipe")
    read = Archive.open(archive)
    found = read.defects
    assert {d.where for d in found if "symlink" in d.what} == {"plan.json", "verdicts"}
    assert named(found)["pipe"] == "is neither a file nor a folder"
    assert read.plan_json is None


@pytest.mark.tamper
@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "a/../../outside", "seal.json", "verdicts/x", "."])
def test_a_list_that_leaves_the_archive(archive: Path, name: str) -> None:
    (archive.parent / "outside").write_bytes(b"")
    sums = (archive / "SHA256SUMS").read_text()
    (archive / "SHA256SUMS").write_text(f"{hashlib.sha256(b'').hexdigest()}  {name}\n{sums}")
    assert "no archive may list" in named(Archive.open(archive).defects)["SHA256SUMS:1"]


@pytest.mark.tamper
@pytest.mark.parametrize(
    ("edit", "word"),
    [
        (lambda lines: lines[::-1], "out of order"),
        (lambda lines: [lines[0], *lines], "listed twice"),
        (lambda lines: [lines[0].replace("  ", " *"), *lines[1:]], "not a line of sha256sum"),
        (lambda lines: [*lines[:-1], lines[-1].rstrip("\n")], "cut off"),
    ],
)
def test_a_list_that_is_not_plain(archive: Path, edit: Callable[[list[str]], list[str]], word: str) -> None:
    lines = (archive / "SHA256SUMS").read_text().splitlines(keepends=True)
    (archive / "SHA256SUMS").write_text("".join(edit(lines)))
    found = Archive.open(archive).defects
    assert any(d.where.startswith("SHA256SUMS") and word in d.what for d in found)


@pytest.mark.tamper
def test_a_newer_format(archive: Path) -> None:
    seal = json.loads((archive / "seal.json").read_bytes())
    (archive / "seal.json").write_bytes(canonical_json({**seal, "format": 2, "new_field": "x"}))
    assert "format 2 is newer" in named(Archive.open(archive).defects)["seal.json"]


# --- damaged, and sealed again: the seal is good, the content is not -----------------------------


@pytest.mark.tamper
def test_a_lost_line_under_a_new_seal(archive: Path) -> None:
    stream = archive / "arms/control/scheduler.jsonl"
    lines = stream.read_bytes().splitlines(keepends=True)
    stream.write_bytes(b"".join(lines[:2] + lines[3:]))
    reseal_folder(archive)
    assert list(named(Archive.open(archive).defects)) == ["arms/control/scheduler.jsonl:3"]


@pytest.mark.tamper
def test_a_lost_attempts_file_under_a_new_seal(archive: Path) -> None:
    (archive / "attempts.jsonl").unlink()
    reseal_folder(archive)
    assert named(Archive.open(archive).defects) == {"attempts.jsonl": "missing"}


@pytest.mark.tamper
@pytest.mark.parametrize(("old", "new"), [("worker-0", "worker-1"), ("client", "scheduler")])
def test_a_stream_under_another_name(archive: Path, old: str, new: str) -> None:
    (archive / f"arms/control/{old}.jsonl").rename(archive / f"arms/control/{new}.jsonl")
    reseal_folder(archive)
    assert "under another name" in named(Archive.open(archive).defects)[f"arms/control/{new}.jsonl:1"]


@pytest.mark.tamper
def test_a_stream_of_another_arm(archive: Path) -> None:
    (archive / "arms/control").rename(archive / "arms/candidate")
    reseal_folder(archive)
    found = Archive.open(archive).defects
    assert len(found) == 3
    assert {d.what for d in found} == {"is a stream of arm 'control'"}


@pytest.mark.tamper
@pytest.mark.parametrize("data", [b"[]", b"{", b'{"%s":[1]}' % (b"0" * 64), b'{"%s":[4294967296]}' % (b"0" * 64)])
def test_inputs_that_are_not_their_digests(archive: Path, data: bytes) -> None:
    (archive / "inputs.json").write_bytes(data)
    reseal_folder(archive)
    read = Archive.open(archive)
    assert list(named(read.defects)) == ["inputs.json"]
    assert read.inputs == {}


@pytest.mark.tamper
def test_another_plan_under_an_old_seal(archive: Path) -> None:
    seal = json.loads((archive / "seal.json").read_bytes())
    (archive / "plan.json").write_bytes(b"{}")
    reseal_folder(archive)
    fields = {**json.loads((archive / "seal.json").read_bytes()), "plan_sha256": seal["plan_sha256"]}
    del fields["self_sha256"]
    own = hashlib.sha256(canonical_json(fields)).hexdigest()
    (archive / "seal.json").write_bytes(canonical_json({**fields, "self_sha256": own}))
    assert named(Archive.open(archive).defects) == {"plan.json": "is not the plan that the seal names"}


@pytest.mark.tamper
def test_a_ruined_stream_does_not_flood(archive: Path) -> None:
    (archive / "arms/control/scheduler.jsonl").write_bytes(b"?\n" * 5000)
    reseal_folder(archive)
    found = Archive.open(archive).defects
    assert len(found) == archive_module.DEFECTS_PER_STREAM + 1
    assert "not listed" in found[-1].what


# --- imported arms ------------------------------------------------------------------------------


@pytest.fixture
def borrower(archive: Path, tmp_path: Path) -> Path:
    """A sealed archive whose `reference-control` was imported from `archive`."""
    writer = write_archive(tmp_path / "borrower")
    writer.import_arm(Archive.open(archive), "control", "reference-control")
    writer.seal()
    return writer.root


def test_an_imported_arm_is_a_copy_with_its_seal(archive: Path, borrower: Path) -> None:
    read = Archive.open(borrower)
    assert read.defects == []
    assert read.arms == ["control", "reference-control"]
    assert read.imported_from("reference-control") == Archive.open(archive).seal_sha256
    assert read.imported_from("control") is None
    for name in ("client.jsonl", "scheduler.jsonl", "worker-0.jsonl", "engine.log"):
        copy = borrower / "arms/reference-control" / name
        assert copy.read_bytes() == (archive / "arms/control" / name).read_bytes()


@pytest.mark.tamper
@pytest.mark.parametrize(
    ("name", "edit"),
    [
        ("engine.log", lambda path: path.write_text("nothing wrong here\n")),
        ("engine.log", Path.unlink),
        ("worker-1.log", Path.touch),
        ("worker-0.jsonl", Path.unlink),
        ("source-seal.json", Path.unlink),
        ("source-SHA256SUMS", Path.unlink),
        ("source-seal.json", lambda path: flip(path, 20)),
        ("source-SHA256SUMS", lambda path: flip(path, 20)),
    ],
)
def test_an_imported_arm_is_held_against_its_source(borrower: Path, name: str, edit: Callable[[Path], object]) -> None:
    edit(borrower / "arms/reference-control" / name)
    reseal_folder(borrower)
    found = Archive.open(borrower).defects
    assert any(d.where.startswith(f"arms/reference-control/{name}") for d in found), found


@pytest.mark.tamper
def test_an_imported_stream_replaced_by_a_good_one(borrower: Path) -> None:
    path = borrower / "arms/reference-control/worker-0.jsonl"
    path.unlink()
    StreamWriter(path, "control", "worker-0").close()
    reseal_folder(borrower)
    found = named(Archive.open(borrower).defects)
    assert found == {"arms/reference-control/worker-0.jsonl": "is not the file that source-SHA256SUMS lists"}


@pytest.mark.tamper
def test_an_imported_arm_of_two_origins(borrower: Path) -> None:
    path = borrower / "arms/reference-control/worker-0.jsonl"
    path.unlink()
    StreamWriter(path, "candidate", "worker-0").close()
    reseal_folder(borrower)
    assert named(Archive.open(borrower).defects) == {
        "arms/reference-control/": "its streams name 2 arms of origin where one was due"
    }


@pytest.mark.tamper
def test_an_imported_arm_of_another_plan(borrower: Path) -> None:
    (borrower / "plan.json").write_bytes(b"{}")
    reseal_folder(borrower)
    assert named(Archive.open(borrower).defects) == {
        "arms/reference-control/source-seal.json": "is the seal of another plan"
    }


def test_arms_that_cannot_be_imported(archive: Path, borrower: Path, tmp_path: Path) -> None:
    def refused(source: Path, arm: str, word: str, plan: bytes = PLAN) -> None:
        writer = ArchiveWriter.create(tmp_path / word.replace(" ", "-"), plan)
        with pytest.raises(ArchiveError, match=word):
            writer.import_arm(Archive.open(source), arm, "control")

    refused(archive, "candidate", "no arm candidate")
    refused(archive, "control", "another plan", plan=b"{}")
    refused(borrower, "reference-control", "itself imported")
    flip(archive / "arms/control/engine.log", 0)
    refused(archive, "control", "engine.log: changed after sealing")
    (archive / "seal.json").unlink()
    refused(archive, "control", "seal.json: missing")


@pytest.fixture
def stranger(archive: Path, tmp_path: Path) -> Path:
    """A sealed archive of another plan whose `reference-control` was imported from `archive`."""
    writer = write_archive(tmp_path / "stranger", b'{"format":1,"name":"other"}')
    writer.import_arm(Archive.open(archive), "control", "reference-control", other_plan=True)
    writer.seal()
    return writer.root


def test_an_arm_of_another_plan_brings_its_plan(archive: Path, borrower: Path, stranger: Path) -> None:
    opened = Archive.open(stranger)
    assert opened.defects == []
    assert opened.source_plan_json("reference-control") == (archive / "plan.json").read_bytes()
    assert opened.source_plan_json("control") is None
    assert Archive.open(borrower).source_plan_json("reference-control") is None


def test_the_plan_of_an_imported_arm_must_be_the_one_that_its_seal_names(stranger: Path) -> None:
    plan = stranger / "arms/reference-control/source-plan.json"
    plan.write_bytes(b"{}")
    reseal_folder(stranger)
    wrong = {"arms/reference-control/source-seal.json": "is the seal of another plan"}
    assert named(Archive.open(stranger).defects) == wrong
    plan.unlink()
    reseal_folder(stranger)
    assert named(Archive.open(stranger).defects) == wrong


def test_an_arm_is_not_imported_over_another(archive: Path, tmp_path: Path) -> None:
    writer = write_archive(tmp_path / "b")
    with pytest.raises(ArchiveError, match="has an arm control already"):
        writer.import_arm(Archive.open(archive), "control", "control")


# --- any single edit ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    writer = write_archive(tmp_path_factory.mktemp("pristine") / "a")
    writer.seal()
    return writer.root


def edit_file(draw: st.DrawFn, data: bytes) -> bytes:
    """One edit that changes the bytes of a file."""
    lines = data.splitlines(keepends=True)
    kind = draw(st.sampled_from(["flip", "delete line", "repeat line", "swap lines", "cut", "insert"]))
    at = draw(st.integers(0, len(data) - 1))
    line = draw(st.integers(0, len(lines) - 1))
    if kind == "flip":
        return data[:at] + bytes([data[at] ^ (1 << draw(st.integers(0, 7)))]) + data[at + 1 :]
    if kind == "delete line":
        return b"".join(lines[:line] + lines[line + 1 :])
    if kind == "repeat line":
        return b"".join([*lines[:line], lines[line], *lines[line:]])
    if kind == "swap lines" and len(lines) > 1:
        other = draw(st.integers(0, len(lines) - 1).filter(lambda n: n != line))
        lines[line], lines[other] = lines[other], lines[line]
        return b"".join(lines)
    if kind == "insert":
        return data[:at] + draw(st.binary(min_size=1, max_size=3)) + data[at:]
    return data[:at]


@pytest.mark.tamper
@settings(max_examples=300, deadline=None)
@given(choice=st.data())
def test_no_single_edit_goes_unseen(pristine: Path, choice: st.DataObject) -> None:
    name = choice.draw(st.sampled_from([*SEALED_FILES, "SHA256SUMS", "seal.json"]))
    path = pristine / name
    whole = path.read_bytes()
    edited = choice.draw(st.one_of(st.none(), st.composite(edit_file)(whole)))
    try:
        if edited is None:
            path.unlink()
        else:
            path.write_bytes(edited)
        read = Archive.open(pristine)
        found = read.defects
        assert found
        assert any(d.where.startswith(name) for d in found), found
        list(read.attempts())
        for process in read.streams("control"):
            list(read.records("control", process))
        assert read.inputs is not None
    finally:
        path.write_bytes(whole)


@pytest.mark.tamper
@settings(max_examples=200, deadline=None)
@given(choice=st.data())
def test_no_single_edit_of_a_stream_goes_unseen_under_a_new_seal(pristine: Path, choice: st.DataObject) -> None:
    """The chain alone must show it, but for the last line: only a seal that was kept shows a forged last line."""
    name = choice.draw(st.sampled_from([file for file in SEALED_FILES if file.endswith(".jsonl")]))
    path = pristine / name
    kept = {file: (pristine / file).read_bytes() for file in (name, "SHA256SUMS", "seal.json")}
    head, last = kept[name][:-1].rsplit(b"\n", 1)
    try:
        path.write_bytes(choice.draw(st.composite(edit_file)(head + b"\n")) + last + b"\n")
        reseal_folder(pristine)
        found = Archive.open(pristine).defects
        assert any(d.where.startswith(name) for d in found)
    finally:
        for file, data in kept.items():
            (pristine / file).write_bytes(data)


# --- what is there instead of a file -------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["plan.json", "seal.json", "SHA256SUMS", "attempts.jsonl", "arms/control/client.jsonl"]
)
@pytest.mark.parametrize("kind", ["fifo", "endless"])
def test_what_is_no_regular_file_is_never_opened(archive: Path, name: str, kind: str) -> None:
    (archive / name).unlink()
    if kind == "fifo":
        os.mkfifo(archive / name)
    else:
        (archive / name).symlink_to("/dev/zero")
    read = Archive.open(archive)
    assert name in named(read.verify())
    assert (read.plan_json is None) == (name == "plan.json")
    assert list(read.attempts()) == [] or name != "attempts.jsonl"


@pytest.mark.parametrize("left", ["arms", "attempts.jsonl"])
def test_what_is_left_of_an_archive_is_an_incomplete_one(archive: Path, left: str) -> None:
    for entry in archive.iterdir():
        if entry.name != left:
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    defects = named(Archive.open(archive).verify())
    assert defects["seal.json"] == "missing: the archive is incomplete"
    assert defects["plan.json"] == "missing"


def test_a_folder_with_nothing_of_an_archive_is_none(tmp_path: Path) -> None:
    (tmp_path / "resolved.txt").write_text("mine")
    (tmp_path / "armsrace").mkdir()
    with pytest.raises(ArchiveError, match=r"is not an archive: it has no plan\.json"):
        Archive.open(tmp_path)


@pytest.mark.parametrize("arm", ["Control", "\udcff", "a\x1bb", ".hidden"])
def test_a_folder_that_no_plan_can_name_is_no_arm(archive: Path, arm: str) -> None:
    shutil.copytree(archive / "arms" / "control", archive / "arms" / arm)
    (archive / "arms" / "control" / "\udcff.jsonl").write_text("")
    if arm == "Control":
        (archive / "arms" / "control" / "\udcff.jsonl").unlink()
        reseal_folder(archive)
    read = Archive.open(archive)
    said = {defect.what for defect in read.verify()}
    assert "lies in a folder that cannot be an arm's" in said
    assert read.arms == ["control"]
    assert read.streams("control") == ["client", "scheduler", "worker-0"]
    "".join(where + what for where, what in read.defects).encode()
