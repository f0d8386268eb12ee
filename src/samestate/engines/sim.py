"""A simulated engine: vLLM's hybrid scheduling in miniature, deterministic, without torch.

It writes the records that a real engine writes. Its "model" makes every mistake about state
visible in the output:

- the recurrent state is a chain over tokens, invertible in both arguments: a state that is
  wrong once stays wrong, and a token applied twice is another state;
- an attention page holds one slot per token; a token written twice into its slot does no harm;
- every rank has its own shard of both, and the next token hashes all of them.

As in vLLM's align mode, slot k of the recurrent table holds a state only if a scheduled chunk
ended at (k+1)·C tokens. Loads are asynchronous: lookup, allocation, load, completion, and only
then the first batch.
"""

from __future__ import annotations

import platform
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from hashlib import blake2b
from itertools import pairwise
from typing import ClassVar, Literal, NamedTuple

from samestate.engines.base import Ask, CounterValues, Engine, EngineError, EngineSpec, Generation, ResetResult
from samestate.evidence.canonical import sha256_hex
from samestate.evidence.records import (
    COUNTERS,
    EXTERNAL_HITS,
    EXTERNAL_QUERIES,
    LOCAL_HITS,
    LOCAL_QUERIES,
    Allocated,
    AnyRecord,
    BatchRow,
    BatchScheduled,
    BatchSource,
    BlocksAssigned,
    EngineGroup,
    EngineStarted,
    EngineStopped,
    Entry,
    EntryKind,
    FaultArmed,
    GuardsChecked,
    LoadCompleted,
    LoadSubmitted,
    Lookup,
    PageRow,
    PagesDigested,
    PageSide,
    PagesPoisoned,
    RankRegistered,
    RequestFinished,
    SaveCompleted,
    SaveDelayed,
    SaveSubmitted,
    SaveWaited,
    Scalar,
    SchedulerConfigured,
    StateComputed,
    TransferGroup,
    TransferPart,
)
from samestate.evidence.stream import StreamWriter

VOCABULARY = 512
EOS = 2
FIRST_TEXT = 3
"""Ids below are special and never sampled; byte b of a text is token ``FIRST_TEXT + b``."""

ATTENTION, RECURRENT = 0, 1
"""Engine groups; the transfer groups have the same numbers."""
NULL_BLOCK = 0
SLOT_BYTES = 2
STATE_BYTES = 8
PRIME = 2**61 - 1
SENTINEL = b"\x41" * 8
"""What a poisoned page is filled with."""

Key = tuple[int, bytes]
"""Group and hash of the whole token prefix that a block ends."""


class Place(NamedTuple):
    """One page of a job: where it is in the request's table, and which block that is."""

    group: int
    slot: int
    block: int


class PendingSave(NamedTuple):
    """A save that was submitted and is not reported yet."""

    job: int
    request: str
    places: list[Place]
    keys: list[Key]
    parts: list[TransferPart]
    due_ns: int


class Conduct:
    """How the connector behaves. This one is right; a fault is a subclass with one other method."""

    def lookup_tokens(self, tokens: int) -> int:
        """Of a request's `tokens`, how many the external lookup may cover: never the last one."""
        return tokens - 1

    def arrives(self, rank: int, group: int, page: bytes) -> bytes | None:
        """What a load puts in place for `page`; None puts nothing and reports success."""
        return page

    def due(self, due_ns: int) -> int:
        """When a save whose completion is held back until `due_ns` is reported as done."""
        return due_ns


class FullLookup(Conduct):
    """Looks up the whole prompt; the last token is subtracted only after retrieval (B = N, p = N-1)."""

    def lookup_tokens(self, tokens: int) -> int:
        return tokens


