"""What a step of the simulated engine computes: states, attention slots, tokens; and what is saved of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from samestate.engines.sim.blocks import Pool, Sequence
from samestate.engines.sim.conduct import Hit
from samestate.engines.sim.state import ATTENTION, EOS, STATE_GROUPS, Settings
from samestate.engines.sim.transfers import Workers

Sample = Callable[[tuple[list[int], ...], int], tuple[int, float]]
"""Block tables and computed tokens -> the next token and its log-probability."""


class Row(NamedTuple):
    """What one step does for one request."""

    sequence: Sequence
    start: int
    end: int
    """Without drafts."""
    drafted: int
    had: tuple[int, ...]
    """Lengths of its tables before the step."""
    pending: Hit | None
    """A load that runs within the step."""

    @property
    def speculates(self) -> bool:
        """Whether its drafts are verified: those of a fault are only scheduled."""
        return self.drafted > 0 and self.start >= self.sequence.prompt


class Runner:
    """Runs rows on the workers, one after the other; their results are those of a batch."""

    def __init__(self, settings: Settings, pool: Pool, workers: Workers, sample: Sample, *, connected: bool) -> None:
        self._settings, self._pool, self._workers = settings, pool, workers
        self._choose, self._connected = sample, connected

    def run(self, row: Row, index: int, ignore_eos: bool) -> None:
        """Compute a row, then file and save the blocks that it completed."""
        sequence, block = row.sequence, self._settings.block_size
        if row.speculates:
            end = self._speculate(row, ignore_eos)
        else:
            end = row.end
            self._compute(row, row.start, end, index, source=sequence.computed)
        sequence.computed = end
        complete = [(ATTENTION, slot) for slot in range(row.start // block, end // block)]
        if end % block == 0 and not row.drafted:
            complete += [(group, end // block - 1) for group in STATE_GROUPS]
        places = [sequence.place(group, slot) for group, slot in complete]
        for place in places:
            self._pool.file(sequence.key(place.group, place.slot), place.block)
        if self._connected:
            self._workers.save(sequence.request, self._workers.conduct.saves(sequence, places, row.start, end))

    def _compute(self, row: Row, start: int, end: int, index: int, source: int) -> None:
        """Tokens [start, end) of a request, from its state after `source` tokens."""
        sequence, conduct, ranks = row.sequence, self._workers.conduct, self._workers.ranks
        tokens = sequence.tokens[start:end]
        sources, targets = sequence.state_blocks(source), sequence.state_blocks(end)
        read = {(rank, group): rank.state(sources[group]) for rank in ranks for group in STATE_GROUPS}
        if row.pending is not None:
            self.load(sequence, row.pending)
        for rank in ranks:
            for group in STATE_GROUPS:
                page = read[rank, group] if start else rank.fresh
                page = conduct.source_state(sequence, start, len(tokens), rank.fresh, page)
                rank.write(targets[group], rank.advance(group, page, conduct.fed(sequence, index, tokens)))
            rank.attend(tokens, start, sequence.attention)

    def _speculate(self, row: Row, ignore_eos: bool) -> int:
        """A step with drafts: as many tokens as are accepted, and one more. Where the computed tokens end."""
        sequence, at = row.sequence, row.start
        accepted = self._accepted(at, row.drafted)
        kept = self._workers.conduct.kept_drafts(sequence.request, accepted, row.drafted)
        states: list[list[dict[int, bytes]]] = []
        while sequence.finish is None and at <= row.start + accepted:
            self._compute(row, at, at + 1, 0, source=at)
            at += 1
            blocks = sequence.state_blocks(at)
            states.append(
                [{group: rank.state(blocks[group]) for group in STATE_GROUPS} for rank in self._workers.ranks]
            )
            self._sample_at(sequence, at, ignore_eos)
        if kept < len(states):
            blocks = sequence.state_blocks(at)
            for rank, pages in zip(self._workers.ranks, states[kept], strict=True):
                for group, page in pages.items():
                    rank.write(blocks[group], page)
        return at

    @staticmethod
    def _accepted(position: int, drafted: int) -> int:
        """How many drafts are accepted: known from where they stand, so that all arms agree."""
        return (position * 7 + 3) % (drafted + 1)

    def sample(self, sequence: Sequence, ignore_eos: bool) -> None:
        self._sample_at(sequence, sequence.computed, ignore_eos)

    def _sample_at(self, sequence: Sequence, computed: int, ignore_eos: bool) -> None:
        sequence.take_token(*self._choose(sequence.tables, computed), eos=EOS, ignore_eos=ignore_eos)

    def load(self, sequence: Sequence, hit: Hit) -> bool:
        """Bring what was hit into the request's blocks; whether that worked."""
        done = self._workers.load(sequence, hit)
        for group, slot in hit.pages if done else ():
            self._pool.file(sequence.key(group, slot), sequence.tables[group][slot])
        return done
