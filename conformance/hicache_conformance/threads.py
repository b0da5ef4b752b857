"""Several threads at once, none of them for ever."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

from hicache_conformance.violation import Violation

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

HANG_SECONDS: Final = 120.0
"""A thread that has not come back after this long hangs; no time that a working driver takes comes near it."""


def together(rule: str, functions: Sequence[Callable[[], object]]) -> None:
    """Run functions in a thread each, begun at the same time, and wait for all of them.

    Raises:
        Violation: `rule`, if one hangs; otherwise what the first that failed has raised.
    """
    errors = list[BaseException]()
    start = threading.Barrier(len(functions))

    def run(function: Callable[[], object]) -> None:
        try:
            start.wait()
            function()
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            errors.append(error)

    threads = [threading.Thread(target=run, args=(function,), daemon=True) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_SECONDS)
        if thread.is_alive():
            raise Violation(rule, f"a call has not come back after {HANG_SECONDS:.0f} s")
    if errors:
        raise errors[0]
