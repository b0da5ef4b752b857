"""The driver under test, and what the cases are handed of it."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

import pytest

from hicache_conformance.bench import open_lab
from hicache_conformance.damage import Damage, can_tamper, tamper_with_objects

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from hicache_conformance.lab import Lab
    from hicache_storage.spec import HiCacheStorage


class DriverTarget:
    """Base of `DriverConformance`, without its cases."""

    driver: ClassVar[str] = ""
    """Name of the driver, as `hicache drivers` lists it."""
    config: ClassVar[Mapping[str, object]] = MappingProxyType({})
    """Options of the driver; `{tmp}` in a text stands for an empty directory."""

    @pytest.fixture
    def driver_config(self) -> Mapping[str, object]:
        """The options; to be overridden by a fixture where they are only known at run time, such as a server's port."""
        return self.config

    @pytest.fixture
    def lab(self, request: pytest.FixtureRequest, driver_config: Mapping[str, object]) -> Iterator[Lab]:
        """What each case works with."""
        yield from open_lab(self, request, driver_config)

    def can_tamper(self, storage: HiCacheStorage) -> bool:
        """Whether `tamper` knows a way to the pages of this storage that does not lead through its API."""
        return can_tamper(storage)

    def tamper(self, storage: HiCacheStorage, pool: str, key: str, damage: Damage) -> bool:
        """Put a damaged object where a page belongs; `False` where this store cannot hold such an object.

        `ObjectStorage` drivers need not override it: it writes through their own `write_objects`.
        """
        return tamper_with_objects(storage, pool, key, damage)
