"""An OTLP collector for tests: takes spans over gRPC and keeps them."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)


class Received(NamedTuple):
    """One span as it came over the wire."""

    name: str
    trace: str
    """32 hexadecimal digits."""
    nanoseconds: int
    attributes: dict[str, Any]


class Collector(TraceServiceServicer):
    """Listens on a free port of 127.0.0.1 until it is closed."""

    def __init__(self) -> None:
        self.spans: list[Received] = []
        self._server = grpc.server(ThreadPoolExecutor(2))
        add_TraceServiceServicer_to_server(self, self._server)
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def Export(self, request: Any, context: Any) -> Any:  # the name is the protocol's
        """Keep them."""
        self.spans += [
            Received(
                span.name,
                span.trace_id.hex(),
                span.end_time_unix_nano - span.start_time_unix_nano,
                {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes},
            )
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]
        return ExportTraceServiceResponse()

    def await_spans(self, wanted: Callable[[Received], bool], seconds: float = 30.0) -> list[Received]:
        """Those that are wanted, once there is one; none after so long."""
        deadline = time.monotonic() + seconds
        while not (found := [span for span in self.spans if wanted(span)]) and time.monotonic() < deadline:
            time.sleep(0.1)
        return found

    def close(self) -> None:
        """Stop listening; safe to call twice."""
        self._server.stop(None).wait()
