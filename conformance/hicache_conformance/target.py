"""The driver under test, and what the cases are handed of it."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

import pytest

from hicache_conformance.bench import open_lab
from hicache_conformance.damage import Damage, can_tamper, tamper_with_objects
from hicache_conformance.grounds.parameters import open_ground, parametrize
from hicache_conformance.pipeline import sdk_engine

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from hicache_conformance.grounds.ground import Ground
    from hicache_conformance.lab import Lab
    from hicache_storage.pools import MHAHostPool
    from hicache_storage.spec import HiCacheStorage
    from hicache_storage.transfer import Device, LayeredPages, Stream, TransferEngine


class DriverTarget:
    """Base of `DriverConformance`, without its cases."""

    driver: ClassVar[str] = ""
    """Name of the driver, as `hicache drivers` lists it."""
    config: ClassVar[Mapping[str, object]] = MappingProxyType({})
    """Options of the driver; `{tmp}` in a text stands for an empty directory, `{port:NAME}` for a port of one of `services`."""
    services: ClassVar[Sequence[str | Sequence[str]] | None] = None
    """Commands of the servers that the driver needs, with `{port:NAME}` and `{tmp}`; by default those that it names itself."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run each case of faults on each ground that the driver has."""
        parametrize(type(self), metafunc)

    @pytest.fixture
    def driver_config(self) -> Mapping[str, object]:
        """The options; to be overridden by a fixture where they are only known at run time, such as a server's port."""
        return self.config

    @pytest.fixture
    def lab(self, request: pytest.FixtureRequest, driver_config: Mapping[str, object]) -> Iterator[Lab]:
        """What each case works with."""
        yield from open_lab(self, request, driver_config)

    def transfer_engine(
        self, device: Device, compute: Stream, device_pages: LayeredPages, host_pool: MHAHostPool
    ) -> TransferEngine:
        """What moves pages between device and host in the level stream: the SDK's engine, unless overridden."""
        return sdk_engine(device, compute, device_pages, host_pool)

    @pytest.fixture
    def ground(self, request: pytest.FixtureRequest) -> Iterator[Ground]:
        """What the driver stands on in a case of faults."""
        yield from open_ground(self, request)

    def can_tamper(self, storage: HiCacheStorage) -> bool:
        """Whether `tamper` knows a way to the pages of this storage that does not lead through its API."""
        return can_tamper(storage)

    def tamper(self, storage: HiCacheStorage, pool: str, key: str, damage: Damage) -> bool:
        """Put a damaged object where a page belongs; `False` where this store cannot hold such an object.

        `ObjectStorage` drivers need not override it: it writes through their own `write_objects`.
        """
        return tamper_with_objects(storage, pool, key, damage)