def chunk_end(start: int, prompt_tokens: int, block: int, limit: int) -> int:
    """Where vLLM ends the prefill chunk that begins at `start` (``_mamba_block_aligned_split``).

    At most `limit` tokens; never past the last multiple of `block` at or below
    ``prompt_tokens - 1`` without a stop there. Without speculation and shared-prefix stops.
    """
    end = min(prompt_tokens, start + limit)
    if end < prompt_tokens:
        aligned = end // block * block
        if aligned > start or block <= limit:
            end = aligned
    stops = [(prompt_tokens - 1) // block * block]
    if start % block:
        stops.append((start // block + 1) * block)
    return min((stop for stop in stops if start < stop < end), default=end)


class _Settings(NamedTuple):
    """The settings that the simulation knows, by vLLM's names."""

    block_size: int
    max_model_len: int
    max_num_batched_tokens: int
    tensor_parallel_size: int
    num_gpu_blocks: int
    """Block 0, the null block, included."""

    @classmethod
    def of(cls, spec: EngineSpec) -> _Settings:
        """Read `spec`; serve arguments win. Raises EngineError for a value that is no count."""
        given: dict[str, Scalar] = dict(spec.settings)
        words = " ".join(spec.serve_args).replace("=", " ").split()
        given.update(
            (flag.removeprefix("--").replace("-", "_"), int(value))
            for flag, value in pairwise(words)
            if flag.startswith("--") and value.isdigit()
        )

        def count(name: str, default: int) -> int:
            value = given.get(name)
            if value is None:
                return default
            if type(value) is not int or value < 1:
                raise EngineError(f"engine.settings.{name}: must be a positive whole number, not {value!r}")
            return value

        block_size, max_model_len = count("block_size", 16), count("max_model_len", 8192)
        two_requests = 1 + 4 * -(-max_model_len // block_size)
        return cls(
            block_size,
            max_model_len,
            count("max_num_batched_tokens", 8192),
            count("tensor_parallel_size", 1),
            count("num_gpu_blocks_override", two_requests),
        )

    @property
    def page_bytes(self) -> int:
        """Both groups' pages, padded to the larger of the two, as vLLM does."""
        return max(self.effective_bytes)

    @property
    def effective_bytes(self) -> tuple[int, int]:
        """Bytes of a page that computation reads, by group."""
        return self.block_size * SLOT_BYTES, STATE_BYTES


class _Pool:
    """Block ids, reused in the order in which they became free; a cached block stays until then."""

    def __init__(self, blocks: int) -> None:
        self._free: dict[int, None] = dict.fromkeys(range(NULL_BLOCK + 1, blocks))
        self._by_key: dict[Key, int] = {}
        self._key_of: dict[int, Key] = {}

    def take(self) -> int:
        if not self._free:
            raise EngineError("out of cache blocks: raise num_gpu_blocks_override or shorten the prompt")
        block = next(iter(self._free))
        del self._free[block]
        if key := self._key_of.pop(block, None):
            del self._by_key[key]
        return block

    def release(self, blocks: Sequence[int]) -> None:
        self._free.update(dict.fromkeys(block for block in blocks if block != NULL_BLOCK))

    def file(self, key: Key, block: int) -> None:
        if key not in self._by_key:
            self._by_key[key] = block
            self._key_of[block] = key

    def holds(self, key: Key) -> bool:
        return key in self._by_key

    def hit(self, key: Key) -> int:
        """The cached block of `key`, taken out of the free list."""
        block = self._by_key[key]
        self._free.pop(block, None)
        return block

    def forget(self) -> None:
        self._by_key.clear()
        self._key_of.clear()


class _Tier:
    """The external tier: one page per rank under each key, least recently used out first."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._used = 0
        self._pages: OrderedDict[Key, list[bytes]] = OrderedDict()

    def __contains__(self, key: Key) -> bool:
        return key in self._pages

    def put(self, key: Key, pages: list[bytes]) -> None:
        self._pages[key] = pages
        self._used += sum(map(len, pages))
        while self._used > self._capacity:
            _, evicted = self._pages.popitem(last=False)
            self._used -= sum(map(len, evicted))

    def get(self, key: Key, rank: int) -> bytes:
        self._pages.move_to_end(key)
        return self._pages[key][rank]


class _Rank:
    """One worker: its memory, ``num_blocks`` pages, and its shard of the model."""

    def __init__(self, rank: int, settings: _Settings) -> None:
        self._block_size = settings.block_size
        self._shard = rank * VOCABULARY + 1  # non-zero: an empty slot is no token
        self._factor = 6_364_136_223_846_793_005 % PRIME + rank
        self.memory = [bytearray(settings.page_bytes) for _ in range(settings.num_gpu_blocks)]

    def clear(self, block: int) -> None:
        self.memory[block][:] = bytes(len(self.memory[block]))

    def write(self, block: int, page: bytes) -> None:
        self.memory[block][: len(page)] = page

    def compute(self, tokens: Sequence[int], start: int, attention: Sequence[int], source: int, target: int) -> None:
        """Apply `tokens`, which begin at `start`: state from block `source` to block `target`."""
        state = int.from_bytes(self.memory[source][:STATE_BYTES]) if start else self._shard
        for token in tokens:
            state = (state * self._factor + token + 1) % PRIME
        self.write(target, state.to_bytes(STATE_BYTES))

        slots = array("H", [self._shard + token for token in tokens]).tobytes()
        done = 0
        while done < len(tokens):
            slot, offset = divmod(start + done, self._block_size)
            fits = min(self._block_size - offset, len(tokens) - done)
            page = self.memory[attention[slot]]
            page[offset * SLOT_BYTES : (offset + fits) * SLOT_BYTES] = slots[
                done * SLOT_BYTES : (done + fits) * SLOT_BYTES
            ]
            done += fits

    def read_out(self, end: int, attention: Sequence[int], state: int) -> bytes:
        """What this shard adds to the logits after `end` tokens."""
        digest = blake2b(self.memory[state][:STATE_BYTES], digest_size=16)
        for slot in range(-(-end // self._block_size)):
            filled = min(self._block_size, end - slot * self._block_size)
            digest.update(self.memory[attention[slot]][: filled * SLOT_BYTES])
        return digest.digest()


class _Sequence:
    """A request in flight: tokens, prefix hashes of its full blocks, block tables of both groups."""

    def __init__(self, request: str, tokens: list[int], block_size: int, salt: str | None) -> None:
        self.request = request
        self.salt = sha256_hex(salt.encode()) if salt else ""
        self.tokens = tokens
        self.tables: tuple[list[int], list[int]] = ([], [])
        self._block_size = block_size
        self._hashes: list[bytes] = []

    def key(self, group: int, slot: int) -> Key:
        while len(self._hashes) <= slot:
            first = len(self._hashes) * self._block_size
            block = array("H", self.tokens[first : first + self._block_size]).tobytes()
            before = self._hashes[-1] if self._hashes else self.salt.encode()
            self._hashes.append(blake2b(before + block, digest_size=16).digest())
        return group, self._hashes[slot]

    def longest(self, first: int, limit: int, held: Callable[[Key], bool]) -> int:
        """Tokens of the longest whole-block prefix within `limit` whose pages from slot `first` on
        and whose state are `held`; 0 if none."""
        full = first
        while full < limit // self._block_size and held(self.key(ATTENTION, full)):
            full += 1
        slots = (slot for slot in range(full, first, -1) if held(self.key(RECURRENT, slot - 1)))
        return next(slots, 0) * self._block_size


class SimEngine(Engine):
    """The simulated engine. Faults by name in `conducts`; settings by vLLM's names, others ignored."""

    conducts: ClassVar[dict[str, type[Conduct]]] = {"full-lookup": FullLookup}

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._connected = spec.connector != "none"
        self._audited = self._connected and spec.audit_level != "off"
        self._reads_pages = self._connected and spec.audit_level in ("digest", "poison")
        self._pending: list[PendingSave] = []
        self._fresh: list[int] = []
        """Blocks that were taken and are not cleared yet."""
        self._started = False
        self._scheduler: StreamWriter | None = None
        self._workers: list[StreamWriter] = []
        self._counters = dict.fromkeys(COUNTERS, 0.0)
        self._requests = self._steps = self._jobs = 0

    def start(self) -> EngineStarted:
        self._settings = settings = _Settings.of(self._spec)
        self._conduct = self._choose_conduct()
        self._pool = _Pool(settings.num_gpu_blocks)
        self._tier = _Tier(self._spec.external_cache_bytes)
        self._ranks = [_Rank(rank, settings) for rank in range(settings.tensor_parallel_size)]
        self._spec.log_path.write_text(f"simulated engine, arm {self._spec.arm}: {settings}\n", encoding="utf-8")
        started = self._describe()
        self._scheduler = self._open_stream("scheduler")
        self._scheduler.append(started)
        groups = self._registration(0).engine_groups
        self._scheduler.append(
            SchedulerConfigured(block_size=settings.block_size, saves_within_steps=False, engine_groups=groups)
        )
        if self._spec.fault is not None:
            self._scheduler.append(FaultArmed(fault=self._spec.fault, parameters={}))
        if self._audited:
            self._workers = [self._open_stream(f"worker-{rank}") for rank in range(len(self._ranks))]
            self._on_ranks(self._registration)
        self._started = True
        return started

    def encode(self, text: str) -> list[int]:
        return [FIRST_TEXT + byte for byte in text.encode()]

    def generate(self, asks: Sequence[Ask], output_tokens: int, seed: int, ignore_eos: bool) -> list[Generation]:
        # One after the other: the simulation has no batches.
        return [self._generate(ask, output_tokens, ignore_eos) for ask in asks]

    def _generate(self, ask: Ask, output_tokens: int, ignore_eos: bool) -> Generation:
        self._require_running()
        prompt = len(ask.token_ids)
        if not 0 < prompt <= self._settings.max_model_len - output_tokens:
            raise EngineError(f"{prompt} prompt tokens: max_model_len allows 1 to that less {output_tokens}")
        self._requests += 1
        name = f"{ask.request}-{self._requests:08x}"
        sequence = _Sequence(name, list(ask.token_ids), self._settings.block_size, ask.salt)
        cached = computed = self._admit(sequence)
        logprobs: list[float] = []
        finish = "length"
        while len(logprobs) < output_tokens:
            end = computed + 1
            if computed < prompt:
                end = chunk_end(computed, prompt, self._settings.block_size, self._settings.max_num_batched_tokens)
            self._step(sequence, computed, end)
            computed = end
            if computed < len(sequence.tokens):
                continue
            token, logprob = self.sample(sequence.tables, computed)
            sequence.tokens.append(token)
            logprobs.append(logprob)
            if token == EOS and not ignore_eos:
                finish = "stop"
                break
        if self._audited:
            self._say(RequestFinished(request=sequence.request))
        self._settle()
        for table in sequence.tables:
            self._pool.release(table)
        return Generation(sequence.request, sequence.tokens[prompt:], logprobs, finish, cached)

    def sample(self, tables: tuple[list[int], list[int]], computed: int) -> tuple[int, float]:
        """The greedy token after `computed` tokens and its log-probability. Never a special id."""
        attention, states = tables
        state = states[(computed - 1) // self._settings.block_size]
        shards = b"".join(rank.read_out(computed, attention, state) for rank in self._ranks)
        logits = blake2b(shards, digest_size=6).digest()
        choice = int.from_bytes(logits[:4])
        return FIRST_TEXT + choice % (VOCABULARY - FIRST_TEXT), -int.from_bytes(logits[4:]) / 2**16

    def reset_local_cache(self) -> ResetResult:
        self._require_running()
        self._pool.forget()
        return ResetResult(local_reset=True, external_kept=True, running_kept=True, attempts=1)

    def counters(self) -> CounterValues:
        self._require_running()
        return CounterValues(dict(self._counters), [])

    def close(self) -> None:
        if self._started and self._scheduler is not None:
            self._scheduler.append(EngineStopped())
        self._started = False
        for stream in (*self._workers, self._scheduler):
            if stream is not None:
                stream.close()

    # --- scheduling ---------------------------------------------------------------------------

    def _admit(self, sequence: _Sequence) -> int:
        """Look both caches up, load what is external, and return p."""
        tokens, block = len(sequence.tokens), self._settings.block_size
        local = sequence.longest(0, tokens - 1, self._pool.holds)
        attention, states = sequence.tables
        attention.extend(self._pool.hit(sequence.key(ATTENTION, slot)) for slot in range(local // block))
        if local:
            states.extend([NULL_BLOCK] * (local // block - 1))
            states.append(self._pool.hit(sequence.key(RECURRENT, local // block - 1)))
        self._count(LOCAL_QUERIES, tokens)
        self._count(LOCAL_HITS, local)
        if not self._connected:
            return local
        boundary = sequence.longest(local // block, self._conduct.lookup_tokens(tokens), lambda key: key in self._tier)
        matched = max(boundary - local, 0)
        self._count(EXTERNAL_QUERIES, tokens - local)
        self._count(EXTERNAL_HITS, matched)
        self._audit(
            Lookup(
                request=sequence.request,
                queried_tokens=tokens,
                local_tokens=local,
                matched_tokens=matched,
                is_async=matched > 0,
                salt=sequence.salt,
            )
        )
        if not matched:
            return local
        self._grow(sequence, boundary)
        tables = [list(table) for table in sequence.tables]
        self._audit(Allocated(request=sequence.request, external_tokens=matched, block_ids=tables))
        self._clear_fresh()
        self._load(sequence, local // block, boundary)
        # vLLM subtracts one after a load of the whole prompt, with no thought of recurrent state.
        return min(boundary, tokens - 1)

    def _grow(self, sequence: _Sequence, end: int) -> None:
        """Blocks for the tokens before `end`; of the recurrent table only the slot that `end` falls in."""
        attention, states = sequence.tables
        slots = -(-end // self._settings.block_size)
        while len(attention) < slots:
            attention.append(self._take())
        states.extend([NULL_BLOCK] * (slots - len(states)))
        if states[slots - 1] == NULL_BLOCK:
            states[slots - 1] = self._take()

    def _take(self) -> int:
        block = self._pool.take()
        self._fresh.append(block)
        return block

    def _clear_fresh(self) -> None:
        """In the workers: wait for the saves that still read a new block, then clear it."""
        for save in [one for one in self._pending if any(place.block in self._fresh for place in one.places)]:
            began = time.monotonic_ns()
            self._sleep_until(save.due_ns)
            waited = time.monotonic_ns() - began
            self._on_ranks(lambda rank: SaveWaited(rank=rank, jobs=[save.job], waited_ns=waited, timed_out=False))  # noqa: B023
            self._complete(save)
        for block in self._fresh:
            for rank in self._ranks:
                rank.clear(block)
        self._fresh.clear()

    def _step(self, sequence: _Sequence, start: int, end: int) -> None:
        """Schedule and compute tokens [start, end), then file and save the blocks they completed."""
        had = [len(table) if start else 0 for table in sequence.tables]
        self._grow(sequence, end)
        self._steps += 1
        if self._reads_pages:
            new = [table[first:] for table, first in zip(sequence.tables, had, strict=True)]
            if any(new):
                self._say(BlocksAssigned(step=self._steps, request=sequence.request, blocks=new))
        row = BatchRow(request=sequence.request, start=start, scheduled=end - start, drafted=0)
        for source in (BatchSource.CONNECTOR, BatchSource.SCHEDULER) if self._audited else (BatchSource.SCHEDULER,):
            self._say(BatchScheduled(step=self._steps, source=source, rows=[row], preempted=[]))
        attention, states = sequence.tables
        block = self._settings.block_size
        if self._reads_pages and end % block == 0:
            held = [[RECURRENT, states[end // block - 1]]]
            self._say(StateComputed(step=self._steps, request=sequence.request, boundary=end, blocks=held))
        self._clear_fresh()
        source_block = states[max(start - 1, 0) // block]
        target_block = states[(end - 1) // block]
        for rank in self._ranks:
            rank.compute(sequence.tokens[start:end], start, attention, source_block, target_block)
        complete = [(ATTENTION, slot) for slot in range(start // block, end // block)]
        if end % block == 0:
            complete.append((RECURRENT, end // block - 1))
        for group, slot in complete:
            self._pool.file(sequence.key(group, slot), sequence.tables[group][slot])
        if self._connected:
            self._save(sequence, [place for place in complete if sequence.key(*place) not in self._tier])

    # --- transfers ----------------------------------------------------------------------------

    def _load(self, sequence: _Sequence, first: int, boundary: int) -> None:
        slots = boundary // self._settings.block_size
        places = [
            Place(group, slot, sequence.tables[group][slot])
            for group, slot in [*((ATTENTION, slot) for slot in range(first, slots)), (RECURRENT, slots - 1)]
        ]
        keys = [sequence.key(place.group, place.slot) for place in places]
        job, parts = self._job(places)
        request, moved = sequence.request, sum(part.bytes for part in parts)
        self._on_ranks(lambda rank: LoadSubmitted(rank=rank, job=job, request=request, boundary=boundary, parts=parts))
        stored = [[self._tier.get(key, rank) for key in keys] for rank in range(len(self._ranks))]
        self._digest("load", PageSide.STORED, "submitted", job, request, places, stored)
        guards = self._poison(job, places) if self._spec.audit_level == "poison" else {}
        for number, rank in enumerate(self._ranks):
            for place, page in zip(places, stored[number], strict=True):
                arrived = self._conduct.arrives(number, place.group, page)
                if arrived is not None:
                    rank.write(place.block, arrived)
        for place, key in zip(places, keys, strict=True):
            self._pool.file(key, place.block)
        self._digest("load", PageSide.DESTINATION, "completed", job, request, places, self._pages(places))
        if guards:
            self._on_ranks(lambda rank: self._guards_checked(rank, job, guards))
        self._on_ranks(lambda rank: LoadCompleted(rank=rank, job=job, ok=True, bytes=moved))

    def _save(self, sequence: _Sequence, slots: list[tuple[int, int]]) -> None:
        if not slots:
            return
        places = [Place(group, slot, sequence.tables[group][slot]) for group, slot in slots]
        job, parts = self._job(places)
        request, delay = sequence.request, self._spec.save_delay_ms
        self._on_ranks(lambda rank: SaveSubmitted(rank=rank, job=job, request=request, parts=parts))
        if delay:
            self._on_ranks(lambda rank: SaveDelayed(rank=rank, job=job, delay_ms=delay))
        self._digest("save", PageSide.SOURCE, "submitted", job, request, places, self._pages(places))
        due = self._conduct.due(time.monotonic_ns() + delay * 1_000_000) if delay else 0
        keys = [sequence.key(place.group, place.slot) for place in places]
        self._pending.append(PendingSave(job, request, places, keys, parts, due))
        if not delay:
            self._settle()

    def _settle(self) -> None:
        """Let every pending save be done; the engine has nothing else to do."""
        for save in list(self._pending):
            self._sleep_until(save.due_ns)
            self._complete(save)

    def _complete(self, save: PendingSave) -> None:
        self._pending.remove(save)
        pages = self._pages(save.places)
        for index, key in enumerate(save.keys):
            self._tier.put(key, [of_rank[index] for of_rank in pages])
        for side in (PageSide.SOURCE, PageSide.STORED):
            self._digest("save", side, "completed", save.job, save.request, save.places, pages)
        moved = sum(part.bytes for part in save.parts)
        self._on_ranks(lambda rank: SaveCompleted(rank=rank, job=save.job, ok=True, bytes=moved))

    def _sleep_until(self, due_ns: int) -> None:
        while (left := due_ns - time.monotonic_ns()) > 0:
            time.sleep(left / 1e9)

    def _pages(self, places: Sequence[Place]) -> list[list[bytes]]:
        """The effective bytes of pages in the engine's memory, by rank."""
        sizes = self._settings.effective_bytes
        return [[bytes(rank.memory[place.block][: sizes[place.group]]) for place in places] for rank in self._ranks]

    def _job(self, places: Sequence[Place]) -> tuple[int, list[TransferPart]]:
        """A new job number, and what the job moves on each rank, by group."""
        self._jobs += 1
        parts = []
        for group, size in enumerate(self._settings.effective_bytes):
            slots = [place.slot for place in places if place.group == group]
            if slots:
                part = TransferPart(
                    group=group,
                    first_block=slots[0],
                    pages=len(slots),
                    bytes=len(slots) * size,
                    boundary=(slots[-1] + 1) * self._settings.block_size,
                )
                parts.append(part)
        return self._jobs, parts

    # --- pages --------------------------------------------------------------------------------

    def _digest(
        self,
        direction: Literal["save", "load"],
        side: PageSide,
        moment: Literal["submitted", "completed"],
        job: int,
        request: str,
        places: Sequence[Place],
        pages: list[list[bytes]],
    ) -> None:
        """Record the pages of a job, given by rank, where pages are read at all. An entry is its group."""
        if not self._reads_pages:
            return
        self._on_ranks(
            lambda rank: PagesDigested(
                rank=rank,
                job=job,
                request=request,
                direction=direction,
                side=side,
                moment=moment,
                rows=[
                    PageRow(
                        entry=place.group,
                        block_index=place.slot,
                        block=place.block,
                        digest=_page_digest(page),
                        nonzero=len(page) - page.count(0),
                        sentinel=sum(8 for at in range(0, len(page) - 7, 8) if page[at : at + 8] == SENTINEL),
                    )
                    for place, page in zip(places, pages[rank], strict=True)
                ],
            )
        )

    def _poison(self, job: int, places: Sequence[Place]) -> dict[int, list[str]]:
        """Fill the destination of a load; digests of the pages beside it and of block 0, by block and rank."""
        blocks = {place.block for place in places}
        beside = {block + step for block in blocks for step in (-1, 1)} | {NULL_BLOCK}
        guarded = sorted(block for block in beside - blocks if 0 <= block < self._settings.num_gpu_blocks)
        sizes = [self._settings.effective_bytes[place.group] for place in places]
        for rank in self._ranks:
            for place, size in zip(places, sizes, strict=True):
                rank.write(place.block, (SENTINEL * (size // 8 + 1))[:size])
        self._on_ranks(
            lambda rank: PagesPoisoned(rank=rank, job=job, pages=len(places), bytes=sum(sizes), guards=len(guarded))
        )
        return {block: [_page_digest(rank.memory[block]) for rank in self._ranks] for block in guarded}

    def _guards_checked(self, rank: int, job: int, guards: dict[int, list[str]]) -> GuardsChecked:
        memory = self._ranks[rank].memory
        changed = [[ATTENTION, block] for block, was in guards.items() if _page_digest(memory[block]) != was[rank]]
        return GuardsChecked(rank=rank, job=job, steps_between=0, changed=changed)

    # --- records ------------------------------------------------------------------------------

    def _describe(self) -> EngineStarted:
        settings = self._settings
        connector = "SimConnector" if self._connected else None
        return EngineStarted(
            engine="sim",
            versions={"python": platform.python_version()},
            checkpoint_interval=settings.block_size,
            max_model_len=settings.max_model_len,
            tensor_parallel=settings.tensor_parallel_size,
            pipeline_parallel=1,
            data_parallel=1,
            decode_context_parallel=1,
            connector=connector,
            audit_level=self._spec.audit_level if self._audited else None,
            settings={
                "cache_config.block_size": settings.block_size,
                "cache_config.enable_prefix_caching": True,
                "cache_config.mamba_cache_mode": "align",
                "cache_config.num_gpu_blocks": settings.num_gpu_blocks,
                "kv_transfer_config": connector,
                "model_config.max_model_len": settings.max_model_len,
                "parallel_config.tensor_parallel_size": settings.tensor_parallel_size,
                "scheduler_config.max_num_batched_tokens": settings.max_num_batched_tokens,
            },
            eos_token_ids=[EOS],
        )

    def _registration(self, rank: int) -> RankRegistered:
        kinds = (
            (EntryKind.ATTENTION, "FullAttentionSpec", "layers.1.attention"),
            (EntryKind.RECURRENT, "MambaSpec", "layers.0.recurrent"),
        )
        block, sizes = self._settings.block_size, self._settings.effective_bytes
        return RankRegistered(
            rank=rank,
            world_size=len(self._ranks),
            num_blocks=self._settings.num_gpu_blocks,
            engine_groups=[
                EngineGroup(
                    group=group,
                    entry_kind=kind,
                    spec=spec,
                    tokens_per_block=block,
                    layers=[layer],
                    page_bytes=self._settings.page_bytes,
                    effective_bytes=sizes[group],
                )
                for group, (kind, spec, layer) in enumerate(kinds)
            ],
            transfer_groups=[
                TransferGroup(group=group, engine_group=group, entries=1, bytes_per_block=size, tokens_per_block=block)
                for group, size in enumerate(sizes)
            ],
            entries=[
                Entry(
                    entry=group,
                    layer=layer,
                    engine_group=group,
                    kind=kind,
                    logical_dtype="uint8",
                    transfer_dtype="uint8",
                    is_byte_view=True,
                    shape=[sizes[group]],
                    storage_offset=0,
                    block_stride=self._settings.page_bytes,
                    page_bytes=self._settings.page_bytes,
                    effective_bytes=sizes[group],
                )
                for group, (kind, _, layer) in enumerate(kinds)
                if self._reads_pages
            ],
            digest="blake2b-128" if self._reads_pages else "",
        )

    def _choose_conduct(self) -> Conduct:
        fault = self._spec.fault
        if fault is None:
            return Conduct()
        if fault not in self.conducts:
            raise EngineError(f"fault {fault!r}: the simulated engine has only {', '.join(sorted(self.conducts))}")
        if not self._connected:
            raise EngineError(f"fault {fault!r} acts in the connector, and arm {self._spec.arm!r} has none")
        return self.conducts[fault]()

    def _open_stream(self, process: str) -> StreamWriter:
        return StreamWriter(self._spec.stream_dir / f"{process}.jsonl", self._spec.arm, process, tolerant=True)

    def _require_running(self) -> None:
        if not self._started:
            raise EngineError(f"the engine of arm {self._spec.arm!r} is not running: start it first")

    def _count(self, counter: str, amount: int) -> None:
        self._counters[counter] += amount

    def _say(self, record: AnyRecord) -> None:
        assert self._scheduler is not None
        self._scheduler.append(record)

    def _audit(self, record: AnyRecord) -> None:
        if self._audited:
            self._say(record)

    def _on_ranks(self, record: Callable[[int], AnyRecord]) -> None:
        for rank, worker in enumerate(self._workers):
            worker.append(record(rank))


def _page_digest(page: bytes | bytearray) -> str:
    return blake2b(page, digest_size=16).hexdigest()
