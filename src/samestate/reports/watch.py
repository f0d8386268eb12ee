"""What a running server's metrics say of reuse, from two readings of ``/metrics``; nothing here asks anybody.

Names are vLLM's (``vllm/v1/metrics/loggers.py``), those of our cache's tiers and those of the audit. What a server does
not export is None here, never 0.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from samestate.evidence.text import printable

NONE = "–"
SOURCES = "vllm:prompt_tokens_by_source"
CACHED = "vllm:prompt_tokens_cached_by_source"
PROMPT_TOKENS = "vllm:prompt_tokens"
RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
TTFT = "vllm:time_to_first_token_seconds"
HITS = {
    "local": ("vllm:prefix_cache_hits", "vllm:prefix_cache_queries"),
    "external": ("vllm:external_prefix_cache_hits", "vllm:external_prefix_cache_queries"),
}
AUDIT = {
    "reloads": "vllm:samestate_audit_reloads",
    "reloaded_tokens": "vllm:samestate_audit_reloaded_tokens",
    "boundary_faults": "vllm:samestate_audit_boundary_faults",
    "waits": "vllm:samestate_audit_waits",
    "wait_seconds": "vllm:samestate_audit_wait_seconds",
}
INTERVAL = "vllm:samestate_audit_interval_tokens"
LOOKUPS = "vllm:samestate_audit_lookups"
ERRORS = "vllm:samestate_audit_errors"
FAILED = "vllm:samestate_audit_failed_transfers"
TIER_MISSES = "vllm:kv_offload_tier_misses"
TIER_UNSTORED = "vllm:kv_offload_tier_unstored_pages"
TIER_DAMAGED = "vllm:kv_offload_tier_damaged_pages"
TIER_PAUSED = "vllm:kv_offload_tier_paused"

NAMES = (
    *(SOURCES, CACHED, PROMPT_TOKENS, RUNNING, WAITING, TTFT, INTERVAL, LOOKUPS, ERRORS, FAILED),
    *(TIER_MISSES, TIER_UNSTORED, TIER_DAMAGED, TIER_PAUSED),
    *(name for pair in HITS.values() for name in pair),
    *AUDIT.values(),
)
"""Everything that is read."""

_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?\s*")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
Labels = tuple[tuple[str, str], ...]


class Reading(NamedTuple):
    """``/metrics`` at one moment."""

    at_s: float
    """A monotonic clock."""
    samples: Mapping[str, Mapping[Labels, float]]
    """By name, a counter's without ``_total``."""

    def total(self, name: str) -> float | None:
        """The sum over all labels."""
        values = self.samples.get(name)
        return sum(values.values()) if values is not None else None

    def by(self, name: str, label: str) -> dict[str, float] | None:
        """Sums by the values of one label."""
        values = self.samples.get(name)
        if values is None:
            return None
        sums: dict[str, float] = {}
        for labels, value in values.items():
            key = dict(labels).get(label, "")
            sums[key] = sums.get(key, 0.0) + value
        return sums


class View(NamedTuple):
    """What is shown. Counts are since the server began; `window` holds the same of the time between two readings."""

    models: list[str]
    interval: int | None
    """C; None: not told. 0: no recurrent state."""
    running: float | None
    waiting: float | None
    seconds: float
    """Between the readings; 0 of the first one."""
    prompt_tokens: float | None
    sources: dict[str, float] | None
    """Prompt tokens by where they came from."""
    cached: dict[str, float] | None
    """Those that were not computed, by tier."""
    rates: dict[str, float | None]
    """Tokens hit over tokens looked up, local and external; None: nothing was looked up."""
    window: dict[str, Any]
    lookups: dict[str, float] | None
    audit: dict[str, float | None] | None
    """None: the server has no audit."""
    errors: float | None
    failed: dict[str, float] | None
    tier_misses: dict[str, float] | None
    tier_unstored: dict[str, float] | None
    damaged: float | None
    paused: float | None

    @property
    def alarms(self) -> list[str]:
        """What must not be there, one line each, the worst first."""
        found = (
            (self.audit and self.audit["boundary_faults"], "reloads with a boundary that no state has"),
            (self.damaged, "damaged pages found, none of them served"),
            (sum((self.failed or {}).values()), "transfers reported as failed"),
            (self.paused, "stores left alone after failures"),
            (self.errors, "observations of the audit that failed: its records are incomplete"),
        )
        return [f"{count:,.0f} {what}" for count, what in found if count]

    @property
    def wrong(self) -> bool:
        """Positive evidence of a wrong boundary."""
        return bool(self.audit and self.audit["boundary_faults"])


def read(text: str, at_s: float) -> Reading:
    """What an exposition says of `NAMES`; lines that are none are passed over."""
    samples: dict[str, dict[Labels, float]] = {}
    for line in text.splitlines():
        match = _SAMPLE.fullmatch(line)
        if match is None:
            continue
        name = match[1].removesuffix("_total")
        base = name.removesuffix("_sum").removesuffix("_count")
        if name not in NAMES and base not in NAMES:
            continue
        labels = tuple((key, re.sub(r"\\(.)", r"\1", value)) for key, value in _LABEL.findall(match[2] or ""))
        try:
            value = float(match[3])
        except ValueError:
            continue
        if not math.isnan(value):
            samples.setdefault(name, {})[labels] = value
    return Reading(at_s, samples)


