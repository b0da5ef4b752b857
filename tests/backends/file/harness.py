"""A file storage with a host pool, and pages that identify themselves."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from hicache_backends.file.config import FileConfig
from hicache_backends.file.driver import FileStorage
from hicache_storage.layers import DeadlineLayer
from hicache_storage.objects import LookupBatch
from hicache_storage.spec import (
    HiCacheStorageExtraInfo,
    PoolTransfer,
    StorageIdentity,
)
from hicache_storage.testing import BytePool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from hicache_backends.file.bundle_set import BundleSet
    from hicache_backends.file.page_index import PageIndex
    from hicache_backends.file.store import Store
    from hicache_storage.objects import Call, Namespace
    from hicache_storage.spec import HiCacheStorage

COMPONENTS = (1000, 3096)
"""Odd on purpose: no component is aligned to anything."""

PATIENCE_SECONDS = 60.0

OVERHEAD_BYTES = 64 + 65
"""What a page with a key of 64 characters takes beside its bytes."""


def bundle_bytes(pages: int) -> int:
    """Length of a bundle with so many pages whose keys have 64 characters."""
    return pages * (sum(COMPONENTS) + OVERHEAD_BYTES) - 1 + 64


def identity(**changes: object) -> StorageIdentity:
    return StorageIdentity(
        **{"model": "m", "kv_dtype": "bfloat16", "page_size": 4, "layout": "page_first", **changes}
    )


def chain(name: str, pages: int) -> list[str]:
    """Keys of a chain, as an engine makes them."""
    return [hashlib.sha256(f"{name}/{page}".encode()).hexdigest() for page in range(pages)]


def content(key: str, version: int, size: int) -> bytes:
    """The bytes that a page has in these tests: no two keys or versions agree anywhere for long."""
    return hashlib.shake_128(f"{version}/{key}".encode()).digest(size)


def flip(path: Path, position: int) -> None:
    """Change a bit of a file."""
    with open(path, "r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 0x40]))


def path_of(where: object) -> str:
    """The path of a name, or of a descriptor."""
    return os.readlink(f"/proc/self/fd/{where}") if isinstance(where, int) else str(where)


def raising(error: type[BaseException] | BaseException | int) -> Callable[..., object]:
    """A function that raises, `OSError` for a number of an error."""

    def fail(*_: object, **__: object) -> object:
        raise OSError(error, os.strerror(error)) if isinstance(error, int) else error

    return fail


@contextlib.contextmanager
def replaced(owner: object, name: str, make: Callable[[Callable], Callable]) -> Iterator[None]:
    """Replace a function by one that `make` makes of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, make(getattr(owner, name)))
        yield


@contextlib.contextmanager
def failing(
    name: str,
    number: int,
    *,
    when: Callable[..., object] = lambda *_: True,
    after: int = 0,
    times: int = 1 << 30,
    applied: bool = False,
) -> Iterator[list[tuple[object, ...]]]:
    """Make a function of `os` fail, for calls that match, after some that succeed.

    Args:
        applied: the calls take effect, and report the error all the same.

    Yields:
        The arguments of the calls that have failed.
    """
    hits, left = list[tuple[object, ...]](), [after]

    def make(real: Callable) -> Callable:
        def broken(*args: object, **kwargs: object) -> object:
            answer = real(*args, **kwargs) if applied else None
            if len(hits) < times and when(*args):
                if not left[0]:
                    hits.append(args)
                    raise OSError(number, os.strerror(number))
                left[0] -= 1
            return answer if applied else real(*args, **kwargs)

        return broken

    with replaced(os, name, make):
        yield hits


@contextlib.contextmanager
def counted(name: str, ending: str) -> Iterator[list[str]]:
    """The paths that a function of `os` gets, as an argument or a descriptor, with this ending."""
    seen = list[str]()

    def make(real: Callable) -> Callable:
        def counting(where: object, *args: object, **kwargs: object) -> object:
            path = path_of(where)
            if path.endswith(ending):
                seen.append(path)
            return real(where, *args, **kwargs)

        return counting

    with replaced(os, name, make):
        yield seen


