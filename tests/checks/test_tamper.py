"""Random edits of sealed archives, and edits that are sealed again: what both verifiers catch, and what neither can."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import msgspec
import pytest

from samestate.checks.analyzers import ANALYZERS, AnalyzerError, Judgement, judge
from samestate.checks.base import Verdict
from samestate.checks.remarks import with_signatures
from samestate.evidence import records as r
from samestate.evidence import verify
from samestate.evidence.amendments import read_amendments
from samestate.evidence.archive import Archive
from samestate.evidence.signature import TrustedKey, new_key, read_signatures, sign, trusted_key
from samestate.plans.model import Plan

from . import builder as b
from . import tampering as t
from .agreement import disagreements, told
from .test_beside import beside
from .test_local_hit import recorded as local_hit_run

pytestmark = pytest.mark.tamper

LEAST = 2000
"""Random edits of sealed archives, together."""
EDITS = {"boundary": 1000, "boundary-instrumented": 600, "imported": 500}
"""Of each archive."""
UNTOUCHED = {"boundary": ("pass", "pass"), "boundary-instrumented": ("pass", "unknown"), "imported": ("pass", "pass")}
"""What the two say of each as it is: checks of pages are not recomputed, so that `verify.py` passes none of them."""
LEFT_TO_CHECK = {
    "save_delayed", "pages_digested", "pages_poisoned", "guards_checked", "state_computed", "blocks_assigned",
}  # fmt: skip
"""Kinds whose loss `verify.py` leaves to the checks of pages."""
REDUNDANT = {"blocks_assigned"}
"""Kinds of which some records can be lost without a trace in any check: others say as much."""


class Sealed(NamedTuple):
    """An archive on disk, and what is in it."""

    root: Path
    files: t.Files


@pytest.fixture(autouse=True)
def second_opinion() -> None:
    """`opinions` asks for it, once for every edit."""


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Sealed]:
    """Three small archives that pass: plain, instrumented on two ranks, and one with an imported control."""
    folder = tmp_path_factory.mktemp("tamper")
    plain = b.build(_small(b.small_plan())).write(folder / "boundary")
    instrumented = b.build(_small(b.instrumented_plan()), ranks=2).write(folder / "boundary-instrumented")
    borrower = b.imported(b.build(_small(b.small_plan()), arms=("candidate",)), control=plain)
    imported = borrower.write(folder / "imported")
    return {one.root.name: Sealed(one.root, t.read(one.root)) for one in (plain, instrumented, imported)}


def _small(plan: Plan) -> Plan:
    return plan.model_copy(update={"lengths": ["2C"], "output_tokens": 6})


class Opinions(NamedTuple):
    """What the two say of one edit."""

    check: Judgement
    second: verify.Judgement

    @property
    def verdicts(self) -> tuple[str, str]:
        return self.check.verdict.value, self.second.verdict

    @property
    def recomputed(self) -> str:
        """The worst that `verify.py` says of a required check."""
        found = {one.verdict for one in self.second.results if one.check in self.second.required}
        return next(
            (verdict for verdict in ("fail", "unknown", "not_exercised", "pass") if verdict in found), "unknown"
        )

    def of(self, check: str) -> tuple[str, str]:
        (theirs,) = [one.verdict for one in self.second.results if one.check == check]
        return b.result(self.check, check).verdict.value, theirs


def opinions(sealed: Sealed, files: t.Files) -> Opinions:
    """Judge the archive with these files instead of its own, twice; the two agree on every check of both."""
    t.write(sealed.root, sealed.files, files)
    try:
        found = Opinions(judge(Archive.open(sealed.root)), verify.judge(str(sealed.root)))
        assert told(found.second, found.check) == []
        return found
    finally:
        t.write(sealed.root, files, sealed.files)


def resealed(sealed: Sealed, name: str, lines: list[dict[str, Any]]) -> Opinions:
    """The same with one stream replaced, everything chained and sealed again."""
    return opinions(sealed, t.sealed({**sealed.files, name: t.stream(lines)}))


def streams(sealed: Sealed) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    for name in sorted(sealed.files):
        if name.endswith(".jsonl"):
            yield name, t.records(sealed.files[name])


def kind(line: dict[str, Any]) -> str:
    return str(line["rec"]["kind"])


# --- the program itself, as people run it -----------------------------------------------------------


def run(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`verify.py` of the archive at `root`, without a single package."""
    command = [sys.executable, "-I", "-S", "-B", str(root / "verify.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_it_runs_beside_the_archive(archives: dict[str, Sealed], tmp_path: Path) -> None:
    """Every required check of the plain plan, and the line of what it cannot compare."""
    result = run(archives["boundary"].root)
    assert (result.returncode, result.stderr) == (0, "")
    *checks, pinned, verdict = result.stdout.splitlines()
    told = {line.split()[0]: line.split()[1] for line in checks if not line.startswith(" ")}
    pin = json.loads(archives["boundary"].files["plan.json"])["analyzer"]["source_sha256"]
    assert {check for check, word in told.items() if word == "pass"} == set(ANALYZERS["boundary-v1"].floor)
    assert set(told.values()) == {"pass", "not_exercised"} and told.keys() == ANALYZERS["boundary-v1"].checks.keys()
    assert pinned == f"not compared     the analyzer source that the plan pins ({pin[:12]})"
    assert verdict == "verdict          pass: every required check was recomputed and passes"
    faulty = b.build(fault="full-lookup").write(tmp_path / "faulty").root
    assert run(faulty).returncode == 1
    tree = json.loads(run(faulty, "--json").stdout)
    assert (tree["verdict"], tree["exit_code"], tree["analyzer"]) == ("fail", 1, "boundary-v1")
    (faulty / "attempts.jsonl").write_bytes(b"")
    assert run(faulty).returncode == 1  # a seal that is broken does not take back what was seen
    (faulty / "plan.json").unlink()
    assert run(faulty).returncode == 3


PAGES = ["layout", "page-bytes", "page-coverage", "poison", "save-completion", "prefix-identity"]


@pytest.mark.regression
def test_page_checks_that_were_not_recomputed_keep_it_from_a_pass(archives: dict[str, Sealed], tmp_path: Path) -> None:
    """Whether they pass or fail."""
    damaged = b.build(_small(b.instrumented_plan()), ranks=2)
    b.edit_pages(
        damaged,
        lambda row: msgspec.structs.replace(row, digest="0" * 32),
        side=r.PageSide.DESTINATION,
        request=_reload(),
    )
    root = damaged.write(tmp_path / "damaged").root
    found = judge(Archive.open(root))
    assert (found.verdict, b.failing(found) & set(PAGES)) == (Verdict.FAIL, b.failing(found)) and b.failing(found)
    for one in (root, archives["boundary-instrumented"].root):
        result = run(one)
        assert result.returncode == 3
        assert f"not recomputed   {', '.join(PAGES)}\n" in result.stdout
        assert result.stdout.endswith("verdict          unknown: required checks were not recomputed\n")
        assert "fail" not in result.stdout


def _reload() -> str:
    return b.request_id("candidate", "N32.reload")


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"id": "frozen-v9"}, "analyzer frozen-v9 is not covered"),
        ({"required": ["integrity", "haruspicy"]}, "required checks were not recomputed"),
        ({"required": ["integrity", "services"]}, "evidence is missing"),
    ],
)
def test_what_it_does_not_cover_is_unknown(tmp_path: Path, change: dict[str, Any], word: str) -> None:
    plan = b.small_plan()
    required = change.get("required", plan.required_checks)
    run_ = b.build(plan.model_copy(update={"required_checks": required}))
    analyzer = run_.plan.analyzer.model_copy(update={"id": change.get("id", plan.analyzer.id)})
    run_.plan = run_.plan.model_copy(update={"analyzer": analyzer})
    result = run(run_.write(tmp_path / "a").root)
    assert result.returncode == 3
    assert ("not recomputed   haruspicy\n" in result.stdout) == ("haruspicy" in required)
    assert result.stdout.endswith(f"verdict          unknown: {word}\n")


