"""A server of an engine: a process that is waited for, and called by HTTP."""

from __future__ import annotations

import json
import time
import urllib.request
from typing import TYPE_CHECKING, ClassVar, Self

import pytest

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable
    from pathlib import Path

# An idle machine needs ten seconds to start one, one with ten other things to do some minutes.
WAIT_SECONDS = 600.0
READY_SECONDS = 30.0


class ServerProcess:
    """What the servers of all engines have in common."""

    process: subprocess.Popen[bytes]
    log: Path
    port: int
    headers: ClassVar[dict[str, str]] = {}
    """Of each call."""
    ready: ClassVar = "/health"
    """Path that is answered when the server serves."""

    def wait_until_up(self) -> Self:
        """Until it serves."""
        self.wait_for(self._is_up, "the server does not start")
        return self

    def wait_for(self, condition: Callable[[], bool], otherwise: str) -> None:
        """Until a condition holds that the server has to bring about."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not condition():
            if self.process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"{otherwise}\n{self.text()[-6000:]}")
            time.sleep(0.2)

    def text(self) -> str:
        """What it has logged."""
        return self.log.read_text(errors="replace")

    def call(
        self, method: str, path: str, body: object = None, seconds: float = WAIT_SECONDS
    ) -> str:
        """One HTTP call.

        Raises:
            TimeoutError: it was not answered in so many seconds.
            urllib.error.HTTPError: it was refused.
        """
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **self.headers}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data, headers, method=method
        )
        with urllib.request.urlopen(request, timeout=seconds) as answer:
            return answer.read().decode()

    def _is_up(self) -> bool:
        try:
            # Something else may listen there, which answers nothing.
            self.call("GET", self.ready, seconds=READY_SECONDS)
        except OSError:
            return False
        return True
