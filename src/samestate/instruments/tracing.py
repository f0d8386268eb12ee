"""OpenTelemetry spans for look-ups, loads and saves, where vLLM's own tracing is on; else nothing at all.

vLLM sets the process's tracer provider when ``--otlp-traces-endpoint`` is given; spans here go through it. They carry
counts and the request's id, never tokens. A look-up belongs to the trace that came with its request; transfers, which
workers make, stand alone and name the request.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from samestate.evidence.records import AnyRecord, LoadCompleted, LoadSubmitted, SaveCompleted, SaveSubmitted

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

LOOKUP, LOAD, SAVE = "samestate.lookup", "samestate.load", "samestate.save"
REQUEST_ID = "gen_ai.request.id"
"""As vLLM's own spans name it (``vllm/tracing/utils.py``)."""
MOST_OPEN = 4096
"""Transfers that are open at once; one beyond it is the end of the oldest, which nobody reported."""


class Spans(Protocol):
    """What the audit tells."""

    def lookup(self, request: Any, began_ns: int, local: int, matched: int | None) -> None:
        """The connector answered; `began_ns`: when it was asked, by the wall's clock."""

    def record(self, record: AnyRecord) -> None:
        """A record of a transfer was written."""


def spans_of(vllm_config: Any) -> Spans | None:
    """What makes the spans; None where tracing is off, or OpenTelemetry is not installed."""
    if not getattr(getattr(vllm_config, "observability_config", None), "otlp_traces_endpoint", None):
        return None
    try:
        from opentelemetry.trace import get_tracer
    except ImportError:
        return None
    return OpenTelemetrySpans(get_tracer("samestate"))


class OpenTelemetrySpans:
    """Spans of one process. Only safe in the thread that the connector is called from."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._open: dict[tuple[str, int], Span] = {}

    def lookup(self, request: Any, began_ns: int, local: int, matched: int | None) -> None:
        """See `Spans`."""
        span = self._tracer.start_span(
            LOOKUP,
            context=_context(getattr(request, "trace_headers", None)),
            start_time=began_ns,
            attributes={
                REQUEST_ID: request.request_id,
                "samestate.queried_tokens": request.num_tokens,
                "samestate.local_tokens": local,
                "samestate.result": "wait" if matched is None else "hit" if matched else "miss",
                **({} if matched is None else {"samestate.matched_tokens": matched}),
            },
        )
        span.end(time.time_ns())

    def record(self, record: AnyRecord) -> None:
        """See `Spans`."""
        match record:
            case LoadSubmitted():
                more = {} if record.boundary is None else {"samestate.boundary": record.boundary}
                self._begin(LOAD, record, more)
            case SaveSubmitted():
                self._begin(SAVE, record, {})
            case LoadCompleted():
                self._end(LOAD, record)
            case SaveCompleted():
                self._end(SAVE, record)

    def _begin(self, name: str, record: LoadSubmitted | SaveSubmitted, more: Mapping[str, int]) -> None:
        while len(self._open) >= MOST_OPEN:
            self._open.pop(next(iter(self._open))).end()
        attributes: dict[str, int | str] = {
            "samestate.rank": record.rank,
            "samestate.job": record.job,
            "samestate.pages": sum(part.pages for part in record.parts),
            **more,
        }
        if record.request is not None:
            attributes[REQUEST_ID] = record.request
        self._open[name, record.job] = self._tracer.start_span(name, attributes=attributes)

    def _end(self, name: str, record: LoadCompleted | SaveCompleted) -> None:
        from opentelemetry.trace import Status, StatusCode

        span = self._open.pop((name, record.job), None)
        if span is None:
            return
        if record.bytes is not None:
            span.set_attribute("samestate.bytes", record.bytes)
        if not record.ok:
            span.set_status(Status(StatusCode.ERROR, "reported as failed"))
        span.end()


def _context(headers: Mapping[str, str] | None) -> Any:
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract(headers) if headers else None
