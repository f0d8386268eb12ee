"""A claim, as its author writes it, and what its words alone give away."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from pydantic import Field

from samestate.checks import marker_close, page_coverage, pages, prefix_identity
from samestate.checks.base import CheckResult
from samestate.checks.written import Written, WrittenError, read_written

DIGESTS = frozenset({pages.CHECK, page_coverage.CHECK, prefix_identity.CHECK})
"""Checks that compare bytes of pages."""
ATTRIBUTIONS = frozenset({marker_close.CLASS, marker_close.SECOND})
"""Checks that say how a marker came about."""
Said = Iterator[tuple[str, str, str]]
"""Rule, why, remedy."""


class Kind(StrEnum):
    """What a claim is about. There is no kind for quality, capacity or promotion: no archive holds those."""

    EQUALITY = "equality"
    BOUNDARY = "boundary"
    TRANSFER = "transfer"
    BYTES = "bytes"
    """These bytes are those bytes."""
    ADDRESSING = "addressing"
    """The right pages were read and written."""
    COVERAGE = "coverage"
    ATTRIBUTION = "attribution"
    """A marker was forced, or sampled."""
    FAILURE = "failure"
    """Something was seen to be wrong."""
    LATENCY = "latency"
    CAUSE = "cause"
    """One thing makes another."""


class Claim(Written):
    """One sentence and what carries it."""

    id: Annotated[str, Field(pattern="^[a-z0-9][a-z0-9.-]*$")]
    kind: Annotated[Kind, Field(strict=False)]
    text: Annotated[str, Field(min_length=1, max_length=1000)]
    archive: Annotated[str, Field(pattern="^[0-9a-f]{12,64}$")]
    """Beginning of the seal hash. One: rounds are never pooled."""
    checks: Annotated[list[str], Field(default_factory=list)]
    """Checks of that archive's judgement."""
    records: Annotated[list[str], Field(default_factory=list)]
    """``arms/candidate/client.jsonl:17``: file and line, from 1."""
    ablation: Annotated[str, Field(pattern="^[0-9a-f]{12,64}$")] | None = None
    """Of a cause: beginning of the seal hash of the archive without it."""


class _File(Written):
    claims: Annotated[list[Claim], Field(min_length=1)]


_COUNTED = re.compile(
    r"(\d[\d,]*) (?:\w+ )??(tasks?|trials?|samples?|runs?|experiments?|models?|prompts?|inputs?|requests?|cases?|tests?"
    r"|comparisons?|generations?|reloads?|repeats?|operations?|loads?|saves?|records?|rows?|entries|ranks?)\b"
)
_SUMMED = re.compile(r"(\d+)(?:/(\d+))? (\w+)")
_TELLING: Mapping[Kind, re.Pattern[str]] = {
    Kind.LATENCY: re.compile(
        r"(?i)\b(faster|slower|quicker|speed-?ups?|latenc\w*|throughput|seconds|milliseconds?|\d+(\.\d+)? ?(s|ms|µs))\b"
    ),
    Kind.CAUSE: re.compile(
        r"(?i)\b(because|caus(e|es|ed|ing)|due to|owing to|thanks to|fix(es|ed)?|responsible for|leads? to|explains?)\b"
    ),
    Kind.ADDRESSING: re.compile(r"(?i)\b(address(es|ed|ing)?|(right|correct) (pages?|blocks?|places?))\b"),
}
"""Words that say what a claim is about, whatever kind it calls itself."""
_BEYOND = re.compile(
    r"(?i)\b(quality|accurac\w+|capacity|production|promot\w+|safe to|always|never"
    r"|(all|any|every) (models?|engines?|prompts?))\b"
)
_COUNTERFACTUAL = re.compile(
    r"(?i)\b(would(n't| not)? have|would (otherwise )?(be|close|continue|end|stop)|counterfactual\w*|otherwise"
    r"|without (a|the|its) (budget|store|force|marker))\b"
)
_LIVE = re.compile(r"(?i)\b(live|re-?ran|re-?run|reproduc\w+|new run)\b")
_INDEPENDENT = re.compile(r"(?i)\b(independent\w*|second implementation|re-?implement\w*)\b")
_DEVICE = (
    r"(?:(?:device|gpu|accelerator|video)(?:'s)?[ -](?:memor(?:y|ies)|buffers?|pages?|blocks?|tensors?|bytes)"
    r"|(?:memory|buffers?|pages?|blocks?|bytes) (?:on|of) the (?:device|gpu|card|accelerator)|vram|hbm)"
)
_LOOKED = (
    r"(?:(?:re-?)?(?:read(?:s|ing)?|verif\w+|check\w*|audit\w*|inspect\w*|examin\w*|compar\w*|validat\w*|confirm\w*))"
)
_READ_DEVICE = re.compile(rf"(?i)\b{_DEVICE}\b.*?\b{_LOOKED}\b|\b{_LOOKED}\b.*?\b{_DEVICE}\b")
_DENIED = re.compile(
    r"(?i)(?:\b(?:no|not(?! (?:only|just|merely))|nor|never|nobody|cannot|without|instead of|rather than)|n't)"
    rf"(?: \w+){{0,2}} (?:{_DEVICE}|{_LOOKED})\b"
)
_CLAUSE = re.compile(r"[.;:,!?()\n]|\b(?:but|although|though)\b")
_SAME_STATE = re.compile(r"(?i)\b(same|equal|identical)\b.*\bstates?\b|\bstates?\b.*\b(same|equal|identical)\b")


