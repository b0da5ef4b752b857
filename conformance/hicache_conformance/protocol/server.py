"""The server under test: one that runs somewhere, or one that the suite starts.

The suite kills its own and starts it again.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from hicache_conformance.harness.ports import accepts, free_ports
from hicache_conformance.model.violation import Violation
from hicache_conformance.protocol.http_client import HttpClient, Unanswered

if TYPE_CHECKING:
    from io import BufferedWriter

START_SECONDS: Final = 180.0
TMP: Final = "{tmp}"
PORT: Final = "{port}"


class CannotStartError(Violation):
    """The server does not come up."""

    def __init__(self, message: str) -> None:
        super().__init__("MD-HTTP-1", f"the server does not come up: {message}")


@dataclass
class RemoteServer:
    """A server that somebody else runs."""

    url: str

    @property
    def can_restart(self) -> bool:
        """Return whether `kill` and `start` work."""
        return False

    @property
    def keeps(self) -> bool:
        """Return whether its command line gives it a place to keep its state."""
        return False

    def start(self) -> None:
        """See that it answers.

        Raises:
            CannotStartError: it does not.
        """
        http = HttpClient(self.url, answer_seconds=5.0)
        try:
            http.get("/healthz")
        except Unanswered as error:
            raise CannotStartError(f"nothing answers at {self.url}: {error}") from error
        finally:
            http.close()

    def kill(self) -> None:
        """Not this one."""
        raise CannotStartError("only a server that --start-server started can be killed")

    def is_running(self) -> bool:
        """Return whether its process runs."""
        return True

    def log(self) -> str:
        """Return its output, as far as it is available."""
        return ""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Leave it alone."""


@dataclass
class Served(RemoteServer):
    """A server that the suite starts from a command with {port} and, for what it keeps, {tmp}."""

    url: str = field(init=False)
    command: str
    directory: Path | None = None
    """For its files; the system's temporary directory if not given."""
    _process: subprocess.Popen[bytes] | None = None
    _home: tempfile.TemporaryDirectory[str] | None = None
    _log: BufferedWriter | None = None

    def __post_init__(self) -> None:
        if PORT not in self.command:
            raise ValueError(
                f"--start-server needs {PORT} in its command, where the server is told its port"
            )
        # Chosen once and kept over restarts, since clients find the server again at the same
        # address.
        [self.port] = free_ports(1)
        self.url = f"http://127.0.0.1:{self.port}"

    @property
    def can_restart(self) -> bool:
        """It can be killed and started again."""
        return True

    @property
    def keeps(self) -> bool:
        """Return whether it is given a directory."""
        return TMP in self.command

    def start(self) -> None:
        """Start it, and wait until it listens.

        Raises:
            CannotStartError: it ended, or did not listen in time.
        """
        if self._home is None:
            self._home = tempfile.TemporaryDirectory(prefix="hicache-metadata-", dir=self.directory)
        home = Path(self._home.name)
        # Kept over restarts, too: what the server finds there after a kill is what the durable
        # cases are about.
        (home / "state").mkdir(exist_ok=True)
        # Appended to, so that the reason why a restart failed stands below what happened before.
        self._log = (home / "log").open("ab")
        words = [
            word.replace(PORT, str(self.port)).replace(TMP, str(home / "state"))
            for word in shlex.split(self.command)
        ]
        try:
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                # Not a session of its own: `runner.child_process` kills by session what a run left.
                process_group=0,
            )
        except OSError as error:
            raise CannotStartError(f"cannot run {words[0]!r}: {error}") from error
        deadline = time.monotonic() + START_SECONDS
        while not accepts(self.port):
            # Looked at first: a server that ended says why in its log, and waiting for the port
            # would hide it for minutes.
            if self._process.poll() is not None:
                raise CannotStartError(
                    f"the server ended with {self._process.returncode} at its start: "
                    f"{self.log()[-1000:]}"
                )
            if time.monotonic() > deadline:
                raise CannotStartError(
                    f"the server does not listen after {START_SECONDS:.0f} s: {self.log()[-1000:]}"
                )
            time.sleep(0.02)

    def kill(self) -> None:
        """Kill -9, whatever it is doing."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                # The group and not only the process: the command may be a shell, or a server with
                # workers.
                os.killpg(self._process.pid, signal.SIGKILL)
            # Reaped before `start`, which needs the port and the files of the old process.
            self._process.wait()
            self._process = None
        if self._log is not None:
            self._log.close()
            self._log = None

    def is_running(self) -> bool:
        """Return whether its process runs."""
        return self._process is not None and self._process.poll() is None

    def log(self) -> str:
        """Return its output, as far as it is available."""
        path = Path(self._home.name) / "log" if self._home else None
        return path.read_text("utf-8", "replace") if path and path.exists() else ""

    def __enter__(self) -> Self:
        try:
            self.start()
        except CannotStartError:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        if self._home is not None:
            self._home.cleanup()
            self._home = None