# --- under the old seal ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def refused(request: pytest.FixtureRequest) -> Iterator[Counter[str]]:
    """Edits that were refused, by archive; said at the end, so that a log of CI has the number."""
    counted: Counter[str] = Counter()
    yield counted
    if counted:
        parts = ", ".join(f"{name} {count:,}" for name, count in counted.items())
        line = f"{counted.total():,} random edits of sealed archives ({parts}): none accepted by either verifier"
        request.config.stash.setdefault(t.SAID, []).append(line)


def test_there_are_two_thousand() -> None:
    """Two of the archives are edited in `make test-deep` alone; `pytest -m tamper` edits all three."""
    assert sum(EDITS.values()) >= LEAST


DEEP = pytest.mark.deep


@pytest.mark.slow
@pytest.mark.parametrize(
    "which", [pytest.param("boundary", marks=DEEP), pytest.param("boundary-instrumented", marks=DEEP), "imported"]
)
def test_no_edit_of_a_sealed_archive_passes(archives: dict[str, Sealed], refused: Counter[str], which: str) -> None:
    sealed, chance = archives[which], Random(which)
    assert opinions(sealed, sealed.files).verdicts == UNTOUCHED[which]
    assert opinions(sealed, sealed.files).recomputed == "pass"
    done: Counter[str] = Counter()
    while done.total() < EDITS[which]:
        files, edit = dict(sealed.files), chance.choice(t.EDITS)
        what = edit(chance, files)
        if files == sealed.files:
            continue
        done[edit.__name__] += 1
        found = opinions(sealed, files)
        assert "pass" not in (*found.verdicts, found.recomputed), what
        assert found.of("integrity") == ("unknown", "unknown"), what
        refused[which] += 1
    assert refused[which] == EDITS[which]
    assert done.keys() == {edit.__name__ for edit in t.EDITS} and min(done.values()) >= 20


