"""A forked child that uses its parent's storage."""

from __future__ import annotations

import os
import select
import signal
import warnings
from functools import partial
from typing import TYPE_CHECKING, Final

from hicache_conformance.harness.storage_under_test import PageGroup
from hicache_storage.spec import HiCacheError, PoolName

if TYPE_CHECKING:
    from hicache_conformance.harness.storage_under_test import StorageUnderTest
    from hicache_storage.spec import PoolTransfer

CHILD_SECONDS: Final = 60.0
"""A child that has not answered after this long hangs."""


def ask_in_child(
    sut: StorageUnderTest,
    keys: list[str],
    *,
    within: float = CHILD_SECONDS,
    everything: bool = False,
) -> str:
    """Read stored pages in a forked child; what was wrong with that, or nothing.

    Args:
        sut: the storage of the parent.
        keys: of pages that it holds.
        within: seconds that the child may take.
        everything: let it make other calls too, and close the storage.
    """
    pages = sut.own_pages(keys)
    # Before the fork, because torch must not start threads in the child.
    transfers = sut.transfers([PageGroup(keys)], [pages])
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        # Python warns of forking with threads, which is what this is about.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        told = b"the child was lost"
        try:
            told = (
                _answer(sut, keys, pages, transfers)
                or (_use(sut, keys, transfers) if everything else "")
            ).encode()
        finally:
            # A byte even where nothing was wrong, because an empty pipe means that the child died.
            os.write(writing, told or b"\0")
            os._exit(0)
    os.close(writing)
    try:
        return _wait(child, reading, within)
    finally:
        os.close(reading)


def _answer(
    sut: StorageUnderTest, keys: list[str], pages: list[int], transfers: list[PoolTransfer]
) -> str:
    try:
        answer = sut.storage.batch_get_v2(transfers)[PoolName.KV]
    except HiCacheError as error:
        return (
            ""
            if str(error)
            else f"a forked child was refused with {type(error).__name__}, which says nothing"
        )
    except BaseException as error:  # noqa: BLE001 - told to the parent
        return f"a forked child that used its parent's storage got {type(error).__name__}: {error}"
    memory = sut.memories[PoolName.KV]
    for index, (key, page, ok) in enumerate(zip(keys, pages, answer, strict=True)):
        # A miss is wrong here: the parent has read these pages a moment before, and LC-5 allows a
        # clear error or a storage that works.
        if not ok:
            return f"page {index}: a forked child got neither an error nor the page that its parent had stored"
        wrong = sut.explain(key, memory.read(page))
        if wrong:
            return f"page {index}: a forked child was delivered a page that {wrong}"
    return ""


def _use(sut: StorageUnderTest, keys: list[str], transfers: list[PoolTransfer]) -> str:
    """Make the other calls of an engine, the last one of which closes."""
    storage = sut.storage
    for name, ask in (
        ("batch_exists_v2", partial(storage.batch_exists_v2, keys)),
        ("batch_set_v2", partial(storage.batch_set_v2, transfers)),
        ("get_stats", storage.get_stats),
        ("health", storage.health),
        ("close", storage.close),
    ):
        try:
            ask()
        except HiCacheError:
            continue
        except BaseException as error:  # noqa: BLE001 - told to the parent
            return f"{name} of a forked child that uses its parent's storage raised {type(error).__name__}: {error}"
    return ""


def _wait(child: int, reading: int, within: float) -> str:
    ready, _, _ = select.select([reading], [], [], within)
    if not ready:
        os.kill(child, signal.SIGKILL)
    told = os.read(reading, 65536) if ready else b""
    _, status = os.waitpid(child, 0)
    if not ready:
        return f"a forked child that used its parent's storage hung for {within:.0f} s"
    if not told:
        return f"a forked child that used its parent's storage died with status {status}"
    return told.strip(b"\0").decode()
