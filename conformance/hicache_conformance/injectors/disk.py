"""The injector `disk`: a directory on a FUSE file system that injects faults."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final

import msgspec

from hicache_conformance.injectors.active_faults import find_fault
from hicache_conformance.injectors.fuse_fs import unmount
from hicache_conformance.injectors.injector import FaultInjector
from hicache_conformance.model.fault_plan import FaultKind
from hicache_conformance.model.violation import Inconclusive

if TYPE_CHECKING:
    from hicache_conformance.model.fault_plan import FaultPlan

PATIENCE_SECONDS: Final = 30.0
"""How long the file system's process may take to mount, or to answer a command."""


def missing_for_disk() -> str:
    """Name the requirement of the injector `disk` that this machine lacks; empty if none."""
    if not os.path.exists("/dev/fuse"):
        return "/dev/fuse"
    if shutil.which("fusermount3") is None:
        return "fusermount3 (package fuse3)"
    if importlib.util.find_spec("mfusepy") is None:
        return "the module mfusepy (pip install 'hicache-storage[conformance]')"
    return ""


class DiskInjector(FaultInjector):
    """A directory on a FUSE file system, mounted by a process of its own.

    Raises:
        Inconclusive: FUSE does not work here; the message says what is missing.
    """

    name: ClassVar[str] = "disk"

    def __init__(self) -> None:
        super().__init__()
        missing = missing_for_disk()
        if missing:
            raise Inconclusive(f"the injector 'disk' needs {missing}")
        # Not below pytest's directories: whoever removes those must not meet a mount that hangs.
        self._home = Path(tempfile.mkdtemp(prefix="hicache-injector-"))
        self._lock = threading.Lock()
        # A session of its own, so that it survives a suite that is killed for long enough to
        # unmount.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "hicache_conformance.injectors.fuse_fs", str(self._home)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        try:
            self._wait_until_mounted()
        except BaseException:
            self.close()
            raise
        self._stores = 0
        self.renew()

    @property
    def tmp(self) -> Path:
        return self._home / "disk" / f"tmp{self._stores}"

    @property
    def backing(self) -> Path:
        """Directory behind `tmp`: the same files, without faults."""
        return self._home / "backing" / f"tmp{self._stores}"

    @property
    def alive(self) -> bool:
        """Return whether the file system's process runs."""
        return self._process.poll() is None

    def apply(self, plan: FaultPlan) -> None:
        # Before the fault is injected: a page that the kernel has cached is read without asking
        # FUSE, and the lost handle would not show.
        if find_fault(plan.faults, FaultKind.LOST_DESCRIPTOR):
            self._drop_page_cache()
        self._ask("inject", plan.as_json())

    def heal(self) -> None:
        self._ask("heal")

    def renew(self) -> None:
        # Another one, as servers and threads of the driver may use that of the case.
        self._stores += 1
        self.tmp.mkdir()

    def requests(self) -> int:
        return msgspec.convert(self._ask("requests"), int)

    def injected_count(self) -> int:
        return msgspec.convert(self._ask("injected_count"), int)

    def close(self) -> None:
        """Unmount, whatever hangs there."""
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            # The process unmounts when its input ends, and does so even if requests hang there.
            self._process.stdin.close()
        try:
            self._process.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(PATIENCE_SECONDS)
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()
        # Once more from here, where the process was killed before it had unmounted.
        unmount(self._home / "disk")
        shutil.rmtree(self._home, ignore_errors=True)

    def _drop_page_cache(self) -> None:
        """Drop the kernel's cache of the files that are open now, so that reads reach FUSE.

        By opening them anew.
        """
        for path in msgspec.convert(self._ask("open"), list[str]):
            with contextlib.suppress(OSError):
                os.close(os.open(f"{self._home}/disk{path}", os.O_RDONLY))

    def _ask(self, command: str, content: str = "") -> object:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        with self._lock:
            process.stdin.write(msgspec.json.encode((command, content)) + b"\n")
            process.stdin.flush()
            ready, _, _ = select.select([process.stdout], [], [], PATIENCE_SECONDS)
            line = process.stdout.readline() if ready else b""
        if not line:
            raise RuntimeError(
                f"the file system's process does not answer {command!r}; it ended with "
                f"{process.poll()}"
            )
        return msgspec.json.decode(line)

    def _wait_until_mounted(self) -> None:
        outside, until = self._home.stat().st_dev, time.monotonic() + PATIENCE_SECONDS
        point = self._home / "disk"
        # A mount point has another device than its parent; the process only says that it will
        # mount.
        while not point.exists() or point.stat().st_dev == outside:
            if self._process.poll() is not None or time.monotonic() > until:
                self._process.kill()
                assert self._process.stderr is not None
                said = self._process.stderr.read().decode("utf-8", "replace").strip()
                raise Inconclusive(
                    f"the injector 'disk' cannot mount a FUSE file system here: "
                    f"{said[-200:] or 'no reason given'}"
                )
            time.sleep(0.005)
