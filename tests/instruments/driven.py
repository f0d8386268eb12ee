"""An engine that a test drives itself, under the sanitizer, and what its streams and checks then say.

For tests that need more of an engine than a plan asks for. What is written down is what the lab writes for the one
arm `candidate`, without counters.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from samestate.checks.analyzers import ANALYZERS
from samestate.checks.base import CheckResult, Finding
from samestate.checks.history import History
from samestate.engines.base import Ask, EngineSpec
from samestate.engines.vllm import VllmEngine
from samestate.evidence.archive import Archive, ArchiveWriter
from samestate.evidence.canonical import token_digest
from samestate.evidence.records import OperationEnded, OperationName, OperationOutput, OperationStarted
from samestate.evidence.stream import StreamWriter
from samestate.plans.load import load, plan_json

ARM = "candidate"
CHECKS = ("page-bytes", "page-coverage", "poison", "save-completion", "prefix-identity")


def prompt(tag: str, tokens: int) -> list[int]:
    """The first `tokens` tokens of an endless text."""
    source = random.Random(tag)
    return [source.randrange(2, 500) for _ in range(tokens)]


class Driver:
    """One engine at level ``poison`` in an archive of its own. `settings` and `changes` are for it alone."""

    def __init__(
        self,
        root: Path,
        model: Path,
        settings: dict[str, Any],
        *,
        output_tokens: int,
        save_delay_ms: int = 0,
        **changes: Any,
    ) -> None:
        plan = load("boundary-instrumented")
        delayed = plan.instruments.model_copy(update={"save_delay_ms": save_delay_ms})
        self.root = root
        self.inputs: dict[str, list[int]] = {}
        self._output_tokens = output_tokens
        self._writer = ArchiveWriter.create(root, plan_json(plan.model_copy(update={"instruments": delayed})))
        folder = self._writer.arm_dir(ARM)
        self._client = StreamWriter(folder / "client.jsonl", ARM, "client")
        spec = EngineSpec(
            arm=ARM,
            model=model,
            settings={
                "max_model_len": 1024,
                "enforce_eager": True,
                "enable_prefix_caching": True,
                "skip_tokenizer_init": True,
                **settings,
            },
            serve_args=[],
            connector="native",
            external_cache_bytes=1 << 28,
            audit_level="poison",
            save_delay_ms=save_delay_ms,
            fault=None,
            stream_dir=folder,
            log_path=self._writer.log_path(ARM),
        )
        self.engine = VllmEngine(spec._replace(**changes))

    def ask(
        self, asked: Sequence[tuple[str, str, list[int]]], name: OperationName, *, together: str | None = None
    ) -> None:
        """Hand in prompts at once, as (operation, case, token ids), then reset the local cache."""
        asks = []
        for op, case, ids in asked:
            digest = token_digest(ids)
            self.inputs[digest] = ids
            asks.append(Ask(op, ids))
            self._client.append(
                OperationStarted(
                    op=op,
                    case=case,
                    name=name,
                    prompt_tokens=len(ids),
                    prompt_sha256=digest,
                    salt="",
                    together=together,
                )
            )
        answers = self.engine.generate(asks, self._output_tokens, 42, True)
        for ask, answer in zip(asks, answers, strict=True):
            told = {
                field: value for field, value in answer._asdict().items() if field not in ("first_token_s", "timing")
            }
            self._client.append(OperationOutput(op=ask.request, **told))
            self._client.append(OperationEnded(op=ask.request, ok=True, error=None))
        assert self.engine.reset_local_cache().local_reset

    def close(self) -> None:
        """Stop the engine, whatever happened."""
        self.engine.close()
        self._client.close()

    def seal(self) -> Seen:
        """Seal what a closed engine left, and read it."""
        self._writer.write_inputs(self.inputs)
        self._writer.seal()
        return Seen.of(Archive.open(self.root))


class Seen(NamedTuple):
    """What the streams hold, and what the sanitizer's checks make of it."""

    lines: list[tuple[int, Any]]
    """(t_ns, record) of scheduler and worker, in time order."""
    answers: list[OperationOutput]
    results: dict[str, CheckResult]
    """By check."""

    @property
    def findings(self) -> dict[str, dict[tuple[str, str], Finding]]:
        """By operation, then by check and code; an operation without any is left out."""
        found: dict[str, dict[tuple[str, str], Finding]] = defaultdict(dict)
        for name, result in self.results.items():
            for finding in result.findings:
                found[finding.place.op or ""][name, finding.code] = finding
        return dict(found)

    @classmethod
    def of(cls, archive: Archive) -> Seen:
        """Read a sealed archive; it must be undamaged."""
        assert archive.verify() == []
        lines = [(line.t_ns, line.rec) for of in ("scheduler", "worker-0") for line in archive.records(ARM, of)]
        client = [line.rec for line in archive.records(ARM, "client")]
        history = History.read(archive)
        checks = ANALYZERS["boundary-instrumented-v1"].checks
        return cls(
            sorted(lines, key=lambda line: line[0]),
            [rec for rec in client if isinstance(rec, OperationOutput)],
            {name: checks[name](history) for name in CHECKS},
        )
