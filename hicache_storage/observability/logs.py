"""The SDK's log lines: what its loggers add to a record, and one JSON object a line for those who want that.

Every record of this project may have the attributes in `FIELDS`, given with `extra`; a formatter that knows them not leaves
them out.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from hicache_storage.observability.request_ids import current_request_id

if TYPE_CHECKING:
    from typing import TextIO

FIELDS: Final = ("request_id", "driver", "operation", "pool", "pages", "seconds")
"""Attributes of records: text, but for `pages` and `seconds`."""
LOGGERS: Final = ("hicache_storage", "hicache_backends")


def fields(**values: str | float) -> dict[str, str | float]:
    """What a logger is given as `extra`: the call's id, and other fields."""
    request_id = current_request_id()
    return {"request_id": request_id, **values} if request_id else values


class JsonFormatter(logging.Formatter):
    """`timestamp` (UTC, ISO 8601), `level`, `logger`, `event`, the `FIELDS` that a record has, and `exception`."""

    def format(self, record: logging.LogRecord) -> str:
        """One line without a line feed."""
        line: dict[str, object] = {
            "timestamp": datetime.fromtimestamp(record.created, UTC).isoformat().replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
        }
        request_id = current_request_id()
        if request_id:
            line["request_id"] = request_id
        line |= {name: getattr(record, name) for name in FIELDS if hasattr(record, name)}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def configure_json_logs(level: int | str = logging.INFO, stream: TextIO | None = None) -> logging.Handler:
    """Send this project's lines to `stream` (standard error), and to no handler above; for engines that do not configure logs.

    Returns:
        the handler, to be removed by whoever wants that.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter())
    for name in LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.propagate = False
        logger.setLevel(level)
    return handler
