"""Ways from a marker plan's probes to an engine: into a child process, or through a server's API (`served_probes`).

Both send a probe once, and say what came back as the client saw it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Literal, NamedTuple

from typing_extensions import override

from samestate.engines.base import Engine, EngineError, ProbeAsk
from samestate.engines.openai_client import ClientError
from samestate.evidence.canonical import canonical_json, sha256_hex
from samestate.evidence.probe_records import IdentityRead, ProbeAnswered, ProbeFailed, ProbeSent, ProbeUsage
from samestate.evidence.records import Scalar
from samestate.plans.markers import address, temperature
from samestate.plans.model import MarkerPlan, ModelIdentity, Plan, ProbePlan

ENGINE_MODEL = "engine"
"""Name of the model where no server names it."""


class Asked(NamedTuple):
    """One probe with everything that the tokenizer had to say about it."""

    probe: ProbePlan
    prompt_ids: list[int]
    """As rendered before the first probe."""
    stop_ids: list[int]


class Route(ABC):
    """Raises `EngineError` when the engine, or the server around it, fails."""

    markers: MarkerPlan

    @abstractmethod
    def start(self, waiting: Callable[[float], None]) -> None:
        """Start the engine; no request was made when this returns."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Token ids by the engine's own tokenizer; where that is no single one, the token that reads so."""

    @abstractmethod
    def prompt(self, probe: ProbePlan) -> list[int]:
        """Token ids of a probe's prompt, made by the engine."""

    @abstractmethod
    def values(self) -> tuple[dict[str, Scalar], list[str]]:
        """What runs at this moment, and names of what cannot be read."""

    @abstractmethod
    def message(self, asked: Asked) -> tuple[str, bytes]:
        """The model's name, and the body that `send` will send."""

    @abstractmethod
    def send(self, asked: Asked, body: bytes) -> ProbeAnswered:
        """Send it, once. Raises `EngineError`."""

    @abstractmethod
    def close(self) -> None:
        """Stop and reap the engine. Safe to call twice."""


def identity_read(route: Route, when: Literal["before", "after"], model: ModelIdentity) -> IdentityRead:
    """The engine as it is now, and the checkpoint as `model` has just been read."""
    values, missing = route.values()
    values = {**values, "model": model.name, "model_sha256": model.sha256}
    return IdentityRead(when=when, values=values, missing=missing)


def sent(plan: Plan, markers: MarkerPlan, asked: Asked, model: str, body: bytes) -> ProbeSent:
    """The record that comes before the first byte."""
    probe = asked.probe
    return ProbeSent(
        probe=probe.name,
        attempt=1,
        retries_allowed=markers.retries,
        address=address(markers),
        model=model,
        body=body.decode(),
        body_sha256=sha256_hex(body),
        budget=probe.budget,
        max_tokens=probe.max_tokens,
        temperature=temperature(plan, probe),
        top_p=probe.top_p,
        stop_token_ids=asked.stop_ids,
        ignore_eos=plan.ignore_eos,
    )


def failed(probe: ProbePlan, error: EngineError, *hidden: str) -> ProbeFailed:
    """The record of a probe without an answer; `hidden`: addresses that it must not hold."""
    words = " ".join(str(error).split())
    for place in hidden:
        words = words.replace(place, "")
    status = error.status if isinstance(error, ClientError) else None
    return ProbeFailed(probe=probe.name, status=status, error=words.lstrip(": "))


class EngineRoute(Route):
    """Probes as token ids, into an engine that the lab drives."""

    def __init__(self, plan: Plan, markers: MarkerPlan, engine: Engine) -> None:
        self.markers = markers
        self._plan = plan
        self._engine = engine

    @override
    def start(self, waiting: Callable[[float], None]) -> None:
        self._engine.start()

    @override
    def encode(self, text: str) -> list[int]:
        ids = self._engine.encode(text)
        return ids if len(ids) == 1 else self._engine.token(text) or ids

    @override
    def prompt(self, probe: ProbePlan) -> list[int]:
        return self._engine.encode(probe.text)

    @override
    def values(self) -> tuple[dict[str, Scalar], list[str]]:
        return self._engine.identity(), []

    @override
    def message(self, asked: Asked) -> tuple[str, bytes]:
        tree = {**self._ask(asked)._asdict(), "token_ids": asked.prompt_ids, "stop_token_ids": asked.stop_ids}
        return ENGINE_MODEL, canonical_json(tree)

    @override
    def send(self, asked: Asked, body: bytes) -> ProbeAnswered:
        result = self._engine.probe(self._ask(asked))
        return ProbeAnswered(
            probe=asked.probe.name,
            request=result.request,
            status=200,
            prompt_token_ids=result.prompt_token_ids,
            token_ids=result.token_ids,
            finish_reason=result.finish_reason,
            stop_reason=result.stop_reason,
            usage=ProbeUsage(prompt=None, completion=None, reasoning=None),
            echo={"model": ENGINE_MODEL, **result.echo},
            content=result.text,
            reasoning=None,
            text_sha256=sha256_hex(result.text.encode()),
            anomalies=[],
        )

    @override
    def close(self) -> None:
        self._engine.close()

    def _ask(self, asked: Asked) -> ProbeAsk:
        probe = asked.probe
        return ProbeAsk(
            request=probe.name,
            token_ids=asked.prompt_ids,
            budget=probe.budget,
            max_tokens=probe.max_tokens,
            temperature=temperature(self._plan, probe),
            top_p=probe.top_p,
            seed=self._plan.seed,
            stop_token_ids=asked.stop_ids,
            ignore_eos=self._plan.ignore_eos,
        )
