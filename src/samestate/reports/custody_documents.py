"""What a swap leaves for people: decision, card, summary, manifest, index, tickets; each from the records alone.

The same records under the same analyzer give the same bytes: `samestate report FOLDER --reproduce` holds them together.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from samestate.checks import custody_probe
from samestate.checks.base import Verdict
from samestate.checks.custody_analyzer import CustodyJudgement, judge_custody
from samestate.checks.custody_history import CustodyHistory, spans
from samestate.checks.custody_tickets import tickets
from samestate.evidence.canonical import file_sha256, sha256_hex
from samestate.evidence.custody_records import (
    JOURNAL,
    PRIVATE,
    RAW,
    CompositionSeen,
    HostSeen,
    ProbeEnded,
    SnapshotTaken,
)
from samestate.evidence.seal import SEAL_NAME, SUMS_NAME
from samestate.evidence.text import printable
from samestate.reports.custody_card import card, functional_word

DECISION, VERDICT, CARD, SUMMARY = "decision.json", "verdict.json", "result-card.txt", "summary.md"
MANIFEST, INDEX, TICKETS = "artifact-manifest.json", "evidence-index.json", "tickets"
_FROZEN = ("model.revision", "template", "executable", "sources.", "gpus", "container.image", "container.id")


def documents(folder: Path) -> dict[str, bytes]:
    """Every derived document by its name in `folder`. OSError where records cannot be read."""
    judgement, history = judge_custody(folder), CustodyHistory.read(folder)
    journal = file_sha256(folder / JOURNAL)
    made: dict[str, bytes] = {
        MANIFEST: _json({"format": 1, "artifacts": _artifacts(folder)}),
        INDEX: _json({"format": 1, "checks": _index(judgement)}),
        VERDICT: _json(judgement.model_dump(mode="json")),
        DECISION: _json(_decision(judgement, journal)),
        CARD: card(judgement, history).encode(),
    }
    for ticket in tickets(judgement, history, journal):
        made[f"{TICKETS}/{ticket.id}.json"] = _json(ticket.model_dump(mode="json"))
    made[SUMMARY] = _summary(judgement, history, journal, made).encode()
    return made


def differing(folder: Path) -> list[str]:
    """Documents that are not, byte for byte, what the records give, and what the probe's archive has against it.

    One line each. Raises OSError.
    """
    made, found = documents(folder), []
    for name, data in made.items():
        path = folder / name
        if not path.is_file():
            found.append(f"{name}: is not there")
        elif path.read_bytes() != data:
            found.append(f"{name}: has other bytes than the records give")
    for path in sorted((folder / TICKETS).glob("*.json")):
        if (name := f"{TICKETS}/{path.name}") not in made:
            found.append(f"{name}: the records open no such ticket")
    return [*found, *_unsealed(folder)]


def _unsealed(folder: Path) -> list[str]:
    """What the probe's archive has against it: its bytes are the manifest's through its seal alone."""
    result = custody_probe.probe(CustodyHistory.read(folder))
    return [one.message for one in result.findings if one.verdict is Verdict.UNKNOWN]


def _artifacts(folder: Path) -> list[dict[str, Any]]:
    """Every file that the verdict rests on."""
    names = [JOURNAL, *(f"{RAW}/{path.name}" for path in sorted((folder / RAW).glob("*")) if path.is_file())]
    for archive in sorted(path.parent for path in folder.glob(f"*/{SEAL_NAME}") if path.parent.name != PRIVATE):
        names += [f"{archive.name}/{SUMS_NAME}", f"{archive.name}/{SEAL_NAME}"]
    return [
        {"name": name, "bytes": (folder / name).stat().st_size, "sha256": file_sha256(folder / name)}
        for name in names
        if (folder / name).is_file()
    ]


def _index(judgement: CustodyJudgement) -> list[dict[str, Any]]:
    return [
        {
            "check": result.check,
            "verdict": result.verdict.value,
            "summary": result.summary,
            "findings": [
                {"code": one.code, "message": one.message, "evidence": one.evidence} for one in result.findings
            ],
        }
        for result in judgement.results
    ]


def _decision(judgement: CustodyJudgement, journal: str) -> dict[str, Any]:
    return {
        "format": 1,
        "swap": judgement.swap,
        "verdict": judgement.verdict.value,
        "operational": judgement.operational.value,
        "functional": functional_word(judgement),
        "disposition": judgement.disposition,
        "incumbent": judgement.incumbent,
        "probe": judgement.probe.model_dump(mode="json") if judgement.probe else None,
        "claims": judgement.claims,
        "suppressed": judgement.suppressed,
        "analyzer": judgement.analyzer,
        "analyzer_sha256": judgement.analyzer_sha256,
        "journal_sha256": journal,
    }


def _summary(judgement: CustodyJudgement, history: CustodyHistory, journal: str, made: dict[str, bytes]) -> str:
    probe = judgement.probe
    window = list(spans(history))
    observations = len(history.all(HostSeen))
    lines = [
        f"# Swap {printable(judgement.swap or 'unknown')}",
        "",
        f"Verdict {judgement.verdict}: operational {judgement.operational}, functional {functional_word(judgement)}. "
        f"Disposition: {judgement.disposition}. Incumbent: {judgement.incumbent}.",
        "",
        f"Probe {printable(probe.plan)}: {probe.verdict or 'no verdict'}, the candidate's own, no part of the verdict."
        if probe
        else "No probe.",
        "",
        *_frozen(history),
        "| check | verdict | |",
        "|---|---|---|",
        *(f"| {one.check} | {one.verdict} | {_cell(one.summary)} |" for one in judgement.results),
        "",
        f"{len(window)} steps, {observations} transition observations.",
        "",
        *_list("Claimed", judgement.claims),
        *_list("Not claimed", judgement.suppressed),
        *_list(
            "Findings",
            [f"{one.check}: {finding.message}" for one in judgement.results for finding in one.findings],
        ),
        *_list("Not shown", judgement.not_shown),
        *_list("Tickets", [name for name in made if name.startswith(f"{TICKETS}/")]),
        f"Journal `{journal}` · manifest `{sha256_hex(made[MANIFEST])}` · index `{sha256_hex(made[INDEX])}` · "
        f"analyzer {judgement.analyzer} `{judgement.analyzer_sha256}`",
    ]
    return "\n".join(lines) + "\n"


def _frozen(history: CustodyHistory) -> list[str]:
    """What the swap was held to, and on what: model, devices, base, layers, reference, sources, probe."""
    before, started = history.first(SnapshotTaken, "before"), history.started
    fields = [
        (one.name, one.value or f"missing: {one.missing}")
        for one in (before.rec.fields if before else ())
        if one.name.startswith(_FROZEN)
    ]
    for noted in history.all(CompositionSeen):
        rec = noted.rec
        fields.append(
            (f"{rec.role} {rec.name}", rec.sha256 or (f"on {rec.base} {rec.base_sha256}" if rec.base else "unread"))
        )
        fields += [(f"layer {layer.name}", layer.seen or "unread") for layer in rec.layers]
    for noted in history.all(ProbeEnded):
        fields.append((f"probe {noted.rec.plan}", f"seal {noted.rec.seal_sha256}"))
    if started is not None:
        fields += [("spec", started.spec_sha256), ("samestate", started.samestate_version)]
    return ["| frozen | value |", "|---|---|", *(f"| {_cell(name)} | {_cell(value)} |" for name, value in fields), ""]


def _list(title: str, lines: list[str]) -> list[str]:
    return [f"## {title}", "", *(f"- {printable(line)}" for line in lines), ""] if lines else []


def _cell(text: str) -> str:
    return printable(text).replace("|", "\\|")


def _json(tree: Any) -> bytes:
    return (json.dumps(tree, indent=2, ensure_ascii=False) + "\n").encode()
