"""Conversion of SIGTERM and SIGHUP into SystemExit.

Child processes end with the program then.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Generator
    from types import FrameType

SIGNALS: Final = (signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def exit_on_signals() -> Generator[None]:
    """Raise these signals as `SystemExit(128 + number)`, as SIGINT is `KeyboardInterrupt`.

    For the main thread only.
    """
    # Child processes and mounts are ended by `finally` blocks, which the default action of these
    # signals skips.
    before = {number: signal.signal(number, _end) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(number: int, _: FrameType | None) -> None:
    # The first is enough: another must not interrupt what it has begun to end.
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)
