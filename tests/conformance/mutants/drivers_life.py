"""Drivers with one planted fault each in how they begin, end and live in a process."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from drivers_plain import FileControlConfig, Plain, PlainConfig

if TYPE_CHECKING:
    from hicache_storage.spec import StorageIdentity


class ConnectsAtOnce(Plain):
    def __init__(self, identity: StorageIdentity, config: PlainConfig) -> None:
        super().__init__(identity, config)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("127.0.0.1", 9))


class WritesAtOnce(Plain):
    def __init__(self, identity: StorageIdentity, config: FileControlConfig) -> None:
        super().__init__(identity, config)
        Path(config.path).mkdir(parents=True, exist_ok=True)
        (Path(config.path) / f"owner-{os.getpid()}").touch()


class LeavesAThread(Plain):
    def open(self) -> None:
        super().open()
        threading.Thread(target=threading.Event().wait, daemon=True, name="left-behind").start()


class LeavesADescriptor(Plain):
    left: ClassVar[list[int]] = []

    def open(self) -> None:
        super().open()
        self.left.append(os.open("/dev/null", os.O_RDONLY))


class KeepsPools(Plain):
    registered: ClassVar[list[object]] = []

    def register_mem_host_pool_v2(self, host_pool: object, host_pool_name: str) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self.registered.append(host_pool)


class WorksWhenClosed(Plain):
    def _check_open(self) -> None:
        return


class InstallsAHandler(Plain):
    def open(self) -> None:
        super().open()
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGUSR2, lambda number, frame: None)


class NeedsTheMainThread(Plain):
    def open(self) -> None:
        super().open()
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)


class Exits(Plain):
    def open(self) -> None:
        super().open()
        if threading.current_thread() is not threading.main_thread():
            sys.exit("no server")


class DeclaresMoreWhenOpen(Plain):
    """Declares what its base declares; it is registered with nothing."""


class ConfiguresLogging(Plain):
    def open(self) -> None:
        super().open()
        logging.getLogger().setLevel(logging.DEBUG)


class ForgetsForks(Plain):
    def __init__(self, identity: StorageIdentity, config: PlainConfig) -> None:
        super().__init__(identity, config)
        self._pid = os.getpid()

    def _check_open(self) -> None:
        super()._check_open()
        if os.getpid() != self._pid:
            raise RuntimeError("bad file descriptor")


class ClearsEverything(Plain):
    def doomed(self) -> list[tuple[object, ...]]:
        return list(self.pages)


class ClearsStrangersFiles(Plain):
    def __init__(self, identity: StorageIdentity, config: FileControlConfig) -> None:
        super().__init__(identity, config)
        self.root = Path(config.path)

    def open(self) -> None:
        super().open()
        self.root.mkdir(parents=True, exist_ok=True)

    def clear(self) -> None:
        super().clear()
        for path in self.root.iterdir():
            path.unlink()
