"""Discovery of drivers: entry points of the group `hicache_storage.drivers`.

They are loaded one by one, so that none can break another.
"""

from __future__ import annotations

import importlib
import logging
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, cast

import pluggy

from hicache_storage import hookspecs
from hicache_storage.hookspecs import ENTRY_POINT_GROUP, PROJECT, DriverSpec
from hicache_storage.layers.stack import StorageOptions, wrap
from hicache_storage.spec import (
    DriverConfig,
    DriverContractError,
    DriverError,
    DriverNotFoundError,
    DriverUnavailableError,
    HiCacheStorage,
    parse_config,
)
from hicache_storage.spec.arguments import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from hicache_storage.spec import StorageIdentity

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BrokenPlugin:
    """A plugin that could not be loaded, or has a driver of another's name.

    Its drivers are missing, and that other one; everyone else's work.
    """

    owner: str
    """`distribution:entry point`."""
    error: Exception


@dataclass(slots=True)
class Registry:
    """The drivers of an environment, by name."""

    drivers: dict[str, DriverSpec] = field(default_factory=dict[str, DriverSpec])
    owners: dict[str, str] = field(default_factory=dict[str, str])
    broken: list[BrokenPlugin] = field(default_factory=list[BrokenPlugin])

    def add(self, spec: DriverSpec, *, owner: str) -> None:
        """Register a driver.

        Raises:
            DriverError: another plugin has registered the name, which neither can use then.
        """
        if spec.name in self.owners:
            self.drivers.pop(spec.name, None)
            raise DriverError(
                f"{self.owners[spec.name]} registers a driver {spec.name!r}, too; uninstall one"
            )
        self.drivers[spec.name] = spec
        self.owners[spec.name] = owner

    def get(self, name: str) -> DriverSpec:
        """The driver of that name.

        Raises:
            DriverNotFoundError: no plugin registers it; the message lists installed and broken
                ones.
        """
        if name not in self.drivers:
            installed = ", ".join(sorted(self.drivers)) or "none"
            broken = "".join(
                f"; plugin {plugin.owner} is broken: {plugin.error}" for plugin in self.broken
            )
            raise DriverNotFoundError(
                f"no driver named {name!r}; installed: {installed}{broken}{did_you_mean(name, self.drivers)}"
            )
        return self.drivers[name]


def discover(points: Iterable[EntryPoint] | None = None) -> Registry:
    """Load all plugins of the environment, or the given entry points.

    Returns a new registry; raises nothing.
    """
    registry = Registry()
    for point in entry_points(group=ENTRY_POINT_GROUP) if points is None else points:
        owner = f"{point.dist.name if point.dist else 'local'}:{point.name}"
        try:
            for spec in _specs(point, owner):
                registry.add(spec, owner=owner)
        except Exception as error:  # noqa: BLE001 - a third-party plugin may raise anything, and must not disable others
            registry.broken.append(BrokenPlugin(owner, error))
            logger.warning("driver plugin %s is broken and was left out: %s", owner, error)
    return registry


@cache
def registry() -> Registry:
    """The environment's registry, discovered once for each process."""
    # Once: it imports the plugin modules of all installed packages.
    return discover()


def driver_class(spec: DriverSpec) -> type[HiCacheStorage]:
    """Import a driver's class.

    Raises:
        DriverUnavailableError: it, or something it needs, cannot be imported.
        DriverContractError: it is not a `HiCacheStorage`.
    """
    target = _resolve(spec, spec.target)
    if not (isinstance(target, type) and issubclass(target, HiCacheStorage)):
        raise DriverContractError(
            f"driver {spec.name!r}: {spec.target} is not a subclass of HiCacheStorage"
        )
    return target


def config_model(spec: DriverSpec) -> type[DriverConfig]:
    """Import a driver's config model.

    Raises:
        DriverUnavailableError: it cannot be imported.
        DriverContractError: it is not a `DriverConfig`.
    """
    model = _resolve(spec, spec.config)
    if not (isinstance(model, type) and issubclass(model, DriverConfig)):
        raise DriverContractError(
            f"driver {spec.name!r}: {spec.config} is not a subclass of DriverConfig"
        )
    return model


def create_storage(
    name: str,
    identity: StorageIdentity,
    config: Mapping[str, object] | None = None,
    *,
    options: StorageOptions | None = None,
) -> HiCacheStorage:
    """Create a storage by the name of its driver.

    Connects to nothing: `open()` or the first call does.

    Args:
        name: a driver listed by `hicache drivers`.
        identity: whose bytes the storage reads and writes.
        config: the driver's options; text values are converted.
        options: what the SDK puts around the driver: deadline, circuit breaker, metrics. Defaults
            apply.

    Raises:
        DriverError: the driver is unknown, cannot be imported, or refuses the configuration.
    """
    spec = registry().get(name)
    settings = parse_config(config_model(spec), config or {})
    # The class is known to be a HiCacheStorage only; that it takes (identity, config) is what
    # DriverSpec.target asks for.
    factory: type = driver_class(spec)
    storage = factory(identity, settings)
    return wrap(storage, options or StorageOptions())


def _specs(point: EntryPoint, owner: str) -> list[DriverSpec]:
    # A manager of its own for each plugin: pluggy keeps a half-registered plugin after a validation
    # error.
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(hookspecs)
    manager.register(point.load(), name=owner)
    manager.check_pending()
    implementations = manager.hook.hicache_register_drivers.get_hookimpls()
    if not implementations:
        raise DriverContractError(
            "implements no hook; decorate hicache_register_drivers() with "
            "hicache_storage.hookspecs.hookimpl"
        )
    specs = list[DriverSpec]()
    for implementation in implementations:
        for spec in cast("Iterable[object]", implementation.function()):
            if not isinstance(spec, DriverSpec):
                raise DriverContractError(
                    f"hicache_register_drivers() must return DriverSpec objects, got {spec!r:.80}"
                )
            specs.append(spec)
    return specs


def _resolve(spec: DriverSpec, target: str) -> object:
    module, _, attribute = target.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        needs = f"; it needs {', '.join(spec.requires)}" if spec.requires else ""
        raise DriverUnavailableError(
            f"driver {spec.name!r}: cannot import {target}{needs}: {error}"
        ) from error
