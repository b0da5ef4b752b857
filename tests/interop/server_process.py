"""A server of an engine: a process that is waited for, and called by HTTP."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
import urllib.request
from typing import TYPE_CHECKING, ClassVar, Self

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

# An idle machine needs ten seconds to start one, one with ten other things to do some minutes.
WAIT_SECONDS = 600.0
READY_SECONDS = 30.0


def counted(metrics: str, name: str, **labels: str) -> float:
    """The sum of a counter's series that have these labels, in a text for Prometheus."""
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    return sum(
        float(line.split()[-1])
        for line in metrics.splitlines()
        if line.startswith(f"{name}{{") and all(part in line for part in wanted)
    )


class ServerProcess:
    """What the servers of all engines have in common: killed when the block ends."""

    process: subprocess.Popen[bytes]
    log: Path
    port: int
    argv: list[str]
    environment: dict[str, str]
    place: Path | None = None
    """Where it runs; elsewhere than this process if given."""
    headers: ClassVar[dict[str, str]] = {}
    """Of each call."""
    ready: ClassVar = "/health"
    """Path that is answered when the server serves."""

    def __enter__(self) -> Self:
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                self.argv,
                cwd=self.place,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """Kill all its processes, and remove the shared memory that nobody else would."""
        shared = self.shared_memory()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for file in shared:
            file.unlink(missing_ok=True)

    def shared_memory(self) -> set[Path]:
        """Its files in `/dev/shm`."""
        return set()

    def wait_until_up(self) -> Self:
        """Until it serves."""
        self.wait_for(self.is_up, "the server does not start")
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

    def counted(self, name: str, **labels: str) -> float:
        """The sum of a counter's series, of those that its own `/metrics` have."""
        return counted(self.call("GET", "/metrics"), name, **labels)

    def is_up(self) -> bool:
        """Whether it serves."""
        try:
            # Something else may listen there, which answers nothing.
            self.call("GET", self.ready, seconds=READY_SECONDS)
        except OSError:
            return False
        return True
