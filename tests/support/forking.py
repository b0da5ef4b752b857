"""Forked children that use their parent's storage, for tests."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

HUNG = "hung"


def in_child(work: Callable[[], str], seconds: float = 20.0) -> str:
    """Return the result of `work` in a forked child, or the name of its exception; `HUNG` if it
    does not return."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            try:
                said = work()
            except BaseException as error:  # noqa: BLE001 - told to the parent
                said = f"{type(error).__name__}: {error}"
            os.write(writer, said.encode())
        finally:
            os._exit(0)
    os.close(writer)
    try:
        until = time.monotonic() + seconds
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            if time.monotonic() > until:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return HUNG
            time.sleep(0.001)
        return os.read(reader, 10_000).decode()
    finally:
        os.close(reader)
