"""A bundle for a bug report holds the failing request, and nothing that is nobody's business."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

from samestate.checks.analyzers import judge
from samestate.checks.base import Finding, Place, Verdict
from samestate.checks.history import History
from samestate.evidence import records as r
from samestate.evidence.archive import Archive
from samestate.reports.case import SETTINGS, Bundle, CaseError, bundle

OP = "N32.reload"
PLANTED = {
    "path": "/home/alice/models/unreleased",
    "host": "gpu-host-17.corp.example",
    "user": "alice",
    "mail": "alice@corp.example",
    "address": "http://10.1.2.3:8000/v1",
    "token": "hf_abcdefghijklmnop",
    "key": "sk-0123456789",
}


def bundle_of(archive: Archive, *, redact_tokens: bool = False, op: str = OP) -> Bundle:
    return bundle(archive, History.read(archive), judge(archive), op, redact_tokens=redact_tokens)


@pytest.fixture(scope="module")
def planted(builder: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Archive:
    """A failing run whose every free text holds a secret."""
    secret = " ".join(PLANTED.values())
    plan = builder.small_plan()
    engine = plan.engine.model_copy(
        update={
            "model": "external",
            "serve_args": ["--api-key", PLANTED["key"], "--download-dir", PLANTED["path"]],
            "settings": plan.engine.settings | {"hf_token": PLANTED["token"]},
        }
    )
    texts = {"title": secret, "question": secret, "scope": secret, "not_shown": [secret]}
    run = builder.build(plan.model_copy(update={**texts, "engine": engine}), fault="full-lookup")
    model = run.resolved.model.model_copy(update={"name": PLANTED["path"], "files": {PLANTED["host"]: "a" * 64}})
    run.resolved = run.resolved.model_copy(update={"model": model})
    settings: dict[str, r.Scalar] = {
        "model_config.hf_token": PLANTED["token"],
        "model_config.dtype": PLANTED["path"],
        "model_config.served_model_name": PLANTED["user"],
        "env.OMP_NUM_THREADS": secret,
        "env.HOME": PLANTED["path"],
        "cache_config.block_size": builder.C,
    }
    for (arm, process), records in run.streams.items():
        if process == "client":
            versions = {"sim": "1", "vllm": secret, PLANTED["host"]: "1"}
            builder.edit(records, r.EngineStarted, {"versions": versions, "settings": settings, "connector": secret})
            builder.edit(records, r.OperationEnded, {"error": f"OSError: {secret}", "ok": False}, op=OP)
        for index, record in enumerate(records):
            records[index] = _renamed(record, builder.request_id(arm, OP))
    return run.write(tmp_path_factory.mktemp("planted") / "a")


def _renamed(record: r.Record, request: str) -> r.Record:
    """The record with an engine request id that says too much."""
    name = f"{PLANTED['host']}-{PLANTED['user']}"
    if getattr(record, "request", None) == request:
        return msgspec.structs.replace(record, request=name)
    if isinstance(record, r.BatchScheduled):
        rows = [msgspec.structs.replace(row, request=name) if row.request == request else row for row in record.rows]
        return msgspec.structs.replace(record, rows=rows)
    return record


@pytest.mark.parametrize("redact_tokens", [False, True])
def test_nothing_secret_gets_in(planted: Archive, redact_tokens: bool) -> None:
    kept = b"".join(path.read_bytes() for path in planted.root.rglob("*") if path.is_file()).decode()
    assert all(secret in kept for secret in PLANTED.values()), "the archive should hold what the bundle must not"
    made = bundle_of(planted, redact_tokens=redact_tokens)
    said = "".join(made.files.values())
    assert [name for name, secret in PLANTED.items() if secret in said] == []
    assert str(planted.root) not in said
    assert '"error": "OSError"' in said
    assert '"external"' in said


def test_a_message_is_shown_without_what_it_quotes(planted: Archive) -> None:
    judgement = judge(planted)
    text = f"{OP} failed: OSError: {' '.join(PLANTED.values())} at {PLANTED['path']}/x"
    found = Finding(code="failed", verdict=Verdict.FAIL, message=text, place=Place(op=OP), evidence=[PLANTED["path"]])
    results = [judgement.results[1].model_copy(update={"findings": [found], "verdict": Verdict.FAIL})]
    made = bundle(
        planted, History.read(planted), judgement.model_copy(update={"results": results}), OP, redact_tokens=True
    )
    (shown,) = json.loads(made.files["case.json"])["findings"]
    assert shown["message"] == f"{OP} failed: (left out) at (left out)"
    assert shown["evidence"] == []


def test_the_last_fence_refuses_what_looks_like_a_place(faulted: Archive, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("samestate.reports.case.plain", lambda value: PLANTED["path"])
    with pytest.raises(CaseError, match="looks like a place; nothing was written"):
        bundle_of(faulted)


def test_settings_are_an_allow_list(faulted: Archive) -> None:
    arms = json.loads(bundle_of(faulted).files["case.json"])["arms"]
    assert all(set(arm["settings"]) <= set(SETTINGS) for arm in arms.values())
    assert any(arm["settings"] for arm in arms.values())


def test_the_request_with_what_it_reused_and_nothing_else(faulted: Archive) -> None:
    made = bundle_of(faulted)
    about = json.loads(made.files["case.json"])
    assert about["operations"] == {"candidate": ["N32.cold", "N32.reset", OP], "control": [OP]}
    lines = [json.loads(line) for line in made.files["records.jsonl"].splitlines()]
    assert len(lines) == made.records > 0
    kinds = {line["rec"]["kind"] for line in lines}
    assert kinds >= {"operation_started", "operation_output", "cache_reset", "lookup", "batch_scheduled"}
    assert kinds >= {"load_submitted", "load_completed", "save_submitted", "save_completed", "allocated"}
    assert {line["rec"]["op"] for line in lines if "op" in line["rec"]} == {"N32.cold", "N32.reset", OP}
    assert {len(ids) for ids in json.loads(made.files["tokens.json"]).values()} == {32}


def test_page_digests_come_along(builder: ModuleType, tmp_path: Path) -> None:
    archive = builder.build(builder.instrumented_plan(), fault="full-lookup").write(tmp_path / "a")
    lines = [json.loads(line)["rec"] for line in bundle_of(archive).files["records.jsonl"].splitlines()]
    digested = [rec for rec in lines if rec["kind"] == "pages_digested"]
    assert {rec["direction"] for rec in digested} == {"save", "load"}
    assert all(rec["request"].startswith("request-") for rec in digested)


def test_it_reads_like_an_issue(faulted: Archive) -> None:
    text = bundle_of(faulted).files["README.md"]
    assert text.startswith(f"# {OP}: retained_lookup_boundary\n")
    for heading in ("## Expected", "## Seen", "## With", "## Reproduce", "## In this folder"):
        assert heading in text
    assert "N = 32 prompt tokens, C = 16" in text


def test_without_tokens_there_are_digests(faulted: Archive) -> None:
    made = bundle_of(faulted, redact_tokens=True)
    assert "tokens.json" not in made.files
    outputs = [json.loads(line)["rec"] for line in made.files["records.jsonl"].splitlines()]
    outputs = [rec for rec in outputs if rec["kind"] == "operation_output"]
    assert {rec["token_ids"] for rec in outputs} == {8}
    assert len({rec["tokens_sha256"] for rec in outputs}) > 1


def test_a_clean_run_and_a_damaged_one_have_no_case(clean: Archive, builder: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(CaseError, match="has no failing finding"):
        bundle_of(clean)
    run = builder.build(fault="full-lookup")
    run.sealed = False
    with pytest.raises(CaseError, match="damaged evidence helps nobody"):
        bundle_of(run.write(tmp_path / "a"))
