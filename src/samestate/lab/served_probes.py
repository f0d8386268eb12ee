"""Probes as chat completions of a server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from typing_extensions import override

from samestate.engines.openai_client import ClientError, Completion, OpenAIClient, encoded
from samestate.engines.server import Server
from samestate.evidence.canonical import sha256_hex
from samestate.evidence.probe_records import ProbeAnswered, ProbeUsage
from samestate.evidence.records import Scalar
from samestate.lab.probing import Asked, Route
from samestate.plans.markers import address, temperature
from samestate.plans.model import MarkerPlan, Plan, ProbePlan

_SECTIONS = ("cache_config", "model_config", "parallel_config", "scheduler_config", "speculative_config")
"""Of vLLM's configuration, what is read back from a server."""
_PLACES = ("path", "dir", "model", "tokenizer", "hf_token", "ip", "port", "addr", "id", "served_model_name", "local")
"""Parts of names whose values are paths, addresses, identifiers or secrets."""


class ServedRoute(Route):
    """Probes as chat completions of a server."""

    def __init__(self, plan: Plan, markers: MarkerPlan, server: Server) -> None:
        self.markers = markers
        self._plan = plan
        self._server = server
        self._client: OpenAIClient | None = None

    @property
    def url(self) -> str:
        """The server's address."""
        return self._server.url

    @override
    def start(self, waiting: Callable[[float], None]) -> None:
        self._server.start(waiting)
        self._client = self._server.client()

    @property
    def _open(self) -> OpenAIClient:
        assert self._client is not None, "the server was not started"
        return self._client

    @override
    def encode(self, text: str) -> list[int]:
        return self._open.encode(text)

    @override
    def prompt(self, probe: ProbePlan) -> list[int]:
        body: dict[str, Any] = {
            "model": self._server.model,
            "messages": _messages(probe),
            "add_generation_prompt": True,
        }
        if probe.effort is not None:  # as the server itself tells the chat template
            body["chat_template_kwargs"] = {**_effort(probe), "enable_thinking": probe.effort != "none"}
        return self._open.tokenize(body)

    @override
    def values(self) -> tuple[dict[str, Scalar], list[str]]:
        values: dict[str, Scalar] = {"served_model": self._server.model}
        missing = []
        if self._server.process is None:
            missing.append("process")
        else:
            values["process"] = self._server.process
        try:
            values["vllm"] = str(self._open.get("/version").tree.get("version"))
        except ClientError:
            missing.append("vllm")
        try:
            config = self._open.get("/server_info?config_format=json").tree["vllm_config"]
            values.update(_plain(config))
        except (ClientError, KeyError, TypeError, AttributeError):
            missing.append("settings")
        return values, missing

    @override
    def message(self, asked: Asked) -> tuple[str, bytes]:
        probe, model = asked.probe, self._server.model
        body: dict[str, Any] = {
            "model": model,
            "messages": _messages(probe),
            "max_completion_tokens": probe.max_tokens,
            "temperature": temperature(self._plan, probe),
            "top_p": probe.top_p,
            "seed": self._plan.seed,
            "stop_token_ids": asked.stop_ids,
            "ignore_eos": self._plan.ignore_eos,
            "n": 1,
            "stream": False,
            "return_token_ids": True,
            **_effort(probe),
        }
        if probe.budget is not None:
            body["thinking_token_budget"] = probe.budget
        return model, encoded(body)

    @override
    def send(self, asked: Asked, body: bytes) -> ProbeAnswered:
        try:
            completion = self._open.complete(address(self.markers), body)
        except ClientError as error:
            error.log_tail = self._server.log_tail()
            raise
        text = (completion.reasoning or "") + completion.text
        return ProbeAnswered(
            probe=asked.probe.name,
            request=completion.id,
            status=200,
            prompt_token_ids=completion.prompt_token_ids or [],
            token_ids=completion.token_ids or [],
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
            usage=_usage(completion),
            echo={"model": completion.model},
            content=completion.text,
            reasoning=completion.reasoning,
            text_sha256=sha256_hex(text.encode()),
            anomalies=list(_anomalies(asked, completion)),
        )

    @override
    def close(self) -> None:
        if self._client is not None:
            self._client.close()
        self._server.close()


def _messages(probe: ProbePlan) -> list[dict[str, str]]:
    return [{"role": "user", "content": probe.text}]


def _effort(probe: ProbePlan) -> dict[str, Any]:
    return {} if probe.effort is None else {"reasoning_effort": probe.effort}


def _plain(config: dict[str, Any]) -> Iterator[tuple[str, Scalar]]:
    """Plain values that say what is computed, under vLLM's names."""
    for section in _SECTIONS:
        for name, value in (config.get(section) or {}).items():
            named = any(part in name.split("_") or part == name for part in _PLACES)
            if not named and (value is None or isinstance(value, str | int | float | bool)):
                yield f"{section}.{name}", value


def _usage(completion: Completion) -> ProbeUsage:
    usage = completion.usage or {}
    details = usage.get("completion_tokens_details") or {}
    return ProbeUsage(
        prompt=usage.get("prompt_tokens"),
        completion=usage.get("completion_tokens"),
        reasoning=details.get("reasoning_tokens"),
    )


def _anomalies(asked: Asked, completion: Completion) -> Iterator[str]:
    """What is odd about an answer, whatever the trace says."""
    if completion.token_ids is None or completion.prompt_token_ids is None:
        yield "the server returned no token ids"
    elif completion.prompt_token_ids != asked.prompt_ids:
        given, rendered = len(completion.prompt_token_ids), len(asked.prompt_ids)
        yield f"the prompt's {given} tokens are not the {rendered} that were rendered before"
    if completion.finish_reason is None:
        yield "the answer has no finish reason"
    if not completion.text:
        yield "nothing came after the reasoning"
    if "�" in (completion.reasoning or "") + completion.text:
        yield "the text holds characters that no token spells"
