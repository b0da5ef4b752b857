"""What a class of cases stands on: which grounds its driver has, and those that are up now."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Final

import pytest

from hicache_conformance.grounds.disk import DiskGround
from hicache_conformance.grounds.network import NetworkGround
from hicache_conformance.grounds.network_apart import NetworkApart
from hicache_conformance.grounds.placeholders import filled, mentions_tmp, port_names
from hicache_conformance.grounds.seam import ObjectsGround
from hicache_conformance.grounds.services import Services, ServicesGround
from hicache_conformance.violation import Untestable
from hicache_storage.objects import ObjectStorage
from hicache_storage.plugins import driver_class, registry
from hicache_storage.spec import DriverError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from hicache_conformance.grounds.ground import Ground

NO_GROUND: Final = "none"
"""Stands for a ground where a driver has none."""
_STANDING: Final = pytest.StashKey["Standing"]()

Commands = tuple[tuple[str, ...], ...]


def commands_of(driver: str, config: Mapping[str, object], services: Sequence[str | Sequence[str]] | None) -> Commands:
    """Commands of the servers: those given, or else those that the driver names for a throwaway store, unless `config` has taken
    it away from them.

    Raises:
        DriverError: there is no such driver.
    """
    if services is None:
        spec = registry().get(driver)
        options = {**spec.trial_config, **config}.values()
        # A driver that was told of none of their ports does without them, and nothing is learnt from killing them.
        is_for_others = port_names(spec.trial_config.values()) and not port_names(options)
        return () if is_for_others else spec.trial_services
    return tuple(tuple(shlex.split(command)) if isinstance(command, str) else tuple(command) for command in services)


def ground_names(driver: str, config: Mapping[str, object], services: Sequence[str | Sequence[str]] | None) -> list[str]:
    """Grounds of a driver with these options; empty where it has none, or cannot be loaded."""
    try:
        spec = registry().get(driver)
        own = issubclass(driver_class(spec), ObjectStorage)
        commands = commands_of(driver, config, services)
    except DriverError:
        return []
    options = list({**spec.trial_config, **config}.values())
    has = {
        DiskGround.name: mentions_tmp(options),
        NetworkGround.name: bool(port_names(options)) and bool(commands),
        ServicesGround.name: bool(commands),
        ObjectsGround.name: own,
    }
    return [name for name, there in has.items() if there]


class Standing:
    """The servers and grounds of one class of cases. Another class begins anew."""

    def __init__(self, owner: str, commands: Commands) -> None:
        self.owner = owner
        self._services = Services(commands) if commands else None
        self._grounds: dict[str, Ground] = {}

    def ports(self, ground: Ground | None = None) -> Mapping[str, int]:
        """The ports that options are filled with; the servers are up."""
        if self._services is None:
            return {}
        self._services.start()
        return (ground.ports if ground else {}) or self._services.ports

    def ground(self, name: str) -> Ground:
        """The ground of this name, healed.

        Raises:
            Untestable: it cannot be had here.
        """
        ground = self._grounds.get(name)
        if isinstance(ground, DiskGround) and not ground.alive:
            ground.close()
            ground = None
        if ground is None:
            ground = self._grounds[name] = self._made(name)
        return ground

    def close(self) -> None:
        """Take down everything."""
        for ground in self._grounds.values():
            ground.close()
        self._grounds.clear()
        if self._services is not None:
            self._services.close()

    def _made(self, name: str) -> Ground:
        if name == DiskGround.name:
            return DiskGround()
        if name == ObjectsGround.name:
            return ObjectsGround()
        if self._services is None:
            raise Untestable(
                "faults can be put nowhere under this driver: it is no ObjectStorage, none of its options contains {tmp}, "
                "and the suite starts no server for it (--serve)"
            )
        self._services.start()
        return NetworkApart(self._services.ports) if name == NetworkGround.name else ServicesGround(self._services)


def standing(config: pytest.Config, owner: str, commands: Commands) -> Standing:
    """What a class stands on; what another one stood on is taken down."""
    found = config.stash.get(_STANDING, None)
    if found is None:
        config.add_cleanup(lambda: _take_down(config))
    if found is None or found.owner != owner:
        _take_down(config)
        found = config.stash[_STANDING] = Standing(owner, commands)
    return found


def filled_options(options: Mapping[str, object], tmp: Path | str, ports: Mapping[str, int]) -> dict[str, object]:
    """Options with their placeholders filled in."""
    return {name: filled(value, tmp, ports) if isinstance(value, str) else value for name, value in options.items()}


def _take_down(config: pytest.Config) -> None:
    found = config.stash.get(_STANDING, None)
    if found is not None:
        del config.stash[_STANDING]
        found.close()
