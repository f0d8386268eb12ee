"""A server of which only the OpenAI API is known: what it can tell of itself, and completions with all that it tells.

Optional fields of a request are tried once and left out where the server refuses them. Nothing is sent again but for
that, nothing beyond the budget is sent at all, and one request is open at a time.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from samestate.engines import black_box_facts as said
from samestate.engines.base import EngineError
from samestate.engines.black_box_answers import Answer, read_answers
from samestate.engines.black_box_budget import Budget
from samestate.engines.black_box_facts import Facts
from samestate.engines.openai_client import COMPLETIONS, ClientError, OpenAIClient
from samestate.engines.served import RESET, read_metrics
from samestate.evidence.records import LOCAL_QUERIES
from samestate.plans.black_box import covers

OPTIONAL: Mapping[str, Any] = {
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
    "logprobs": 2,
    "ignore_eos": True,
    "seed": 0,
}
"""Fields that some servers refuse, beside ``cache_salt``; ``logprobs`` of two tokens gives a margin."""
SALT = "cache_salt"
WHOLE = "cache_prompt"
"""llama.cpp's: false has a prompt computed whole."""
QUESTION_SECONDS = 5.0
"""For what a server need not answer."""
RESET_SECONDS = 10.0
IDLE_POLL_SECONDS = 0.5
T = TypeVar("T")


class Reading(NamedTuple):
    """``/metrics`` at one moment."""

    values: dict[str, float]
    """As `samestate.engines.served.read_metrics`, and llama.cpp's under the same names."""
    others: int | None
    """Requests that run or wait there; None: not told."""
    began: float | None


class Prompt(NamedTuple):
    """Token ids or, where the server takes none, a text."""

    ids: Sequence[int] | None
    text: str
    tokens: int
    """N; of a text an estimate."""

    @property
    def sent(self) -> list[int] | str:
        return self.text if self.ids is None else list(self.ids)

    @property
    def most(self) -> int:
        """Tokens that it can be at most: a token of a text has a byte or more, and some may be put before it."""
        return self.tokens if self.ids is not None else len(self.text.encode()) + 8


