"""Calls that the SDK makes on a driver, and the steps of a call outside of the interpreter."""

from __future__ import annotations

import sys
from collections import Counter
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from hicache_conformance.model.case import Inconclusive
from hicache_storage.layers import innermost
from hicache_storage.objects import ObjectStorage

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from types import FrameType

    from hicache_storage.spec import HiCacheStorage


STEPS: Final = ("objects_exist", "read_objects", "write_objects")


def require_steps(storage: HiCacheStorage) -> None:
    """Make sure that a driver has calls of its own to count.

    Raises:
        Inconclusive: it is no `ObjectStorage`.
    """
    if not has_steps(storage):
        raise Inconclusive(
            "the driver is no ObjectStorage, so that there are no calls of its own to count"
        )


def has_steps(storage: HiCacheStorage) -> bool:
    """Return whether a driver is an `ObjectStorage`, whose methods can be counted."""
    return isinstance(innermost(storage), ObjectStorage)


@contextmanager
def counted(storage: HiCacheStorage) -> Generator[Counter[str]]:
    """Count the calls of an `ObjectStorage` driver's own methods, by name.

    Of no other driver any.
    """
    driver, calls = innermost(storage), Counter[str]()
    if not isinstance(driver, ObjectStorage):
        # Nothing is counted and nothing is held against it: BU-1 speaks of an `ObjectStorage`.
        yield calls
        return
    for name in STEPS:
        # On the instance, so that the class and its other instances stay as they are.
        method = partial(_count, getattr(driver, name), name, calls)
        setattr(driver, name, method)
    try:
        yield calls
    finally:
        for name in STEPS:
            delattr(driver, name)


def _count(method: Callable[..., Any], name: str, calls: Counter[str], *arguments: Any) -> Any:
    calls[name] += 1
    return method(*arguments)


_OUTSIDE: Final = {
    *("posix", "_io", "io", "mmap", "fcntl", "select", "_socket", "socket", "_ssl", "sqlite3"),
    "_sqlite3",
}
"""Modules of the standard library that reach a disk or a peer; those of a driver do so, too."""
_LOOKING: Final = {
    *("fspath", "stat", "lstat", "fstat", "fstatvfs", "listdir", "scandir", "getpid"),
    # Of the entries that `scandir` yields: as many as others have left in the directory.
    *("is_file", "is_dir", "is_symlink", "inode"),
}
_INSIDE: Final = sys.stdlib_module_names - _OUTSIDE | {"numpy", "torch"}


class CallSteps:
    """Acts after one step of a set, delete or clear of a storage.

    A step is a function in C that has returned, of the operating system or an extension module: the
    places where a signal is handled or a kill leaves something behind. What only looks does not
    count, nor do calls of other threads: a storage without layers runs its own in the caller's.
    """

    def __init__(self, storage: HiCacheStorage, act: Callable[[], object]) -> None:
        self._act = act
        self.at: int | None = None
        """Number of the step after which to act; 0 counts alone, and None does not even count."""
        self.count = 0
        """Steps of the last call so far."""
        # On the instance, so that the class and its other instances stay as they are.
        for name in ("batch_set_v2", "delete", "clear"):
            setattr(storage, name, partial(self._watched, getattr(storage, name)))

    def _watched(self, method: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        self.count, before = 0, sys.getprofile()
        sys.setprofile(before if self.at is None else self._watch)
        try:
            return method(*arguments, **options)
        finally:
            sys.setprofile(before)

    def _watch(self, frame: FrameType, event: str, function: Any) -> None:
        if event != "c_return" or function.__name__ in _LOOKING:
            return
        module = function.__module__ or type(function.__self__).__module__
        if module.partition(".")[0] in _INSIDE:
            return
        self.count += 1
        if self.count == self.at:
            sys.setprofile(None)
            self._act()
