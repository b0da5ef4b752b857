"""The injector `disk`: a directory on a FUSE file system that injects faults."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from hicache_conformance.injectors.active_faults import find_fault
from hicache_conformance.injectors.fuse_fs import serve, unmount
from hicache_conformance.injectors.injector import PATIENCE_SECONDS, ProcessInjector
from hicache_conformance.model.fault_plan import FaultKind
from hicache_conformance.model.violation import Inconclusive

if TYPE_CHECKING:
    from hicache_conformance.model.fault_plan import FaultPlan


def missing_for_disk() -> str:
    """Name the requirement of the injector `disk` that this machine lacks; empty if none."""
    if not os.path.exists("/dev/fuse"):
        return "/dev/fuse"
    if shutil.which("fusermount3") is None:
        return "fusermount3 (package fuse3)"
    if importlib.util.find_spec("mfusepy") is None:
        return "the module mfusepy (pip install 'hicache-storage[conformance]')"
    return ""


class DiskInjector(ProcessInjector):
    """A directory on a FUSE file system, mounted by a process of its own.

    Raises:
        Inconclusive: FUSE does not work here; the message says what is missing.
    """

    name: ClassVar[str] = "disk"

    def __init__(self) -> None:
        missing = missing_for_disk()
        if missing:
            raise Inconclusive(f"the injector 'disk' needs {missing}")
        # Not below pytest's directories: whoever removes those must not meet a mount that hangs.
        self._home = Path(tempfile.mkdtemp(prefix="hicache-injector-"))
        super().__init__(serve, self._home)
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

    def apply(self, plan: FaultPlan) -> None:
        # Before the fault is injected: a page that the kernel has cached is read without asking
        # FUSE, and the lost handle would not show.
        if find_fault(plan.faults, FaultKind.LOST_DESCRIPTOR):
            for path in self.ask("paths"):
                # Opened anew, it is dropped from the kernel's cache.
                with contextlib.suppress(OSError):
                    os.close(os.open(f"{self._home}/disk{path}", os.O_RDONLY))
        super().apply(plan)

    def renew(self) -> None:
        # Another one, as servers and threads of the driver may use that of the case.
        self._stores += 1
        self.tmp.mkdir()

    def close(self) -> None:
        """Unmount, whatever hangs there."""
        # The process unmounts when its connection ends, and does so even if requests hang there.
        super().close()
        # Once more from here, where the process was killed before it had unmounted.
        unmount(self._home / "disk")
        shutil.rmtree(self._home, ignore_errors=True)

    def _wait_until_mounted(self) -> None:
        outside, until = self._home.stat().st_dev, time.monotonic() + PATIENCE_SECONDS
        point = self._home / "disk"
        # A mount point has another device than its parent; the process only says that it will
        # mount.
        while not point.exists() or point.stat().st_dev == outside:
            if not self.alive or time.monotonic() > until:
                log = self._home / "log"
                said = log.read_text("utf-8", "replace").strip() if log.exists() else ""
                raise Inconclusive(
                    f"the injector 'disk' cannot mount a FUSE file system here: "
                    f"{said[-200:] or 'no reason given'}"
                )
            time.sleep(0.005)
