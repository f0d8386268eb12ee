"""Requests on a transformers model, one at a time: prefill in chunks that end at multiples of C, a snapshot at each
end, lookup in a local and an external cache, restoration at B, and the records of all of it.

Nothing here schedules or pages: the steps are fixed by C, and a block is the number of a snapshot.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import NamedTuple

import torch
from transformers.cache_utils import Cache

from samestate.engines.children.protocol import Answer, Asked
from samestate.engines.children.transformers_cache import Layout, Page
from samestate.engines.children.transformers_faults import Conduct
from samestate.engines.children.transformers_journal import Journal
from samestate.engines.children.transformers_model import Model
from samestate.engines.children.transformers_store import External, Local, Prompt
from samestate.evidence.records import COUNTERS, EXTERNAL_HITS, EXTERNAL_QUERIES, LOCAL_HITS, LOCAL_QUERIES


class Hit(NamedTuple):
    """What a lookup found."""

    local: int
    """Tokens that the local cache holds."""
    boundary: int
    """B; `local`, where the external cache has no more."""
    credited: int
    """p."""


class Sequence:
    """One request as it runs. Tables grow by the blocks that its tokens reach into."""

    def __init__(self, request: str, prompt: Prompt, layout: Layout) -> None:
        self.request, self.prompt = request, prompt
        self.tables: list[list[int]] = [[] for _ in layout.groups]

    def grow(self, tokens: int, interval: int, blocks: Iterator[int]) -> list[list[int]]:
        """Give it blocks for so many tokens; the new ones, by group."""
        more = -(-tokens // interval) - len(self.tables[0])
        new = [[next(blocks) for _ in range(more)] for _ in self.tables]
        for table, added in zip(self.tables, new, strict=True):
            table.extend(added)
        return new


class Runner:
    """Runs requests on one model."""

    def __init__(self, model: Model, layout: Layout, journal: Journal, capacity: int, blocks: Iterator[int]) -> None:
        """`capacity`: of the external cache, bytes; 0: there is none."""
        self.counters = dict.fromkeys(COUNTERS, 0.0)
        self.conduct = Conduct()
        self._model, self._layout, self._journal, self._blocks = model, layout, journal, blocks
        self._local = Local()
        self._external = External(capacity) if capacity else None
        self._requests = 0

    def reset(self) -> None:
        """Drop the local cache."""
        self._local.clear()

    @torch.inference_mode()
    def run(self, ask: Asked, output_tokens: int, eos: frozenset[int]) -> Answer:
        """Answer one request greedily; `eos` ends it early."""
        began = time.monotonic()
        self._requests += 1
        prompt = Prompt(ask.token_ids, ask.salt, self._layout)
        sequence = Sequence(f"{ask.request}-{self._requests:08x}", prompt, self._layout)
        hit = self._look_up(sequence, ask.salt)
        cache = self._resume(sequence, hit)
        logits = self._prefill(sequence, cache, hit.credited)
        first = time.monotonic() - began
        tokens, chosen, margins = list[int](), list[float](), list[float]()
        while True:
            scores = torch.log_softmax(logits, dim=-1)
            best = torch.topk(scores, 2)
            tokens.append(int(scores.argmax()))
            chosen.append(float(best.values[0]))
            margins.append(float(best.values[0] - best.values[1]))
            stopped = tokens[-1] in eos
            if stopped or len(tokens) == output_tokens:
                break
            self._schedule(sequence, len(prompt) + len(tokens) - 1, 1)
            logits = self._model.step(tokens[-1:], cache)
        self._journal.finished(sequence.request)
        return Answer(
            request=sequence.request,
            token_ids=tokens,
            logprobs=chosen,
            margins=margins,
            finish_reason="stop" if stopped else "length",
            cached_tokens=hit.credited,
            first_token_s=first,
        )

    # --- lookup and load ----------------------------------------------------------------------------

    def _look_up(self, sequence: Sequence, salt: str | None) -> Hit:
        prompt = sequence.prompt
        tokens = len(prompt)
        local = prompt.longest(tokens - 1, self._local.__contains__)
        self._count(LOCAL_QUERIES, tokens)
        self._count(LOCAL_HITS, local)
        if self._external is None:
            return Hit(local, local, local)
        limit = self.conduct.lookup_tokens(tokens)
        boundary = max(local, prompt.longest(limit, self._external.__contains__))
        matched = boundary - local
        self._count(EXTERNAL_QUERIES, tokens - local)
        self._count(EXTERNAL_HITS, matched)
        self._journal.looked_up(sequence.request, tokens, local, matched, salt)
        return Hit(local, boundary, min(boundary, tokens - 1))

    def _resume(self, sequence: Sequence, hit: Hit) -> Cache:
        """A cache that holds the state of [0, B), and the rows of tokens up to p."""
        cache = self._model.fresh_cache()
        if not hit.boundary:
            return cache
        layout, interval = self._layout, self._layout.interval
        new = sequence.grow(hit.boundary, interval, self._blocks)
        pages = dict(self._local_pages(sequence.prompt, hit))
        if hit.boundary == hit.local:
            self._journal.assigned(sequence.request, new)
            layout.restore(cache, pages, hit.boundary)
            return cache
        self._journal.allocated(sequence.request, hit.boundary - hit.local, sequence.tables)
        fetched = self._fetch(sequence.prompt, hit)
        job = self._journal.load_submitted(sequence.request, hit.boundary, fetched, sequence.tables)
        arrived = {at: page for at, page in fetched.items() if self.conduct.arrives(layout.entries[at[0]])}
        layout.restore(cache, pages | arrived, hit.boundary)
        # Read back from the cache object that the next step computes on, not from what was put into it.
        landed = {(number, block): layout.read(cache, layout.entries[number], block) for number, block in fetched}
        self._journal.load_completed(job, landed)
        if hit.credited < hit.boundary:
            _trim(cache, hit.boundary - hit.credited)
        return cache

    def _local_pages(self, prompt: Prompt, hit: Hit) -> Iterator[tuple[tuple[int, int], Page]]:
        blocks = hit.local // self._layout.interval
        for entry in self._layout.entries:
            last = range(blocks - 1, blocks) if hit.boundary == hit.local else range(0)
            for block in last if entry.axis is None else range(blocks):
                yield (entry.number, block), self._local.get(prompt.key(entry.number, block))

    def _fetch(self, prompt: Prompt, hit: Hit) -> dict[tuple[int, int], Page]:
        """Pages from the external cache: of states those at B, of tokens those that are not local."""
        assert self._external is not None
        interval, found = self._layout.interval, dict[tuple[int, int], Page]()
        first, end = hit.local // interval, hit.boundary // interval
        for entry in filter(self.conduct.moves, self._layout.entries):
            for block in range(end - 1 if entry.axis is None else first, end):
                key = prompt.key(entry.number, block)
                found[entry.number, block] = self.conduct.fetch(entry, key, self._external)
        return found

    # --- computation and save -----------------------------------------------------------------------

    def _prefill(self, sequence: Sequence, cache: Cache, start: int) -> torch.Tensor:
        """Run the prompt from `start` on; logits after its last token."""
        tokens, interval = sequence.prompt.token_ids, self._layout.interval
        while True:
            end = min((start // interval + 1) * interval, len(tokens))
            self._schedule(sequence, start, end - start)
            if end % interval == 0:
                self._journal.computed(sequence.request, end, sequence.tables)
            logits = self._model.step(tokens[start:end], cache)
            if end % interval == 0:
                self._snapshot(sequence, cache, end // interval - 1)
            if end == len(tokens):
                return logits
            start = end

    def _schedule(self, sequence: Sequence, start: int, count: int) -> None:
        new = sequence.grow(start + count, self._layout.interval, self._blocks)
        self._journal.scheduled(sequence.request, start, count, new)

    def _snapshot(self, sequence: Sequence, cache: Cache, block: int) -> None:
        """Copy what the last block added, and the states at its end, into both caches."""
        prompt, layout = sequence.prompt, self._layout
        pages = {(entry.number, block): layout.read(cache, entry, block) for entry in layout.entries}
        for (number, _), page in pages.items():
            self._local.put(prompt.key(number, block), page)
        external = self._external
        if external is None or all(prompt.key(number, block) in external for number, _ in pages):
            return
        job = self._journal.save_submitted(sequence.request, pages, sequence.tables)
        for (number, _), page in pages.items():
            external.put(prompt.key(number, block), page)
        source = {at: layout.read(cache, layout.entries[at[0]], block) for at in pages}
        stored = {(number, block): external.get(prompt.key(number, block)) for number, _ in pages}
        self._journal.save_completed(job, source, stored)

    def _count(self, counter: str, amount: int) -> None:
        self.counters[counter] += amount


def _trim(cache: Cache, tokens: int) -> None:
    """Take the last tokens' rows out of the cache, and leave its states: what can be trimmed is, as servers did."""
    for layer in cache.layers:
        if hasattr(layer, "keys"):
            layer.crop(-tokens)