@contextlib.contextmanager
def at_steps(
    look: Callable[[int], object], names: Sequence[str] = ("rename", "unlink"), within: str = ""
) -> Iterator[list[int]]:
    """Do something before and after each call of some functions of `os` by this thread.

    Args:
        look: gets the number of the step; what it does itself is left alone.
        within: part of the paths that count.

    Yields:
        The steps so far.
    """
    steps, busy, thread = list[int](), list[None](), threading.get_ident()

    def taken() -> None:
        busy.append(None)
        try:
            look(len(steps))
        finally:
            busy.pop()
            steps.append(len(steps))

    def make(real: Callable) -> Callable:
        def step(*paths: object, **kwargs: object) -> object:
            if busy or threading.get_ident() != thread or within not in str(paths[-1]):
                return real(*paths, **kwargs)
            taken()
            try:
                return real(*paths, **kwargs)
            finally:
                taken()

        return step

    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(replaced(os, name, make))
        yield steps


@contextlib.contextmanager
def interrupted(
    owner: object,
    name: str,
    act: Callable[[], object] = lambda: None,
    *,
    times: int = 1,
    after: int = 0,
    late: bool = False,
) -> Iterator[list[tuple[object, ...]]]:
    """Note the calls of a function; let something else happen just before it does its work, some
    times, once some calls have passed.

    Args:
        late: just after it has done its work.

    Yields:
        The arguments of the calls so far.
    """
    calls = list[tuple[object, ...]]()

    def make(real: Callable) -> Callable:
        def stand_in(*arguments: object, **named: object) -> object:
            calls.append(arguments)
            acts = after < len(calls) <= after + times
            if acts and not late:
                act()
            answer = real(*arguments, **named)
            if acts and late:
                act()
            return answer

        return stand_in

    with replaced(owner, name, make):
        yield calls


class Hurried(DeadlineLayer):
    """A deadline that a busy machine keeps, until there is a hurry."""

    def __init__(self, inner: FileStorage) -> None:
        super().__init__(inner, PATIENCE_SECONDS)

    def hurry(self, seconds: float = 0.1) -> None:
        self._seconds = seconds
        self._default = HiCacheStorageExtraInfo(deadline_seconds=seconds)

    def be_patient(self) -> None:
        self.hurry(PATIENCE_SECONDS)