def view(now: Reading, before: Reading | None = None) -> View:
    """The view of a reading, against an earlier one of the same server."""
    models = {dict(labels).get("model_name", "") for values in now.samples.values() for labels in values}
    interval = now.samples.get(INTERVAL)
    audited = LOOKUPS in now.samples or AUDIT["reloads"] in now.samples or interval is not None
    return View(
        models=sorted(printable(name) for name in models if name),
        interval=int(max(interval.values())) if interval else None,
        running=now.total(RUNNING),
        waiting=now.total(WAITING),
        seconds=now.at_s - before.at_s if before else 0.0,
        prompt_tokens=now.total(PROMPT_TOKENS),
        sources=now.by(SOURCES, "source"),
        cached=now.by(CACHED, "source"),
        rates={where: _rate(now.total(hits), now.total(queries)) for where, (hits, queries) in HITS.items()},
        window=_window(now, before) if before else {},
        lookups=now.by(LOOKUPS, "result"),
        audit={key: now.total(name) for key, name in AUDIT.items()} if audited else None,
        errors=now.total(ERRORS),
        failed=now.by(FAILED, "direction"),
        tier_misses=now.by(TIER_MISSES, "reason"),
        tier_unstored=now.by(TIER_UNSTORED, "reason"),
        damaged=now.total(TIER_DAMAGED),
        paused=now.total(TIER_PAUSED),
    )


def _window(now: Reading, before: Reading) -> dict[str, Any]:
    """The same between two readings: rates, tokens a second, the mean time to a first token."""
    seconds = now.at_s - before.at_s
    prompt = _grown(now.total(PROMPT_TOKENS), before.total(PROMPT_TOKENS))
    sources = now.by(SOURCES, "source") or {}
    earlier = before.by(SOURCES, "source") or {}
    sums, counts = f"{TTFT}_sum", f"{TTFT}_count"
    return {
        "prompt_tokens_per_second": prompt / seconds if prompt is not None and seconds > 0 else None,
        "sources": {name: _grown(value, earlier.get(name, 0.0)) for name, value in sources.items()},
        "rates": {
            where: _rate(_grown(now.total(hits), before.total(hits)), _grown(now.total(asked), before.total(asked)))
            for where, (hits, asked) in HITS.items()
        },
        "mean_ttft_seconds": _rate(
            _grown(now.total(sums), before.total(sums)), _grown(now.total(counts), before.total(counts))
        ),
    }


def _grown(now: float | None, before: float | None) -> float | None:
    """By how much a counter grew; one that is smaller began anew with its server."""
    if now is None:
        return None
    return now if before is None or now < before else now - before


def _rate(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def facts(shown: View) -> dict[str, Any]:
    """The view for a script."""
    return {**shown._asdict(), "alarms": shown.alarms}


# --- for people -----------------------------------------------------------------------------------


def table(shown: View, url: str, note: str = "") -> RenderableType:
    """The view as a few lines of a terminal. `note`: a line below, e.g. that the server is silent."""
    parts: list[RenderableType] = [Text(f"{', '.join(shown.models) or 'no model yet'} at {url}", style="bold")]
    grid = Table.grid(padding=(0, 2))
    for heading, text in _rows(shown):
        grid.add_row(Text(heading, style="dim"), text)
    parts.append(grid)
    parts += [Text(f"alarm: {line}", style="bold red") for line in shown.alarms]
    if note:
        parts.append(Text(printable(note), style="yellow"))
    return Group(*parts)


def _rows(shown: View) -> Iterator[tuple[str, str]]:
    window = shown.window
    yield "requests", f"{_count(shown.running)} running, {_count(shown.waiting)} waiting"
    speed = window.get("prompt_tokens_per_second")
    now = f", {speed:,.0f} a second" if speed is not None else ""
    yield "prompt tokens", f"{_count(shown.prompt_tokens)}{now}"
    yield "by source", _shares(shown.sources)
    if window:
        yield f"last {shown.seconds:.0f} s", _shares(window["sources"])
    for where, rate in shown.rates.items():
        recent = window["rates"][where] if window else None
        yield f"{where} hits", _percent(rate) + (f" (last {_percent(recent)})" if recent is not None else "")
    yield "cached by tier", _shares(shown.cached)
    if (ttft := window.get("mean_ttft_seconds")) is not None:
        yield "first token", f"{1000 * ttft:,.0f} ms on average"
    if shown.audit is None:
        yield "audit", "not attached: boundaries, faults and waits are not seen (samestate serve-args)"
    else:
        yield from _audit(shown, shown.audit)
    if shown.tier_misses is not None or shown.tier_unstored is not None:
        yield "tier refusals", f"loads: {_reasons(shown.tier_misses)} · saves: {_reasons(shown.tier_unstored)}"


def _audit(shown: View, audit: dict[str, float | None]) -> Iterator[tuple[str, str]]:
    interval = {None: "C not told", 0: "no recurrent state"}.get(shown.interval, f"C = {shown.interval or 0:,}")
    faults = f"{_count(audit['boundary_faults'])} with a boundary that no state has"
    yield "boundaries", f"{interval}; {_count(audit['reloads'])} reloads, {faults}"
    yield "look-ups", _reasons(shown.lookups)
    waited = audit["wait_seconds"]
    yield "waits", f"{_count(audit['waits'])} for saves" + (f", {waited:.3f} s" if waited else "")
    yield "failed", f"{_reasons(shown.failed)}; audit errors {_count(shown.errors)}"


def _count(value: float | None) -> str:
    return NONE if value is None else f"{value:,.0f}"


def _percent(value: float | None) -> str:
    return NONE if value is None else f"{100 * value:.1f} %"


def _shares(values: Mapping[str, float | None] | None) -> str:
    known = {name: value for name, value in (values or {}).items() if value}
    whole = sum(known.values())
    return " · ".join(f"{_said(name)} {_percent(value / whole)}" for name, value in known.items()) or NONE


def _reasons(values: Mapping[str, float] | None) -> str:
    return ", ".join(f"{_said(name)} {value:,.0f}" for name, value in (values or {}).items() if value) or NONE


def _said(name: str) -> str:
    return printable(name).replace("_", " ")
