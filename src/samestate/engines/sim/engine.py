"""The simulated engine, as the lab drives it."""

from __future__ import annotations

from collections.abc import Sequence as Many
from hashlib import blake2b
from itertools import count
from typing import ClassVar

from samestate.engines.base import Ask, CounterValues, Engine, EngineError, EngineSpec, Generation, Kill, ResetResult
from samestate.engines.sim.blocks import Pool, Sequence
from samestate.engines.sim.conduct import Conduct
from samestate.engines.sim.faults import CONDUCTS
from samestate.engines.sim.journal import Journal, describe, engine_groups, registration, transfer_groups
from samestate.engines.sim.runner import Runner
from samestate.engines.sim.scheduler import Scheduler
from samestate.engines.sim.state import (
    ATTENTION,
    FIRST_TEXT,
    STATE_GROUPS,
    VOCABULARY,
    Settings,
)
from samestate.engines.sim.tier import Shelf, Tier
from samestate.engines.sim.transfers import Workers
from samestate.evidence.records import (
    EngineStarted,
    EngineStopped,
    FaultArmed,
    SchedulerConfigured,
)

_ENGINES = count(1)
"""Simulated engines have no process of their own: each one counts as one."""


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
        self._requests = 0
        self._process = f"simulated-{next(_ENGINES)}"

    # --- as every engine ------------------------------------------------------------------------

    def start(self) -> EngineStarted:
        self._settings = settings = Settings.of(self._spec)
        conduct = self._choose_conduct(self._spec.fault)
        self._pool = Pool(settings.num_gpu_blocks)
        tier = conduct.begins_with(self._shelf, self._spec.arm, self._spec.external_cache_bytes)
        self._workers = Workers(self._spec, settings, self._journal, conduct, tier)
        runner = Runner(settings, self._pool, self._workers, self.sample, connected=self._connected)
        self._scheduler = Scheduler(
            settings, self._pool, self._workers, runner, self._journal, connected=self._connected
        )
        self._spec.log_path.write_text(f"simulated engine, arm {self._spec.arm}: {settings}\n", encoding="utf-8")
        ranks, journal = self._workers.ranks, self._journal
        started = describe(self._spec, settings, self._process, audited=journal.audited)
        journal.open(len(ranks))
        journal.say(started)
        groups = engine_groups(settings)
        journal.say(SchedulerConfigured(block_size=settings.block_size, saves_within_steps=False, engine_groups=groups))
        if self._spec.fault is not None:
            journal.say(FaultArmed(fault=self._spec.fault, parameters={}))
        registered = conduct.registers(transfer_groups(settings))
        journal.on_ranks(lambda rank: registration(rank, ranks, settings, registered, journal.reads_pages))
        self._started = True
        return started

    def encode(self, text: str) -> list[int]:
        return [FIRST_TEXT + byte for byte in text.encode()]

    def generate(self, asks: Many[Ask], output_tokens: int, seed: int, ignore_eos: bool) -> list[Generation]:
        self._require_running()
        sequences = [self._sequence(ask, output_tokens) for ask in asks]
        self._scheduler.run_all(sequences, ignore_eos=ignore_eos)
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
        if self._workers.conduct.forgets():
            self._pool.forget()
        return ResetResult(local_reset=True, external_kept=True, running_kept=True, attempts=1)

    def counters(self) -> CounterValues:
        self._require_running()
        return CounterValues(dict(self._scheduler.counters), [])

    def arm_fault(self, name: str | None) -> None:
        self._require_running()
        self._workers.conduct = self._choose_conduct(name)
        if name is not None:
            self._journal.say(FaultArmed(fault=name, parameters={}))

    def kill(self) -> Kill:
        self._require_running()
        self._started = False
        self._journal.close()
        return Kill(self._process, 1)

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
        drops = bool(self._settings.eagle_block_drop)
        return Sequence(name, list(ask.token_ids), output_tokens, self._settings.block_size, ask.salt, drops_last=drops)

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
