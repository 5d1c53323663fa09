"""A collector of traces: takes OTLP over HTTP on loopback and keeps the spans."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.support.polling import eventually


class Collector:
    """Returns the spans that have arrived so far."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.paths: list[str] = []
        self.spans: list[Span] = []
        self.resource: dict[str, str] = {}

    def take(self, path: str, body: bytes) -> None:
        self.paths.append(path)
        request = ExportTraceServiceRequest.FromString(body)
        for resource in request.resource_spans:
            self.resource = {each.key: each.value.string_value for each in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.spans.extend(scope.spans)

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name.endswith(name)]

    def wait_for(self, name: str) -> Span:
        """Returns the first span whose name ends with that."""
        assert eventually(lambda: self.named(name)), [span.name for span in self.spans]
        return self.named(name)[0]


def attributes(span: Span) -> dict[str, Any]:
    found = {}
    for each in span.attributes:
        kind = each.value.WhichOneof("value")
        found[each.key] = getattr(each.value, kind) if kind is not None else None
    return found


@contextmanager
def collecting() -> Iterator[Collector]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            collector.take(self.path, self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Logs nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector = Collector(f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join()