# --- sealed again: what shows ---------------------------------------------------------------------


@pytest.mark.parametrize("which", ["boundary", "boundary-instrumented"])
def test_a_lost_operation_is_found_by_coverage(archives: dict[str, Sealed], which: str) -> None:
    sealed = archives[which]
    name = "arms/candidate/client.jsonl"
    lines = dict(streams(sealed))[name]
    planned = list(dict.fromkeys(line["rec"]["op"] for line in lines if "op" in line["rec"]))
    assert len(planned) == 5
    for op in planned:
        without = [line for line in lines if line["rec"].get("op") != op]
        found = resealed(sealed, name, without)
        assert "pass" not in found.verdicts
        assert found.of("coverage") == ("unknown", "unknown")
        assert f"4 of 5 planned operations done, first missing: {op}" in str(b.result(found.check, "coverage").findings)


def test_an_operation_lost_from_every_stream_and_from_resolved_is_found(archives: dict[str, Sealed]) -> None:
    """The request's records too, in both arms, and `resolved.json` told that it was never planned."""
    sealed = archives["boundary"]
    resolved = json.loads(sealed.files["resolved.json"])
    op = resolved["operations"].pop()
    files = {**sealed.files, "resolved.json": t.canonical(resolved)}
    for name, lines in streams(sealed):
        requests = {b.request_id(arm, op) for arm in ("control", "candidate")}
        kept = [line for line in lines if line["rec"].get("op") != op and line["rec"].get("request") not in requests]
        kept = [line for line in kept if not requests & {row[0] for row in line["rec"].get("rows", ())}]
        for line in kept:
            if kind(line) == "plan_resolved":
                line["rec"]["resolved_sha256"] = t.sha256(files["resolved.json"])
        files[name] = t.stream(kept)
    found = opinions(sealed, t.sealed(files))
    assert found.of("coverage") == ("unknown", "unknown") and "pass" not in found.verdicts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("which", "traceless", "left"),
    [
        ("boundary", set(), set()),
        pytest.param("boundary-instrumented", REDUNDANT, LEFT_TO_CHECK, marks=pytest.mark.deep),
    ],
)
def test_which_single_records_can_be_lost(
    archives: dict[str, Sealed], which: str, traceless: set[str], left: set[str]
) -> None:
    sealed = archives[which]
    passed: defaultdict[int, set[str]] = defaultdict(set)
    for name, lines in streams(sealed):
        for at, line in enumerate(lines):
            found = resealed(sealed, name, lines[:at] + lines[at + 1 :])
            for side, verdict in enumerate((found.verdicts[0], found.recomputed)):
                if verdict == "pass":
                    passed[side].add(kind(line))
    assert passed[0] == traceless
    assert passed[1] == left


