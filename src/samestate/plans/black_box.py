"""What a probe of somebody else's server does, and what it costs at most, said before the first request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from samestate.evidence.records import EXTERNAL_HITS, LOCAL_HITS, LOCAL_QUERIES, OperationName
from samestate.plans.lengths import evaluate
from samestate.plans.model import AnalyzerPin, ArmPlan, EnginePlan, Plan

SERVER = "server"
"""The one arm."""
BESIDE = "beside_tokens"
"""In `ProbeAnswered.echo`: tokens of the prompt that was in the same request, 0 where there was none."""
PIECES = "logprob_pieces"
"""There: the pieces of an answer whose token ids nobody tells, as a JSON list."""
CACHED = "cached_tokens"
"""There: what the server's usage says, where that is no count; `OperationOutput` has counts alone."""
SHARED_START = 4
"""Tokens that all prompts may begin with, as a server puts some before each text: no more is reused in a cold run."""
SALTED = "other-salt"
"""Ends the operation that asks a prompt again under another salt, to see whether salts are heeded."""
SWEEP, EVICTION, CASE = "S", "eviction", "N"
"""Begin the cases: the search for C, prompts that only fill the cache, and those that are compared."""

AUTO = ("C", "C+1", "2C-1", "2C", "2C+1", "3C+7", "5C", "12C")
"""Around the boundaries where state is kept, and some that take several steps to compute."""
SMALLEST = 16
"""Single multiples of a smaller C are prompts too short to have a beginning of their own, so `around` has others."""
SHORTEST_CASE = 64
"""Tokens, of the shortest of those."""
PLAIN = ("129", "257", "513", "1030", "2055")
"""Instead of them where C is not known."""
FLOOR_PAIRS = 8
"""Cold runs beside cold runs that `samestate.checks.divergence` wants."""
REPEATS = 2
HELLO_TOKENS = 24
"""N of the first prompts, which only show what the server takes."""
TEXT_BYTES = 8
"""That one token of our texts may have."""
TEMPLATE = "ledger-en"
REQUIRED = ["integrity", "probe-whole", "probe-equality", "probe-reuse"]
SCOPE = (
    "Holds for this server, as it was while it was probed, for these prompts and lengths. Nothing of it was seen but "
    "its API and its counters."
)
NOT_SHOWN = [
    "Requests were serial, but for cold runs beside one other prompt; nothing is shown about concurrency.",
    "Prompts are synthetic, each with a beginning of its own; hits share the whole prompt, never a part of it.",
    "A later difference than the last token asked for would not be seen.",
    "Equal answers do not show that every internal state was equal: that takes the engine's own records.",
    "Whether the answers are any good was not evaluated.",
    "No performance was measured.",
    "One run; how often a fault would occur is not estimated.",
]


def reused(tokens: int, grown: Mapping[str, int], cached: int | None) -> int | None:
    """Prompt tokens that were not computed: by the counters where this request alone moved them, else by its usage.

    `grown`: by how much counters grew around it. A multiple of `tokens` looked up may be somebody else's, so it tells
    nothing. None: nobody tells.
    """
    queried, local = grown.get(LOCAL_QUERIES), grown.get(LOCAL_HITS)
    if queried == tokens and local is not None:
        return local + grown.get(EXTERNAL_HITS, 0)
    return cached


def covers(counted: int | None, tokens: int, beside: int) -> bool:
    """Whether the usage of a request is of all its prompts: that of llama.cpp is of the first alone.

    `counted`: prompt tokens by it; None, where it says nothing, is no such case. `tokens` and `beside`, what was sent,
    may be estimates.
    """
    return not beside or counted is None or counted >= max(tokens, beside) + min(tokens, beside) // 2


