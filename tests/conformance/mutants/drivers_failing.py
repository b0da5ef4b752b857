"""Drivers that end or hang a run; for the tests of the command line."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from drivers_objects import Objects
from drivers_plain import Plain

from hicache_storage.objects import Call, ObjectStorage

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


class TakesLess(Objects):
    """Takes fewer arguments than it is called with, and promises what it does not have."""

    def read_objects(self, batches):
        return super().read_objects(batches, Call())

    delete_objects = ObjectStorage.delete_objects
