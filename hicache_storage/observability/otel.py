"""Spans by OpenTelemetry. Needs `hicache-storage[otel]`."""

from __future__ import annotations

import os
from contextlib import contextmanager
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Final

from opentelemetry import propagate, trace
from opentelemetry.trace import SpanKind, Status, StatusCode

from hicache_storage.spec import ConfigError

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, MutableMapping, Sequence

    from opentelemetry.sdk.trace import TracerProvider as SdkTracerProvider
    from opentelemetry.trace import Span, TracerProvider
    from opentelemetry.util.types import AttributeValue

REQUEST_ID: Final = "hicache.request_id"
ROUTE: Final = "http.route"
STATUS: Final = "http.response.status_code"
FLUSH_MILLISECONDS: Final = 5000
"""Time limit of a flush."""
CARRIED: Final = (b"traceparent", b"tracestate", b"baggage")
"""Headers that a server takes a trace context from."""


class ServerSpan:
    """The server's span of a request, until it is answered."""

    __slots__ = ("_span",)

    def __init__(self, span: Span) -> None:
        self._span = span

    def end(self, status: int, scopes: int, entries: int) -> None:
        """End the span of an answered request.

        Args:
            status: HTTP status of the answer.
            scopes: number of scopes that the request names.
            entries: number of keys or slots that it names.
        """
        self._span.set_attribute(STATUS, status)
        self._span.set_attribute("hicache.scopes", scopes)
        self._span.set_attribute("hicache.entries", entries)
        # 4xx is the client's error: OpenTelemetry's conventions leave the status of a server's span
        # unset.
        if status >= 500:
            self._span.set_status(Status(StatusCode.ERROR))
        self._span.end()


class Spans:
    """Factory of spans; `provider` receives them."""

    def __init__(self, provider: TracerProvider | None = None) -> None:
        self._provider = provider
        self._tracer = trace.get_tracer("hicache_storage", tracer_provider=provider)

    def flush(self) -> None:
        """Export pending spans, within `FLUSH_MILLISECONDS`.

        A global provider is flushed by its owner.
        """
        # OpenTelemetry's API has no `force_flush`; providers of its SDK do.
        flush = getattr(self._provider, "force_flush", None)
        if flush is not None:
            flush(FLUSH_MILLISECONDS)

    @contextmanager
    def call(
        self, operation: str, request_id: str, pools: Sequence[str], pages: int
    ) -> Generator[Span]:
        """Trace one call of a storage, as `hicache.batch_get` and the like."""
        attributes: dict[str, AttributeValue] = {
            REQUEST_ID: request_id,
            "hicache.pools": list(pools),
            "hicache.pages": pages,
        }
        with self._tracer.start_as_current_span(
            f"hicache.{operation}", attributes=attributes
        ) as span:
            yield span

    @contextmanager
    def request(self, route: str, request_id: str) -> Generator[None]:
        """Trace one request to a metadata server, retries included.

        A failure becomes the span's status.
        """
        attributes = {REQUEST_ID: request_id, ROUTE: route}
        with self._tracer.start_as_current_span(
            f"hicache.metadata {route}", kind=SpanKind.CLIENT, attributes=attributes
        ):
            yield

    def answer(
        self, method: str, route: str, request_id: str, headers: Mapping[bytes, bytes]
    ) -> ServerSpan:
        """Start the server's span of a request.

        It is a child of the span that the request's `traceparent` names.
        """
        carried = {
            # Headers are bytes in any encoding; latin-1 decodes all of them.
            name.decode(): headers[name].decode("latin-1")
            for name in CARRIED
            if name in headers
        }
        attributes = {REQUEST_ID: request_id, ROUTE: route, "http.request.method": method}
        context = propagate.extract(carried)
        return ServerSpan(
            self._tracer.start_span(
                f"{method} {route}", context, SpanKind.SERVER, attributes=attributes
            )
        )


def inject(headers: MutableMapping[str, str]) -> None:
    """Add the current span's `traceparent` to a request's headers."""
    propagate.inject(headers)


def provider_from_environment(service: str) -> SdkTracerProvider:
    """Make a provider that exports as OpenTelemetry's environment variables say.

    These are `OTEL_TRACES_EXPORTER` (`otlp_proto_http` by default, `console`, or any installed
    one), `OTEL_EXPORTER_OTLP_ENDPOINT`, `OTEL_TRACES_SAMPLER` and so on.

    Args:
        service: name of the service, unless `OTEL_SERVICE_NAME` says another.

    Raises:
        ConfigError: there is no such exporter.
    """
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    # `otlp` is in a package that brings gRPC along, and stands for either of its two protocols.
    name = os.environ.get("OTEL_TRACES_EXPORTER", "").strip()
    if name in ("", "otlp"):
        name = "otlp_proto_http"
    # As OpenTelemetry finds exporters itself, so that any installed one can be named.
    found = list(entry_points(group="opentelemetry_traces_exporter", name=name))
    if not found:
        raise ConfigError(
            f"OTEL_TRACES_EXPORTER={name}: no such exporter is installed; pip install "
            "'hicache-storage[otel]'"
        )
    try:
        exporter: Any = found[0].load()
    except ImportError as error:
        raise ConfigError(f"OTEL_TRACES_EXPORTER={name} cannot be imported: {error}") from error
    # An attribute that is passed here would win over the environment variable.
    resource = Resource.create({} if "OTEL_SERVICE_NAME" in os.environ else {SERVICE_NAME: service})
    provider = TracerProvider(resource=resource)
    # It exports in a thread of its own: a collector that is down delays no call.
    provider.add_span_processor(BatchSpanProcessor(exporter()))
    return provider
