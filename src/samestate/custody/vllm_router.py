"""``vllm-router`` through its HTTP interface: `drain` takes the incumbent out of its workers, `ready` puts it back.

It says nothing of requests that are open at a worker which was taken out: the engine's own counters do. It has no
configuration file; its command line is its configuration.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from typing_extensions import override

from samestate.custody.base import Admission, CustodyError, Router, field, missing
from samestate.custody.spec import RouterSpec
from samestate.engines.openai_client import ClientError, OpenAIClient, needs_certificates
from samestate.engines.processes import identity
from samestate.evidence.canonical import sha256_hex
from samestate.evidence.custody_records import Field

SECONDS = 30.0
ERRORS = "vllm_router_request_errors_total"
_OWN = "vllm_router_"
_MOMENTARY = ("load", "is_healthy")


class VllmRouter(Router):
    """One worker of it: the incumbent."""

    def __init__(self, spec: RouterSpec, worker: str) -> None:
        assert spec.url is not None and spec.metrics_url is not None and spec.pid_file is not None
        self._url, self._metrics_url, self._pid_file = spec.url, spec.metrics_url, Path(spec.pid_file)
        self._worker = worker

    @override
    def fields(self) -> list[Field]:
        workers = [
            {name: value for name, value in one.items() if name not in _MOMENTARY}
            for one in self._workers()
            if one.get("url") != self._worker
        ]
        made = [field("router.others", json.dumps(sorted(workers, key=lambda one: str(one.get("url")))))]
        who = None
        with suppress(OSError, ValueError):
            who = identity(int(self._pid_file.read_text().partition("@")[0]))
        if who is None:
            return [*made, missing("router.process", "its pid_file names no process that runs")]
        home = Path("/proc") / who.partition("@")[0]
        try:
            made += [
                field("router.process", who),
                field("router.executable", os.readlink(home / "exe")),
                field("router.config.argv", sha256_hex((home / "cmdline").read_bytes())),
            ]
        except OSError as error:
            made.append(missing("router.executable", f"cannot be read: {error.strerror}"))
        return made

    @override
    def admission(self) -> Admission:
        own = next((one for one in self._workers() if one.get("url") == self._worker), None)
        with self._client(self._metrics_url) as client:
            try:
                lines = client.text("/metrics").splitlines()
            except ClientError as error:
                raise CustodyError(f"router.metrics_url: {error}") from None
        failed = sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{ERRORS}{{", f"{ERRORS} ")))
        return Admission(
            admitting=own is not None and own.get("is_healthy") is True,
            sessions=max(0, int(own.get("load") or 0)) if own is not None else 0,
            # One that never failed has no such counter; another program's page has none of its kind.
            failed=int(failed) if any(line.startswith(_OWN) for line in lines) else None,
        )

    @override
    def drain(self) -> None:
        self._tell("remove_worker")

    @override
    def ready(self) -> None:
        if all(one.get("url") != self._worker for one in self._workers()):
            self._tell("add_worker")

    def _workers(self) -> list[dict[str, Any]]:
        with self._client(self._url) as client:
            try:
                found = client.get("/workers").tree["workers"]
            except (ClientError, LookupError) as error:
                raise CustodyError(f"router.url: {error}; is it a vllm-router?") from None
        return [one for one in found if isinstance(one, dict)]

    def _tell(self, what: str) -> None:
        import httpx

        try:
            answer = httpx.post(
                f"{self._url}/{what}",
                params={"url": self._worker},
                timeout=SECONDS,
                trust_env=False,
                verify=needs_certificates(self._url),
            )
        except httpx.HTTPError as error:
            raise CustodyError(f"router.url: {what}: {error}; is it a vllm-router?") from None
        if answer.status_code != 200:
            raise CustodyError(f"router.url: {what} {self._worker}: {' '.join(answer.text.split())[:200]}")

    @staticmethod
    def _client(url: str) -> OpenAIClient:
        return OpenAIClient(url, seconds=SECONDS)
