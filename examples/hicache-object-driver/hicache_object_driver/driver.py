"""Pages as objects in a bucket, one request for each page."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, cast

import obstore
from hicache_storage.objects import AsyncObjectStorage
from hicache_storage.spec import ConfigError, Health, StorageUnavailableError
from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError
from obstore.store import from_url

from hicache_object_driver.plugin import CAPABILITIES

if TYPE_CHECKING:
    from collections.abc import Generator

    from hicache_storage.objects import Call, Namespace, ObjectRead, ObjectWrite
    from hicache_storage.spec import StorageIdentity
    from obstore.store import ClientConfig, ObjectStore, RetryConfig, S3Config

    from hicache_object_driver.config import ObjectConfig

HEALTH_SECONDS = 5.0
# A call's deadline cancels its requests, so that neither limit ever lengthens a call.
CLIENT: ClientConfig = {"timeout": "60s", "connect_timeout": "2s"}
RETRY: RetryConfig = {
    "max_retries": 2,
    "retry_timeout": timedelta(seconds=10),
    "backoff": {
        "init_backoff": timedelta(milliseconds=50),
        "max_backoff": timedelta(seconds=1),
        "base": 2,
    },
}


class ObjectBucketStorage(AsyncObjectStorage):
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
            concurrency=config.concurrency,
        )
        self._url = config.url
        self._options = {name: value for name, _, value in parts}
        self._plain = self._options.get("endpoint", "").startswith("http:")

    async def open_store(self) -> None:
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
        await self._length("health")

    async def close_store(self) -> None:
        # Its connections close with it.
        del self._store

    async def object_exists(self, namespace: Namespace, key: str) -> bool:
        # An object of another length is damaged: the next set replaces it.
        return await self._length(_name(namespace, key)) == namespace.object_bytes

    async def read_object(self, read: ObjectRead) -> bool:
        with _faults():
            try:
                answer = await obstore.get_async(self._store, _name(read.namespace, read.key))
                payload = await answer.bytes_async()
            except FileNotFoundError:
                return False
        if not len(payload):
            # It has been discarded.
            return False
        return read.fill(memoryview(payload))

    async def write_object(self, write: ObjectWrite, call: Call) -> bool:
        name, payload = _name(write.namespace, write.key), write.tobytes()
        if call.expired():
            # The caller may have been answered, and have reused the memory of these bytes.
            return False
        with _faults():
            if not write.replaces:
                try:
                    await obstore.put_async(self._store, name, payload, mode="create")
                    return True
                except AlreadyExistsError:
                    # Another writer was faster, or the object is damaged.
                    write.existed = await self.object_exists(write.namespace, write.key)
                    if write.existed:
                        return True
            await obstore.put_async(self._store, name, payload)
        return True

    async def delete_object(self, namespace: Namespace, key: str) -> bool:
        name = _name(namespace, key)
        # A bucket does not say if there was an object. An empty one has been discarded.
        if not await self._length(name):
            return False
        with _faults():
            await obstore.delete_async(self._store, name)
        return True

    async def discard_object(self, read: ObjectRead) -> bool:
        name = _name(read.namespace, read.key)
        with _faults():
            try:
                found = await obstore.get_async(self._store, name)
                tag = found.meta["e_tag"]
                if tag and read.has_read(memoryview(await found.bytes_async())):
                    # No store deletes on a condition. An empty object does not exist for lookups.
                    await obstore.put_async(self._store, name, b"", mode={"e_tag": tag})
            except (FileNotFoundError, PreconditionError):
                # Removed, or stored anew, meanwhile.
                return True
            except NotImplementedError:
                # A directory has no conditional writes, either: the SDK hides the page.
                return False
        return bool(tag)

    async def clear_namespace(self, namespace: Namespace, call: Call) -> None:
        with _faults():
            async for objects in obstore.list(self._store, f"{namespace.name}/"):
                if call.expired():
                    raise TimeoutError("the clear was cancelled")
                await obstore.delete_async(self._store, [found["path"] for found in objects])

    def check_health(self) -> Health:
        self.run(lambda: self._length("health"), HEALTH_SECONDS)
        return Health(ok=True)

    async def _length(self, name: str) -> int | None:
        """Return the length of an object; None if there is none."""
        with _faults():
            try:
                return (await obstore.head_async(self._store, name))["size"]
            except FileNotFoundError:
                return None


def _name(namespace: Namespace, key: str) -> str:
    return f"{namespace.name}/{namespace.object_name(key)}"


@contextmanager
def _faults() -> Generator[None]:
    """The errors of obstore as those of a store that does not serve."""
    try:
        yield
    except BaseError as error:
        raise StorageUnavailableError(str(error).partition("\n")[0]) from error
