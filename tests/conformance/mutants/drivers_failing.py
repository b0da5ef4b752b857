"""Drivers that end or hang a run; for the tests of the command line."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import time

from drivers_files import Files, SteadyFiles
from drivers_memory import Objects, Plain, PlainPath

from hicache_storage.hookspecs import DriverSpec
from hicache_storage.objects import ObjectStorage


class Dies(Plain):
    def read(self, request):
        os._exit(3)


class Poisoned(Files):
    """Leaves its directory unusable when it is full, or given a page of more than a MiB."""

    full = False

    def put(self, write, call):
        poison = self.root.parent / "poison"
        if self.full or write.namespace.geometry.page_bytes > 1 << 20 or poison.exists():
            poison.mkdir(exist_ok=True)
            raise OSError("it is poisoned")
        try:
            return super().put(write, call)
        except OSError as error:
            self.full = error.errno == errno.ENOSPC
            raise


class AbortsInLargeReads(Plain):
    def read(self, request):
        if len(request.keys) > 60:
            os.abort()
        return super().read(request)


class Hangs(Plain):
    def read(self, request):
        time.sleep(3600)
        raise AssertionError


class HangsOnManyPages(Plain):
    """Stores few pages; does not come back from a set of many."""

    def write(self, request):
        if len(request.keys) > 60:
            time.sleep(3600)
        return super().write(request)


class HangsWithTheLock(Plain):
    """Hangs in a library that keeps the interpreter's lock: no other thread of Python runs."""

    def read(self, request):
        ctypes.PyDLL(None).sleep(3600)
        raise AssertionError


class CannotOpen(Plain):
    def open(self):
        raise ConnectionRefusedError("no server at 127.0.0.1:1")


class PromisesMore(Objects):
    """Promises what it does not have."""

    delete_objects = ObjectStorage.delete_objects


class AcknowledgesAll(SteadyFiles):
    """Acknowledges pages that could not be written."""

    def batch_set_v2(self, transfers, extra_info=None):
        logging.getLogger("sample").warning("acknowledges whatever comes")
        answers = super().batch_set_v2(transfers, extra_info)
        return {pool: [True] * len(some) for pool, some in answers.items()}


FAILING = [
    DriverSpec(
        name=name,
        target=f"{__name__}:{name}",
        capabilities=driver.promises,
        **(Files if issubclass(driver, Files) else PlainPath).spec,
    )
    for name, driver in list(globals().items())
    if getattr(driver, "__module__", "") == __name__
]
"""All drivers of this module."""