class BlackBox:
    """One server. Raises `ClientError` with the remedy in one line, and `BudgetSpent` before too much is sent."""

    def __init__(
        self, url: str, budget: Budget, *, api_key: str | None = None, seconds: float = 60.0, stream: bool = False
    ) -> None:
        self.budget = budget
        self._client = OpenAIClient(url, api_key=api_key, seconds=seconds)
        self._questions = OpenAIClient(url, api_key=api_key, seconds=min(seconds, QUESTION_SECONDS))
        self._stream = stream
        self._fields = dict(OPTIONAL)
        self._settled = False
        self._metrics = False
        """It gave them when it was surveyed; else they are not asked for again, as that may hang each time."""
        self._tokenize: Callable[[str], dict[str, Any]] | None = None
        self._encoded: dict[str, list[int]] = {}
        self.salts = True
        """Requests may carry a salt: not refused so far. Whether it is heeded is for the answers to show."""
        self.recomputes = False
        """It can be asked to compute a prompt whole, though it has its state."""
        self.companions = True
        """A request may carry two prompts: not refused so far."""
        self.model = ""

    @property
    def url(self) -> str:
        """Without ``/v1``."""
        return self._client.url

    @property
    def refused(self) -> list[str]:
        """Optional fields that the server does not take."""
        return sorted({*OPTIONAL} - {*self._fields}) + ([] if self.salts else [SALT])

    # --- what it says ---------------------------------------------------------------------------

    def survey(self, model: str | None) -> Facts:
        """Ask all that costs no tokens. Raises `ClientError` where the server does not answer, or lacks `model`."""
        cards = self._models()
        names = [card["id"] for card in cards]
        if model is not None and model not in names:
            raise ClientError(f"--model: {model} is not served there; it serves {', '.join(names)}")
        self.model = model or names[0]
        card = next(one for one in cards if one["id"] == self.model)
        text = self._told(lambda: self._questions.text("/metrics"), "")
        self._metrics = bool(text)
        labels = said.labels(text, said.CACHE)
        interval, source = self._interval(labels)
        vllm = "vllm:" in text or card.get("owned_by") == "vllm"
        software, version, most = (None, None, None) if vllm else self._software(card)
        self.recomputes = software == said.LLAMA_CPP
        return Facts(
            model=self.model,
            max_model_len=said.count(card.get("max_model_len")) or most,
            vllm=vllm,
            version=version or self._told(lambda: str(self._questions.get("/version").tree["version"]), None),
            tokenizer=self._has_tokenizer(),
            counters=LOCAL_QUERIES in read_metrics(text) | said.counters(text),
            interval=interval,
            interval_from=source,
            capacity=said.capacity(text, interval),
            can_reset=self._status_of(RESET.partition("?")[0]) == 405,
            began=said.began(text),
            software=software,
        )

    def reading(self) -> Reading | None:
        """Counters and gauges; None: they cannot be read, or could not when it was surveyed."""
        text = self._told(lambda: self._questions.text("/metrics"), None) if self._metrics else None
        if text is None:
            return None
        return Reading(read_metrics(text) | said.counters(text), said.waiting(text), said.began(text))

    def idle(self, patience: float) -> tuple[Reading | None, float]:
        """Wait up to `patience` seconds while others are served; what was read last, and seconds waited."""
        began, pause = time.monotonic(), IDLE_POLL_SECONDS / 8
        while True:
            reading, waited = self.reading(), time.monotonic() - began
            if reading is None or not reading.others or waited >= patience:
                return reading, waited
            time.sleep(pause)  # our own last request may still be counted for a moment
            pause = min(2 * pause, 2 * IDLE_POLL_SECONDS)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, by the server. Raises `ClientError`."""
        if self._tokenize is None:
            raise ClientError(f"{self.url}/tokenize: returned no token ids")
        if text not in self._encoded:
            self._encoded[text] = self._client.tokenize(self._tokenize(text))
        return self._encoded[text]

    def reset(self) -> tuple[bool, int]:
        """Drop the server's local cache, and keep what is outside: done or not, and attempts. A request each."""
        deadline, attempts = time.monotonic() + RESET_SECONDS, 0
        while True:
            self.budget.take(0)
            attempts += 1
            done = self._client.post(RESET, b"").tree.get("success") is True
            if done or time.monotonic() > deadline:
                return done, attempts
            time.sleep(IDLE_POLL_SECONDS)

    # --- completions ----------------------------------------------------------------------------

    def ask(
        self, prompt: Prompt, output_tokens: int, salt: str, beside: Prompt | None = None, *, whole: bool = False
    ) -> Answer:
        """The greedy answer to `prompt`, alone or after `beside` in the same request, so in other steps.

        `whole`: computed whole, where the server can be asked for that beside the salt.
        """
        prompts = [prompt] if beside is None else [beside, prompt]
        most = sum(one.most + output_tokens for one in prompts)
        base = {
            "model": self.model,
            "prompt": prompt.sent if beside is None else [one.sent for one in prompts],
            "max_tokens": output_tokens,
            "temperature": 0.0,
            **({WHOLE: False} if whole and self.recomputes else {}),
            **({"stream": True, "stream_options": {"include_usage": True}} if self._stream else {}),
        }
        while True:
            self.budget.take(most)
            body = base | self._fields | ({SALT: salt} if self.salts else {})
            try:
                reply = self._client.post(COMPLETIONS, body)
            except ClientError as error:
                if error.status not in (400, 422) or not self._gives_in(str(error), len(prompts)):
                    raise
                continue
            self._settled = True
            answers = read_answers(reply, f"{self.url}{COMPLETIONS}", len(prompts))
            used = answers[-1].usage_count("prompt_tokens")
            if used is not None and covers(used, prompt.tokens, beside.tokens if beside else 0):
                given = sum(one.generated or output_tokens for one in answers)
                self.budget.correct(most, used + max(given, answers[-1].usage_count("completion_tokens") or 0))
            return answers[-1]

    def _gives_in(self, words: str, prompts: int) -> bool:
        """Leave out what the server refuses; False: there is nothing left to leave out."""
        if self._settled or prompts > 1:
            return False
        fields = [*self._fields, *([SALT] if self.salts else [])]
        named = [name for name in fields if re.search(rf"\b{name}\b", words)]
        if not fields:
            return False
        refused = named[0] if named else fields[0]
        if refused == SALT:
            self.salts = False
        else:
            del self._fields[refused]
        return True

    def forget(self) -> None:
        """Try every optional field again: the refusal was of something else."""
        self._fields, self.salts = dict(OPTIONAL), True

    def close(self) -> None:
        """Close the connections."""
        self._client.close()
        self._questions.close()

    # --- questions ------------------------------------------------------------------------------

    def _models(self) -> list[dict[str, Any]]:
        self._client.models()
        data = self._client.get("/v1/models").tree["data"]
        return [card for card in data if isinstance(card, dict) and isinstance(card.get("id"), str)]

    def _told(self, question: Callable[[], T], otherwise: T) -> T:
        try:
            return question()
        except (EngineError, KeyError, TypeError, AttributeError):
            return otherwise

    def _status_of(self, path: str) -> int | None:
        try:
            self._questions.get(path)
        except ClientError as error:
            return error.status
        return 200

    def _has_tokenizer(self) -> bool:
        """vLLM's form first, then llama.cpp's; a tokenizer gives ids for a word and other ids for another."""
        forms: list[Callable[[str], dict[str, Any]]] = [
            lambda text: {"model": self.model, "prompt": text, "add_special_tokens": False},
            lambda text: {"content": text, "add_special": False},
        ]
        for form in forms:
            try:
                first, second = (self._questions.tokenize(form(word)) for word in ("river", "stone"))
            except ClientError:
                continue
            if first and second and first != second:
                self._tokenize = form
                return True
        return False

    def _software(self, card: Mapping[str, Any]) -> tuple[str | None, str | None, int | None]:
        """Name, version and context of a server that is no vLLM, as far as it says them."""
        name = said.owner(card)
        if name == said.LLAMA_CPP:
            properties: dict[str, Any] = self._told(lambda: self._questions.get("/props").tree, {})
            build = properties.get("build_info")
            return name, build if isinstance(build, str) else None, said.context_in(properties)
        if name == said.SGLANG:
            return name, self._told(lambda: str(self._questions.get("/get_server_info").tree["version"]), None), None
        return *said.title_in(self._told(lambda: self._questions.get("/openapi.json").tree, {})), None

    def _interval(self, labels: Mapping[str, str]) -> tuple[int | None, str | None]:
        config = self._told(
            lambda: self._questions.get("/server_info?config_format=json").tree["vllm_config"]["cache_config"], None
        )
        if isinstance(config, dict) and (size := said.interval_in(config)) is not None:
            return size, "/server_info"
        size = said.interval_in({name: said.count_of(value) for name, value in labels.items()})
        return size, "/metrics" if size is not None else None
