"""The simulated engine as a state machine: whatever is asked in whatever order, the output is that of a cold run.

And what it writes down of it is judged clean: every page arrives as it was saved and represents the prefix that is
credited, saves complete before what depends on them, steps adjoin, whatever was stored is served.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from samestate.checks.analyzers import source_sha256
from samestate.checks.base import CheckResult, Verdict
from samestate.checks.completion import save_completion
from samestate.checks.failures import failures
from samestate.checks.history import History
from samestate.checks.pages import page_bytes
from samestate.checks.poison import poison
from samestate.checks.prefix_identity import prefix_identity
from samestate.checks.steps import steps
from samestate.engines.base import Ask, EngineSpec, Generation
from samestate.engines.sim import SimEngine
from samestate.evidence.archive import Archive, ArchiveWriter
from samestate.evidence.canonical import sha256_hex, token_digest
from samestate.evidence.records import OperationEnded, OperationName, OperationOutput, OperationStarted
from samestate.evidence.stream import StreamWriter
from samestate.plans.load import freeze, load, plan_json

ARM = "candidate"
LONGEST, OUTPUT = 120, 9
CHECKS: dict[str, Callable[[History], CheckResult]] = {
    "page-bytes": page_bytes,
    "prefix-identity": prefix_identity,
    "poison": poison,
    "save-completion": save_completion,
    "steps": steps,
    "failures": failures,
}
VACUOUS = {"vacuous", "nothing_examined"}
"""A short life may load nothing; that it then shows nothing is right."""
PROFILES = {"quick": (25, 12), "long": (400, 30)}
"""Lives, and steps of each. Set SAMESTATE_MACHINE=long for more."""


def text(source: int, tokens: int) -> list[int]:
    """The first tokens of an endless text."""
    drawn = random.Random(source)
    return [drawn.randrange(3, 512) for _ in range(tokens)]


class Life(RuleBasedStateMachine):
    """One engine from start to end, beside an engine without any cache for every answer."""

    engine: SimEngine

    @initialize(
        block=st.integers(2, 24),
        limit=st.integers(4, 200),
        ranks=st.integers(1, 2),
        blocks=st.integers(0, 12),
        seqs=st.integers(1, 4),
        tier=st.sampled_from([600, 4000, 1 << 20]),
        drafts=st.sampled_from([0, 0, 3]),
    )
    def begin(self, block: int, limit: int, ranks: int, blocks: int, seqs: int, tier: int, drafts: int) -> None:
        least = 3 + 3 * -(-(LONGEST + OUTPUT) // block)
        self.folder = Path(tempfile.mkdtemp())
        plan = load("boundary-instrumented")
        quick = plan.model_copy(update={"instruments": plan.instruments.model_copy(update={"save_delay_ms": 0})})
        self.writer = ArchiveWriter.create(self.folder / "a", plan_json(freeze(quick, source_sha256(plan.analyzer.id))))
        self.options: dict[str, Any] = {
            "block_size": block,
            "max_model_len": 2 * LONGEST,
            "max_num_batched_tokens": limit,
            "max_num_seqs": seqs,
            "tensor_parallel_size": ranks,
            "num_speculative_tokens": drafts,
        }
        self.engine = self._engine(self.writer.arm_dir(ARM), "native", tier, num_gpu_blocks_override=least + blocks)
        self.client = StreamWriter(self.writer.arm_dir(ARM) / "client.jsonl", ARM, "client")
        self.cold: dict[tuple[int, ...], list[int]] = {}
        self.asked = 0
        self.inputs: dict[str, list[int]] = {}
        self.sealed = False

    def _engine(self, folder: Path, connector: str, tier: int = 0, **more: int) -> SimEngine:
        folder.mkdir(parents=True, exist_ok=True)
        spec = EngineSpec(
            arm=ARM,
            model=folder,
            settings={**self.options, **more},
            serve_args=[],
            connector=connector,
            external_cache_bytes=tier,
            audit_level="poison" if connector != "none" else "off",
            save_delay_ms=0,
            fault=None,
            stream_dir=folder,
            log_path=self.folder / f"{connector}.log",
        )
        engine = SimEngine(spec)
        engine.start()
        return engine

    @rule(
        asks=st.lists(
            st.tuples(st.integers(0, 2), st.integers(1, LONGEST), st.sampled_from([None, None, "salt"])),
            min_size=1,
            max_size=4,
        ),
        output=st.integers(1, OUTPUT),
    )
    def ask(self, asks: list[tuple[int, int, str | None]], output: int) -> None:
        """Prompts that begin alike, at once."""
        named = [(self._name(), text(source, tokens), salt) for source, tokens, salt in asks]
        for op, ids, salt in named:
            self._started(op, ids, salt)
        answers = self.engine.generate([Ask(op, ids, salt) for op, ids, salt in named], output, 0, True)
        for (op, ids, _), answer in zip(named, answers, strict=True):
            self._ended(op, answer)
            assert answer.token_ids == self._computed(ids)[:output], (op, len(ids), answer.cached_tokens)
            assert answer.cached_tokens is not None and answer.cached_tokens < len(ids)

    @rule()
    def reset(self) -> None:
        self.engine.reset_local_cache()

    @precondition(lambda self: self.asked > 0 and not self.sealed)
    @rule()
    def look_at_counters(self) -> None:
        assert self.engine.counters().missing == []

    @invariant()
    def never_out_of_blocks(self) -> None:
        """All blocks come back when the engine is idle."""
        if hasattr(self, "engine"):
            assert self.engine.idle_blocks == self.engine.all_blocks

    def teardown(self) -> None:
        """Nothing that was written down is called wrong."""
        if not hasattr(self, "engine"):
            return
        self.engine.close()
        self.client.close()
        self.writer.write_inputs(self.inputs)
        self.writer.seal()
        history = History.read(Archive.open(self.folder / "a"))
        for name, check in CHECKS.items():
            result = check(history) if self.asked else None
            wrong = [one for one in result.findings if one.code not in VACUOUS] if result else []
            assert not [one for one in wrong if one.verdict is Verdict.FAIL], (name, wrong[:2])

    def _name(self) -> str:
        self.asked += 1
        return f"p{self.asked}.1"

    def _computed(self, ids: list[int]) -> list[int]:
        """What an engine that reuses nothing answers."""
        key = tuple(ids)
        if key not in self.cold:
            alone = self._engine(self.folder / f"cold-{len(self.cold)}", "none")
            self.cold[key] = alone.generate_one("cold", ids, OUTPUT, 0, True).token_ids
            alone.close()
        return self.cold[key]

    def _started(self, op: str, ids: list[int], salt: str | None) -> None:
        digest = token_digest(ids)
        self.inputs[digest] = ids
        self.client.append(
            OperationStarted(
                op=op,
                case=op.partition(".")[0],
                name=OperationName.PROMPT,
                prompt_tokens=len(ids),
                prompt_sha256=digest,
                salt=sha256_hex(salt.encode()) if salt else "",
                together=None,
            )
        )

    def _ended(self, op: str, answer: Generation) -> None:
        told = {field: value for field, value in answer._asdict().items() if field not in ("first_token_s", "timing")}
        self.client.append(OperationOutput(op=op, **told))
        self.client.append(OperationEnded(op=op, ok=True, error=None))


_lives, _steps = PROFILES[os.environ.get("SAMESTATE_MACHINE", "quick")]
TestLife = Life.TestCase
TestLife.settings = settings(
    max_examples=_lives, stateful_step_count=_steps, deadline=None, suppress_health_check=list(HealthCheck)
)
