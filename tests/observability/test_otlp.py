"""Spans as OpenTelemetry's own exporter sends them: OTLP over HTTP, decoded by a receiver that is
told only where to listen."""

from __future__ import annotations

import gzip
import http.server
import threading
from contextlib import contextmanager

import pytest
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from hicache_storage.layers import StorageOptions, wrap
from hicache_storage.observability import tracing
from hicache_storage.observability.otel import provider_from_environment
from hicache_storage.observability.request_ids import RequestScope
from tests.backends.hf3fs.harness import Rig, chain
from tests.observability.serving import ask, stopped
from tests.observability.test_traces import SERVE
from tests.support.metadata import Served


class Receiver(http.server.ThreadingHTTPServer):
    """Takes `POST /v1/traces`."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.spans = list[tuple[str, Span]]()
        """The name of each one's service, and the span."""
        self.unlike = list[str]()
        """What came besides."""


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        if (self.path, self.headers["Content-Type"]) != ("/v1/traces", "application/x-protobuf"):
            self.server.unlike.append(f"{self.path} {self.headers['Content-Type']}")
        for of_resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            [service] = [
                one.value.string_value
                for one in of_resource.resource.attributes
                if one.key == "service.name"
            ]
            self.server.spans += [
                (service, span) for scope in of_resource.scope_spans for span in scope.spans
            ]
        answer = ExportTraceServiceResponse().SerializeToString()
        self.send_response(200)
        self.send_header("Content-Type", "application/x-protobuf")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_):
        pass


@contextmanager
def receiving():
    receiver = Receiver()
    thread = threading.Thread(target=receiver.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield receiver
    finally:
        receiver.shutdown()
        receiver.server_close()
        thread.join()


def traced(endpoint):
    return Served(
        command=f"env OTEL_TRACES_EXPORTER=otlp OTEL_EXPORTER_OTLP_ENDPOINT={endpoint} {SERVE}"
    )


def test_engine_client_and_server_are_one_trace_at_the_receiver(tmp_path, monkeypatch):
    """Two processes, each with its own exporter."""
    with receiving() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
        provider = provider_from_environment("engine")
        tracing.enable(provider)
        try:
            with traced(receiver.url) as place:
                rig = Rig(tmp_path / "store", metadata_url=place.url)
                storage = wrap(rig.storage, StorageOptions(traces=True))
                engine = trace.get_tracer("engine", tracer_provider=provider)
                with engine.start_as_current_span("prefill"), RequestScope("chat-7"):
                    assert storage.batch_set_v2([rig.transfer(chain("c", 3))])["kv"] == [True] * 3
                storage.close()
                stopped(place)
        finally:
            tracing.disable()
            provider.shutdown()
    assert receiver.unlike == []
    named = {(service, span.name): span for service, span in receiver.spans}
    root, put = named["engine", "prefill"], named["engine", "hicache.batch_set"]
    assert put.parent_span_id == root.span_id
    for route in ("/v2/reserve", "/v2/commit"):
        client, server = (
            named["engine", f"hicache.metadata {route}"],
            named["hicache-metadata", f"POST {route}"],
        )
        assert (client.kind, server.kind) == (Span.SPAN_KIND_CLIENT, Span.SPAN_KIND_SERVER)
        assert (client.parent_span_id, server.parent_span_id) == (put.span_id, client.span_id)
        assert {client.trace_id, server.trace_id} == {root.trace_id}
        told = {one.key: one.value for one in server.attributes}
        assert told["hicache.request_id"].string_value == "chat-7"
        assert (told["hicache.entries"].int_value, told["http.response.status_code"].int_value) == (
            3,
            200,
        )
        assert (
            root.start_time_unix_nano
            <= client.start_time_unix_nano
            <= client.end_time_unix_nano
            <= root.end_time_unix_nano
        )


@pytest.mark.long
def test_a_receiver_that_is_gone_costs_no_request_and_no_end():
    with receiving() as receiver:
        gone = receiver.url
    with traced(gone) as place:
        assert [ask(place.url, "GET", "/v2/scopes")[0] for _ in range(20)] == [200] * 20
        assert "stopped" in stopped(place)