def read_claims(path: Path) -> list[Claim]:
    """Read a file of claims. Raises WrittenError."""
    claims = read_written(path, _File).claims
    seen: set[str] = set()
    for index, claim in enumerate(claims):
        if claim.id in seen:
            raise WrittenError(f"{path}: claims[{index}].id: {claim.id!r} is there twice; rename one")
        seen.add(claim.id)
    return claims


def device_read(text: str) -> str | None:
    """The words that say that a device's memory was read or verified; None: no clause says so, or it denies it."""
    for clause in _CLAUSE.split(" ".join(text.split())):
        if (found := _READ_DEVICE.search(clause)) and not _DENIED.search(clause):
            return found[0]
    return None


def by_words(claim: Claim, cited: list[CheckResult], *, recorded: bool) -> Said:
    """What the text says, whatever the claim calls itself. `recorded`: the control was recorded earlier."""
    for kind, words in _TELLING.items():
        if claim.kind is not kind and (found := words.search(claim.text)):
            yield (
                "kind-by-words",
                f"says {found[0]!r} and calls itself {claim.kind}",
                f"make it kind {kind}, or reword it",
            )
    if found := _BEYOND.search(claim.text):
        yield "beyond-scope", f"says {found[0]!r}, which no archive shows", "leave it out, or say what was run"
    if (found := _LIVE.search(claim.text)) and recorded:
        yield "recorded-not-live", f"says {found[0]!r}; the control was recorded earlier", "say so, or run both arms"
    if found := _INDEPENDENT.search(claim.text):
        yield (
            "not-independent",
            f"says {found[0]!r}; checks recompute results from recorded evidence",
            "say recomputed, not independent",
        )
    if (found := _SAME_STATE.search(claim.text)) and not DIGESTS & set(claim.checks):
        remedy = f"say tokens, or cite one of: {', '.join(sorted(DIGESTS))}"
        yield "state-from-tokens", "speaks of equal state; equal tokens do not prove it", remedy
    if (found := _COUNTERFACTUAL.search(claim.text)) and (
        claim.kind is Kind.ATTRIBUTION or ATTRIBUTIONS & set(claim.checks)
    ):
        why = f"says {found[0]!r}; stores and committed rows show the path that was taken, not another"
        yield "counterfactual", why, "say what was stored and what was committed"
    for number, noun in _COUNTED.findall(claim.text):
        yield from _count(int(number.replace(",", "")), noun, cited)


def _count(number: int, noun: str, cited: list[CheckResult]) -> Said:
    """A number with a noun must be what a cited check counted: comparisons are no tasks."""
    counted: dict[int, set[str]] = {}
    for result in cited:
        counted.setdefault(result.examined, set()).add(result.unit)
        for part, whole, word in _SUMMED.findall(result.summary.replace(",", "")):
            for digits in filter(None, (part, whole)):
                counted.setdefault(int(digits), set()).add(word)
    stem = noun.rstrip("s")
    if number not in counted:
        yield "count", f"says {number} {noun}; no cited check counted {number}", "cite the check that counted them"
    elif not any(stem in unit for unit in counted[number]):
        units = " or ".join(sorted(counted[number]))
        yield "unit", f"calls {number} {units} {noun}", f"say {units}: the unit of analysis is the check's"