class Rig:
    """A storage on a directory, driven by keys and versions instead of slots and buffers.

    Args:
        storage: another one than a bare file driver on the path, such as one below the layers.
    """

    UNTOUCHED = 0
    """What is in the host pool before a get."""

    def __init__(
        self,
        path: Path,
        *,
        pages: int = 64,
        components: Sequence[int] = COMPONENTS,
        who: StorageIdentity | None = None,
        storage: HiCacheStorage | None = None,
        **options: object,
    ):
        self.path = path
        self.pool = BytePool(pages=pages, page_size=4, components=components)
        self.storage = storage or FileStorage(
            who or identity(), FileConfig(path=str(path), **options)
        )
        self.storage.register_mem_host_pool_v2(self.pool, "kv")
        self.page_bytes = self.pool.geometry.page_bytes

    @property
    def store(self) -> Store:
        self.storage.open()
        return self.storage.store

    @property
    def namespace(self) -> str:
        return self.kv.name

    @property
    def kv(self) -> Namespace:
        return self.storage.pools["kv"].namespace

    @property
    def bundle_set(self) -> BundleSet:
        return self.store.bundle_sets.get(self.namespace)

    @property
    def page_index(self) -> PageIndex:
        return self.store.known_page_indexes([self.kv])[0]

    def catch_up(self, *, listing: bool = False) -> None:
        """Apply what has been announced, or list the bundles, as another thread of the storage may
        at any time."""
        if listing:
            self.bundle_set.invalidate()
        self.bundle_set.catch_up(self.store.feed.read())

    def delete_store(self) -> None:
        """Delete the directory at once, whatever the storage's threads are writing there."""
        gone = self.path.rename(f"{self.path}.gone")
        shutil.rmtree(gone, ignore_errors=True)

    def temporaries(self) -> list[str]:
        return os.listdir(self.store.paths.temporaries)

    @property
    def bundles_path(self) -> Path:
        return Path(self.store.paths.bundles(self.namespace))

    def bundles(self) -> list[Path]:
        return sorted(self.bundles_path.glob("*.bundle"))

    def put(
        self, keys: Sequence[str], *, version: int = 0, seconds: float | None = None
    ) -> list[bool]:
        size = self.page_bytes
        for number, key in enumerate(keys):
            self.pool.memory[number * size : (number + 1) * size] = content(key, version, size)
        return self.storage.batch_set_v2([self.transfer(keys)], _within(seconds))["kv"]

    def put_again(self, keys: Sequence[str], version: int) -> None:
        """Write pages that are there already, as after a lookup that has failed."""
        with replaced(self.storage, "objects_exist", lambda _: raising(errno.ESTALE)):
            assert self.put(keys, version=version) == [True] * len(keys)

    def look_up(self, keys: Sequence[str], call: Call) -> list[bool]:
        return self.storage.objects_exist([LookupBatch(self.kv, keys)], call)[0]

    def get(self, keys: Sequence[str], *, seconds: float | None = None) -> list[bytes | None]:
        """Each page's bytes, None where it was not delivered."""
        self.pool.memory[:] = bytes([self.UNTOUCHED]) * len(self.pool.memory)
        answer = self.storage.batch_get_v2([self.transfer(keys)], _within(seconds))["kv"]
        assert len(answer) == len(keys)
        return [self.pool.page(number) if ok else None for number, ok in enumerate(answer)]

    def versions(self, keys: Sequence[str], versions: Iterable[int] = (0,)) -> list[int | None]:
        """The version of each page; None where it was not delivered. Any other bytes are a
        failure."""
        known, found = list(versions), list[int | None]()
        for key, page in zip(keys, self.get(keys), strict=True):
            if page is None:
                found.append(None)
                continue
            matching = [
                version for version in known if content(key, version, self.page_bytes) == page
            ]
            assert matching, f"a get answered True with other bytes for {key}"
            found.append(matching[0])
        return found

    def holds(self, keys: Sequence[str], *, version: int = 0) -> bool:
        """Return whether all pages are there, with the bytes of that version."""
        return self.versions(keys, (version,)) == [version] * len(keys)

    def hit(self, keys: Sequence[str]) -> int:
        return self.storage.batch_exists_v2(keys).kv_hit_pages

    def expect(self, keys: Sequence[str], version: int = 0) -> None:
        """All pages are there, with the bytes of that version."""
        assert self.holds(keys, version=version)

    def present(self, keys: Sequence[str]) -> list[bool]:
        return [bool(self.hit([key])) for key in keys]

    def stats(self):
        return self.storage.get_stats().pools["kv"]

    def transfer(self, keys: Sequence[str]) -> PoolTransfer:
        return PoolTransfer("kv", torch.arange(len(keys) * 4), keys=list(keys))


def opened_rigs(kind: type[Rig]) -> object:
    """A fixture that opens rigs, all on one directory unless told otherwise; closed at the end."""

    @pytest.fixture
    def rig(tmp_path: Path) -> Iterator[Callable[..., Rig]]:
        rigs = list[Rig]()

        def make(path: Path | None = None, **options: object) -> Rig:
            rigs.append(kind(path or tmp_path / "store", **options))
            return rigs[-1]

        yield make
        for made in rigs:
            made.storage.close()

    return rig


def _within(seconds: float | None) -> HiCacheStorageExtraInfo:
    return HiCacheStorageExtraInfo(deadline_seconds=seconds)


def fill(rig: Rig, names: Sequence[str]) -> None:
    """Write a batch of 8 pages for each name."""
    for name in names:
        assert rig.put(chain(name, 8)) == [True] * 8


def hits(rig: Rig, names: Sequence[str]) -> list[int]:
    """How many pages of each batch are there."""
    return [rig.hit(chain(name, 8)) for name in names]
