"""Stores of the three drivers, each with what can be done to it from outside: damage and outages."""

from __future__ import annotations

import contextlib
import urllib.request
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from examples.mooncake_cluster import DevCluster
from hicache_backends.mooncake.client import library
from hicache_backends.mooncake.client.handle import connections
from hicache_backends.mooncake.config import MooncakeConfig, client_settings
from hicache_metadata_server.cli.options import AdminClient
from hicache_metadata_server.protocol import Fsck, FsckReport, Scopes
from hicache_storage import create_storage
from hicache_storage.engines.engine_pool import EnginePool
from hicache_storage.objects import Namespace
from tests.metadata_server import servers
from tests.support.metadata import Served

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from hicache_storage.spec import HiCacheStorage

SERVE = f"{servers.SERVE} --quarantine-seconds 0.05 --lease-seconds 2 --store"
NOISE = bytes(range(100, 164))
PAGE_BYTES = 64 << 10
"""At most a page of the tests' models: noise at such distances is in every page."""


class Store(Protocol):
    """An empty store, and the options of its driver."""

    driver: str
    options: dict[str, object]

    def damage(self) -> None:
        """Overwrite 64 bytes in pages that are stored; no page is removed."""

    def outages(self) -> list[AbstractContextManager[None]]:
        """Ways in which the store can be away until the end of a `with` block."""


def tier(store: Store, **options: object) -> dict[str, object]:
    """Return an entry of `secondary_tiers` for this project's tier over a store."""
    return {
        "type": "HiCacheTier",
        "module_path": "hicache_storage.engines.vllm",
        "driver": store.driver,
        "driver_config": store.options,
        "on_reset": "keep",
        **options,
    }


@dataclass
class FileStore:
    """A directory."""

    place: Path
    driver: str = "file"
    options: dict[str, object] = field(init=False)

    def __post_init__(self) -> None:
        self.options = {"path": str(self.place)}

    def reopened(self) -> HiCacheStorage:
        """Open the only namespace of the directory, by its description."""
        [found] = Namespace.read_all(map(str, self.place.rglob("namespace.json")))
        memory, layout = memoryview(bytearray(found.page_bytes)), found.geometry.layout
        pool = EnginePool(memory, stride=len(memory), page_bytes=len(memory), layout=layout)
        storage = create_storage(self.driver, found.identity, self.options)
        storage.register_mem_host_pool_v2(pool, found.pool)
        return storage

    def damage(self) -> None:
        """Damage the page in the middle of each bundle."""
        for bundle in self.place.rglob("*.bundle"):
            with bundle.open("r+b") as file:
                file.seek(bundle.stat().st_size // 2)
                file.write(NOISE)

    def outages(self) -> list[AbstractContextManager[None]]:
        """The directory has another name."""
        away = self.place.with_name("away")
        return [_between(lambda: self.place.rename(away), lambda: self._put_back(away))]

    def _put_back(self, away: Path) -> None:
        # What was written in its place meanwhile is another store.
        if self.place.exists():
            others = len(list(self.place.parent.glob("meanwhile-*")))
            self.place.rename(self.place.with_name(f"meanwhile-{others}"))
        away.rename(self.place)


@dataclass
class Hf3fsStore:
    """A directory, and a metadata server that keeps its state on disk."""

    place: Path
    server: Served
    driver: str = "hf3fs"
    options: dict[str, object] = field(init=False)

    def __post_init__(self) -> None:
        self.options = {
            "path": str(self.place),
            "metadata_url": self.server.url,
            "file_size": "64MiB",
        }

    def damage(self) -> None:
        """Damage every page."""
        for path in self.place.rglob("*"):
            if path.is_file():
                with path.open("r+b") as file:
                    for start in range(0, path.stat().st_size, PAGE_BYTES):
                        file.seek(start)
                        # What was never written stays a hole.
                        if any(file.read(len(NOISE))):
                            file.seek(start)
                            file.write(NOISE)

    def outages(self) -> list[AbstractContextManager[None]]:
        """The metadata server is killed and started again, or suspended."""
        return [_between(self.server.kill, self.server.start), self.server.suspended()]


def live(url: str) -> dict[str, int]:
    """How many pages our server says there are, by scope."""
    scopes = AdminClient(url).call("/v2/scopes", None, Scopes).scopes
    return {scope.scope: scope.live for scope in scopes}


@dataclass
class MooncakeStore:
    """A master and the memory of one store process."""

    cluster: DevCluster
    driver: str = "mooncake"
    options: dict[str, object] = field(init=False)

    def __post_init__(self) -> None:
        self.options = self.cluster.options

    def damage(self) -> None:
        """Put damaged bytes in the place of every object, by the library itself."""
        client = library.new_store()
        buffer = 16 << 20
        code = client.setup("127.0.0.1", "P2PHANDSHAKE", 0, buffer, "tcp", "", self.cluster.address)
        assert code == 0
        try:
            for name in self._names():
                stored = bytearray(client.get(name))
                middle = len(stored) // 2
                stored[middle : middle + len(NOISE)] = NOISE
                assert client.batch_remove([name], True) == [0]
                assert client.put(name, bytes(stored)) == 0
        finally:
            client.close()

    def clear(self) -> None:
        """Remove all objects."""
        connection = connections.acquire(client_settings(MooncakeConfig(**self.options)))
        connection.remove_prefix("")
        connections.release(connection)

    def _names(self) -> list[str]:
        """Names of all objects, as the master has them."""
        address = f"http://127.0.0.1:{self.cluster._metrics}/get_all_keys"
        with urllib.request.urlopen(address, timeout=10) as answer:
            return answer.read().decode().split()

    def outages(self) -> list[AbstractContextManager[None]]:
        """The master is killed, with all that it knew of, and started again; or suspended."""
        master = self.cluster.master
        return [_between(master.kill, master.start), _between(master.suspend, master.resume)]


@contextlib.contextmanager
def _between(away: Callable[[], object], back: Callable[[], object]) -> Generator[None]:
    """Until the end of a `with` block."""
    away()
    try:
        yield
    finally:
        back()


@contextlib.contextmanager
def opened(driver: str, place: Path) -> Generator[Store]:
    """An empty store of a driver, with the servers that it needs."""
    match driver:
        case "file":
            yield FileStore(place / "store")
        case "hf3fs":
            with Served(command=f"{SERVE} sqlite:///{{tmp}}/m.db") as server:
                yield Hf3fsStore(place / "store", server)
                found = AdminClient(server.url).call("/v2/fsck", Fsck(), FsckReport)
                assert found.problems == []
        case _:
            # However busy the machine is, no lease may end during a read, and no store may seem
            # dead.
            with DevCluster(
                1, 64 << 20, client_ttl_seconds=60, lease_milliseconds=30_000
            ) as cluster:
                yield MooncakeStore(cluster)
