"""What a case works with: storages of the driver under test, identities and keys of its own, and a seeded source of chance."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Protocol

from hicache_conformance.foreign.promises import Dialect
from hicache_conformance.memory import GuardedPool
from hicache_conformance.pages import PageBook
from hicache_conformance.peers.messages import PoolShape
from hicache_conformance.peers.peer import Peer
from hicache_conformance.pipeline import MakeTransferEngine, sdk_engine
from hicache_conformance.subject import Subject
from hicache_conformance.violation import Untestable, Violation
from hicache_storage.layers import StorageOptions
from hicache_storage.plugins import create_storage, registry
from hicache_storage.spec import Capabilities, DriverError, PoolName, StorageIdentity

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hicache_conformance.damage import Damage
    from hicache_conformance.grounds.ground import Ground
    from hicache_conformance.memory import PoolMemory
    from hicache_conformance.profiles import Profile
    from hicache_storage.spec import HiCacheStorage


# The layers are the SDK's; what a foreign driver does is not to be mended by them.
FOREIGN_OPTIONS = StorageOptions(deadline_seconds=None, breaker_threshold=0, metrics=False)


class Tamper(Protocol):
    """Puts a damaged object where a page belongs, below the API; `False` where this driver cannot hold such an object."""

    def __call__(self, storage: HiCacheStorage, pool: str, key: str, damage: Damage) -> bool: ...


@dataclass(kw_only=True)
class Lab:
    """One case's own; nothing in it is shared with another case but the store itself.

    Cases never reset the store: each has an identity salt of its own, so that it finds nothing of another.
    """

    driver: str
    config: dict[str, object]
    """With `{tmp}` and `{port:NAME}` filled in."""
    case: str
    seed: int
    run: str
    """Tells this run's pages from those that an earlier run left in the same store."""
    profile: Profile
    tmp: Path
    """The directory that `{tmp}` stands for; all cases of a class share it."""
    sandbox: Path
    """A directory some levels above `tmp`; what is written in between has left the store."""
    tamper: Tamper
    transfer_engine: MakeTransferEngine = sdk_engine
    dialect: Dialect = field(default_factory=Dialect)
    """How far cases may go with the interface of the driver."""
    capabilities: Capabilities = field(default_factory=Capabilities)
    ground: Ground | None = None
    """What its storages stand on, in a case that puts faults there."""
    random: Random = field(init=False)
    book: PageBook = field(default_factory=PageBook)
    _opened: ExitStack = field(default_factory=ExitStack)
    _keys: int = 0
    _peers: int = 0
    _salts: int = 0

    def __post_init__(self) -> None:
        self.random = self.chance("case")

    def chance(self, what: str) -> Random:
        """Random numbers that depend on the seed, the case and `what` alone."""
        return Random(f"{self.seed}/{self.case}/{what}")

    def number(self, what: str) -> int:
        """A seed for another library, from the run's seed, the case and `what`."""
        return int.from_bytes(hashlib.blake2b(f"{self.seed}/{self.case}/{what}".encode(), digest_size=8).digest(), "big")

    def identity(self, **changes: object) -> StorageIdentity:
        """A fresh identity: equal to no other that this case, or any other run, has used."""
        self._salts += 1
        base = StorageIdentity(
            model="conformance/model",
            kv_dtype="bfloat16",
            page_size=2,
            layout="page_first",
            salt=f"{self.run}.{self.case}.{self._salts}",
        )
        return replace(base, **changes)  # type: ignore[arg-type]  # names and types are checked where they are written

    def keys(self, count: int, prefix: str = "page") -> list[str]:
        """Fresh keys; most of each is a digest, as engines have them."""
        first, self._keys = self._keys, self._keys + count
        return [
            f"{prefix}{number}-{hashlib.blake2b(f'{self.seed}/{self.case}/{number}'.encode(), digest_size=16).hexdigest()}"
            for number in range(first, first + count)
        ]

    def storage(
        self,
        identity: StorageIdentity | None = None,
        *,
        pools: Mapping[str, PoolMemory] | None = None,
        config: Mapping[str, object] | None = None,
        options: StorageOptions | None = None,
    ) -> Subject:
        """An open storage of its own, with its pools registered; closed when the case ends, if not before."""
        subject = self.unopened(identity, pools=pools, config=config, options=options)
        subject.call("open", subject.storage.open)
        return subject

    def unopened(
        self,
        identity: StorageIdentity | None = None,
        *,
        pools: Mapping[str, PoolMemory] | None = None,
        config: Mapping[str, object] | None = None,
        options: StorageOptions | None = None,
    ) -> Subject:
        """A storage with its pools registered that has not connected yet."""
        storage = self.bare(identity, config, options)
        self._opened.callback(self._close, storage)
        memories: Mapping[str, PoolMemory] = {PoolName.KV: GuardedPool()} if pools is None else pools
        subject = Subject(storage, memories, self.book, self.chance("places"))
        for name, memory in memories.items():
            subject.call("register_mem_host_pool_v2", lambda m=memory, n=name: storage.register_mem_host_pool_v2(m.host_pool, n))  # type: ignore[misc]
        subject.call("on_host_pools_registered", storage.on_host_pools_registered)
        return subject

    def with_pool(self, subject: Subject, name: str, memory: PoolMemory) -> Subject:
        """Register one more pool, or one in the place of another."""
        subject.call("register_mem_host_pool_v2", lambda: subject.storage.register_mem_host_pool_v2(memory.host_pool, name))
        return Subject(subject.storage, {**subject.memories, name: memory}, self.book, self.chance(f"places of {name}"))

    def bare(
        self,
        identity: StorageIdentity | None = None,
        config: Mapping[str, object] | None = None,
        options: StorageOptions | None = None,
    ) -> HiCacheStorage:
        """A storage without pools, for the caller to close."""
        settings = self.config if config is None else dict(config)
        if self.dialect.promises is not None:
            options = FOREIGN_OPTIONS
        try:
            storage = create_storage(self.driver, identity or self.identity(), settings, options=options)
        except DriverError:
            raise
        except (Exception, SystemExit) as error:
            raise Violation("LC-1", f"constructing the driver raised {type(error).__name__}: {error}") from error
        if self.ground is not None:
            self.ground.attach(storage)
        return storage

    def capped(self, capacity: int) -> dict[str, object]:
        """The options of a store that holds so many bytes at most; a fresh one, where they name a directory.

        Raises:
            Untestable: the driver names no option that limits its capacity.
        """
        option = registry().get(self.driver).capacity_option
        if not option:
            raise Untestable(
                "the driver's DriverSpec names no capacity_option, so that no store of limited capacity can be opened"
            )
        return {**self.apart()[0], option: f"{-(-capacity // 1024)}KiB"}

    def apart(self) -> tuple[dict[str, object], Path]:
        """The options of a store in a directory of its own, where they name one, and that directory."""
        home = Path(tempfile.mkdtemp(prefix="apart-", dir=self.tmp))
        self._opened.callback(shutil.rmtree, home, ignore_errors=True)
        fresh = {
            name: value.replace(str(self.tmp), str(home)) if isinstance(value, str) else value
            for name, value in self.config.items()
        }
        return fresh, home

    def damage(self, subject: Subject, key: str, damage: Damage, pool: str = PoolName.KV) -> bool:
        """Put a damaged object where the page of `key` belongs; `False` where the driver cannot hold such an object."""
        return self.tamper(subject.storage, pool, key, damage)

    def peer(
        self,
        identity: StorageIdentity | None = None,
        *,
        name: str = "",
        pools: Mapping[str, PoolShape] | None = None,
        config: Mapping[str, object] | None = None,
        options: StorageOptions | None = None,
        fresh: bool = False,
        clock: float = 0.0,
    ) -> Peer:
        """An open storage in a process of its own, which ends with the case, if not before.

        Args:
            name: for the report.
            clock: seconds by which its clock is ahead of this machine's; behind it if negative.
            fresh: a new interpreter, with a hash seed of its own; takes a second. Otherwise a fork of one that has only loaded
                what takes long to load.
        """
        self._peers += 1
        peer = Peer.open(
            name or f"p{self._peers}",
            self.driver,
            self.config if config is None else config,
            identity or self.identity(),
            pools=pools or {PoolName.KV: PoolShape()},
            options=FOREIGN_OPTIONS if self.dialect.promises is not None else options,
            seed=f"{self.number(f'peer {self._peers}')}",
            fresh=fresh,
            clock=clock,
        )
        self._opened.callback(peer.close)
        return peer

    def close(self) -> None:
        """Close all storages."""
        self._opened.close()

    def _close(self, storage: HiCacheStorage) -> None:
        try:
            storage.close()
        except Exception as error:
            raise Violation("LC-2", f"close raised {type(error).__name__}: {error}") from error
