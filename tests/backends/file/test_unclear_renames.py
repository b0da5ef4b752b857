"""Renames that report an error and take effect: no acknowledged page is lost."""

from __future__ import annotations

import contextlib
import errno
from typing import TYPE_CHECKING

import pytest
from msgspec import structs

from hicache_backends.file import publisher as publisher_module
from hicache_backends.file.bundle import parse_bundle
from tests.backends.file.harness import chain, failing, replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NUMBERS = [errno.EIO, errno.ENOENT, errno.ETIMEDOUT]


@contextlib.contextmanager
def unclear(number: int, when: Callable[[str, str], bool]) -> Iterator[None]:
    """Make a rename take effect and report an error."""
    with failing("rename", number, when=when, times=1, applied=True) as hits:
        yield
    assert hits


def into_place(source: str, target: str) -> bool:
    return source.endswith(".temporary") and target.endswith(".bundle")


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("step", ["claim", "replacement", "listed"])
def test_a_rewrite_with_a_rename_that_is_unclear_loses_no_page(rig, number, step):
    a, keys = rig(), chain("a", 4)
    a.put(keys)

    def when(source, target):
        if step == "claim":
            return target.endswith(".claimed")
        # Whoever lists now takes the claimed bundle for void, and removes it.
        return into_place(source, target) and (step == "replacement" or rig().holds(keys[1:]))

    with unclear(number, when):
        a.storage.delete(keys[:1])
    # The next bundle must not have the number by which the claimed one would be replaced.
    assert a.put(chain("next", 2)) == [True] * 2
    for side in (a, rig()):
        assert side.holds(keys[1:])
        assert side.holds(chain("next", 2))
    # The delete reported an error, or was repeated and took place.
    there = rig().hit(keys[:1]) == 1
    assert a.storage.delete(keys[:1]) == [there]
    assert rig().present(keys) == [False, True, True, True]


def test_a_replacement_that_could_not_be_synced_loses_no_page(rig):
    a, keys = rig(fsync=True), chain("a", 4)
    a.put(keys)
    other = rig()

    def sync(_):
        def failed(path):
            # A listing has found both, and removed the void one.
            assert rig().holds(keys[1:])
            raise OSError(errno.EIO, "EIO")

        return failed

    with replaced(publisher_module, "sync_directory", sync):
        a.storage.delete(keys[:1])
    for side in (a, other, rig()):
        assert side.holds(keys[1:])


@pytest.mark.parametrize("function", ["announce", "sync_directory"])
def test_a_failed_announcement_takes_no_page_from_who_has_found_it(rig, function):
    syncs = function == "sync_directory"
    a, b, keys = rig(fsync=syncs), rig(), chain("a", 3)
    a.put(chain("before", 1))
    b.hit(keys)
    answers = list[object]()

    def slow(*_, **__):
        # The other one finds the bundle by listing, and writes nothing.
        b.bundle_set.invalidate()
        answers.append(b.put(keys))
        raise OSError(errno.ENOSPC, "ENOSPC")

    with replaced(publisher_module if syncs else a.store.feed, function, lambda _: slow):
        assert a.put(keys) == [False] * 3
    assert answers == [[True] * 3]
    for side in (a, b, rig()):
        assert side.holds(keys)


def test_what_could_not_be_announced_is_announced_with_the_next_set(rig):
    a, b, keys = rig(), rig(), chain("a", 3)
    a.put(chain("before", 1))
    assert b.hit(keys) == 0
    with failing("rename", errno.ENOSPC, when=lambda _, to: "/writers/" in to):
        assert a.put(keys) == [False] * 3
    assert b.hit(keys) == 0
    assert a.put(chain("after", 1)) == [True]
    for side in (a, b, rig()):
        assert side.holds(keys)
        assert side.holds(chain("after", 1))


@pytest.mark.parametrize("number", [errno.EIO, errno.ETIMEDOUT])
def test_a_bundle_whose_removal_is_unclear_is_promised_by_nobody(rig, number):
    a, b, keys = rig(), rig(), chain("a", 3)
    a.put(keys)
    assert b.hit(keys) == 3
    with failing("unlink", number, when=lambda path: path.endswith(".bundle"), applied=True):
        assert a.storage.delete(keys) == [False] * 3
    a.put(chain("next", 1))
    assert [a.hit(keys), b.hit(keys)] == [0, 0]
    assert b.put(keys, version=1) == [True] * 3
    for side in (a, b, rig()):
        assert side.holds(keys, version=1)


def test_another_file_under_a_known_bundles_number_is_not_taken_for_it(rig):
    a, knows, keys, others = rig(), rig(), chain("a", 3), chain("b", 3)
    a.put(keys)
    assert knows.holds(keys)
    (mine,) = a.bundles()
    a.put(others)
    (second,) = set(a.bundles()) - {mine}
    name = structs.replace(parse_bundle(second.name), sequence=parse_bundle(mine.name).sequence)
    second.rename(second.with_name(str(name)))
    for side in (a, knows):
        side.store.descriptors.close()
        side.bundle_set.invalidate()
        assert side.holds(keys)
        assert side.stats().pages_damaged == 0
    assert mine.exists()
    # Once it has gone, the other one is what the number stands for.
    mine.unlink()
    for side in (a, knows):
        side.bundle_set.invalidate()
        assert side.present(keys) == [False] * 3
        assert side.holds(others)
