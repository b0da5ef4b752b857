"""Interrupts (SIGINT, SIGALRM) at any step of a change: no acknowledged page is lost."""

from __future__ import annotations

import itertools
import sys
from typing import TYPE_CHECKING

import pytest

from hicache_backends.file import bundle_set, change_feed, page_index, publisher
from tests.backends.file.harness import chain

if TYPE_CHECKING:
    from collections.abc import Callable

INTERRUPTED = {module.__file__ for module in (bundle_set, change_feed, page_index, publisher)}


CHANGES = {
    *("rename", "unlink", "utime", "open", "close", "pread"),
    *("append", "extend", "update", "difference_update", "pop", "sum"),
}


def interrupted_at(step: int, change: Callable[[], object]) -> bool:
    """Make a change, interrupted at its step of that number; `False` if it has fewer steps.

    A step is a place where CPython raises what a signal handler has raised: the return of a call of
    C code, here of those that change or read a file, change a collection, or count bytes.
    """
    steps = itertools.count()

    def profile(frame, event, function):
        if (
            event == "c_return"
            and function.__name__ in CHANGES
            and frame.f_code.co_filename in INTERRUPTED
            and next(steps) == step
        ):
            raise KeyboardInterrupt

    sys.setprofile(profile)
    try:
        change()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
    return False


@pytest.mark.parametrize("change", ["set", "delete", "shorten", "clear", "look up", "list"])
def test_an_interrupt_at_any_step_loses_no_acknowledged_page(rig, change):
    a, knows = rig(), rig()
    a.put(chain("opened", 1))
    assert knows.hit(chain("opened", 1)) == 1
    for step in itertools.count():
        keys, others = chain(f"{step}", 3), chain(f"{step} other", 2)
        # Few bundles, so that a listing has few steps.
        a.storage.clear()
        if change != "set":
            a.put(keys)
        if change not in ("look up", "list"):
            knows.hit(keys)
        made = {
            "set": lambda keys=keys: a.put(keys),
            "delete": lambda keys=keys: a.storage.delete(keys),
            "shorten": lambda keys=keys: a.storage.delete(keys[:1]),
            "clear": a.storage.clear,
            "look up": lambda keys=keys: knows.hit(keys),
            "list": lambda keys=keys: (knows.bundle_set.invalidate(), knows.hit(keys)),
        }[change]
        if not interrupted_at(step, made):
            break
        assert a.put(others) == [True] * 2
        fresh = rig()
        for side in (a, knows, fresh):
            assert side.holds(others), step
        if change == "shorten":
            assert fresh.holds(keys[1:]), step
        for side in (a, knows, fresh):
            bundles = side.bundle_set.bundles.values()
            assert side.bundle_set.used == sum(bundle.size for bundle in bundles), step
        if change in ("look up", "list"):
            assert [len(knows.page_index.copies(key)) for key in keys] == [1, 1, 1], step
        # All agree, so a set writes what is missing, and only that.
        assert a.present(keys) == knows.present(keys) == fresh.present(keys), step
        assert knows.put(keys) == [True] * 3
        for side in (a, knows, fresh):
            assert side.holds(keys), step
        fresh.storage.close()
    assert step >= 10
