"""Structured logging: one JSON object a line, or text for a terminal."""

from __future__ import annotations

import io
import logging
import os
import select
import sys
from typing import TYPE_CHECKING, Any, Final, TextIO

import structlog

from hicache_storage.observability.request_ids import current_request_id

AUDIT: Final = "hicache.audit"
"""Logger of the audit log."""
FIELDS: Final = ("request_id", "driver", "operation", "pool", "pages", "defect", "seconds")
"""Attributes that the SDK gives to its records."""

if TYPE_CHECKING:
    from structlog.typing import EventDict, WrappedLogger


class NonBlockingHandler(logging.StreamHandler[TextIO]):
    """Writes lines, and drops those for which a pipe has no room: nobody reads it.

    A write would stop the event loop until somebody does. The next line that is written is preceded
    by the number of those that were dropped.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._dropped = 0
        self._poll = select.poll()
        try:
            self._descriptor = stream.fileno()
            self._poll.register(self._descriptor, select.POLLOUT)
        except (io.UnsupportedOperation, ValueError):
            self._descriptor = -1

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line, or drop it."""
        if self._descriptor < 0:
            super().emit(record)
            return
        try:
            line = self.format(record) + "\n"
            if self._dropped:
                line = f'{{"event": "lines_dropped", "lines": {self._dropped}}}\n{line}'
            left = line.encode(errors="backslashreplace")
            while left:
                # A pipe that can be written takes this much at once.
                if not self._poll.poll(0):
                    self._dropped += 1
                    return
                left = left[os.write(self._descriptor, left[: select.PIPE_BUF]) :]
            self._dropped = 0
        except Exception:  # noqa: BLE001 - as every handler of the standard library
            self.handleError(record)


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
    handler = NonBlockingHandler(sys.stderr)
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
    # The level of the log is about the server, and no operator wants fewer lines of its callers.
    logging.getLogger(AUDIT).setLevel(logging.INFO)


def add_request_id(logger: WrappedLogger, name: str, event: EventDict) -> EventDict:
    """Add the id of the current request to a log line that has none."""
    request_id = current_request_id()
    if request_id:
        event.setdefault("request_id", request_id)
    return event