def under(trusted: list[TrustedKey], root: Path, judgement: Judgement) -> Judgement:
    """A judgement as ``--trust`` makes it, by the signatures beside the seal."""
    signatures = read_signatures(root, judgement.seal_sha256, trusted)
    return with_signatures(judgement, signatures, read_amendments(root, judgement.seal_sha256))


@pytest.fixture(scope="module")
def resealings(request: pytest.FixtureRequest) -> Iterator[Counter[str]]:
    """Edits that were sealed again; said at the end."""
    counted: Counter[str] = Counter()
    yield counted
    if counted:
        line = (
            f"{counted['sealed again']:,} random edits that were sealed again: the two verifiers agree on each, and a "
            f"signature refuses each ({counted['passes without a signature']:,} pass where nobody asks for one)"
        )
        request.config.stash.setdefault(t.SAID, []).append(line)


AGREE = {"boundary": 250, "boundary-instrumented": 150, "lent": 150, "repaired": 250, "local-hit": 250}
"""Random edits of each archive, sealed again: whatever they do, the two say the same."""


@pytest.fixture(scope="module")
def others(archives: dict[str, Sealed], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Sealed]:
    """Archives with an arm of another plan, with a repair, a release and a server, and of repeats in one engine."""
    folder = tmp_path_factory.mktemp("others")
    plan = _small(b.small_plan()).model_copy(update={"name": "borrower", "control_from": "boundary"})
    lent = b.imported(b.build(plan, arms=("candidate",)), control=Archive.open(archives["boundary"].root))
    repaired = beside("strict-prefix", "0.5.5")
    repeats = local_hit_run(folder / "recorded", "1250", "1500")
    written = [
        run.write(folder / name) for name, run in (("lent", lent), ("repaired", repaired), ("local-hit", repeats))
    ]
    return archives | {one.root.name: Sealed(one.root, t.read(one.root)) for one in written}


@pytest.mark.slow
@pytest.mark.parametrize(
    "which", ["boundary", *(pytest.param(other, marks=DEEP) for other in AGREE if other != "boundary")]
)
def test_of_any_archive_that_is_sealed_again_the_two_say_the_same_and_no_signature_holds(
    others: dict[str, Sealed], resealings: Counter[str], tmp_path: Path, which: str
) -> None:
    """What only a signature shows passes both, under another seal: who trusts a key, or kept the hash, refuses it."""
    sealed, chance = others[which], Random(which)
    untouched = opinions(sealed, sealed.files)
    assert (untouched.verdicts[0], untouched.recomputed) == ("pass", "pass")
    new_key(tmp_path / "team.key")
    sign(Archive.open(sealed.root), tmp_path / "team.key")
    trusted = [trusted_key(tmp_path / "team.key.pub")]
    assert under(trusted, sealed.root, untouched.check).verdict is Verdict.PASS
    said: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for _ in range(AGREE[which]):
        files = dict(sealed.files)
        what = chance.choice(t.RESEALED)(chance, files)
        try:
            found = opinions(sealed, t.sealed(files))
        except AnalyzerError:
            continue
        except AssertionError as error:
            raise AssertionError(what) from error
        for one in found.second.results:
            said[one.check][one.verdict] += 1
        if t.sealed(files)["SHA256SUMS"] == sealed.files["SHA256SUMS"]:
            continue  # the edit changed nothing
        assert untouched.check.seal_sha256 not in (found.check.seal_sha256, found.second.seal_sha256), what
        assert under(trusted, sealed.root, found.check).verdict is not Verdict.PASS, what
        resealings["sealed again"] += 1
        resealings["passes without a signature"] += found.verdicts[0] == "pass"
    for check in set(untouched.second.required) & said.keys():
        assert len(said[check]) > 1, f"no edit touched {check}"


def test_files_that_may_not_go(archives: dict[str, Sealed]) -> None:
    sealed = archives["boundary"]
    for name in sorted(sealed.files.keys() - {"SHA256SUMS", "seal.json", "verify.py", "inputs.json"}):
        files = {other: data for other, data in sealed.files.items() if other != name}
        assert "pass" not in opinions(sealed, t.sealed(files)).verdicts, name
    # The program travels with the evidence and is none of it; that of an archive may be missing.
    files = {other: data for other, data in sealed.files.items() if other != "verify.py"}
    assert opinions(sealed, t.sealed(files)).verdicts == ("pass", "pass")


