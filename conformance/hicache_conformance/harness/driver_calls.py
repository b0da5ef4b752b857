"""Counts of the calls that the SDK makes on a driver."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from hicache_conformance.model.violation import Inconclusive
from hicache_storage.layers import innermost
from hicache_storage.objects import ObjectStorage

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

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
        setattr(driver, name, _counting(getattr(driver, name), name, calls))
    try:
        yield calls
    finally:
        for name in STEPS:
            delattr(driver, name)


def _counting(method: Callable[..., Any], name: str, calls: Counter[str]) -> Callable[..., Any]:
    def count(*arguments: Any) -> Any:
        calls[name] += 1
        return method(*arguments)

    return count
