"""Drivers that end or hang a run; for the tests of the command line."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from drivers_plain import Plain

if TYPE_CHECKING:
    from hicache_storage.objects.requests import PoolRequest


class Dies(Plain):
    def read(self, request: PoolRequest) -> list[bool]:
        os._exit(3)


class Hangs(Plain):
    def read(self, request: PoolRequest) -> list[bool]:
        threading.Event().wait()
        raise AssertionError


class CannotOpen(Plain):
    def open(self) -> None:
        raise ConnectionRefusedError("no server at 127.0.0.1:1")
