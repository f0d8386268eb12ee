"""``probe-usage`` and ``probe-boundary``: what a server says of reuse, held against the prompt, C and its own counters.

With C known, a prompt of N tokens can have at most C·⌊(N−1)/C⌋ of them reused: its last token is always computed, and
state is kept at multiples of C alone.
"""

from __future__ import annotations

from collections.abc import Iterator

from samestate.checks.base import CheckResult, Finding
from samestate.checks.history import History
from samestate.checks.probe_history import Probed, interval, probed
from samestate.checks.verdicts import conclude, fail, not_exercised, unknown

USAGE = "probe-usage"
BOUNDARY = "probe-boundary"
_FIELD = "usage.prompt_tokens_details.cached_tokens"


def usage(history: History) -> CheckResult:
    """The usage field is a count, no more than can be reused, and what the counters say."""
    told = [one for one in probed(history) if one.cached is not None or one.odd_cached is not None]
    if not told:
        options = "vLLM: --enable-prompt-tokens-details; SGLang: --enable-cache-report"
        message = f"the server's usage has no cached tokens ({options})"
        return not_exercised(USAGE, "not_told", message, unit="answers")
    findings = [finding for one in told for finding in _usage(one)]
    against = sum(one.alone for one in told)
    summary = f"{len(told)} answers tell what was reused, {against} held against the counters"
    if findings:
        summary = f"{len({one.place.op for one in findings})}/{len(told)} answers lie: {findings[0].code}"
    return conclude(USAGE, findings, unit="answers", examined=len(told), summary=summary)


def _usage(one: Probed) -> Iterator[Finding]:
    prompts = 2 if one.beside else 1
    tokens = one.tokens + one.beside
    if one.odd_cached is not None:
        yield _lie("usage_no_count", f"{one.op}: {_FIELD} is {one.odd_cached}, no count", one)
        return
    cached = one.cached or 0
    if one.exact and one.usage_prompt not in (None, tokens):
        message = f"{one.op}: usage.prompt_tokens is {one.usage_prompt:,}, and {tokens:,} were sent"
        yield _lie("usage_prompt_tokens", message, one)
    if cached > tokens:
        yield _lie("usage_beyond_prompt", f"{one.op}: {_FIELD} is {cached:,}, of a prompt of {tokens:,}", one)
    elif cached > tokens - prompts and not (one.alone and one.external):  # vLLM counts what a connector matched
        message = f"{one.op}: {_FIELD} is {cached:,} = N, and the last token of a prompt is always computed"
        yield _lie("usage_whole_prompt", message, one)
    if one.alone and one.local is not None:
        counted = one.local + (one.external or 0)
        if cached != counted:
            message = f"{one.op}: {_FIELD} is {cached:,}, and the server's counters grew by {counted:,}"
            yield _lie("usage_contradicts_counters", message, one)


def _lie(code: str, message: str, one: Probed) -> Finding:
    return fail(code, message, one.place, one.where)


def boundary(history: History) -> CheckResult:
    """What was reused is a multiple of C, and leaves the last token to compute."""
    c = interval(history)
    told = [one for one in probed(history) if one.reused is not None and one.counted and not one.beside]
    if c is None:
        return not_exercised(BOUNDARY, "interval_unknown", "C is not known", unit="answers")
    findings = [finding for one in told for finding in _boundary(one, c)]
    reused = sum(bool(one.reused) for one in told)
    summary = f"{reused} answers went on from multiples of C={c:,}"
    if c == 1:
        summary = f"{reused} answers left the last token of their prompt to compute; C=1 has no other boundary"
    if findings:
        summary = findings[0].message
    return conclude(BOUNDARY, findings, unit="answers", examined=reused, summary=summary)


def _boundary(one: Probed, c: int) -> Iterator[Finding]:
    reused = one.reused or 0
    most = (one.tokens - 1) // c * c
    if reused % c == 0 and reused <= most:
        return
    source = "counters" if one.alone and one.local is not None else "usage"
    if reused >= one.tokens:
        said = "all of the prompt"
    elif reused == one.tokens - 1:
        said = "N-1, as if one were taken off after the lookup"
    elif reused % c:
        said = f"no multiple of C={c:,}"
    else:
        said = f"more than the {most:,} that the strict prefix allows"
    message = f"{one.op}: {reused:,} tokens reused of N={one.tokens:,} by its {source}, {said}"
    if one.external and one.tokens - 1 <= reused <= one.tokens:
        # Attention alone can go on from any token; recurrent state cannot. From outside the two look alike.
        yield _unsure(message, one)
    else:
        yield fail("unaligned_credit" if reused % c else "beyond_strict_prefix", message, one.place, one.where)


def _unsure(message: str, one: Probed) -> Finding:
    advice = "right for attention alone, wrong where state is recurrent: its answers decide"
    return unknown("retained_lookup_boundary", f"{message}: {advice}", one.place, one.where)