def test_a_changed_copy_of_the_program(archives: dict[str, Sealed]) -> None:
    sealed = archives["boundary"]
    files = {**sealed.files, "verify.py": sealed.files["verify.py"] + b"# pass\n"}
    found = opinions(sealed, t.sealed(files))
    assert found.verdicts == ("unknown", "unknown")
    assert "do not run it" in b.only(found.check, "integrity").message


@pytest.mark.parametrize(("process", "to"), [("worker-0", "worker-1"), ("scheduler", "frontend")])
def test_a_renamed_stream(archives: dict[str, Sealed], process: str, to: str) -> None:
    sealed = archives["boundary"]
    old, new = f"arms/candidate/{process}.jsonl", f"arms/candidate/{to}.jsonl"
    lines = dict(streams(sealed))[old]
    files = {name: data for name, data in sealed.files.items() if name != old}
    assert "pass" not in opinions(sealed, t.sealed({**files, new: t.stream(lines)})).verdicts


# --- sealed again: what only a signature shows ----------------------------------------------------


def forged(sealed: Sealed, change: Callable[[str, dict[str, Any]], None]) -> Opinions:
    """Every line of every stream changed by `change`, everything sealed again."""
    files = dict(sealed.files)
    for name, lines in streams(sealed):
        for line in lines:
            change(name, line)
        files[name] = t.stream(lines)
    found = opinions(sealed, t.sealed(files))
    assert found.check.seal_sha256 == found.second.seal_sha256 != t.sha256(sealed.files["seal.json"])
    return found


def test_a_token_changed_in_one_operation_fails(archives: dict[str, Sealed]) -> None:
    def change(name: str, line: dict[str, Any]) -> None:
        if kind(line) == "operation_output" and (name, line["rec"]["op"]) == (
            "arms/candidate/client.jsonl",
            "N32.reload",
        ):
            line["rec"]["token_ids"][3] += 1

    assert forged(archives["boundary"], change).verdicts == ("fail", "fail")


def test_tokens_changed_alike_everywhere_only_a_signature_shows(archives: dict[str, Sealed]) -> None:
    """Everything in the archive agrees with everything else. The seal hash is another, and nothing else is."""

    def change(_: str, line: dict[str, Any]) -> None:
        if kind(line) == "operation_output":
            line["rec"]["token_ids"][3] += 1

    assert forged(archives["boundary"], change).verdicts == ("pass", "pass")


@pytest.mark.parametrize("field", ["wall_time", "pid", "samestate_version", "t_ns", "logprobs", "attempt", "versions"])
def test_what_nothing_in_the_archive_contradicts_only_a_signature_shows(
    archives: dict[str, Sealed], field: str
) -> None:
    values: dict[str, Any] = {
        "wall_time": "1999-12-31T23:59:59.000Z", "pid": 1, "samestate_version": "9", "attempt": 2,
        "versions": {"sim": "9"},
    }  # fmt: skip

    def change(_: str, line: dict[str, Any]) -> None:
        if field == "t_ns":
            line["t_ns"] += 10**12
        elif field in line["rec"]:
            values["logprobs"] = [-0.5] * len(line["rec"].get("token_ids", ()))
            line["rec"][field] = values[field]

    assert forged(archives["boundary"], change).verdicts == ("pass", "pass")


def test_a_log_that_was_edited_only_a_signature_shows(archives: dict[str, Sealed]) -> None:
    sealed = archives["boundary"]
    found = opinions(sealed, t.sealed({**sealed.files, "arms/candidate/engine.log": b"nothing happened\n"}))
    assert found.verdicts == ("pass", "pass")


def test_a_disagreement_is_told(archives: dict[str, Sealed]) -> None:
    """Or all of the above would show nothing of `verify.py`."""
    sealed = archives["boundary"]
    second, check = verify.judge(str(sealed.root)), judge(Archive.open(sealed.root))
    assert told(second, check) == []
    for name in check.required:
        flipped = [
            one.model_copy(update={"verdict": Verdict.FAIL}) if one.check == name else one for one in check.results
        ]
        said = disagreements(second, flipped, check.required)
        assert [one.partition(":")[0] for one in said] == [name, "verdict"]
    fewer = second._replace(required=second.required[1:], not_recomputed=["layout"])
    assert [one.partition(":")[0] for one in told(fewer, check)] == ["required", "not recomputed"]
