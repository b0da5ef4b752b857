"""A fork server: starts worker processes from a preloaded interpreter, kills and reaps them.

It imports slow third-party modules, and no driver and nothing of this project: a fork of it that
continues as `worker_main` imports the driver as a new interpreter would, in a tenth of the time.
Forks share the hash seed and nothing else of an interpreter's start; a case that depends on it asks
for a fresh interpreter.

No process is reaped until the suite asks for it, so that its PID cannot be reused while it may
still be killed.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from typing import Any, Final

MESSAGE_BYTES: Final = 1 << 20
REAP_SECONDS: Final = 10.0
"""A killed process that is still there after this long waits in the kernel for a store that does
not answer."""

ENGINES: Final = (
    "sglang",
    "vllm.v1.kv_offload.tiering.base",
    "lmcache.v1.distributed.memory_manager",
)
"""Modules of engines, preloaded where the suite's process has imported them: a foreign driver needs
its engine in each worker, which takes seconds to import. Storage drivers are not among what these
modules import."""

_PR_SET_PDEATHSIG: Final = 1


class ForkServer:
    """The suite's side: starts, kills and reaps workers. One a process; not thread-safe."""

    def __init__(self) -> None:
        # Sequenced packets keep the boundaries of messages, so that a descriptor stays with the
        # request that it was sent with.
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Environments are long; a message has to fit.
        for side in (ours, theirs):
            side.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MESSAGE_BYTES)
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-m",
                "hicache_conformance.processes.fork_server",
                str(theirs.fileno()),
                *(engine for engine in ENGINES if engine in sys.modules),
            ],
            pass_fds=[theirs.fileno()],
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        theirs.close()
        self._control = ours
        self.owner = os.getpid()

    def alive(self) -> bool:
        """Return whether it accepts requests; in a fork of the suite it does not."""
        return self.owner == os.getpid() and self._process.poll() is None

    def spawn(self, *, fresh: bool) -> tuple[int, socket.socket]:
        """Start a worker in a session of its own; its PID, and the socket that it listens to."""
        ours, theirs = socket.socketpair()
        with theirs:
            environment = _environment()
            if fresh:
                # A fixed hash seed would make two interpreters as alike as two forks.
                environment.pop("PYTHONHASHSEED", None)
            request = {"fresh": fresh, "environment": environment, "path": sys.path}
            try:
                socket.send_fds(self._control, [json.dumps(request).encode()], [theirs.fileno()])
                return int(self._answer()), ours
            except BaseException:
                ours.close()
                raise

    def kill(self, pid: int) -> int | None:
        """Kill a worker and everything in its session, and wait for it.

        Returns:
            The status of `os.waitpid`; None if the process does not end.
        """
        try:
            self._control.send(json.dumps({"kill": pid}).encode())
            status = self._answer()
        # The control socket is closed on the other side.
        except OSError:
            # The fork server has died, and its children were killed with it.
            return int(signal.SIGKILL)
        return None if status is None else int(status)

    def close(self) -> None:
        """End the fork server, and all workers with it."""
        self._control.close()
        self._process.wait()

    def _answer(self) -> Any:
        answer = self._control.recv(MESSAGE_BYTES)
        if not answer:
            raise ConnectionResetError("the process that starts workers has died")
        return json.loads(answer)


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def _main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    # Set before anything slow: a suite that is killed during the imports would leave this process
    # behind.
    die_with_parent()
    _preload_slow_modules()
    for engine in sys.argv[2:]:
        importlib.import_module(engine)
    alive_pids = set[int]()
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, MESSAGE_BYTES, 1)
        if not message:
            # The suite has closed its end, or has been killed.
            break
        request = json.loads(message)
        if "kill" in request:
            status = _kill(request["kill"])
            if status is not None:
                alive_pids.discard(request["kill"])
            control.send(json.dumps(status).encode())
            continue
        pid = os.fork()
        if not pid:
            control.close()
            _become_worker(request, descriptors[0])
        os.close(descriptors[0])
        alive_pids.add(pid)
        control.send(json.dumps(pid).encode())
    for pid in alive_pids:
        _kill(pid)


def _become_worker(request: dict[str, Any], descriptor: int) -> None:
    """Become a worker; never returns."""
    status = 1
    try:
        # A session of its own, so that `_kill` also reaches what a driver has started there.
        os.setsid()
        # Holds across execve, so for a fresh interpreter too.
        die_with_parent()
        os.set_inheritable(descriptor, True)
        if request["fresh"]:
            command = [
                sys.executable,
                "-P",
                "-m",
                "hicache_conformance.processes.worker_main",
                str(descriptor),
            ]
            os.execve(sys.executable, command, request["environment"])
        # The fork has the environment of the time when the fork server was started; a case may have
        # changed variables or `sys.path` since.
        os.environ.clear()
        os.environ.update(request["environment"])
        sys.path[:] = request["path"]
        from hicache_conformance.processes.worker_main import serve

        serve(descriptor)
        status = 0
    except BaseException:  # noqa: BLE001 - whatever it was, this process must not continue as a second fork server
        traceback.print_exc()
    finally:
        # Not `sys.exit`: exit handlers of the fork server belong to the fork server.
        os._exit(status)


def _kill(pid: int) -> int | None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        # Not in its own session yet.
        os.kill(pid, signal.SIGKILL)
    limit = time.monotonic() + REAP_SECONDS
    while time.monotonic() < limit:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status
        time.sleep(0.0005)
    return None


def die_with_parent() -> None:
    """Let the kernel kill this process when the thread that started it ends.

    Nothing outlives the suite.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _preload_slow_modules() -> None:
    # Nothing of this project, and nothing that draws random numbers when it is imported.
    import msgspec
    import pytest
    import torch
    import xxhash

    _ = msgspec, pytest, torch, xxhash


if __name__ == "__main__":
    _main()
