"""Structured logging: one JSON object a line, or text for a terminal."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Any

import structlog

from hicache_storage.observability.logs import FIELDS
from hicache_storage.observability.request_ids import current_request_id

if TYPE_CHECKING:
    from structlog.typing import EventDict, WrappedLogger


def configure_logs(level: str, form: str) -> None:
    """Send the lines of all loggers, uvicorn's included, to standard error."""
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        add_request_id,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    # Not structlog's default formatter of exceptions: it shows local variables, which may be tokens.
    console = structlog.dev.ConsoleRenderer(
        colors=False, exception_formatter=structlog.dev.plain_traceback
    )
    renderer: Any = structlog.processors.JSONRenderer() if form == "json" else console
    last = [structlog.processors.format_exc_info] if form == "json" else []
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            # For lines of the standard library's loggers, which skip structlog's processors.
            foreign_pre_chain=[*shared, structlog.stdlib.ExtraAdder(allow=FIELDS)],
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                *last,
                renderer,
            ],
        )
    )
    root = logging.getLogger()
    # Replaced, not added: a second handler would print every line twice.
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


def add_request_id(logger: WrappedLogger, name: str, event: EventDict) -> EventDict:
    """Add the id of the current request to a log line that has none."""
    request_id = current_request_id()
    if request_id:
        event.setdefault("request_id", request_id)
    return event
