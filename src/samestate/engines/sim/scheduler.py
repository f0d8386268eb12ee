"""Steps over running and waiting requests, as vLLM's scheduler makes them: who goes on, begins, or must give way."""

from __future__ import annotations

from collections import deque

from samestate.engines.base import EngineError
from samestate.engines.sim.blocks import OUT_OF_BLOCKS, Pool, Sequence, chunk_end
from samestate.engines.sim.conduct import Hit
from samestate.engines.sim.journal import Journal
from samestate.engines.sim.runner import Row, Runner
from samestate.engines.sim.state import ATTENTION, NULL_BLOCK, STATE_GROUPS, Settings
from samestate.engines.sim.transfers import Workers
from samestate.evidence.records import (
    COUNTERS,
    EXTERNAL_HITS,
    EXTERNAL_QUERIES,
    LOCAL_HITS,
    LOCAL_QUERIES,
    PREEMPTIONS,
    Allocated,
    BatchRow,
    BatchScheduled,
    BatchSource,
    BlocksAssigned,
    Lookup,
    RequestFinished,
    StateComputed,
)


class Scheduler:
    """First come, first served; running requests go first, and the latest of them gives way."""

    def __init__(
        self,
        settings: Settings,
        pool: Pool,
        workers: Workers,
        runner: Runner,
        journal: Journal,
        *,
        connected: bool,
    ) -> None:
        self.counters = dict.fromkeys(COUNTERS, 0.0)
        self._settings, self._pool, self._workers, self._runner = settings, pool, workers, runner
        self._journal, self._connected = journal, connected
        self._steps = 0

    def run_all(self, sequences: list[Sequence], *, ignore_eos: bool) -> None:
        """Step until every request is over and every save done."""
        waiting, running = deque(sequences), list[Sequence]()
        while waiting or running:
            self._step(waiting, running, ignore_eos)
        self._workers.settle()

    def _step(self, waiting: deque[Sequence], running: list[Sequence], ignore_eos: bool) -> None:
        rows, preempted = self._go_on(waiting, running)
        if not preempted:
            rows += self._admit_waiting(waiting, running, rows)
        self._steps += 1
        self._record(rows, preempted)
        self._workers.clear_fresh()
        for index, row in enumerate(rows):
            self._runner.run(row, index, ignore_eos)
        self._workers.land_late()
        for row in rows:
            if row.sequence.computed == len(row.sequence.tokens) and not row.speculates:
                self._runner.sample(row.sequence, ignore_eos)
        for sequence in [row.sequence for row in rows if row.sequence.finish]:
            running.remove(sequence)
            self._finish(sequence)

    def _go_on(self, waiting: deque[Sequence], running: list[Sequence]) -> tuple[list[Row], list[str]]:
        """Rows of what runs already; what has no room for its next step loses its blocks, the latest first."""
        rows: list[Row] = []
        preempted: list[str] = []
        budget = self._settings.max_num_batched_tokens
        for sequence in list(running):
            if sequence not in running or budget < 1:
                break
            row = self._next_row(sequence, budget)
            while row.sequence in running and self._pool.free < self._wanted(row):
                victim = running.pop()
                if not running and victim is sequence:
                    raise EngineError(OUT_OF_BLOCKS)
                self._preempt(victim)
                preempted.append(victim.request)
                waiting.appendleft(victim)
            if sequence not in running:
                break
            budget -= row.end + row.drafted - row.start
            self._grow(row)
            rows.append(row)
        return rows, preempted

    def _admit_waiting(self, waiting: deque[Sequence], running: list[Sequence], rows: list[Row]) -> list[Row]:
        """Rows of requests that begin, first come first served, as long as there is room."""
        budget = self._settings.max_num_batched_tokens - sum(row.end + row.drafted - row.start for row in rows)
        admitted: list[tuple[Row, int, Hit, int]] = []
        while waiting and len(running) < self._settings.max_num_seqs and budget > 0:
            found = self._admit(waiting[0], budget)
            if found is None:
                break
            running.append(waiting.popleft())
            row = self._next_row(running[-1], budget)
            self._grow(row)
            admitted.append((row, budget, *found))
            budget -= row.end - row.start
        if not running:
            raise EngineError(OUT_OF_BLOCKS)
        self._workers.clear_fresh()
        return [self._first_row(*one) for one in admitted]

    def _admit(self, sequence: Sequence, budget: int) -> tuple[Hit, int] | None:
        """Look both caches up and take blocks; what was hit and the local tokens, or None where there is no room."""
        tokens, conduct = len(sequence.tokens), self._workers.conduct
        local = conduct.local_tokens(sequence, self._pool)
        hit = conduct.search(sequence, local, self._workers.tier) if self._connected else Hit(local, local, {})
        matched = max(hit.boundary - local, 0)
        sequence.computed = hit.credited if matched else local
        self._share(sequence, local)
        end = self._chunk_end(sequence, sequence.computed, budget)
        if self._pool.free < sequence.needs(max(hit.boundary, end)) + (len(STATE_GROUPS) if matched else 0):
            self._pool.release(sequence.give_up())
            return None
        self._count(LOCAL_QUERIES, tokens)
        self._count(LOCAL_HITS, local)
        if self._connected:
            self._count(EXTERNAL_QUERIES, tokens - local)
            self._count(EXTERNAL_HITS, matched)
        self._journal.audit(
            Lookup(
                request=sequence.request,
                queried_tokens=tokens,
                local_tokens=local,
                matched_tokens=matched,
                is_async=matched > 0 and not conduct.within_step(),
                salt=sequence.salt,
            )
        )
        if matched:
            sequence.grow(hit.boundary, self._take)
            tables = [list(table) for table in sequence.tables]
            self._journal.audit(Allocated(request=sequence.request, external_tokens=matched, block_ids=tables))
        return hit, local

    def _share(self, sequence: Sequence, local: int) -> None:
        """The local cache's blocks of [0, local)."""
        slots = local // self._settings.block_size
        sequence.attention.extend(self._pool.hit(sequence.key(ATTENTION, slot)) for slot in range(slots))
        for group in STATE_GROUPS if slots else ():
            key = sequence.key(group, slots - 1)
            held = self._pool.hit(key) if self._pool.holds(key) else NULL_BLOCK
            sequence.tables[group].extend([*[NULL_BLOCK] * (slots - 1), held])

    def _first_row(self, row: Row, budget: int, hit: Hit, local: int) -> Row:
        """Load what was hit, and go on from there; or compute again what did not come."""
        sequence = row.sequence
        if hit.boundary > local:
            row = row._replace(drafted=self._workers.conduct.first_drafts(sequence))
            if self._workers.conduct.within_step():
                row = row._replace(pending=hit)
            elif not self._runner.load(sequence, hit):
                sequence.computed = self._workers.conduct.credited_after_failure(hit, local)
                row = self._next_row(sequence, budget)
        if sequence.cached is None:
            sequence.cached = sequence.computed
        if sequence.computed == len(sequence.tokens):
            self._runner.sample(sequence, ignore_eos=True)
        self._grow(row)
        return row

    def _next_row(self, sequence: Sequence, budget: int) -> Row:
        start = sequence.computed
        had = tuple(len(table) if start else 0 for table in sequence.tables)
        end = self._chunk_end(sequence, start, budget)
        left = sequence.output_tokens - len(sequence.logprobs)
        decodes = start == len(sequence.tokens) - 1 and start >= sequence.prompt
        drafted = min(self._settings.num_speculative_tokens, left - 1, budget - 1) if decodes else 0
        if 0 < start < sequence.prompt:
            start = self._workers.conduct.chunk_start(sequence, start)
        return Row(sequence, start, end, drafted, had, None)

    def _chunk_end(self, sequence: Sequence, start: int, budget: int) -> int:
        if start >= len(sequence.tokens) - 1:
            return start + 1
        drops = bool(self._settings.eagle_block_drop)
        return chunk_end(start, len(sequence.tokens), self._settings.block_size, budget, drops_last=drops)

    def _wanted(self, row: Row) -> int:
        """Blocks for a row; a step with drafts may need the states of two slots."""
        return row.sequence.needs(row.end + row.drafted) + (len(STATE_GROUPS) if row.drafted else 0)

    def _grow(self, row: Row) -> None:
        for end in range(row.end, row.end + row.drafted + 1):
            row.sequence.grow(end, self._take)

    def _take(self) -> int:
        return self._workers.taken(self._pool.take())

    def _preempt(self, sequence: Sequence) -> None:
        blocks = sequence.give_up()
        self._workers.conduct.preempted(blocks)
        self._pool.release(blocks)
        self._count(PREEMPTIONS, 1)

    def _record(self, rows: list[Row], preempted: list[str]) -> None:
        """What the scheduler knows of the step before it runs."""
        say, reads_pages = self._journal.say, self._journal.reads_pages
        for row in rows if reads_pages else ():
            new = [table[first:] for table, first in zip(row.sequence.tables, row.had, strict=True)]
            if any(new):
                say(BlocksAssigned(step=self._steps, request=row.sequence.request, blocks=new))
        shown = [
            BatchRow(
                request=row.sequence.request,
                start=row.start,
                scheduled=row.end - row.start + row.drafted,
                drafted=row.drafted,
            )
            for row in rows
        ]
        sources = (BatchSource.CONNECTOR, BatchSource.SCHEDULER) if self._journal.audited else (BatchSource.SCHEDULER,)
        for source in sources:
            say(BatchScheduled(step=self._steps, source=source, rows=shown, preempted=preempted))
        for row in rows if reads_pages else ():
            if row.end % self._settings.block_size == 0 and not row.drafted:
                held = [[group, block] for group, block in row.sequence.state_blocks(row.end).items()]
                say(StateComputed(step=self._steps, request=row.sequence.request, boundary=row.end, blocks=held))

    def _finish(self, sequence: Sequence) -> None:
        self._journal.audit(RequestFinished(request=sequence.request))
        if self._connected:
            self._workers.save(sequence.request, self._workers.conduct.saves_at_end(sequence))
        self._pool.release(sequence.give_up())

    def _count(self, counter: str, amount: int) -> None:
        self.counters[counter] += self._workers.conduct.counts(counter, amount)