def around(interval: int | None) -> tuple[str, ...]:
    """Lengths to compare where nobody says others."""
    if interval is None:
        return PLAIN
    if interval >= SMALLEST:
        return AUTO
    k = -(-SHORTEST_CASE // interval)
    return (f"{k}C", f"{k}C+1", f"{2 * k}C-1", f"{2 * k}C", f"{2 * k}C+1", f"{5 * k}C+7", f"{8 * k}C", f"{32 * k}C")


class Means(NamedTuple):
    """What the probe may do to the server."""

    reset: bool
    evict: bool
    """Fill its local cache by prompts of our own."""


class Cost(NamedTuple):
    """Upper bounds."""

    requests: int
    tokens: int

    def __add__(self, other: Cost) -> Cost:  # type: ignore[override]
        return Cost(self.requests + other.requests, self.tokens + other.tokens)


def probe_plan(lengths: Sequence[str], output_tokens: int, means: Means, analyzer: AnalyzerPin) -> Plan:
    """The plan, under the words that its archive keeps."""
    operations = [OperationName.COLD, OperationName.COLD, OperationName.REPEAT, OperationName.INTERPOSER]
    operations.append(OperationName.REPEAT)
    if means.reset or means.evict:
        operations += [OperationName.RESET if means.reset else OperationName.INTERPOSER, OperationName.RELOAD]
    return Plan(
        format=1,
        name="probe",
        title="A server that somebody else runs, asked over its API",
        question="Does a prompt that the server has seen continue as it did when nothing was reused?",
        engine=EnginePlan(model="external", settings={}, external_cache_bytes=0),
        arms=[ArmPlan(name=SERVER, connector="none")],
        lengths=list(lengths),
        operations=operations,
        template=TEMPLATE,
        output_tokens=output_tokens,
        seed=0,
        temperature=0,
        ignore_eos=True,
        analyzer=analyzer,
        required_checks=REQUIRED,
        differing_settings=[],
        scope=SCOPE,
        not_shown=NOT_SHOWN,
    )


def cold_runs(lengths: int) -> int:
    """Second cold runs of each prompt."""
    return max(1, -(-FLOOR_PAIRS // max(1, lengths)))


def interposer_tokens(tokens: int, interval: int | None) -> int:
    """N of what comes between two repeats."""
    return min(tokens, (interval or tokens) + 1)


def case_cost(tokens: int, output_tokens: int, interval: int | None, colds: int, means: Means) -> Cost:
    """Of all requests of one length."""
    beside = interposer_tokens(tokens, interval)
    one = tokens + output_tokens
    own = Cost(1 + colds + REPEATS + 1, (1 + REPEATS) * one + colds * (one + beside + output_tokens) + beside + 1)
    return own + (Cost(2, 2 * (one + beside + output_tokens)) if means.reset or means.evict else Cost(0, 0))


def hello_cost() -> Cost:
    """Of one short prompt and of two in one request, where the server refuses nothing."""
    return Cost(2, 3 * (HELLO_TOKENS + 1))


def trial_cost(interval: int) -> Cost:
    """Of one prompt of C+1 tokens: cold, repeated twice at most, and under another salt."""
    return Cost(4, 4 * (interval + 2))


def sweep_cost(largest: int) -> Cost:
    """Of a search for C among prompts up to `largest` tokens."""
    lengths = sweep_lengths(largest)
    return Cost(3 * len(lengths) + 6, sum(3 * (length + 1) for length in lengths) + 6 * (largest // 2 + 1))


def sweep_lengths(largest: int) -> list[int]:
    """17, 33, 65, …, and the largest itself."""
    doubled = [(1 << power) + 1 for power in range(4, 21)]
    return [*(length for length in doubled if length < largest), *([largest] if largest >= doubled[0] else [])]


def fitting(
    lengths: Sequence[str], interval: int | None, most: int | None, output_tokens: int, means: Means, left: Cost
) -> tuple[list[tuple[str, int]], list[str]]:
    """(length, N) that fit the server's context and what is left of the budget, and what was left out, in words."""
    named = [(length, evaluate(length, interval or 1)) for length in lengths]
    kept = [one for one in named if most is None or one[1] + output_tokens <= most]
    left_out = [
        f"{name}: {n:,} tokens and {output_tokens} of output, and the server takes {most:,}"
        for name, n in named
        if (name, n) not in kept
    ]
    kept = list({n: (name, n) for name, n in reversed(kept)}.values())[::-1]
    while kept:
        colds = cold_runs(len(kept))
        costs = [case_cost(n, output_tokens, interval, colds, means) for _, n in kept]
        total = Cost(sum(one.requests for one in costs) + 25 * means.reset, sum(one.tokens for one in costs))
        if total.requests <= left.requests and total.tokens <= left.tokens:
            break
        largest = max(kept, key=lambda one: one[1])
        reusing = [one for one in kept if one[1] > (interval or 0)]
        if len(reusing) == 1 and len(kept) > 1:  # without it nothing could be compared
            largest = next(one for one in kept if one not in reusing)
        kept.remove(largest)
        left_out.append(f"{largest[0]}: the budget does not allow it")
    return kept, left_out
