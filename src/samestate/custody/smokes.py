"""Functional smokes: requests of a client's kind, sent once before and once after, never again, raw bytes kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from samestate.custody.base import CustodyError
from samestate.custody.spec import SmokeSpec
from samestate.engines.openai_client import CHAT, ClientError, OpenAIClient, encoded, needs_certificates
from samestate.evidence.canonical import sha256_hex
from samestate.evidence.custody_records import RAW, SmokeDone, When
from samestate.evidence.whole import write_new

SECONDS = 300.0


def smoke(spec: SmokeSpec, when: When, url: str, folder: Path, key: str | None = None) -> SmokeDone:
    """Send it to `url`; its request and its response, failed or not, lie in the folder's `RAW`. Raises OSError."""
    import httpx

    try:
        with OpenAIClient(url, api_key=key, seconds=SECONDS) as client:
            model = client.models()[0]
    except ClientError as error:
        return _done(spec, when, b"", None, None, str(error).replace(url, "the server"), folder)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    sent = encoded(_body(spec, model))
    try:
        # As a client of theirs: an answer of 500 is an answer, and its bytes are kept.
        answer = httpx.post(
            f"{url}{CHAT}",
            content=sent,
            headers=headers | {"Content-Type": "application/json"},
            timeout=SECONDS,
            trust_env=False,
            verify=needs_certificates(url),
        )
    except httpx.HTTPError as error:
        words = " ".join(str(error).split()) or type(error).__name__
        return _done(spec, when, sent, None, None, f"no answer: {words}".replace(url, "the server"), folder)
    return _done(
        spec, when, sent, answer.status_code, answer.content, _wrong(spec, answer.status_code, answer.content), folder
    )


def require_kept(specs: list[SmokeSpec], required: list[str]) -> None:
    """Raise `CustodyError` where a response from before is required that nobody would keep."""
    kept = {smoke.name for smoke in specs if smoke.raw}
    for name in (word.removeprefix("smoke.") for word in required if word.startswith("smoke.")):
        if name not in kept:
            raise CustodyError(
                f"probe.required_before: smoke.{name} has no producer; add a smoke of that name that keeps raw bytes"
            )


def require_validator(specs: list[SmokeSpec]) -> None:
    """Raise `CustodyError` where a smoke wants a validator of JSON Schema, or a schema that is none."""
    strict = [smoke for smoke in specs if smoke.json_schema is not None]
    if not strict:
        return
    try:
        from jsonschema import Draft202012Validator, SchemaError
    except ImportError:
        raise CustodyError("smokes: strict-json needs jsonschema; pip install 'samestate[custody]'") from None
    for smoke in strict:
        try:
            Draft202012Validator.check_schema(smoke.json_schema)
        except SchemaError as error:
            raise CustodyError(f"smokes: {smoke.name}: json_schema is no schema ({error.message}); mend it") from None


def _body(spec: SmokeSpec, model: str) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": spec.prompt}],
        "max_completion_tokens": spec.max_tokens,
        "temperature": 0,
        "seed": 0,
    }
    if spec.json_schema is not None:
        schema = {"name": spec.name, "schema": spec.json_schema, "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    return body


def _wrong(spec: SmokeSpec, status: int, raw: bytes) -> str | None:
    """Why an answer will not do, in words that are the same for the same failure; None: it will."""
    try:
        tree = json.loads(raw)
    except (ValueError, RecursionError):
        return f"status {status}, and the answer is no JSON"
    if status != 200:
        said = tree.get("error", tree) if isinstance(tree, dict) else tree
        message = said.get("message") if isinstance(said, dict) else None
        return f"status {status}: {' '.join(str(message or 'no reason given').split())[:300]}"
    try:
        content = tree["choices"][0]["message"]["content"]
    except (LookupError, TypeError):
        return "the answer has no message"
    if not content:
        return "the message is empty"
    if not isinstance(content, str):
        return "the message is no text"
    return _strictly(content, spec.json_schema) if spec.kind == "strict-json" else None


def _strictly(content: str, schema: dict[str, Any] | None) -> str | None:
    from jsonschema import Draft202012Validator

    try:
        tree = json.loads(content)
    except (ValueError, RecursionError) as error:
        return f"strict JSON: {error}"
    try:
        mistake = next(iter(Draft202012Validator(schema or {}).iter_errors(tree)), None)
    except Exception as error:  # a reference that leads nowhere, or round and round: kinds of several packages
        return f"strict JSON: json_schema cannot be applied ({type(error).__name__})"
    return f"strict JSON: {' '.join(mistake.message.split())[:300]}" if mistake else None


def _done(
    spec: SmokeSpec, when: When, sent: bytes, status: int | None, raw: bytes | None, error: str | None, folder: Path
) -> SmokeDone:
    response = None
    if spec.raw:
        (folder / RAW).mkdir(exist_ok=True)
        stem = f"{when}-{spec.name}"
        attempt = len(list((folder / RAW).glob(f"{stem}*.request.json")))
        stem = f"{stem}-{attempt + 1}" if attempt else stem
        write_new(folder / RAW / f"{stem}.request.json", sent)
        if raw is not None:
            response = f"{stem}.response"
            write_new(folder / RAW / response, raw)
    return SmokeDone(
        name=spec.name,
        when=when,
        form=spec.kind,
        status=status,
        ok=error is None,
        error=error,
        request_sha256=sha256_hex(sent),
        response=response,
        response_sha256=sha256_hex(raw) if raw is not None else None,
    )
