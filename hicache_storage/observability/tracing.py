"""Whether calls are traced. Costs a look at a variable where they are not; OpenTelemetry is imported by `enable` only."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

    from hicache_storage.observability.otel import Spans

_spans: list[Spans] = []
"""One, or none."""


def spans() -> Spans | None:
    """What begins spans; None where nothing is traced."""
    return _spans[0] if _spans else None


def enable(provider: TracerProvider | None = None) -> Spans:
    """Trace the calls of this process from now on.

    Args:
        provider: takes the spans; the process' global one by default, which is asked for each span.

    Raises:
        ConfigError: OpenTelemetry is not installed.
    """
    from hicache_storage.spec import ConfigError

    try:
        from hicache_storage.observability.otel import Spans
    except ImportError as error:
        raise ConfigError(f"traces need more packages: pip install 'hicache-storage[otel]' ({error})") from error
    _spans[:] = [Spans(provider)]
    return _spans[0]


def disable() -> None:
    """Trace nothing from now on; spans that have begun are ended by whoever began them."""
    _spans.clear()
