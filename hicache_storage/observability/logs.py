"""Structured logs: fields of the SDK's records, and a JSON formatter.

Every record of this project may have the attributes in `FIELDS`, passed as `extra`; other
formatters ignore them.
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

FIELDS: Final = ("request_id", "driver", "operation", "pool", "pages", "defect", "seconds")
"""Attributes of records: strings, except for the numbers `pages` and `seconds`."""
LOGGERS: Final = ("hicache_storage", "hicache_backends")


def fields(**values: str | float) -> dict[str, str | float]:
    """Return the `extra` of a record: the request id, and other fields."""
    request_id = current_request_id()
    return {"request_id": request_id, **values} if request_id else values


class JsonFormatter(logging.Formatter):
    """Formatter of JSON lines.

    Fields are `timestamp` (UTC, ISO 8601), `level`, `logger`, `event`, a record's `FIELDS`, and
    `exception`.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Format a record as one line, without a line feed."""
        line: dict[str, object] = {
            "timestamp": datetime.fromtimestamp(record.created, UTC)
            .isoformat()
            .replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
        }
        # Also for records of other code, such as a driver's, which does not pass it as `extra`.
        request_id = current_request_id()
        if request_id:
            line["request_id"] = request_id
        # After the context's id: a record of a background thread carries the id of the call it
        # works for.
        line |= {name: getattr(record, name) for name in FIELDS if hasattr(record, name)}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        # `default=str`: a field that JSON cannot represent must not lose the record.
        return json.dumps(line, ensure_ascii=False, default=str)


def configure_json_logs(
    level: int | str = logging.INFO, stream: TextIO | None = None
) -> logging.Handler:
    """Log this project's records to `stream` (standard error by default), and to no parent handler.

    For engines that configure no logs.

    Returns:
        the handler, which the caller may remove again.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter())
    for name in LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        # Otherwise handlers of the root logger print each record again, in another format.
        logger.propagate = False
        logger.setLevel(level)
    return handler


def log_like(engine: logging.Logger) -> None:
    """Print this project's records as an engine prints its own, where nobody has configured logs.

    vLLM and LMCache give handlers to loggers of their own and none to the root, so that records of
    others are printed from WARNING on only, without a time. No effect beside a handler of the root,
    or of this project's loggers.

    Args:
        engine: a logger that has the engine's handlers.
    """
    if logging.getLogger().handlers:
        return
    for name in LOGGERS:
        logger = logging.getLogger(name)
        if not logger.handlers:
            logger.handlers[:] = engine.handlers
            logger.setLevel(engine.getEffectiveLevel())
