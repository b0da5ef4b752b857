"""The process-wide switch of traces. OpenTelemetry is imported by `enable` only."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

    from hicache_storage.observability.otel import Spans

_spans: list[Spans] = []
"""At most one; a list, so that `enable` and `disable` rebind no global."""


def spans() -> Spans | None:
    """Return the factory of spans; None while traces are off."""
    return _spans[0] if _spans else None


def enable(provider: TracerProvider | None = None) -> Spans:
    """Trace the calls of this process from now on.

    Args:
        provider: receiver of the spans; by default the global one, looked up for each span.

    Raises:
        ConfigError: OpenTelemetry is not installed.
    """
    from hicache_storage.spec import ConfigError

    try:
        from hicache_storage.observability.otel import Spans
    except ImportError as error:
        raise ConfigError(
            f"traces need more packages: pip install 'hicache-storage[otel]' ({error})"
        ) from error
    _spans[:] = [Spans(provider)]
    return _spans[0]


def disable() -> None:
    """Stop tracing; spans that have begun are still ended by their calls."""
    _spans.clear()
