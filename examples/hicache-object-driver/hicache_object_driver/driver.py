"""Pages as objects in a bucket, one request for each page."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, TypeVar, cast

import obstore
from hicache_storage.objects import ObjectStorage, ThreadPool
from hicache_storage.spec import ConfigError, Health, HiCacheError, StorageUnavailableError
from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError
from obstore.store import from_url

from hicache_object_driver.plugin import CAPABILITIES

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from hicache_storage.objects import (
        Call,
        LookupBatch,
        Namespace,
        ObjectRead,
        ObjectWrite,
        ReadBatch,
        WriteBatch,
    )
    from hicache_storage.spec import StorageIdentity
    from obstore.store import ClientConfig, ObjectStore, RetryConfig, S3Config

    from hicache_object_driver.config import ObjectConfig

PageT = TypeVar("PageT")

# A request to a store that hangs keeps its thread for the sum of both limits.
CLIENT: ClientConfig = {"timeout": "10s", "connect_timeout": "2s"}
RETRY: RetryConfig = {
    "max_retries": 2,
    "retry_timeout": timedelta(seconds=5),
    "backoff": {
        "init_backoff": timedelta(milliseconds=50),
        "max_backoff": timedelta(seconds=1),
        "base": 2,
    },
}
CLOSE_SECONDS = 15.0


class ObjectBucketStorage(ObjectStorage):
    """A page and its envelope are one object, named `NAMESPACE/PAGE` below the URL's prefix."""

    _store: ObjectStore

    def __init__(self, identity: StorageIdentity, config: ObjectConfig) -> None:
        parts = [part.partition("=") for part in config.options.split(",") if part]
        if not all(equals for _, equals, _ in parts):
            raise ConfigError("option 'options': write name=value,name=value")
        super().__init__(
            identity,
            driver_name="object",
            capabilities=replace(
                CAPABILITIES,
                durability=config.durability,
                requests_in_flight=config.concurrency,
            ),
        )
        self._url = config.url
        self._options = {name: value for name, _, value in parts}
        self._plain = self._options.get("endpoint", "").startswith("http:")
        # The thread of the call makes requests, too.
        self._threads = ThreadPool("hicache-object", config.concurrency - 1)

    def connect(self) -> None:
        with _faults():
            if self._url.startswith("file:"):
                self._store = from_url(self._url, mkdir=True)
            else:
                self._store = from_url(
                    self._url,
                    # Of the URL's store, which only it can tell.
                    config=cast("S3Config", self._options),
                    client_options={**CLIENT, "allow_http": self._plain},
                    retry_config=RETRY,
                )
        self._length("health")

    def disconnect(self) -> None:
        self._threads.close(CLOSE_SECONDS)
        # Its connections close with it.
        del self._store

    def objects_exist(self, batches: Sequence[LookupBatch], call: Call) -> list[list[bool]]:
        return self._each(_pages(batches), lambda page: self._exists(*page), call)

    def read_objects(self, batches: Sequence[ReadBatch], call: Call) -> list[list[bool]]:
        return self._each([batch.reads for batch in batches], self._get, call)

    def write_objects(self, batches: Sequence[WriteBatch], call: Call) -> list[list[bool]]:
        return self._each(
            [batch.writes for batch in batches], lambda write: self._put(write, call), call
        )

    def delete_objects(self, batches: Sequence[LookupBatch], call: Call) -> list[list[bool]]:
        return self._each(_pages(batches), lambda page: self._remove(*page), call)

    def discard_objects(self, batches: Sequence[ReadBatch], call: Call) -> bool:
        discarded = self._each([batch.reads for batch in batches], self._discard, call)
        return all(map(all, discarded))

    def clear_namespaces(self, namespaces: Sequence[Namespace], call: Call) -> None:
        with _faults():
            for namespace in namespaces:
                for objects in obstore.list(self._store, f"{namespace.name}/"):
                    if call.expired():
                        raise TimeoutError("the clear was cancelled")
                    obstore.delete(self._store, [found["path"] for found in objects])

    def check_health(self) -> Health:
        self._length("health")
        return Health(ok=True)

    def _each(
        self, batches: Sequence[Sequence[PageT]], ask: Callable[[PageT], bool], call: Call
    ) -> list[list[bool]]:
        """Make a request for each page, many at a time; a fault of one leaves the others."""
        answers = [[False] * len(batch) for batch in batches]
        faults = list[Exception]()

        def attempt(answer: list[bool], index: int, page: PageT) -> None:
            try:
                if call.expired():
                    raise TimeoutError("the call is over")
                answer[index] = ask(page)
            except (HiCacheError, OSError) as error:
                faults.append(error)

        requests = [
            partial(attempt, answer, index, page)
            for answer, batch in zip(answers, batches, strict=True)
            for index, page in enumerate(batch)
        ]
        self._threads.run(requests)
        self.note_partial_faults(faults, served=len(faults) < len(requests))
        return answers

    def _exists(self, namespace: Namespace, key: str) -> bool:
        # An object of another length is damaged: the next set replaces it.
        return self._length(_name(namespace, key)) == namespace.object_bytes

    def _get(self, read: ObjectRead) -> bool:
        with _faults():
            try:
                payload = obstore.get(self._store, _name(read.namespace, read.key)).bytes()
            except FileNotFoundError:
                return False
        # An empty one has been discarded.
        return len(payload) > 0 and read.fill(memoryview(payload))

    def _put(self, write: ObjectWrite, call: Call) -> bool:
        name, payload = _name(write.namespace, write.key), write.tobytes()
        if call.expired():
            # The caller may have been answered, and have reused the memory of these bytes.
            return False
        with _faults():
            if not write.replaces:
                try:
                    obstore.put(self._store, name, payload, mode="create")
                    return True
                except AlreadyExistsError:
                    # Another writer was faster, or the object is damaged.
                    write.existed = self._exists(write.namespace, write.key)
                    if write.existed:
                        return True
            obstore.put(self._store, name, payload)
        return True

    def _remove(self, namespace: Namespace, key: str) -> bool:
        name = _name(namespace, key)
        # A bucket does not say if there was an object. An empty one has been discarded.
        if not self._length(name):
            return False
        with _faults():
            obstore.delete(self._store, name)
        return True

    def _discard(self, read: ObjectRead) -> bool:
        name = _name(read.namespace, read.key)
        with _faults():
            try:
                found = obstore.get(self._store, name)
                tag = found.meta["e_tag"]
                if tag and read.has_read(memoryview(found.bytes())):
                    # No store deletes on a condition. An empty object does not exist for lookups.
                    obstore.put(self._store, name, b"", mode={"e_tag": tag})
            except (FileNotFoundError, PreconditionError):
                # Removed, or stored anew, meanwhile.
                return True
            except NotImplementedError:
                # A directory has no conditional writes, either: the SDK hides the page.
                return False
        return bool(tag)

    def _length(self, name: str) -> int | None:
        """Return the length of an object; None if there is none."""
        with _faults():
            try:
                return obstore.head(self._store, name)["size"]
            except FileNotFoundError:
                return None


def _pages(batches: Sequence[LookupBatch]) -> list[list[tuple[Namespace, str]]]:
    return [[(batch.namespace, key) for key in batch.keys] for batch in batches]


def _name(namespace: Namespace, key: str) -> str:
    return f"{namespace.name}/{namespace.object_name(key)}"


@contextmanager
def _faults() -> Generator[None]:
    """The errors of obstore as those of a store that does not serve."""
    try:
        yield
    except BaseError as error:
        raise StorageUnavailableError(str(error).partition("\n")[0]) from error
