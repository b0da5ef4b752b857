"""Capture of a driver's log records."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Generator


@contextmanager
def records_above_debug() -> Generator[list[logging.LogRecord]]:
    """The records above debug level that reach the root logger meanwhile, from any thread."""
    records = list[logging.LogRecord]()

    class _Capture(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    listener, root = _Capture(logging.DEBUG + 1), logging.getLogger()
    level = root.level
    root.addHandler(listener)
    # Otherwise whatever is logged at INFO would not get as far as the listener.
    root.setLevel(logging.DEBUG + 1)
    try:
        yield records
    finally:
        root.setLevel(level)
        root.removeHandler(listener)
