"""The simulated engine: steps over running and waiting requests, as vLLM's scheduler makes them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Many
from hashlib import blake2b
from itertools import count
from typing import ClassVar, NamedTuple

from samestate.engines.base import Ask, CounterValues, Engine, EngineError, EngineSpec, Generation, ResetResult
from samestate.engines.sim.blocks import OUT_OF_BLOCKS, Pool, Sequence, chunk_end
from samestate.engines.sim.conduct import Conduct, Hit
from samestate.engines.sim.faults import CONDUCTS
from samestate.engines.sim.journal import Journal, describe, engine_groups, registration, transfer_groups
from samestate.engines.sim.state import (
    ATTENTION,
    EOS,
    FIRST_TEXT,
    NULL_BLOCK,
    STATE_GROUPS,
    VOCABULARY,
    Settings,
)
from samestate.engines.sim.tier import Shelf, Tier
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
    EngineStarted,
    EngineStopped,
    FaultArmed,
    Lookup,
    RequestFinished,
    SchedulerConfigured,
    StateComputed,
)

_ENGINES = count(1)
"""Simulated engines have no process of their own: each one counts as one."""


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


class SimEngine(Engine):
    """The simulated engine. Faults by name in `conducts`; settings by vLLM's names, others ignored."""

    conducts: ClassVar[dict[str, type[Conduct]]] = CONDUCTS

    def __init__(self, spec: EngineSpec, shelf: Shelf | None = None) -> None:
        """`shelf`: where tiers lie that outlive their engine; None: nothing outlives this one."""
        self._spec = spec
        self._shelf = shelf or Shelf({})
        self._connected = spec.connector != "none"
        self._journal = Journal(spec)
        self._started = False
        self._counters = dict.fromkeys(COUNTERS, 0.0)
        self._requests = self._steps = 0
        self._process = f"simulated-{next(_ENGINES)}"

    # --- as every engine ------------------------------------------------------------------------

    def start(self) -> EngineStarted:
        self._settings = settings = Settings.of(self._spec)
        self._conduct = self._choose_conduct(self._spec.fault)
        self._pool = Pool(settings.num_gpu_blocks)
        tier = self._conduct.begins_with(self._shelf, self._spec.arm, self._spec.external_cache_bytes)
        self._workers = Workers(self._spec, settings, self._journal, self._conduct, tier)
        self._spec.log_path.write_text(f"simulated engine, arm {self._spec.arm}: {settings}\n", encoding="utf-8")
        ranks, journal = self._workers.ranks, self._journal
        started = describe(self._spec, settings, self._process, audited=journal.audited)
        journal.open(len(ranks))
        journal.say(started)
        groups = engine_groups(settings)
        journal.say(SchedulerConfigured(block_size=settings.block_size, saves_within_steps=False, engine_groups=groups))
        if self._spec.fault is not None:
            journal.say(FaultArmed(fault=self._spec.fault, parameters={}))
        registered = self._conduct.registers(transfer_groups(settings))
        journal.on_ranks(lambda rank: registration(rank, ranks, settings, registered, journal.reads_pages))
        self._started = True
        return started

    def encode(self, text: str) -> list[int]:
        return [FIRST_TEXT + byte for byte in text.encode()]

    def generate(self, asks: Many[Ask], output_tokens: int, seed: int, ignore_eos: bool) -> list[Generation]:
        self._require_running()
        sequences = [self._sequence(ask, output_tokens) for ask in asks]
        waiting, running = deque(sequences), list[Sequence]()
        while waiting or running:
            self._step(waiting, running, ignore_eos)
        self._workers.settle()
        return [sequence.answer() for sequence in sequences]

    def sample(self, tables: tuple[list[int], ...], computed: int) -> tuple[int, float]:
        """The greedy token after `computed` tokens and its log-probability. Never a special id."""
        slot = (computed - 1) // self._settings.block_size
        states = {group: tables[group][slot] for group in STATE_GROUPS}
        shards = b"".join(rank.read_out(computed, tables[ATTENTION], states) for rank in self._workers.ranks)
        logits = blake2b(shards, digest_size=6).digest()
        choice = int.from_bytes(logits[:4])
        return FIRST_TEXT + choice % (VOCABULARY - FIRST_TEXT), -int.from_bytes(logits[4:]) / 2**16

    def reset_local_cache(self) -> ResetResult:
        self._require_running()
        if self._conduct.forgets():
            self._pool.forget()
        return ResetResult(local_reset=True, external_kept=True, running_kept=True, attempts=1)

    def counters(self) -> CounterValues:
        self._require_running()
        return CounterValues(dict(self._counters), [])

    def arm_fault(self, name: str | None) -> None:
        self._require_running()
        self._conduct = self._workers.conduct = self._choose_conduct(name)
        if name is not None:
            self._journal.say(FaultArmed(fault=name, parameters={}))

    def close(self) -> None:
        if self._started:
            self._journal.say(EngineStopped())
        self._started = False
        self._journal.close()

    @property
    def all_blocks(self) -> int:
        """Blocks of the pool, the null block left out."""
        return self._settings.num_gpu_blocks - 1

    @property
    def idle_blocks(self) -> int:
        """Blocks that no request holds."""
        return self._pool.free

    # --- a step ---------------------------------------------------------------------------------

    def _step(self, waiting: deque[Sequence], running: list[Sequence], ignore_eos: bool) -> None:
        rows, preempted = self._go_on(waiting, running)
        if not preempted:
            rows += self._admit_waiting(waiting, running, rows)
        self._steps += 1
        self._record(rows, preempted)
        self._workers.clear_fresh()
        for index, row in enumerate(rows):
            self._run(row, index, ignore_eos)
        self._workers.land_late()
        for row in rows:
            if row.sequence.computed == len(row.sequence.tokens) and not row.speculates:
                self._sample(row.sequence, ignore_eos)
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
        tokens, conduct = len(sequence.tokens), self._conduct
        local = conduct.local_tokens(sequence, self._pool)
        hit = conduct.search(sequence, local, self._tier) if self._connected else Hit(local, local, {})
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
            row = row._replace(drafted=self._conduct.first_drafts(sequence))
            if self._conduct.within_step():
                row = row._replace(pending=hit)
            elif not self._load(sequence, hit):
                sequence.computed = self._conduct.credited_after_failure(hit, local)
                row = self._next_row(sequence, budget)
        if sequence.cached is None:
            sequence.cached = sequence.computed
        if sequence.computed == len(sequence.tokens):
            self._sample(sequence, ignore_eos=True)
        self._grow(row)
        return row

    def _load(self, sequence: Sequence, hit: Hit) -> bool:
        done = self._workers.load(sequence, hit)
        for (group, slot), _ in hit.pages.items() if done else ():
            self._pool.file(sequence.key(group, slot), sequence.tables[group][slot])
        return done

    def _next_row(self, sequence: Sequence, budget: int) -> Row:
        start = sequence.computed
        had = tuple(len(table) if start else 0 for table in sequence.tables)
        end = self._chunk_end(sequence, start, budget)
        left = sequence.output_tokens - len(sequence.logprobs)
        decodes = start == len(sequence.tokens) - 1 and start >= sequence.prompt
        drafted = min(self._settings.num_speculative_tokens, left - 1, budget - 1) if decodes else 0
        if 0 < start < sequence.prompt:
            start = self._conduct.chunk_start(sequence, start)
        return Row(sequence, start, end, drafted, had, None)

    def _chunk_end(self, sequence: Sequence, start: int, budget: int) -> int:
        if start >= len(sequence.tokens) - 1:
            return start + 1
        return chunk_end(start, len(sequence.tokens), self._settings.block_size, budget)

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
        self._conduct.preempted(blocks)
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

    # --- what a step computes ---------------------------------------------------------------------

    def _run(self, row: Row, index: int, ignore_eos: bool) -> None:
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
            self._workers.save(sequence.request, self._conduct.saves(sequence, places, row.start, end))

    def _compute(self, row: Row, start: int, end: int, index: int, source: int) -> None:
        """Tokens [start, end) of a request, from its state after `source` tokens."""
        sequence, conduct, ranks = row.sequence, self._conduct, self._workers.ranks
        tokens = sequence.tokens[start:end]
        sources, targets = sequence.state_blocks(source), sequence.state_blocks(end)
        read = {(rank, group): rank.state(sources[group]) for rank in ranks for group in STATE_GROUPS}
        if row.pending is not None:
            self._load(sequence, row.pending)
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
        kept = self._conduct.kept_drafts(sequence.request, accepted, row.drafted)
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

    def _sample(self, sequence: Sequence, ignore_eos: bool) -> None:
        self._sample_at(sequence, sequence.computed, ignore_eos)

    def _sample_at(self, sequence: Sequence, computed: int, ignore_eos: bool) -> None:
        sequence.take_token(*self.sample(sequence.tables, computed), eos=EOS, ignore_eos=ignore_eos)

    def _finish(self, sequence: Sequence) -> None:
        self._journal.audit(RequestFinished(request=sequence.request))
        if self._connected:
            self._workers.save(sequence.request, self._conduct.saves_at_end(sequence))
        self._pool.release(sequence.give_up())

    # --- odds and ends ----------------------------------------------------------------------------

    @property
    def _tier(self) -> Tier:
        return self._workers.tier

    @_tier.setter
    def _tier(self, tier: Tier) -> None:
        self._workers.tier = tier

    def _sequence(self, ask: Ask, output_tokens: int) -> Sequence:
        prompt, room = len(ask.token_ids), self._settings.max_model_len - output_tokens
        if not 0 < prompt <= room:
            raise EngineError(f"{prompt} prompt tokens: max_model_len allows 1 to that less {output_tokens}")
        self._requests += 1
        name = f"{ask.request}-{self._requests:08x}"
        return Sequence(name, list(ask.token_ids), output_tokens, self._settings.block_size, ask.salt)

    def _choose_conduct(self, fault: str | None) -> Conduct:
        if fault is None:
            return Conduct()
        if fault not in self.conducts:
            raise EngineError(f"fault {fault!r}: the simulated engine has only {', '.join(sorted(self.conducts))}")
        if not self._connected:
            raise EngineError(f"fault {fault!r} acts in the connector, and arm {self._spec.arm!r} has none")
        return self.conducts[fault]()

    def _require_running(self) -> None:
        if not self._started:
            raise EngineError(f"the engine of arm {self._spec.arm!r} is not running: start it first")

    def _count(self, counter: str, amount: int) -> None:
        self._counters[counter] += self._conduct.counts(counter, amount)
