"""``hit-length``: how much of a prompt is found, as a function of its length N, over a sweep; no dips, no silent zero.

A prompt that was computed before must be found up to B = C·⌊(N−1)/C⌋: nothing where N ≤ C, and a whole C more from
one token beyond each multiple of C on. From its second request on; the third finds no less than the second. Asked of
the local cache as long as nothing can have been evicted, and of the external one where every page was saved
(`cacheability`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from samestate.checks.base import CheckResult, Finding, Verdict
from samestate.checks.boundary import RULES
from samestate.checks.cacheability import Store
from samestate.checks.history import ArmHistory, History
from samestate.checks.scenario import Generation, generations
from samestate.checks.verdicts import conclude, fail, unknown
from samestate.evidence.records import OperationName
from samestate.plans.operations import boundary

CHECK = "hit-length"
Place = Literal["local", "external"]


class Sighting(NamedTuple):
    """A prompt that comes again."""

    one: Generation
    where: Place
    """``local``: it came since the last reset; ``external``: only before."""
    before: list[Generation]
    """Generations since its first one (local: since the reset), in order, of whatever prompt."""
    number: int
    """2 for the second request of the prompt in this place."""


def hit_length(history: History) -> CheckResult:
    """Hold p of every repeated prompt of every candidate against C·⌊(N−1)/C⌋."""
    findings: list[Finding] = []
    c = history.resolved.checkpoint_interval
    right: dict[str, set[int]] = {"local": set(), "external": set()}
    lengths: dict[str, set[int]] = {"local": set(), "external": set()}
    examined = 0
    for arm in history.candidates:
        store = Store(history, arm)
        found = list(sightings(history, arm))
        last: dict[tuple[str, Place], int] = {}
        for sighting in found:
            one, at = sighting.one, (sighting.one.prompt, sighting.where)
            examined += 1
            wrong = [*_expected(history, sighting, store, c), *_no_less(one, last.get(at))]
            last |= {at: one.first.start} if one.first else {}
            findings += wrong
            lengths[sighting.where].add(one.tokens)
            if wrong:
                right[sighting.where].discard(one.tokens)
            elif not any(known.place.case == one.prompt for known in findings):
                right[sighting.where].add(one.tokens)
    findings += _sweep(lengths, c)
    counts = ", ".join(f"{where} {len(right[where])}/{len(lengths[where])}" for where in ("local", "external"))
    rule = RULES[any(arm.drops_last_block for arm in history.candidates)]
    summary = f"hits of {rule} at all sightings, by length: {counts}"
    return conclude(CHECK, findings, unit="sightings", examined=examined, summary=summary)


def sightings(history: History, arm: ArmHistory) -> Iterator[Sighting]:
    """Every prompt of an arm that had come before under its salt, alone both times."""
    planned = {one.op.op: one for one in generations(history, [arm])}
    ever: list[Generation] = []
    since: list[Generation] = []
    counted: dict[tuple[str, Place], int] = {}
    for op in [op for case in history.cases(arm.name) for op in case.operations]:
        if op.name is OperationName.RESET:
            since = []
            continue
        one = planned[op.op]
        known_local, known = _like(one, since), _like(one, ever)
        if known and one.op.together is None:
            where: Place = "local" if known_local else "external"
            company = since if known_local else ever
            first = (known_local or known)[0]
            at = one.prompt, where
            # The first request of a prompt that the external cache has is its second one, as the cache sees it.
            counted[at] = counted.get(at, 1) + 1
            yield Sighting(one, where, company[company.index(first) :], counted[at])
        ever.append(one)
        since.append(one)


def _like(one: Generation, before: Sequence[Generation]) -> list[Generation]:
    return [other for other in before if (other.prompt, other.op.salt) == (one.prompt, one.op.salt)]


def _expected(history: History, sighting: Sighting, store: Store, c: int) -> Iterator[Finding]:
    one = sighting.one
    drops = one.arm.drops_last_block
    due = boundary(one.tokens, c, drops_last=drops)
    # vLLM 0.33 gives no block up where there is no connector: hashes that cover the next token do instead.
    most = due if one.arm.connected else boundary(one.tokens, c)
    place = one.place.model_copy(update={"boundary": due})
    if one.first is None or one.local is None:
        yield unknown("hit_unknown", f"{one.name}: no step or no lookup is recorded: its hit is not known", place)
        return
    p, evidence = one.first.start, [one.first.where]
    name = f"{one.name} (N={one.tokens}), request {sighting.number} of its prompt, {sighting.where}: hit of {p} tokens"
    make = fail if history.whole(one.arm.name) else unknown
    if p > most:
        rule = RULES[drops and one.arm.connected]
        yield make("above_boundary", f"{name}, and at most {rule} = {most} can be right", place, evidence)
    elif p < due:
        code = "hit_dips" if p else "silent_zero"
        if (why := _not_kept(sighting, store, due)) is None:
            yield make(code, f"{name}, expected {due}: it was there", place, evidence)
        else:
            yield unknown("not_kept", f"{name}, expected {due}: {why}", place, evidence)


def _not_kept(sighting: Sighting, store: Store, due: int) -> str | None:
    """Why what is due may not be there; None: it must be."""
    one = sighting.one
    if sighting.where == "external":
        stored = store.longest(one)
        return None if stored is not None and stored.boundary >= due else "it was not stored whole, or may be evicted"
    if not any(row.end == due for other in _like(one, sighting.before) for row in other.schedule or ()):
        return "no step of the earlier requests ended there"
    needed = sum(map(_blocks, [*sighting.before, one]))
    pool = min((seen.rec.num_blocks for seen in one.arm.ranks.values()), default=0)
    if needed >= pool:
        return f"requests since then may have used {needed} blocks, and the pool has {pool}"
    return None


def _blocks(one: Generation) -> int:
    """Blocks of all groups that a request can have taken, at most: states a step, and attention pages."""
    groups = next(iter(one.arm.ranks.values())).rec.engine_groups if one.arm.ranks else []
    end = one.tokens + one.op.output_tokens
    return sum(-(-end // group.tokens_per_block) + 1 for group in groups)


def _no_less(one: Generation, before: int | None) -> Iterator[Finding]:
    """The third finds what the second found."""
    if one.first is not None and before is not None and one.first.start < before:
        message = f"{one.name} (N={one.tokens}): hit of {one.first.start} tokens, and {before} the time before"
        yield unknown("hit_shrinks", message, one.place, [one.first.where])


def _sweep(lengths: dict[str, set[int]], c: int) -> Iterator[Finding]:
    """A sweep that meets no multiple of C, or never leaves it again, shows no function of N."""
    for where, seen in lengths.items():
        around = {n // c for n in seen if n % c == 0} & {(n - 1) // c for n in seen if n % c == 1}
        if not around:
            message = f"{where}: no multiple of C was asked for again, and one token more: nothing is shown about dips"
            yield Finding(code="no_sweep", verdict=Verdict.UNKNOWN, message=message)
