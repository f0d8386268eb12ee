"""`verify.py` as a program, its tables against the records, and its reading of JSON against samestate's."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import pytest
import rfc8785
from pydantic import BaseModel

from samestate.checks.analyzers import ANALYZERS
from samestate.evidence import archive as archive_module
from samestate.evidence import latency_records, marker_records, probe_records, records, verify
from samestate.evidence.archive import Archive, ArchiveWriter, verifier
from samestate.evidence.canonical import canonical_json, sha256_hex
from samestate.plans.model import Plan, ResolvedPlan

from .conftest import reseal_folder, write_archive

SOURCE = Path(verify.__file__)
SCALAR = set(get_args(records.Scalar))
SECTIONS = ("The second verifier", "What the checks ask")
NAMES = {
    records.EngineGroup: "@engine_group",
    records.TransferGroup: "@transfer_group",
    records.Entry: "@entry",
    records.TransferPart: "@part",
    records.PatchedFunction: "@patched_function",
    records.Control: "@control",
    records.Argument: "@argument",
    records.PatchedFile: "@patched_file",
    records.KernelSelection: "@kernel_selection",
    records.BatchRow: "%batch_row",
    records.PageRow: "%page_row",
    records.StorageRow: "%storage_row",
    marker_records.LogitsRow: "%logits_row",
    probe_records.ProbeUsage: "@probe_usage",
    latency_records.StreamEvent: "%stream_event",
}


# --- one file, nothing but the standard library -----------------------------------------------------


def test_only_the_standard_library_and_python_39() -> None:
    tree = ast.parse(SOURCE.read_bytes(), feature_version=(3, 9))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in imported} <= sys.stdlib_module_names
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Match)]


def run(*arguments: object, program: Path = SOURCE) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", "-S", "-B", str(program), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [(["nowhere"], "is not an archive"), (["a", "b"], "unrecognized arguments"), (["--what"], "unrecognized")],
)
def test_usage(tmp_path: Path, arguments: list[str], word: str) -> None:
    result = run(*arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert word in result.stderr
    assert run(tmp_path).returncode == 2


def test_the_folder_that_it_lies_in(archive: Path) -> None:
    """A plan that is none is unknown; nothing is printed but the checks and the verdict."""
    result = run(program=archive / "verify.py")
    assert result.returncode == 3, result.stderr
    assert result.stdout.startswith("integrity        unknown") and result.stdout.endswith(
        "verdict          unknown: no plan\n"
    )
    tree = json.loads(run(archive, "--json").stdout)
    assert (tree["verdict"], tree["exit_code"]) == ("unknown", 3)
    assert tree["seal_sha256"] == Archive.open(archive).seal_sha256
    assert sorted(path.name for path in archive.iterdir() if path.name not in tree) == sorted(
        ["SHA256SUMS", "arms", "attempts.jsonl", "inputs.json", "plan.json", "resolved.json", "seal.json", "verify.py"]
    )


def test_modules_that_lie_in_the_archive_are_not_imported(archive: Path) -> None:
    for name in ("json", "os", "argparse", "hashlib"):
        (archive / f"{name}.py").write_text("raise SystemExit(0)\n")
    for options in ([], ["-I"], ["-S"]):
        command = [sys.executable, "-B", *options, str(archive / "verify.py")]
        assert subprocess.run(command, capture_output=True, check=False).returncode == 3, options


def test_a_newer_format_is_not_judged(archive: Path) -> None:
    seal = json.loads((archive / "seal.json").read_bytes())
    (archive / "seal.json").write_bytes(canonical_json({**seal, "format": 2, "new": "field"}))
    result = run(archive)
    assert result.returncode == 3 and "format 2 is newer" in result.stdout
    assert "coverage" not in result.stdout


def test_names_from_an_archive_do_not_reach_the_terminal_as_they_are(archive: Path) -> None:
    (archive / "a\x1b[31m\nb").touch()
    result = run(archive)
    assert "\x1b" not in result.stdout and "\\x1b" in result.stdout


# --- the copy in an archive -------------------------------------------------------------------------


def test_every_archive_carries_it(archive: Path) -> None:
    assert (archive / "verify.py").read_bytes() == SOURCE.read_bytes() == verifier()
    assert f"{sha256_hex(verifier())}  verify.py\n" in (archive / "SHA256SUMS").read_text()
    assert Archive.open(archive).defects == []


def told(root: Path) -> list[str]:
    """Defects of the copy, by samestate and by `verify.py`."""
    second = [where for where, _ in verify.Archive(str(root)).defects if where == "verify.py"]
    return [defect.where for defect in Archive.open(root).defects] + second


def test_another_copy_is_a_defect_under_any_seal(archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = verifier().replace(b"PASS: 0", b"PASS: 0, FAIL: 0")
    (archive / "verify.py").write_bytes(other)
    reseal_folder(archive)
    assert told(archive) == ["verify.py", "verify.py"]
    for module, name in ((archive_module, "OLDER_VERIFIERS"), (verify, "OLDER")):
        monkeypatch.setattr(module, name, (sha256_hex(other),))
    assert told(archive) == []


def test_an_archive_without_a_copy_is_older_and_undamaged(archive: Path) -> None:
    (archive / "verify.py").unlink()
    reseal_folder(archive)
    assert told(archive) == []


def test_both_know_the_same_older_copies() -> None:
    assert verify.OLDER == archive_module.OLDER_VERIFIERS
    assert sha256_hex(verifier()) not in verify.OLDER


def test_an_unsealed_archive_has_it_too(tmp_path: Path) -> None:
    ArchiveWriter.create(tmp_path / "a", b"{}").abandon()
    assert "the archive is incomplete" in run(program=tmp_path / "a" / "verify.py").stdout


# --- its tables -------------------------------------------------------------------------------------


def spec(hint: Any) -> str:
    """A type of the records in the words of `verify.py`. No number of a record is negative (docs/archive-format.md)."""
    if get_origin(hint) is Annotated:
        base, meta = get_args(hint)[:2]
        return "hash" if base is str else {0: "integer", 1: "count"}[meta.ge]
    if isinstance(hint, type) and issubclass(hint, Enum):
        return "|".join(hint)
    if get_origin(hint) is Literal:
        return "|".join(get_args(hint))
    if get_origin(hint) in (UnionType, Union):
        if set(get_args(hint)) == SCALAR:
            return "scalar"
        if set(get_args(hint)) == {int, str, NoneType}:
            return "reason"
        (inner,) = [one for one in get_args(hint) if one is not NoneType]
        return spec(inner) + "?"
    if get_origin(hint) is list:
        return spec(get_args(hint)[0]) + "[]"
    if get_origin(hint) is dict:
        return spec(get_args(hint)[1]) + "{}"
    return NAMES.get(hint) or {int: "integer", str: "text", float: "number", bool: "bool"}[hint]


def columns(kind: type[msgspec.Struct]) -> str:
    hints = get_type_hints(kind, include_extras=True)
    absent = {field.name for field in msgspec.structs.fields(kind) if not field.required}
    return " ".join(f"{name}{'=' * (name in absent)}:{spec(hints[name])}" for name in kind.__struct_fields__)


def test_the_kinds_are_those_of_the_records() -> None:
    kinds = {str(kind.__struct_config__.tag): columns(kind) for kind in get_args(records.AnyRecord)}
    kinds["stream_opened"] = kinds["stream_opened"].replace("format:integer", "format:int")
    kinds["state_computed"] = kinds["state_computed"].replace("integer[][]", "%place[]")
    assert kinds == verify.KINDS


@pytest.mark.parametrize("kind", NAMES)
def test_nested_tables(kind: type[msgspec.Struct]) -> None:
    assert columns(kind) == verify.NESTED[NAMES[kind][1:]]


MODELS = {
    "arms": "arm_plan", "engine": "engine_plan", "instruments": "instrument_plan", "analyzer": "analyzer_pin",
    "expected_layout": "expected_layout", "prompts": "prompt_plan", "scenario": "step_plan",
    "series": "series_plan", "inputs": "input",
    "model": "model",
    "speculation": "speculation_plan",
    "probes": "probe_plan",
    "latency": "latency_plan",
}  # fmt: skip
MARKERS = {Plan: "marker_plan", ResolvedPlan: "resolved_markers"}


def names(model: type[BaseModel]) -> list[str]:
    return [name if field.is_required() else f"{name}=" for name, field in model.model_fields.items()]


def parts(hint: Any) -> list[type[BaseModel]]:
    inside = [part for one in get_args(hint) for part in parts(one)]
    return [hint] if isinstance(hint, type) and issubclass(hint, BaseModel) else inside


@pytest.mark.parametrize(("model", "table"), [(Plan, verify.PLAN), (ResolvedPlan, verify.RESOLVED)])
def test_plans_have_these_fields(model: type[BaseModel], table: str) -> None:
    assert [field.rpartition(":")[0] for field in table.split()] == names(model)
    for name, field in model.model_fields.items():
        for part in parts(field.annotation):
            known = MARKERS[model] if name == "markers" else MODELS[name]
            assert [one.rpartition(":")[0] for one in verify.NESTED[known].split()] == names(part)
            for inner, inside in part.model_fields.items():
                for small in parts(inside.annotation):
                    assert [one.rpartition(":")[0] for one in verify.NESTED[MODELS[inner]].split()] == names(small)


def test_analyzers_have_these_checks() -> None:
    assert verify.ANALYZERS.keys() <= ANALYZERS.keys()
    for name, decide in verify.ANALYZERS.items():
        assert set(decide) == set(ANALYZERS[name].floor)
        assert {*decide, *verify.CONDITIONAL[name]} == set(ANALYZERS[name].checks)
    known = {check for analyzer in ANALYZERS.values() for check in analyzer.checks}
    assert verify.COVERED.keys() <= known


@pytest.mark.parametrize("analyzer", ["boundary-v1", "local-hit-v1"])
def test_of_these_plans_nothing_is_left_to_samestate(analyzer: str) -> None:
    assert set(ANALYZERS[analyzer].checks) <= {"integrity", *verify.COVERED}


def test_the_document_names_every_check_that_is_recomputed() -> None:
    document = (Path(__file__).parents[2] / "docs" / "archive-format.md").read_text(encoding="utf-8")
    second, asked = (document.split(f"\n## {title}\n")[1].split("\n## ")[0] for title in SECTIONS)
    for check in verify.COVERED:
        assert f"**`{check}`**" in asked
    for analyzer, decide in verify.ANALYZERS.items():
        for check in (analyzer, *decide, *verify.CONDITIONAL[analyzer]):
            assert f"`{check}`" in second


# --- its JSON ---------------------------------------------------------------------------------------

LINES = [
    b'{"kind":"engine_stopped"}',
    b'{"kind":"engine_stopped","kind":"engine_stopped"}',
    b'{"kind":"engine_stopped","x":1}',
    b'{"kind":"stream_closed","dropped":0}',
    b'{"kind":"stream_closed","dropped":0.0}',
    b'{"kind":"stream_closed","dropped":-1}',
    b'{"kind":"stream_closed","dropped":true}',
    b'{"kind":"stream_closed","dropped":1,"dropped":0}',
    b'{"kind":"stream_closed"}',
    b'{"kind":"stream_closed","dropped":1e2}',
    b'{"kind":"stream_closed","dropped":1180591620717411303424}',
    b'{"dropped":0}',
    b'{"kind":"request_finished","request":"\\ud800"}',
    b'{"kind":"request_finished","request":"\\ud83d\\ude00"}',
    b'{"kind":"request_finished","request":"\xff"}',
    b'{"kind":"request_finished","request":"\x01"}',
    b'{"kind":"request_finished","request":"a\tb"}',
    b'{"kind":"request_finished","request":null}',
    b'{"kind":"nothing"}',
    b'{"kind":"request_finished","request":"x"} ',
    b'\xef\xbb\xbf{"kind":"engine_stopped"}',
    b'{"kind":"engine_stopped",}',
    b'{"kind":"counters_read","op":"x","when":"after","values":{"a":1e999},"missing":[]}',
    b'{"kind":"counters_read","op":"x","when":"after","values":{"a":NaN},"missing":[]}',
    b'{"kind":"counters_read","op":"x","when":"after","values":{"a":1},"missing":[]}',
    b'{"kind":"counters_read","op":"x","when":"now","values":{"a":1},"missing":[]}',
    b'{"kind":"batch_scheduled","step":1,"source":"scheduler","rows":[["r",0,1,0]],"preempted":[]}',
    b'{"kind":"batch_scheduled","step":1,"source":"scheduler","rows":[["r",0,1]],"preempted":[]}',
    b'{"kind":"batch_scheduled","step":1,"source":"scheduler","rows":[["r",0,1,0,0]],"preempted":[]}',
    b'{"kind":"batch_scheduled","step":1,"source":"scheduler","rows":[{}],"preempted":[]}',
    b'{"kind":"fault_armed","fault":"x","parameters":{"a":[]}}',
    b'{"kind":"fault_armed","fault":"x","parameters":{"a":null}}',
    b"[]",
    b"null",
    b"",
    b"{",
    b"[" * 100_000,
]


@pytest.mark.parametrize("rec", LINES, ids=lambda rec: rec[:60].decode("ascii", "backslashreplace"))
def test_a_line_is_one_for_both_or_for_neither(rec: bytes) -> None:
    line = b'{"n":0,"prev":"%s","t_ns":0,"rec":%s}' % (b"0" * 64, rec)
    try:
        msgspec.json.decode(line, type=records.Line)
        ours = True
    except (ValueError, RecursionError):
        ours = False
    try:
        theirs = verify.IS_LINE(verify.parse(line))
    except (ValueError, RecursionError):
        theirs = False
    assert ours == theirs


@pytest.mark.parametrize(
    "fields", [{"b": 1, "a": 'ä\n\x7f\\"'}, {"a": 2**53 - 1}, {"\U0001f600": "x", "\ufb01": "y"}, {"a": -3, "A": ""}]
)
def test_canonical_is_that_of_rfc_8785(fields: dict[str, Any]) -> None:
    assert verify.canonical(fields) == rfc8785.dumps(fields)


def test_canonical_all_the_way_down() -> None:
    tree = {"b": [{"z": 1, "a": ["x", 2]}, []], "a": {}}
    assert verify.canonical(tree) == rfc8785.dumps(tree)


@pytest.mark.parametrize("value", [1.0, True, None, 2**53, [1.0], {"b": None}])
def test_what_is_not_hashed_has_no_canonical_form(value: Any) -> None:
    with pytest.raises(ValueError, match="canonical form"):
        verify.canonical({"a": value})


def test_it_copies_with_the_folder(archive: Path, tmp_path: Path) -> None:
    shutil.copytree(archive, tmp_path / "copy")
    assert run(program=tmp_path / "copy" / "verify.py").stdout == run(archive).stdout


def test_a_line_is_read_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No stream is ever read as a whole."""
    writer = write_archive(tmp_path / "a")
    writer.seal()
    read: list[str] = []
    whole = verify.Archive.read
    monkeypatch.setattr(verify.Archive, "read", lambda self, name: (read.append(name), whole(self, name))[1])
    verify.judge(str(writer.root))
    assert read and not [name for name in read if name.endswith(".jsonl")]
