"""Fields of the SDK's log records, which are passed as `extra`, and the engine's handlers for them."""

from __future__ import annotations

import logging
from typing import Final

from hicache_storage.observability.request_ids import current_request_id

LOGGERS: Final = ("hicache_storage", "hicache_backends")


def fields(**values: str | float) -> dict[str, str | float]:
    """Return the `extra` of a record: the request id, and strings or numbers by their names."""
    request_id = current_request_id()
    return {"request_id": request_id, **values} if request_id else values


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
