"""Claims: each rule refuses the claim that it is there for, and lets the honest one beside it through."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import msgspec
import pytest

from samestate.checks import claim as words
from samestate.checks import claims as rules_of_evidence
from samestate.checks.analyzers import judge
from samestate.checks.base import Verdict
from samestate.checks.claim import Claim, Kind, read_claims
from samestate.checks.claims import Evidence, bases, lint
from samestate.checks.history import History
from samestate.checks.known import read_known
from samestate.checks.written import WrittenError
from samestate.evidence import records as r
from samestate.evidence.controls import CONTROLS, MATCHED_SCHEDULE, TUNER_PROFILE

from .builder import Run, build, edit, imported, instrumented_plan


def evidence(run: Run, root: Path) -> Evidence:
    archive = run.write(root)
    return Evidence(archive, judge(archive), History.read(archive))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("claims")


@pytest.fixture(scope="module")
def clean(folder: Path) -> Evidence:
    return evidence(build(), folder / "clean")


@pytest.fixture(scope="module")
def faulty(folder: Path) -> Evidence:
    return evidence(build(fault="full-lookup"), folder / "faulty")


@pytest.fixture(scope="module")
def paged(folder: Path) -> Evidence:
    return evidence(build(instrumented_plan()), folder / "paged")


@pytest.fixture(scope="module")
def recorded(folder: Path, clean: Evidence) -> Evidence:
    return evidence(imported(build(arms=("candidate",)), control=clean.archive), folder / "recorded")


def seal(of: Evidence) -> str:
    assert of.judgement.seal_sha256
    return of.judgement.seal_sha256


def rules(of: Evidence, kind: str, text: str, checks: list[str], *others: Evidence, **fields: object) -> list[str]:
    claim = Claim(id="c", kind=Kind(kind), text=text, archive=seal(of)[:12], checks=checks, **fields)  # type: ignore[arg-type]
    refused = lint([claim], {seal(one): one for one in (of, *others)})
    assert all(one.why and one.remedy for one in refused)
    return [one.rule for one in refused]


HONEST = [
    ("equality", "12 comparisons: the candidate continues as the control, token by token", ["paired-equality"]),
    ("equality", "12 generations equal", ["paired-equality"]),
    ("boundary", "3 reloads restored B = p, the last checkpoint before the last token", ["boundary", "transfers"]),
    ("transfer", "Each reload was loaded from the external cache", ["transfers"]),
    ("coverage", "Every planned operation was done once", ["coverage"]),
]


@pytest.mark.parametrize(("kind", "text", "checks"), HONEST)
def test_an_honest_claim_is_let_through(clean: Evidence, kind: str, text: str, checks: list[str]) -> None:
    assert rules(clean, kind, text, checks) == []


@pytest.mark.parametrize(
    ("kind", "text", "checks", "rule"),
    [
        ("equality", "12 tasks continue as the control", ["paired-equality"], "unit"),
        ("equality", "13 comparisons are equal", ["paired-equality"], "count"),
        ("equality", "The reload is faster", ["paired-equality"], "kind-by-words"),
        ("equality", "The answers are equal because of the strict prefix", ["paired-equality"], "kind-by-words"),
        ("transfer", "The right pages were filled", ["transfers"], "kind-by-words"),
        ("equality", "Answers keep their quality", ["paired-equality"], "beyond-scope"),
        ("equality", "It is safe to promote", ["paired-equality"], "beyond-scope"),
        ("equality", "Confirmed independently", ["paired-equality"], "not-independent"),
        ("equality", "Reload and cold have the same state", ["paired-equality"], "state-from-tokens"),
        ("equality", "All good", ["boundary"], "kind-without-check"),
        ("boundary", "All good", ["paired-equality"], "kind-without-check"),
        ("bytes", "All good", ["transfers"], "kind-without-check"),
        ("equality", "All good", [], "no-evidence"),
        ("equality", "All good", ["paired-equality", "no-check"], "no-such-check"),
        ("failure", "It fails", ["paired-equality"], "no-failure"),
        ("equality", "All good", ["paired-equality", "controls-equal"], "not-passed"),
    ],
)
def test_a_claim_that_its_evidence_cannot_carry(
    clean: Evidence, kind: str, text: str, checks: list[str], rule: str
) -> None:
    assert rules(clean, kind, text, checks) == [rule]


def test_latency_needs_times_and_no_bytes(clean: Evidence, paged: Evidence) -> None:
    client = clean.archive.records("candidate", "client")
    lines = {line.n: type(line.rec).__name__ for line in client}
    begin = next(n for n, name in lines.items() if name == "OperationStarted")
    end = next(n for n, name in lines.items() if name == "OperationEnded")
    times = [f"arms/candidate/client.jsonl:{n + 1}" for n in (begin, end)]
    text = "The first request took 3 ms"
    assert rules(clean, "latency", text, [], records=times) == []
    assert rules(clean, "latency", text, [], records=times[:1]) == ["latency-not-timed"]
    assert rules(clean, "latency", text, ["transfers"], records=times) == ["latency-from-bytes"]
    assert rules(clean, "latency", text, ["transfers"]) == ["latency-from-bytes", "latency-not-timed"]
    assert "latency-not-eligible" in rules(paged, "latency", text, [], records=times)


CLIENT = "arms/candidate/client.jsonl"


@pytest.mark.parametrize(
    "where",
    ["client.jsonl:1", f"{CLIENT}:99999", f"{CLIENT}:0", f"{CLIENT}:{'9' * 5000}", f"{CLIENT}:²", "/etc/passwd:1",
     "plan.json", ":", ""],
)  # fmt: skip
def test_a_record_that_is_not_there(clean: Evidence, where: str) -> None:
    assert "no-such-record" in rules(clean, "equality", "Equal", ["paired-equality"], records=[where])


def test_lines_count_from_one(clean: Evidence) -> None:
    last = sum(1 for _ in clean.archive.records("candidate", "client"))
    for line, known in ((1, True), (last, True), (last + 1, False)):
        said = rules(clean, "equality", "Equal", ["paired-equality"], records=[f"{CLIENT}:{line}"])
        assert ("no-such-record" not in said) == known


def test_a_cause_needs_a_run_without_it_that_comes_out_otherwise(
    clean: Evidence, faulty: Evidence, paged: Evidence, folder: Path
) -> None:
    text, checks = "Reloads differ because the whole prompt is looked up", ["paired-equality"]
    assert rules(faulty, "cause", text, checks, clean, ablation=seal(clean)) == []
    assert rules(faulty, "cause", text, checks, clean) == ["cause-without-ablation"]
    assert rules(faulty, "cause", text, checks, ablation=seal(clean)) == ["cause-without-ablation"]
    assert rules(faulty, "cause", text, checks, ablation=seal(faulty)) == ["cause-without-ablation"]
    assert rules(faulty, "cause", text, ["coverage"], clean, ablation=seal(clean)) == ["no-contrast"]
    assert rules(faulty, "cause", text, checks, paged, ablation=seal(paged)) == ["joint-intervention"]
    again = evidence(build(), folder / "again")
    assert rules(clean, "cause", text, checks, again, ablation=seal(again)) == ["no-contrast", "joint-intervention"]


def controlled(folder: Path, fault: str | None, *on: str) -> Evidence:
    """A run under these controls; of a fault it carries the outputs and no tag."""
    run = build(fault=fault)
    run.attempts[0] = msgspec.structs.replace(run.attempts[0], fault=None)
    recorded = [r.Control(name=name, on=name in on, sha256="a" * 64 if name in on else None) for name in CONTROLS]
    for arm in ("control", "candidate"):
        edit(run.client(arm), r.EngineStarted, {"controls": recorded})
    return evidence(run, folder / "-".join(["under", *on]))


def test_controls_are_separate_and_a_cause_is_one_of_them(folder: Path) -> None:
    text, checks = "The matched schedule makes reloads equal", ["paired-equality"]
    without = controlled(folder, "full-lookup")
    one = controlled(folder, None, MATCHED_SCHEDULE)
    both = controlled(folder, None, MATCHED_SCHEDULE, TUNER_PROFILE)
    assert rules(one, "cause", text, checks, without, ablation=seal(without)) == []
    assert rules(both, "cause", text, checks, without, ablation=seal(without)) == ["joint-intervention"]


def test_equal_digests_are_no_proof_of_addressing(paged: Evidence) -> None:
    text = "Loads filled the right pages"
    assert rules(paged, "addressing", text, ["page-bytes"]) == ["addressing-from-digests"]
    assert rules(paged, "addressing", text, ["page-bytes", "layout"]) == ["addressing-from-digests"]
    assert rules(paged, "addressing", text, ["page-bytes", "layout", "poison"]) == []
    assert rules(paged, "bytes", "Loaded bytes are the saved bytes of the same state", ["page-bytes"]) == []


READ = "Device buffers were verified"
CHECKED_PAGES = ["page-bytes", "page-coverage", "prefix-identity", "poison"]


@pytest.mark.parametrize("checks", [[check] for check in CHECKED_PAGES] + [["page-bytes", "layout"]])
@pytest.mark.parametrize(
    "text",
    [
        READ,
        "The audit re-read GPU memory",
        "Pages on the device were inspected",
        "Loads were checked against device memory",
        "No page differs: VRAM was compared with the store",
        "Not only recorded rows, device memory was read",
        "Device memory\nwas  read again",
    ],
)
def test_page_rows_are_recorded_and_no_device_is_read_again(paged: Evidence, checks: list[str], text: str) -> None:
    assert rules(paged, "coverage", text, ["coverage", *checks]) == ["device-from-page-rows"]
    assert rules(paged, "coverage", text, ["coverage"]) == []


@pytest.mark.parametrize(
    "text",
    [
        "Recorded digests of pages were compared",
        "Loaded bytes are the saved bytes; no device memory was read again",
        "Recorded page rows were verified, not device buffers",
        "Recorded rows agree, without reading any device memory",
        "Device memory wasn't read",
        "Pages were digested as they left device memory",
        "Nobody read device memory",
        "Device memory cannot be verified",
        "Recorded rows were compared instead of reading device memory",
    ],
)
def test_a_claim_of_recorded_rows_is_let_through(paged: Evidence, text: str) -> None:
    assert rules(paged, "bytes", text, ["page-bytes"]) == []


def test_an_archived_control_and_single_rows_carry_no_word_of_a_device_either(paged: Evidence, folder: Path) -> None:
    archived = evidence(
        imported(build(instrumented_plan(), arms=("candidate",)), control=paged.archive), folder / "archived"
    )
    assert {one.kind for one in bases(archived.judgement)} == {"recorded"}
    assert rules(archived, "bytes", READ, ["page-bytes"]) == ["device-from-page-rows"]
    lines = paged.archive.records("candidate", "worker-0")
    row = next(line.n for line in lines if isinstance(line.rec, r.PagesDigested))
    where = [f"arms/candidate/worker-0.jsonl:{row + 1}"]
    assert rules(paged, "coverage", READ, ["coverage"], records=where) == ["device-from-page-rows"]


def test_parameters_are_read_from_the_device(folder: Path) -> None:
    run = build(instrumented_plan())
    weights = [
        r.StorageRow(name="lm_head.weight", role="parameter", shape=[2], dtype="torch.bfloat16", digest="a" * 32)
    ]
    for arm in ("control", "candidate"):
        for index, moment in ((0, "start"), (len(run.scheduler(arm)), "end")):
            taken = r.StoragesDigested(rank=0, moment=moment, digest="xxh3-128", rows=weights)  # type: ignore[arg-type]
            run.scheduler(arm).insert(index, taken)
    stored = evidence(run, folder / "stored")
    text = "Parameters in device memory were read at the start and at the end"
    assert rules(stored, "coverage", text, ["coverage", "storages"]) == []
    assert rules(stored, "coverage", text, ["coverage", "storages", "page-bytes"]) == ["device-from-page-rows"]
    assert rules(stored, "coverage", text, ["coverage", "page-bytes"]) == ["device-from-page-rows"]


def test_a_recorded_control_is_not_live(clean: Evidence, recorded: Evidence) -> None:
    text = "Two live arms agree"
    assert rules(recorded, "equality", text, ["paired-equality"]) == ["recorded-not-live"]
    assert rules(clean, "equality", text, ["paired-equality"]) == []


def test_a_fault_run_carries_failures_and_causes_only(faulty: Evidence) -> None:
    assert rules(faulty, "failure", "A reload differs", ["paired-equality"]) == []
    assert rules(faulty, "coverage", "Every operation was done", ["coverage"]) == ["fault-run"]


def test_a_damaged_archive_carries_nothing(folder: Path) -> None:
    damaged = evidence(build(), folder / "damaged")
    (damaged.archive.root / "arms" / "candidate" / "client.jsonl").unlink()
    again = Evidence(damaged.archive, judge(damaged.archive), damaged.history)
    assert "not-whole" in rules(again, "coverage", "Every operation was done", ["coverage"])


def test_an_archive_that_was_not_given(clean: Evidence) -> None:
    claim = Claim(id="c", kind=Kind.EQUALITY, text="t", archive="0" * 12, checks=["paired-equality"])
    assert [one.rule for one in lint([claim], {seal(clean): clean})] == ["no-such-archive"]


def test_every_result_says_what_it_rests_on(faulty: Evidence, recorded: Evidence) -> None:
    found = bases(faulty.judgement)
    assert [one.check for one in found] == [one.check for one in faulty.judgement.results]
    assert {(one.independence, one.kind) for one in found} == {("recomputed", "live")}
    wrong = next(one for one in found if one.check == "paired-equality")
    assert (wrong.unit, wrong.examined) == ("comparisons", 12)
    assert wrong.evidence
    assert {one.kind for one in bases(recorded.judgement)} == {"recorded"}
    assert faulty.judgement.verdict is Verdict.FAIL


def test_a_file_of_claims(tmp_path: Path) -> None:
    path = tmp_path / "claims.yaml"
    one = f"  - id: {{}}\n    kind: equality\n    text: equal\n    archive: {'a' * 12}\n    checks: [paired-equality]\n"
    path.write_text("claims:\n" + one.format("a") + one.format("b"))
    assert [claim.id for claim in read_claims(path)] == ["a", "b"]
    for content, word in {
        "claims: []\n": "claims",
        "claims:\n" + one.format("a") * 2: r"claims\[1\].id: 'a' is there twice; rename one",
        ("claims:\n" + one.format("a")).replace("equality\n", "quality\n", 1): r"claims\[0\].kind",
        ("claims:\n" + one.format("a")).replace("a" * 12, "a" * 11): r"claims\[0\].archive",
    }.items():
        path.write_text(content)
        with pytest.raises(WrittenError, match=word):
            read_claims(path)


DOCUMENT = (Path(__file__).parents[2] / "docs" / "evidence.md").read_text(encoding="utf-8")


def test_the_document_names_every_rule() -> None:
    source = inspect.getsource(words) + inspect.getsource(rules_of_evidence)
    yielded = set(re.findall(r'yield \(?\s*"([a-z-]+)"', source))
    table = DOCUMENT.split("| rule | refuses |")[1].split("\n\n")[0]
    named = {
        name for row in table.splitlines() for name in re.findall(r"`([a-z-]+)`", row.partition("|")[2].split("|")[0])
    }
    assert named == yielded
    assert {kind.value for kind in Kind} <= set(re.findall(r"`(\w+)`", DOCUMENT))


def test_the_files_in_the_document_are_read(tmp_path: Path) -> None:
    known, claims = re.findall(r"^```yaml\n(.*?)^```", DOCUMENT, re.MULTILINE | re.DOTALL)
    (tmp_path / "known.yaml").write_text(known)
    (tmp_path / "claims.yaml").write_text(claims)
    assert read_known(tmp_path / "known.yaml")[0].op == "N3584.reload"
    assert read_claims(tmp_path / "claims.yaml")[0].checks == ["paired-equality"]
